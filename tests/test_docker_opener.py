"""Opening boxes on engines: several hosts, boxes kept ready, the reaper, limits, and whose fault a failure is."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from docker_image import derived, engine, image
from oprd.sandbox.box import Broke, Limits, Unusable
from oprd.sandbox.sweep import run_label
from sandbox_help import TASK

CLIENT, WHY_NOT = engine()
pytestmark = pytest.mark.skipif(CLIENT is None, reason=WHY_NOT)
ROOT = Path(__file__).resolve().parents[1]

if CLIENT is not None:
    import docker
    import requests

    from oprd.sandbox import docker_host
    from oprd.sandbox.docker_box import DockerSandbox
    from oprd.sandbox.docker_exec import Frames, Report, hijacked
    from oprd.sandbox.docker_host import DockerHost, DockerHosts, DockerSettings
    from oprd.sandbox.docker_opener import DockerOpener
    from oprd.sandbox.docker_sweep import RUN_LABEL

URL = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")


@pytest.fixture(scope="module")
def tag():
    try:
        return image(CLIENT)
    except RuntimeError as problem:
        pytest.skip(str(problem))


@pytest.fixture
def make(tag, tmp_path):
    """Openers with a label of their own; nothing may be left of it afterwards."""
    label, made = run_label(tmp_path), []

    def make(**settings):
        made.append(DockerOpener(Limits(), label, tag, DockerSettings(**settings)))
        return made[-1]

    yield make
    for opener in made:
        opener.close()
    assert containers(label) == [] and all(opener.reaper.process.poll() == 0 for opener in made if opener.reaper)


def containers(label) -> list[str]:
    return [c.name for c in CLIENT.containers.list(all=True, filters={"label": f"{RUN_LABEL}={label}"})]


def wait_for(what, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.05)


def test_the_reaper_is_there_before_the_first_container_and_each_attempt_has_its_own(make):
    opener = make()
    with opener(TASK) as one, opener(TASK) as other:
        assert opener.reaper.process.poll() is None
        assert os.getsid(opener.reaper.process.pid) != os.getsid(0)  # Ctrl-C is not for it
        one.write("x", b"1")
        with pytest.raises(FileNotFoundError):
            other.read("x")
        assert len(containers(opener.label)) == 2
    assert containers(opener.label) == [] and opener.reaper.process.poll() is None


def test_a_box_is_kept_ready_and_never_the_one_that_was_used(make):
    opener = make(warm=1)
    with opener(TASK) as first:
        first.write("x", b"1")
        wait_for(lambda: opener._spare)
        start = time.monotonic()
        with opener(TASK) as second:
            taken = time.monotonic() - start
            assert second.container.id != first.container.id
            with pytest.raises(FileNotFoundError):
                second.read("x")
        start = time.monotonic()
        with DockerSandbox(opener.image, Limits(), opener.label, CLIENT):
            made = time.monotonic() - start
    assert taken < made
    wait_for(lambda: not opener._makers)
    assert len(containers(opener.label)) == len(opener._spare) == 1


def test_boxes_are_spread_over_hosts_and_an_engine_that_is_gone_gets_none(make, monkeypatch):
    opener = make(hosts=(URL, URL))
    boxes = [opener(TASK) for _ in range(4)]
    assert [host.boxes for host in opener.hosts.all] == [2, 2]
    one, other = opener.hosts.all

    def gone(*args, **kwargs):
        raise requests.ConnectionError("connection refused")

    monkeypatch.setattr(one.client.api, "send", gone)
    for _ in range(3):  # the first may still be sent there
        try:
            boxes.append(opener(TASK))
        except Broke:
            continue
    assert one.rests_until > time.monotonic() and all(box.host is other for box in boxes[4:]) and len(boxes) >= 6
    monkeypatch.undo()
    for box in boxes:
        box.close()
    opener.close()
    assert containers(opener.label) == []  # what could not be removed while its engine was gone, too


def test_while_no_engine_answers_attempts_wait_for_one_and_not_for_ever(monkeypatch):
    hosts = DockerHosts((URL,))
    host = hosts.all[0]
    answers = iter([False, False, True])
    monkeypatch.setattr(host, "answers", lambda: next(answers))
    host.rest()
    start = time.monotonic()
    assert hosts.one() is host and host.boxes == 1 and 0.3 < time.monotonic() - start < docker_host.REST_S
    monkeypatch.setattr(host, "answers", lambda: False)
    host.rest()
    with pytest.raises(Broke, match="no engine has answered for 0.3 s"):
        hosts.one(0.3)
    hosts.close()


def test_an_engine_that_is_not_there_or_has_no_such_kind_of_name_is_said_at_once(tmp_path):
    with pytest.raises(Broke, match="no engine at unix:///nonexistent"):
        DockerHosts(("unix:///nonexistent",))
    with pytest.raises(ValueError, match="must be unix://"):
        DockerHosts(("ftp://x",))
    with pytest.raises(Broke, match="ssh"):
        DockerHosts(("ssh://nobody@127.0.0.1:9",))


class Registry:
    """An engine's pull, as it goes wrong; `said` are the errors of the first tries."""

    def __init__(self, client, *said):
        self.client, self.said, self.pulls = client, list(said), 0

    def pull(self, repository, tag, stream, decode):
        self.pulls += 1
        if self.said:
            raise docker.errors.APIError(self.said.pop(0))
        self.client.api.tag(image(CLIENT), repository, tag)
        return iter([{"status": "done"}])


