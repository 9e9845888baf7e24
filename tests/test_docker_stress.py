"""Attempts under random kills of commands, containers, the engine and the trainer: nothing is left, every attempt has
one fate, and none is wrong. With an engine of its own, because it kills it. OPRD_STRESS_ATTEMPTS: how many (200)."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from docker_image import image
from stress_trainer import expected

ATTEMPTS = int(os.environ.get("OPRD_STRESS_ATTEMPTS", "200"))
HERE = Path(__file__).resolve().parent
pytestmark = [pytest.mark.slow, pytest.mark.field, pytest.mark.timeout(7200),
              pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("dockerd", path="/usr/sbin:/usr/bin"),
                                 reason="an engine of its own needs root and dockerd")]


class Engine:
    """A dockerd whose data survives its kills."""

    def __init__(self, folder: Path):
        self.folder, self.process = folder, None
        self.url = f"unix://{folder}/socket"
        self.start()

    def start(self) -> None:
        """On a busy machine dockerd may give up waiting for its containerd; then it is started again."""
        for attempt in range(5):
            if self._start():
                return
        raise AssertionError((self.folder / "log").read_text()[-2000:])

    def _start(self) -> bool:
        import docker

        (self.folder / "pid").unlink(missing_ok=True)
        self.process = subprocess.Popen(
            ["dockerd", "--data-root", f"{self.folder}/data", "--exec-root", f"{self.folder}/exec", "--pidfile",
             f"{self.folder}/pid", "--host", self.url, "--bridge=none", "--iptables=false"],
            stdout=subprocess.DEVNULL, stderr=open(self.folder / "log", "ab"), start_new_session=True)
        deadline = time.monotonic() + 120
        while True:
            try:
                self.client = docker.DockerClient(base_url=self.url, timeout=60)
                self.client.ping()
                return True
            except Exception:
                if self.process.poll() is not None:
                    return False
                assert time.monotonic() < deadline, (self.folder / "log").read_text()[-2000:]
                time.sleep(0.3)

    def kill(self) -> None:
        """dockerd alone; its containerd and the containers live on until the next one ends them."""
        self.client.close()
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        self.client.close()
        self.process.terminate()
        self.process.wait(60)


@pytest.fixture
def engine(tmp_path_factory):
    engine = Engine(Path(tmp_path_factory.mktemp("d")))
    yield engine
    engine.stop()
    shutil.rmtree(engine.folder, ignore_errors=True)


def trainer(folder, tag, url):
    return subprocess.Popen([sys.executable, str(HERE / "stress_trainer.py"), str(folder), tag, str(ATTEMPTS)],
                            stdout=open(folder / "out", "ab"), stderr=open(folder / "err", "ab"),
                            start_new_session=True, env={**os.environ, "DOCKER_HOST": url, "OMP_NUM_THREADS": "1"})


def kill_a_command(engine, rng) -> None:
    container = rng.choice(engine.client.containers.list())
    pids = [int(row[0]) for row in container.top(ps_args="-eo pid")["Processes"]]
    os.kill(rng.choice(pids[1:]), signal.SIGKILL)  # pids[0] is the container's own


def kill_a_container(engine, rng) -> None:
    rng.choice(engine.client.containers.list()).kill()


def kill_the_engine(engine, rng) -> None:
    engine.kill()
    time.sleep(rng.random())
    engine.start()


def ours() -> list[str]:
    """Processes of the machine that a box left."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            if line.startswith(("sleep 300 ", "sleep 301 ", "sleep 600 ")) or "oprd.sandbox.reaper" in line:
                found.append(line)
        except OSError:
            continue
    return found


def test_two_hundred_attempts_under_random_kills(engine, tmp_path):
    before, tag, rng = ours(), image(engine.client), random.Random(5)
    fates, kills, trainers = tmp_path / "fates.jsonl", {}, 1
    process = trainer(tmp_path, tag, engine.url)
    deaths = [ATTEMPTS // 3, 2 * ATTEMPTS // 3]  # of the trainer, by attempts done
    outages = [ATTEMPTS // 4, ATTEMPTS // 2]  # of the engine: at least these
    while process.poll() is None:
        time.sleep(rng.uniform(0.2, 1.5) * (1 if ATTEMPTS > 50 else 3))
        done = len(fates.read_text().splitlines()) if fates.exists() else 0
        if deaths and done >= deaths[0]:
            deaths.pop(0)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process, trainers = trainer(tmp_path, tag, engine.url), trainers + 1
        act = rng.choices([kill_a_command, kill_a_container, kill_the_engine], [10, 3, 0.25])[0]
        if outages and done >= outages[0]:
            outages.pop(0)
            act = kill_the_engine
        try:
            act(engine, rng)
            kills[act.__name__] = kills.get(act.__name__, 0) + 1
        except Exception:  # the victim was gone already
            continue
    assert process.returncode == 0, (tmp_path / "err").read_text()[-3000:]
    lines = [json.loads(line) for line in fates.read_text().splitlines()]
    assert sorted(int(line["id"]) for line in lines) == list(range(ATTEMPTS))
    judged = [line for line in lines if line["trouble"] is None]
    wrong = [line for line in judged if line["resolved"] != expected(int(line["id"]))]
    assert wrong == []
    assert {line["trouble"] for line in lines} <= {None, "infra_sandbox", "infra_verifier", "invalid_verdict"}
    assert all("status 137" in line["why"] for line in lines if line["trouble"] == "invalid_verdict")  # killed each time
    print(f"\n{len(judged)} of {ATTEMPTS} judged, {len(lines) - len(judged)} infrastructure, kills {kills}, "
          f"{trainers} trainers")
    assert len(judged) > ATTEMPTS // 2 and trainers == 3 and len(kills) == 3
    deadline = time.monotonic() + 60  # the reapers of the killed trainers
    while (left := engine.client.containers.list(all=True)) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert left == [] and engine.client.volumes.list() == []
    while sorted(ours()) != sorted(before) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert sorted(ours()) == sorted(before)
