"""A process of its own that outlives its trainer and then removes everything with the run's label.

`Reaper` starts it before the first container: in a session of its own, so that neither Ctrl-C nor a killed process
group takes it along. It waits for its owner's end (or a good-bye: then the owner has cleaned up and it just leaves),
and removes the run's containers, networks and local copies from every engine, again and again until QUIET_S have
passed in which nothing was found: an engine may still be working on a request of the dead owner's. An engine that
does not answer (it may be restarting) is asked again for PATIENCE_S.

What ends this process too (a power cut, the end of a Slurm job) leaves the rest to the next start's sweep.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from typing import Callable, Sequence

from oprd.sandbox.box import Broke
from oprd.sandbox.sweep import owner_is_dead, sweep

QUIET_S = 5.0
PATIENCE_S = 900.0
START_S = 60.0  # how long the process may take to say that it is there


class Reaper:
    """The owner's end of it. Raises Broke when the process cannot be started."""

    def __init__(self, label: str, hosts: Sequence[str]):
        path = os.pathsep.join(os.path.abspath(part) for part in sys.path)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "oprd.sandbox.reaper", label, *(hosts or ("",))], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True, cwd="/",
                env={**os.environ, "PYTHONPATH": path})
        except OSError as problem:
            raise Broke(f"the reaper of containers cannot be started: {problem}") from problem
        ready, _, _ = select.select([self.process.stdout], [], [], START_S)
        if not ready or self.process.stdout.read(1) != b"r":
            self.process.kill()
            self.process.wait()
            raise Broke("the reaper of containers does not start")

    def close(self) -> None:
        """Let it go: the owner has closed its boxes. Idempotent."""
        if self.process.stdin.closed:
            return
        try:
            self.process.stdin.write(b"bye")
            self.process.stdin.close()
        except BrokenPipeError:
            pass
        self.process.stdout.close()
        self.process.wait()


def reap(label: str, engines: Sequence[Callable[[], list[str]]], quiet_s: float = QUIET_S,
         patience_s: float = PATIENCE_S) -> list[str]:
    """Remove what carries `label`: `engines` each remove what one engine has and say what (Broke: not reachable)."""
    done = sweep(lambda other: other == label)
    calm = start = time.monotonic()
    while time.monotonic() - calm < quiet_s:
        for engine in engines:
            try:
                found = engine()
            except Broke:
                if time.monotonic() - start > patience_s:
                    continue
                found = ["?"]  # not known to be clean
            if found:
                calm = time.monotonic()
            done += [line for line in found if line != "?"]
        time.sleep(0.5)
    return done


def _engine(url: str, label: str) -> Callable[[], list[str]]:
    """Connects anew every time: the engine may have been restarted, its tunnel ended with the owner."""
    from oprd.sandbox.docker_host import DockerHost
    from oprd.sandbox.docker_sweep import sweep_engine

    def clean() -> list[str]:
        host = DockerHost(url)
        try:
            return sweep_engine(host.client, lambda other: other == label)
        finally:
            host.close()

    return clean


def main(label: str, hosts: Sequence[str]) -> None:
    engines = [_engine(url, label) for url in hosts]  # imports what it needs while its owner is alive
    os.write(1, b"r")
    if os.read(0, 3) == b"bye":
        return
    while not owner_is_dead(label):  # its pipe ends a moment before it does
        time.sleep(0.05)
    reap(label, engines)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