@pytest.fixture
def pulling(tag, monkeypatch):
    host = DockerHost(URL)
    monkeypatch.setattr(docker_host.time, "sleep", lambda seconds: None)

    def pulling(*said):
        registry = Registry(host.client, *said)
        monkeypatch.setattr(host.client.api, "pull", registry.pull)
        return host, registry

    yield pulling
    for name in ("oprd-test-pulled:7",):
        try:
            CLIENT.images.remove(name)
        except docker.errors.ImageNotFound:
            pass
    host.close()


def test_a_pull_is_tried_again_and_done_once_for_many(pulling):
    host, registry = pulling("toomanyrequests: rate limit", "net/http: TLS handshake timeout")
    found = []
    threads = [threading.Thread(target=lambda: found.append(host.folder_of("oprd-test-pulled:7", DockerSettings())))
               for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and registry.pulls == 3


def test_an_image_that_exists_nowhere_is_the_tasks_failure_and_a_registry_that_fails_the_machines(pulling):
    host, registry = pulling("manifest unknown: not found")
    with pytest.raises(Unusable, match="has no image oprd-test-pulled:7 and cannot pull it"):
        host.folder_of("oprd-test-pulled:7", DockerSettings())
    assert registry.pulls == 1
    host, registry = pulling(*["i/o timeout"] * 9)
    with pytest.raises(Broke, match="not pulled in 4 tries: i/o timeout"):
        host.folder_of("oprd-test-pulled:7", DockerSettings())


def test_a_full_disk_costs_images_this_run_pulled_and_then_is_the_machines_failure(pulling):
    host, _ = pulling()
    host.folder_of("oprd-test-pulled:7", DockerSettings())
    with pytest.raises(Broke, match="GiB free on the engine's disk, less than 1e"):
        host.folder_of(image(CLIENT), DockerSettings(free_gib=1e9))
    with pytest.raises(docker.errors.ImageNotFound):
        CLIENT.images.get("oprd-test-pulled:7")
    assert CLIENT.images.get(image(CLIENT))  # another's image is never touched


def test_output_that_comes_in_one_breath_with_the_answers_headers_is_not_lost(tmp_path):
    import socket

    frame = b"\1\0\0\0\0\0\0\6hello\n"
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(tmp_path / "engine"))
    server.listen()

    def answer():
        connection, _ = server.accept()
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 101 UPGRADED\r\nContent-Type: application/vnd.docker.raw-stream\r\n"
                           b"Connection: Upgrade\r\nUpgrade: tcp\r\n\r\n" + frame)
        time.sleep(0.3)
        connection.sendall(frame)
        connection.close()

    thread = threading.Thread(target=answer)
    thread.start()
    api = docker.APIClient(f"unix://{tmp_path}/engine", version="1.41")
    sock, begun = hijacked(api.exec_start("x", socket=True))
    seen = []
    assert Frames(sock, begun).read(lambda *piece: seen.append(piece), time.monotonic() + 10)
    thread.join()
    server.close()
    api.close()
    assert begun == frame and seen == [(1, b"hello\n")] * 2


