"""The Docker sandbox against the docker command line on the same engine, as ratios of medians, the two interleaved.

    DOCKER_HOST=... python bench/sandbox.py [rounds]

exec      one command: box.run("true") against `docker exec ID sh -c true`
start     a box ready for its first command against `docker run -d`, both limited alike
16 boxes  attempts at once, each opening a box and working in it: share of the machine's cores that is busy
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from docker_image import engine, image  # noqa: E402
from oprd.sandbox.box import Limits  # noqa: E402
from oprd.sandbox.docker_box import DockerSandbox  # noqa: E402
from oprd.sandbox.docker_host import DockerHost  # noqa: E402
from oprd.sandbox.opener import opener  # noqa: E402
from oprd.sandbox.sweep import run_label  # noqa: E402
from sandbox_help import TASK  # noqa: E402

LABEL = run_label(__file__)
WORK = "python -c 'sum(i * i for i in range(3000000))'"


def seconds(do) -> float:
    start = time.perf_counter()
    do()
    return time.perf_counter() - start


def cli(*arguments: str) -> str:
    return subprocess.run(["docker", *arguments], check=True, capture_output=True, text=True).stdout.strip()


def compare(name: str, rounds: int, ours, theirs) -> None:
    times = [(seconds(ours), seconds(theirs)) for _ in range(rounds)]
    a, b = (statistics.median(column) for column in zip(*times))
    print(f"{name:8} ours {1e3 * a:6.1f} ms   docker {1e3 * b:6.1f} ms   ratio {a / b:.2f}", flush=True)


def busy() -> tuple[int, int]:
    fields = [int(f) for f in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return sum(fields) - fields[3] - fields[4], sum(fields)


def crowd(tag: str, boxes: int) -> None:
    open_box = opener("docker", Limits(cpus=2), LABEL, tag)

    def attempt() -> None:
        with open_box(TASK) as box:
            for _ in range(3):
                box.run(WORK)
                box.run("git status --porcelain")

    threads = [threading.Thread(target=attempt) for _ in range(boxes)]
    before, start = busy(), time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    used, total = (after - first for after, first in zip(busy(), before))
    took = time.perf_counter() - start
    print(f"{boxes} boxes at once: {took:.1f} s, cores {100 * used / total:.0f}% busy", flush=True)
    open_box.close()


def main(rounds: int) -> None:
    client, why = engine()
    if client is None:
        sys.exit(f"no engine: {why}")
    tag, host = image(client), DockerHost(client=client)
    with DockerSandbox(tag, Limits(), LABEL, host) as box:
        name = box.container.id
        compare("exec", rounds, lambda: box.run("true"), lambda: cli("exec", name, "sh", "-c", "true"))
    made: list[DockerSandbox] = []
    theirs: list[str] = []
    limits = ("--network=none", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--memory=1g", "--memory-swap=1g",
              "--pids-limit=128", "--cpus=1", "--log-driver=none", "--entrypoint=/bin/sh")
    compare("start", max(3, rounds // 3), lambda: made.append(DockerSandbox(tag, Limits(), LABEL, host)),
            lambda: theirs.append(cli("run", "-d", *limits, tag, "-c", "while :; do sleep 600; done")))
    for box in made:
        box.close()
    cli("rm", "-f", *theirs)
    crowd(tag, 16)
    client.close()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 30)
