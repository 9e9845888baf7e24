"""The Docker sandbox on a real engine; skipped where none answers."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from docker_image import engine, image
from oprd.sandbox.box import Broke, Limits
from oprd.sandbox.repo import apply_patch, extract_patch, prepare
from oprd.sandbox.sweep import owner_is_dead, run_label
from oprd.sandbox.verify import gold_check, verify
from sandbox_help import PATCH, TASK

CLIENT, WHY_NOT = engine()
pytestmark = pytest.mark.skipif(CLIENT is None, reason=WHY_NOT)
LABEL = run_label(Path(__file__))

if CLIENT is not None:
    from oprd.sandbox.docker_box import DockerSandbox
    from oprd.sandbox.docker_sweep import RUN_LABEL, sweep_engine


@pytest.fixture(scope="module")
def tag():
    try:
        return image(CLIENT)
    except RuntimeError as problem:
        pytest.skip(str(problem))


@pytest.fixture(scope="module")
def shared(tag):
    with DockerSandbox(tag, Limits(), LABEL, CLIENT) as box:
        yield box


@pytest.fixture
def box(shared):
    """One container for the tests that do not break it; what a test left in its root goes."""
    shared.run("rm -rf ./* .[a-z]*")
    return shared


def processes(box) -> int:
    """Everything but process 1 and what it started itself, as the engine's `top` sees it from outside."""
    table = box.container.top(ps_args="-eo pid,ppid,stat")["Processes"] or []
    alive = {pid: parent for pid, parent, state in table if not state.startswith("Z")}
    first = next((pid for pid, parent in alive.items() if parent not in alive), None)
    return sum(1 for pid, parent in alive.items() if first not in (pid, parent))


def test_a_command_runs_in_the_root_with_both_streams_and_its_exit_code(box):
    ran = box.run("pwd; echo oops >&2; exit 3")
    assert (ran.output, ran.code) == ("/repo\noops\n", 3)
    assert box.run(r"printf '\377\0ok'").output == "\ufffd\0ok"
    assert box.run("echo a\0b").code == 126


def test_the_container_has_no_network_no_capabilities_and_no_secret(box, monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "s3cret")
    assert box.run("ls /sys/class/net").output.split() == ["lo"]
    status = box.run("grep -E 'CapEff|NoNewPrivs' /proc/self/status").output.split()
    assert status == ["CapEff:", "0000000000000000", "NoNewPrivs:", "1"]
    assert "s3cret" not in box.run("env").output


def test_a_timeout_ends_daemons_too_and_keeps_the_output_so_far(box):
    start = time.monotonic()
    ran = box.run("echo begun; setsid sleep 300 & sleep 300 & sleep 300", 1.5)
    assert ran.timed_out and ran.code == 137 and time.monotonic() - start < 12
    assert ran.output.startswith("begun\n") and "timed out after 1.5 s" in ran.output
    assert processes(box) == 0


def test_it_returns_when_the_shell_ends_though_a_child_holds_the_pipe(box):
    start = time.monotonic()
    ran = box.run("setsid sleep 300 & sleep 300 & echo done", 20)
    assert ran.output == "done\n" and ran.code == 0 and ran.ended and time.monotonic() - start < 12
    assert processes(box) == 0


def test_a_flood_is_cut_while_reading_and_ends_at_the_limit(box):
    ran = box.run("echo first; yes", 1.5)
    assert ran.timed_out and ran.output.startswith("first\n") and "bytes left out" in ran.output
    assert len(ran.output) < 17000 and box.run("echo fine", 10).output == "fine\n"


def test_stdin_is_empty(box):
    assert box.run("cat; read x; echo end", 10).output == "end\n"


def test_files_keep_their_bytes_and_errors_are_the_usual_ones(box):
    box.write("new/deep/f 'x'.bin", b"\0\r\n\xff")
    assert box.read("new/deep/f 'x'.bin") == box.read("/repo/new/deep/f 'x'.bin") == b"\0\r\n\xff"
    with pytest.raises(IsADirectoryError):
        box.read("new")
    with pytest.raises(FileNotFoundError):
        box.read("missing.py")
    with pytest.raises(OSError):
        box.write("new/deep/f 'x'.bin/below", b"")


@pytest.mark.parametrize("path", ["../x", "/etc/x", "new/../../x", "out/x", "gone", "fifo"])
def test_paths_and_links_that_leave_the_root_are_refused(box, path):
    box.run("mkdir new; ln -s /etc out; ln -s /nowhere/file gone; mkfifo fifo")
    with pytest.raises(PermissionError):
        box.write(path, b"")
    with pytest.raises(PermissionError):
        box.read(path)


def test_memory_process_and_file_limits_bind(tag):
    with DockerSandbox(tag, Limits(memory_mib=64, processes=20, file_mib=1, cpu_s=1), LABEL, CLIENT) as box:
        assert "137" in box.run("python -c 'bytearray(200 << 20)'; echo $?", 20).output.split()
        assert "fork" in box.run("i=0; while [ $i -lt 40 ]; do sleep 5 & i=$((i+1)); done", 20).output
        assert box.run("head -c 3000000 /dev/zero > big; wc -c < big").output.split()[-1] == "1048576"
        assert "137" in box.run("python -c 'while True: pass'; echo $?", 20).output.split()
        assert box.run("echo fine", 10).output == "fine\n"