def test_a_task_says_where_its_repository_lies_and_what_must_go(make):
    script = "mkdir -p /elsewhere/src /r2e_tests && echo 1 > /elsewhere/src/a && echo secret > /r2e_tests/test_1.py"
    tag = derived(CLIENT, "elsewhere", script)
    task = replace(TASK, files={}, image_name=tag, workdir="/elsewhere", hidden=("/r2e_tests",))
    with make()(task) as box:
        assert box.root == "/elsewhere" and box.run("pwd; cat src/a; ls /r2e_tests 2>&1 | wc -l").output == (
            "/elsewhere\n1\n1\n")
        assert "No such file" in box.run("ls /r2e_tests").output
        assert box.run("git log --oneline | wc -l").output == "1\n"


def test_memory_at_the_boxes_limit_is_the_agents_and_said_and_the_machines_is_not(tag, tmp_path):
    with DockerSandbox(tag, Limits(memory_mib=64), run_label(tmp_path), CLIENT) as box:
        ran = box.run("python -c 'bytearray(200 << 20)'; echo $?", 30)
        assert "137\n\n[killed: more than 64 MiB of memory]\n" in ran.output and ran.code == 0
        assert "memory" not in box.run("kill -9 $$").output
        before = box._memory[1]
        with pytest.raises(Broke, match="the machine ran out of memory"):
            box._blame(137, Report(0, box._memory[0], before + 1), False, "")


def test_what_a_box_writes_is_limited_without_a_quota_too(tag, tmp_path):
    limits = Limits(disk_mib=40, file_mib=16)
    with DockerSandbox(tag, limits, run_label(tmp_path), CLIENT) as box:
        writes = "i=0; while i=$((i+1)); dd if=/dev/zero of=f$i bs=1M count=8 2>/dev/null; do sleep 0.1; done; exit 1"
        ran = box.run(writes, 60)
        assert ran.code != 0 and not ran.timed_out
        if not box.host.quota:
            assert "[killed: more than 40 MiB written to the disk]" in ran.output
        assert box.run("rm f*; echo fine").output == "fine\n"


def test_a_full_disk_of_the_engine_is_the_machines_failure(tag, tmp_path, monkeypatch):
    with DockerSandbox(tag, Limits(), run_label(tmp_path), CLIENT) as box:
        command = "echo cp: write error: No space left on device; exit 1"
        assert box.run(command).code == 1  # it only says so
        real = box.trusted
        monkeypatch.setattr(box, "trusted", lambda command, **more: (0, b"Filesystem\noverlay 100 99 1 99% /\n", b"")
                            if command.startswith("df") else real(command, **more))
        with pytest.raises(Broke, match="disk is full"):
            box.run(command)


def test_mounts_are_read_only_environment_is_given_and_volumes_go_with_the_box(tag, tmp_path):
    (tmp_path / "data").write_text("shared\n")
    settings = DockerSettings(mounts=(f"{tmp_path}:/data",), environment=("COLOUR=red and blue",))
    volumed = derived(CLIENT, "volumed", "true")
    holder = CLIENT.containers.create(volumed, ["true"])
    try:
        holder.commit("oprd-test-volumed", "2", conf={"Volumes": {"/cache": {}}, "WorkingDir": "/repo"})
    finally:
        holder.remove(force=True, v=True)
    before = {volume.name for volume in CLIENT.volumes.list()}
    with DockerSandbox("oprd-test-volumed:2", Limits(), run_label(tmp_path), CLIENT, settings) as box:
        assert box.run("cat /data/data; echo x > /data/new; echo $COLOUR").output.startswith("shared\n")
        assert not (tmp_path / "new").exists() and "red and blue" in box.run("echo $COLOUR").output
        assert box.run("echo x > /cache/y; cat /cache/y").output == "x\n"
        assert len({volume.name for volume in CLIENT.volumes.list()} - before) == 1
    assert {volume.name for volume in CLIENT.volumes.list()} <= before


