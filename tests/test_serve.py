"""rollout/serve.py: servers of ours end with us, by whatever death, and say why they ended on their own."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from oprd.core import hf
from oprd.core.settings import Config
from oprd.rollout.engine import Sampling
from oprd.rollout.serve import Managed, free_port, serve
from tests.sglang_fake import Fake
from tests.sglang_help import PipePublisher, a_model, furthest

pytestmark = pytest.mark.timeout(120)
ROOT = Path(__file__).resolve().parents[1]
SLEEPS = "bash -c 'sleep 1000 & sleep 1000; : {model} {port}'"  # a server with a child of its own


def group_members(pid):
    """Ids of the processes of a session."""
    listed = subprocess.run(["ps", "-s", str(pid), "-o", "pid="], capture_output=True, text=True).stdout
    return [int(found) for found in listed.split()]


def wait_until(true, seconds=60):
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_closing_ends_every_process_also_of_servers_that_are_still_starting(tmp_path):
    managed = Managed(SLEEPS, tmp_path, tmp_path / "servers", 2)
    pids = [process.pid for process in managed._processes.values()]
    wait_until(lambda: all(len(group_members(pid)) == 4 for pid in pids))  # guard, bash, two sleeps
    assert managed.gone() is None and len(set(managed.urls())) == 2
    managed.close()
    assert not any(group_members(pid) for pid in pids)


def test_a_trainer_that_is_killed_takes_its_servers_with_it(tmp_path):
    program = f"""
import time
from pathlib import Path
from oprd.rollout.serve import Managed
managed = Managed({SLEEPS!r}, Path({str(tmp_path)!r}), Path({str(tmp_path)!r}) / "servers", 1)
print(*[p.pid for p in managed._processes.values()], flush=True)
time.sleep(1000)
"""
    trainer = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    pid = int(trainer.stdout.readline())
    wait_until(lambda: len(group_members(pid)) == 4)
    os.kill(trainer.pid, signal.SIGKILL)
    trainer.wait()
    wait_until(lambda: not group_members(pid))


def test_a_server_that_ends_says_why_with_its_last_line(tmp_path):
    managed = Managed("bash -c 'echo no such model {model} {port}; exit 3'", tmp_path, tmp_path / "servers", 1)
    wait_until(lambda: managed.gone() is not None)
    assert "has ended" in managed.gone() and "ends: no such model" in managed.gone()
    managed.close()


def test_a_command_must_say_where_model_and_port_go(tmp_path):
    with pytest.raises(ValueError, match=r"sglang.command = .* must hold \{port\}"):
        Managed("serve {model}", tmp_path, tmp_path / "servers", 1)


def test_a_free_port_is_one_that_nobody_listens_at():
    with socket.socket() as busy:
        port = free_port(set())
        busy.bind(("127.0.0.1", port))
        busy.listen()
        assert free_port(set()) != port and free_port({1}) not in (1, port)


def test_running_servers_are_used_as_they_are_and_woken_if_a_killed_run_left_them_paused(tmp_path):
    model, fakes = a_model(), [Fake(a_model(7)), Fake(a_model(8))]
    fakes[0].do_pause_generation({"mode": "abort"})
    hf.save(model, tmp_path / "model")
    config = Config.model_validate({"run": {"folder": str(tmp_path)}, "rollout": {"max_context_tokens": 512},
                                    "sglang": {"servers": [fake.url for fake in fakes], "call_s": 20.0}})
    publisher = PipePublisher(tmp_path / "model", "", 2**20, "gloo", 20.0)
    engine = serve(config, publisher, tmp_path / "model", model, 5)
    try:
        done = engine.generate("s", [1, 2, 3], Sampling(1.0, 1.0, 9, ()), 0)
        assert done.version == 5 and furthest(model, [1, 2, 3], done) < 1e-5 and engine.measured()["servers"] == 2
    finally:
        engine.close()
    long = config.model_copy(update={"rollout": config.rollout.model_copy(update={"max_context_tokens": 9999})})
    with pytest.raises(ValueError, match="max_context_tokens = 9999 must not exceed what http.* takes = 4096"):
        serve(long, publisher, tmp_path / "model", model, 5)
    for fake in fakes:
        fake.kill()
