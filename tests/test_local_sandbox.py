"""The local sandbox: a command's limits, its end as a whole tree, and a copy that paths cannot leave."""

import os
import time

import pytest

from oprd.sandbox import local
from oprd.sandbox.box import Broke, Limits
from oprd.sandbox.local import LocalSandbox
from oprd.sandbox.output import HeadTail
from oprd.sandbox.sweep import MARKER, kill_marked, run_label

FILES = {"src/a.py": b"x = 1\n", "README.md": b"caf\xc3\xa9\r\n"}


@pytest.fixture(params=["namespaces", "plain"])
def box(request, monkeypatch, tmp_path):
    """Both ways the sandbox can hold a command: in namespaces of its own, and by session and marker."""
    if request.param == "plain":
        monkeypatch.setattr(local, "launcher", lambda: ())
    elif not local.launcher():
        pytest.skip("this machine allows no namespaces")
    with LocalSandbox(FILES, Limits(), run_label(tmp_path)) as box:
        yield box


def alive(box) -> list[int]:
    from oprd.sandbox.sweep import _marked

    return _marked(box.env[MARKER])


def test_a_command_runs_in_the_root_with_both_streams_and_its_exit_code(box):
    ran = box.run("cat src/a.py; echo oops >&2; exit 3")
    assert (ran.output, ran.code, ran.timed_out) == ("x = 1\noops\n", 3, False)


def test_the_root_has_the_same_name_in_every_box_and_commands_may_use_it(box):
    assert box.root == "/mnt"
    assert box.run("cat /mnt/src/a.py").output == "x = 1\n"
    trace = box.run("python -c 'import src.b'; python src/c.py").output
    assert "/box-" not in trace


def test_stdin_is_empty_and_no_secret_is_inherited(box, monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "s3cret")
    ran = box.run("cat; read x; env", 5)
    assert not ran.timed_out and "s3cret" not in ran.output and "HOME=" in ran.output


def test_a_timeout_ends_daemons_too_and_keeps_the_output_so_far(box):
    start = time.monotonic()
    ran = box.run("echo begun; setsid sleep 300 & sleep 300 & sleep 300", 0.4)
    assert ran.timed_out and ran.code == 137 and time.monotonic() - start < 3
    assert ran.output.startswith("begun\n") and "timed out after 0.4 s" in ran.output
    assert alive(box) == []


def test_it_returns_when_the_shell_ends_though_a_child_holds_the_pipe(box):
    start = time.monotonic()
    ran = box.run("setsid sleep 300 & sleep 300 & echo done", 20)
    assert ran.output == "done\n" and ran.code == 0 and time.monotonic() - start < 3
    assert alive(box) == []


def test_a_command_that_closes_its_output_still_runs_to_its_end(box):
    assert box.run("exec >&- 2>&-; sleep 0.2; touch late; exit 4").code == 4
    assert box.read("late") == b""


def test_a_flood_is_cut_while_reading_and_ends_at_the_limit(box):
    start = time.monotonic()
    ran = box.run("echo first; yes", 0.5)
    assert ran.timed_out and time.monotonic() - start < 4
    assert ran.output.startswith("first\n") and "bytes left out" in ran.output and len(ran.output) < 17000


def test_head_and_tail_are_kept_to_the_byte():
    kept = HeadTail(4)
    for byte in b"abcdefg":
        kept.add(bytes([byte]))
    assert kept.text() == "ab\n[... 3 bytes left out ...]\nfg"
    whole = HeadTail(8)
    whole.add(b"\xff12345")
    assert whole.text() == "\ufffd12345"


def test_output_of_a_command_may_be_any_bytes(box):
    assert box.run(r"printf '\377\0ok'").output == "\ufffd\0ok"


def test_death_by_signal_is_128_plus_its_number(box):
    assert box.run("kill -9 $$").code == 137
    assert box.run("python -c 'import os; os.abort()'").code == 134


@pytest.mark.parametrize("limits, command, sign", [
    (Limits(memory_mib=256), "python -c 'bytearray(400 << 20)'", "MemoryError"),
    (Limits(file_mib=1), "head -c 3000000 /dev/zero > big; stat -c %s big", "1048576"),
    (Limits(cpu_s=1), "python -c 'while True: pass'; echo $?", "137"),
    (Limits(processes=20), "for i in $(seq 60); do sleep 5 & done; wait", "more than 20 processes"),
])
def test_every_limit_binds(limits, command, sign, tmp_path):
    with LocalSandbox({}, limits, run_label(tmp_path)) as box:
        assert sign in box.run(command, 8).output


