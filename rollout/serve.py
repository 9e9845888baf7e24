"""SGLang servers for a run: those that are running already, or those it starts itself and always ends."""

from __future__ import annotations

import os
import random
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable, Sequence

from oprd.core.settings import Config
from oprd.rollout import guard
from oprd.rollout.server import Lost, Refused, Server, wait_for
from oprd.rollout.sglang import SGLangEngine
from oprd.rollout.update import Publisher, Updater

PORTS = range(20_000, 30_000)  # below those that outgoing connections take: a server binds its port seconds later


class Managed:
    """Servers that live as long as this object, or this process. command: a shell-like line with {model} and {port};
    folder: where their output goes. Raises ValueError for a command that cannot be started."""

    def __init__(self, command: str, model: Path, folder: Path, count: int):
        self._command, self._model, self._folder = command, model, folder
        self._processes: dict[int, subprocess.Popen] = {}
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("{model}", "{port}"):
            if name not in command:
                raise ValueError(f"sglang.command = {command!r} must hold {name}")
        try:
            for _ in range(count):
                self._start(free_port(set(self._processes)))
        except BaseException:
            self.close()
            raise

    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self._processes]

    def gone(self) -> str | None:
        """Why one of the servers has ended, or None."""
        for port, process in self._processes.items():
            if process.poll() is not None:
                return f"the server at port {port} has ended; {self.log(port)} ends: {self._last_line(port)}"
        return None

    def restart(self, port: int) -> bool:
        """Start a server that has ended again, at its port; False: it has not ended."""
        if self._processes[port].poll() is None:
            return False
        self._start(port)
        return True

    def log(self, port: int) -> Path:
        return self._folder / f"server_{port}.log"

    def close(self) -> None:
        """End all servers with everything they started, and wait for that."""
        for process in self._processes.values():
            process.stdin.close()
        for process in self._processes.values():
            process.wait()
            _wait_until_gone(process.pid)

    def _start(self, port: int) -> None:
        line = [part.format(model=self._model.resolve(), port=port) for part in shlex.split(self._command)]
        root = Path(__file__).resolve().parents[1]
        if (root / line[0]).is_file():  # launch/sglang.sh, wherever the run was started from
            line[0] = str(root / line[0])
        with open(self.log(port), "ab") as out:
            self._processes[port] = subprocess.Popen([sys.executable, guard.__file__, *line], stdin=subprocess.PIPE,
                                                     stdout=out, stderr=subprocess.STDOUT, start_new_session=True)

    def _last_line(self, port: int) -> str:
        lines = [line for line in self.log(port).read_text(errors="replace").splitlines()
                 if line.strip() and not line.startswith("ended with code")]
        return lines[-1].strip()[:300] if lines else "(nothing)"


def _wake(server: Server) -> None:
    """Let a server go on that a run which was killed in an update left paused."""
    try:
        server.call("/continue_generation", {})
    except (Lost, Refused):
        pass  # wait_for tells


def _wait_until_gone(group: int, seconds: float = 10.0) -> None:
    """Killed processes take a moment to disappear from the process table."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.02)


def free_port(taken: set[int]) -> int:
    """A port of this machine that nothing listens at now."""
    for port in random.Random(time.time_ns()).sample(PORTS, len(PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in taken:
            return port
    raise OSError(f"no free port from {PORTS.start} to {PORTS.stop - 1}")


class Served(SGLangEngine):
    """An engine of its servers, which end with it."""

    def __init__(self, managed: Managed | None, servers: Sequence[Server], updater: Updater, vocab: int, ready_s: float,
                 **settings):
        super().__init__(servers, updater, vocab, **settings)
        self._managed, self._ready_s = managed, ready_s

    def revive(self, server: Server) -> None:
        """A server of ours that has died is started anew; raises Lost when it does not come up."""
        if self._managed is not None and self._managed.restart(server.port):
            wait_for([server], self._ready_s, self._managed.gone, lambda ready: None)
            server.learn()

    def close(self) -> None:
        try:
            super().close()
        finally:
            if self._managed is not None:
                self._managed.close()


def serve(config: Config, publisher: Publisher, model: Path, weights: Any, version: int,
          report: Callable[[int], None] = lambda ready: None) -> Served:
    """The engine of a run's settings, serving `weights` as `version`. model: the folder that servers of ours load at
    first. Their output, and weights that go over the disk, are kept in run.folder/servers. `report` hears how many
    servers are ready. Raises ValueError for settings that cannot work, a Broke (Lost, Unserved) for servers that do not
    come up or do not take the weights."""
    s, r, folder = config.sglang, config.rollout, Path(config.run.folder) / "servers"
    managed = None if s.servers else Managed(s.command, model, folder, s.count)
    try:
        servers = [Server(url, s.call_s) for url in s.servers or managed.urls()]
        if managed is None:
            for server in servers:
                _wake(server)
        wait_for(servers, s.ready_s if managed else s.call_s, managed.gone if managed else lambda: None, report)
        for server in servers:
            try:
                server.learn()
            except Refused as problem:
                raise ValueError(f"{server}: is no SGLang server: {problem}") from None
            if server.most_tokens and server.most_tokens < r.max_context_tokens:
                raise ValueError(f"rollout.max_context_tokens = {r.max_context_tokens} must not exceed what {server} "
                                 f"takes = {server.most_tokens}; start it with more")
        serving = {server.dtype for server in servers}
        if not s.dtype and len(serving) == 1 and serving <= {"float32", "bfloat16"}:
            publisher.send_as(*serving)  # what a server would round, or widen after we have rounded it
        updater = Updater(publisher, folder / "weights", s.update, s.update_s, s.probe_tolerance, s.address)
        engine = Served(managed, servers, updater, publisher.vocab, s.ready_s, turn_s=s.turn_s, retries=s.retries,
                        health_s=s.health_s)
    except BaseException:
        if managed is not None:
            managed.close()
        raise
    try:
        engine.load(weights, version)
    except BaseException:
        engine.close()
        raise
    return engine