def test_a_fork_bomb_ends_and_leaves_a_usable_box_with_its_files(box):
    box.write("kept", b"1")
    assert box.run("f() { f | f & }; f; sleep 30", 1).code in (0, 137)
    assert processes(box) == 0 and box.read("kept") == b"1"


def test_where_a_kill_inside_fails_the_container_is_restarted_with_its_files(box, monkeypatch):
    box.write("kept", b"1")
    answers = iter([b"7 0 0 0\n"])
    real = box._quick
    monkeypatch.setattr(box, "_quick", lambda *asked: next(answers, None) or real(*asked))
    assert box.run("sleep 300", 0.5).timed_out
    monkeypatch.undo()
    assert box.read("kept") == b"1" and box.run("echo fine").output == "fine\n"


def test_a_patch_of_every_kind_survives_the_way_out_and_in(tag):
    with DockerSandbox(tag, Limits(), LABEL, CLIENT) as box, DockerSandbox(tag, Limits(), LABEL, CLIENT) as fresh:
        prepare(TASK, box)
        prepare(TASK, fresh)
        assert box.run("git status --porcelain; git log --oneline").output.endswith(" Base\n")
        assert extract_patch(box) == b""
        box.run(r"printf '\0\377\r\n' > bin; rm README.md; chmod +x src/words.py; printf 'caf\351' > latin1; mkdir n; "
                "cd n; git init -q; echo 1 > inner; git config --global diff.noprefix true; rm -rf ../.git")
        patch = extract_patch(box)
        assert apply_patch(fresh, patch) == "" and fresh.read("bin") == b"\0\xff\r\n"
        assert fresh.read("latin1") == b"caf\xe9" and fresh.read("n/inner") == b"1\n"
        assert extract_patch(fresh) == patch


def test_an_images_own_tree_becomes_one_commit(box):
    from dataclasses import replace

    box.run("git init -q; echo old > f; git add f; git commit -qm old; echo new > f; mkdir sub; echo 1 > sub/g")
    prepare(replace(TASK, files={}), box)
    assert box.run("git log --oneline --all | wc -l; git status --porcelain").output.strip() == "1"
    box.run("echo 2 > sub/g")
    assert b"-1\n+2\n" in extract_patch(box)
    box.run("rm -rf .git")
    box.trusted('rm -rf "$PRIVATE/git"')


def test_a_task_is_graded_in_a_container(tag):
    from contextlib import contextmanager

    @contextmanager
    def open_box(task):
        with DockerSandbox(tag, Limits(), LABEL, CLIENT) as box:
            prepare(task, box)
            yield box

    assert gold_check(TASK, open_box) == ""
    assert not verify(TASK, PATCH.replace("+    return a + b", "+    return a * b").encode(), open_box).resolved


def test_a_container_that_is_gone_is_the_machines_failure_and_close_is_safe(tag):
    with DockerSandbox(tag, Limits(), LABEL, CLIENT) as box:
        box.container.kill()
        with pytest.raises(Broke):
            box.run("true")
        box.container.remove(force=True)
        with pytest.raises(Broke):
            box.read("x")
        box.close()


def test_a_container_that_dies_under_a_command_is_the_machines_failure(tag):
    import threading

    with DockerSandbox(tag, Limits(), LABEL, CLIENT) as box:
        threading.Timer(0.5, box.container.kill).start()
        with pytest.raises(Broke):
            box.run("sleep 20", 30)


def test_an_image_that_does_not_exist_is_named():
    with pytest.raises(ValueError, match="no image nosuch:1; pull or build it"):
        DockerSandbox("nosuch:1", Limits(), LABEL, CLIENT)


def test_nothing_is_left_after_close_and_other_runs_are_untouched(tag):
    mine = run_label("/another/run")
    with DockerSandbox(tag, Limits(), LABEL, CLIENT) as other:
        with DockerSandbox(tag, Limits(), mine, CLIENT) as box:
            name = box.container.name
        assert CLIENT.containers.list(all=True, filters={"label": f"{RUN_LABEL}={mine}"}) == []
        assert sweep_engine(CLIENT, lambda label: label == mine) == []
        assert other.run("echo here").output == "here\n" and name != other.container.name


OWNER = """
import sys
sys.path[:0] = sys.argv[2:]
from oprd.sandbox.box import Limits
from oprd.sandbox.docker_box import DockerSandbox
from oprd.sandbox.sweep import run_label
box = DockerSandbox(sys.argv[1], Limits(), run_label("/a/killed/run"))
print(box.container.id, flush=True)
box.run("sleep 300")
"""


def test_the_container_of_a_killed_trainer_is_swept_at_the_next_start(tag, box):
    root = Path(__file__).resolve().parents[1]
    owner = subprocess.Popen([sys.executable, "-c", OWNER, tag, str(root)], stdout=subprocess.PIPE, text=True)
    container = owner.stdout.readline().strip()
    assert not any("killed" in line or container in line for line in sweep_engine(CLIENT, owner_is_dead))
    assert CLIENT.containers.get(container).status == "running"
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    name = CLIENT.containers.get(container).name
    assert f"container {name}" in sweep_engine(CLIENT, owner_is_dead)
    assert container not in [c.id for c in CLIENT.containers.list(all=True)]
    assert box.run("echo here").output == "here\n"