def test_a_fork_bomb_ends_and_leaves_a_usable_box(tmp_path):
    if not local.launcher() or local._kernel() < (6, 14):
        pytest.skip("needs Linux 6.14, where a namespace bounds its own processes")
    with LocalSandbox({}, Limits(), run_label(tmp_path)) as box:
        assert box.run("f() { f | f & }; f; sleep 5", 5).code == 137
        assert alive(box) == [] and box.run("echo fine").output == "fine\n"


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "src/../../x", "out/x", "gone", "a\0b", "fifo"])
def test_paths_and_links_that_leave_the_root_are_refused(box, path):
    os.symlink("/etc", box.host_root / "out")
    os.symlink("/nowhere/file", box.host_root / "gone")
    os.mkfifo(box.host_root / "fifo")
    with pytest.raises(PermissionError):
        box.write(path, b"")
    with pytest.raises(PermissionError):
        box.read(path)


def test_files_keep_their_bytes_and_errors_are_the_usual_ones(box):
    box.write("new/deep/f.bin", b"\0\r\n\xff")
    assert box.read("new/deep/f.bin") == box.read("/mnt/new/deep/f.bin") == b"\0\r\n\xff"
    with pytest.raises(IsADirectoryError):
        box.read("src")
    with pytest.raises(FileNotFoundError):
        box.read("src/missing.py")


def test_deleting_the_root_is_the_agents_mistake_not_the_machines(box):
    box.run('rm -rf "$PWD"; rm -rf src README.md')
    assert box.run("ls").output == ""


def test_a_launcher_that_fails_is_the_machines_failure(box, monkeypatch):
    monkeypatch.setattr(local, "launcher", lambda: ("false",))
    with pytest.raises(Broke, match="launcher"):
        box.run("true")
    monkeypatch.setattr(local, "launcher", lambda: ("/no/such/program",))
    with pytest.raises(Broke):
        box.run("true")


def test_a_command_no_shell_can_take_is_an_ordinary_failure(box):
    assert box.run("echo a\0b").code == 126
    assert box.run("x" * 10**7).code == 126


def test_commands_of_one_box_do_not_see_the_tmp_of_another(tmp_path):
    if not local.launcher() or not local._tmp_can_be_masked():
        pytest.skip("/tmp cannot be private here")
    label = run_label(tmp_path)
    with LocalSandbox({}, Limits(), label) as one, LocalSandbox({}, Limits(), label) as two:
        one.run("touch /tmp/mine")
        assert one.run("ls /tmp").output == "mine\n" and two.run("ls /tmp").output == ""


def test_close_removes_everything_even_what_was_made_read_only_and_twice(box):
    box.run("mkdir -p locked/in; touch locked/in/f; chmod 000 locked/in locked; ln -s /etc away")
    box.close()
    assert not box.folder.exists() and os.path.exists("/etc/passwd")
    box.close()


def test_a_marked_process_without_a_session_is_found_and_killed(tmp_path):
    import subprocess

    label = run_label(tmp_path)
    process = subprocess.Popen(["sleep", "300"], env={MARKER: f"{label}/box-1"}, start_new_session=True)
    other = subprocess.Popen(["sleep", "300"], env={MARKER: f"{label}0/box-1"})
    try:
        time.sleep(0.1)
        assert kill_marked(label + "/") == [process.pid]
        assert process.wait(5) == -9 and other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_the_folder_a_shell_ends_in_is_told_and_another_command_can_start_there(box):
    box.write("src/a b/x.py", b"")
    ran = box.run("cd 'src/a b'; false", folder=box.root)
    assert (ran.output, ran.code, ran.folder) == ("", 1, f"{box.root}/src/a b")
    assert box.run("pwd; ls; cd ..; exit 3", folder=ran.folder).folder == "/mnt/src"
    assert box.run("pwd; ls; exit 3", folder=ran.folder).output.endswith("/src/a b\nx.py\n")
    assert box.run("pwd").folder is None
    assert box.run("cd src; exec true", folder="/mnt").folder == "/mnt"  # the shell is gone: it stays where it was
    assert box.run("cd src; sleep 30", 0.3, folder="/mnt").folder == "/mnt"
    gone = box.run("pwd", folder="/mnt/none")
    assert "none is gone; this ran in " in gone.output and gone.folder == "/mnt"
    assert box.run("nosuch", folder="/mnt").output == box.run("nosuch").output