OWNER = """
import sys, threading
sys.path[:0] = sys.argv[3:]
from oprd.sandbox.box import Limits
from oprd.sandbox.docker_host import DockerSettings
from oprd.sandbox.docker_opener import DockerOpener
from oprd.sandbox.sweep import run_label
from sandbox_help import TASK
opener = DockerOpener(Limits(), run_label(sys.argv[2]), sys.argv[1], DockerSettings(warm=1))
boxes = [opener(TASK) for _ in range(2)]
print(opener.label, opener.reaper.process.pid, flush=True)
boxes[0].run("setsid sleep 300 & sleep 300", 300)
"""


def test_a_trainer_killed_with_its_whole_process_group_leaves_nothing_without_any_next_start(tag, tmp_path):
    owner = subprocess.Popen([sys.executable, "-c", OWNER, tag, str(tmp_path), str(ROOT), str(ROOT / "tests")],
                             stdout=subprocess.PIPE, text=True, start_new_session=True)
    label, reaper = owner.stdout.readline().split()
    assert len(containers(label)) >= 2
    os.killpg(owner.pid, signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    wait_for(lambda: containers(label) == [], 60)
    wait_for(lambda: not Path(f"/proc/{reaper}").exists() or "Z" in Path(f"/proc/{reaper}/stat").read_text(), 60)
    assert containers(label) == []


@pytest.mark.skipif(shutil.which("sshd", path="/usr/sbin:/usr/bin") is None, reason="no sshd on this machine")
@pytest.mark.skipif(not URL.startswith("unix://"), reason="the engine has no socket here")
def test_an_engine_is_reached_through_ssh_and_the_tunnel_ends_with_the_host(tag, tmp_path, monkeypatch):
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)], check=True)
    shutil.copy(tmp_path / "user.pub", tmp_path / "authorized")
    os.makedirs("/run/sshd", exist_ok=True)
    server = subprocess.Popen(["/usr/sbin/sshd", "-D", "-p", "22622", "-o", "ListenAddress=127.0.0.1", "-f",
                               "/dev/null", "-o", f"HostKey={tmp_path}/host", "-o", "StrictModes=no", "-o",
                               f"AuthorizedKeysFile={tmp_path}/authorized", "-o", f"PidFile={tmp_path}/pid"],
                              stderr=subprocess.DEVNULL)
    wrapper = tmp_path / "bin" / "ssh"
    wrapper.parent.mkdir()
    wrapper.write_text(f"#!/bin/sh\nexec /usr/bin/ssh -F /dev/null -i {tmp_path}/user -o StrictHostKeyChecking=no "
                       f"-o UserKnownHostsFile=/dev/null \"$@\"\n")
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{wrapper.parent}:{os.environ['PATH']}")
    try:
        time.sleep(1)
        host = DockerHost(f"ssh://root@127.0.0.1:22622{URL.removeprefix('unix://')}")
        with DockerSandbox(tag, Limits(), run_label(tmp_path), host) as box:
            assert box.run("echo over ssh").output == "over ssh\n"
            host._tunnel.kill()
            host._tunnel.wait()
            with pytest.raises(Broke):
                box.run("true")
            host.mend()
            assert box.run("echo again").output == "again\n"
        tunnel = host._tunnel
        host.close()
        assert tunnel.poll() is not None and host.free_gib is not None
    finally:
        server.terminate()
        server.wait()
