"""New weights for running servers: the HTTP half of a broadcast, and the proof that they arrived.

    pause (running turns come back with what they have) -> [begin] -> buckets -> [end] -> flush, confirmed -> continue
    -> probe: the log-probabilities of fixed rows must be the trainer's

A server ignores a parameter that it does not know, and keeps old values in its prefix cache; it says success in both
cases. So success is believed when the probe agrees. A server whose update failed half-way holds neither the old nor the
new weights: it is unusable until a reload of everything from the disk has passed the same probe.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping, Protocol, Sequence

from oprd.rollout.engine import Unserved
from oprd.rollout.server import DEAD, SERVING, UNUSABLE, Lost, Refused, Server
from oprd.rollout.wire import Strange

log = logging.getLogger("oprd.rollout")
TROUBLE = (Lost, Refused, Strange, RuntimeError, OSError)  # torch.distributed raises RuntimeErrors


class Bucket(Protocol):
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    data: Any
    last: bool


class Publisher(Protocol):
    """The trainer's side (core/publish.py)."""

    vocab: int
    wide: bool  # float32 matrices are sent
    probes: list[list[int]]
    backend: str  # gloo or nccl

    def send_as(self, dtype: str) -> None: ...

    def buckets(self, weights: Any) -> Iterator[Bucket]: ...

    def group(self, size: int, name: str) -> Any: ...

    def expected(self, weights: Any) -> list[list[float]]: ...

    def write(self, weights: Any, folder: Path) -> None: ...


class Updater:
    """way: `broadcast` or `disk`. folder: where weights for a reload from disk are written; servers must see it under
    the same path. seconds: limit of every single step. tolerance: largest mean difference of the probe; 0 takes 1e-5
    in float32 and 0.15 else (rounding a trained model to bfloat16 moves random tokens by 0.05); the largest single
    difference may be ten times that."""

    def __init__(self, publisher: Publisher, folder: Path, way: str = "broadcast", seconds: float = 120.0,
                 tolerance: float = 0.0, address: str = ""):
        self.publisher, self._folder, self._way, self._seconds = publisher, folder, way, seconds
        self._tolerance = tolerance or (1e-5 if publisher.wide else 0.15)
        self._address = address
        self._nonce = secrets.token_hex(4)  # a restarted server, or another run's weights, must not pass for ours
        self._groups: dict[Server, Any] = {}
        self._tainted: set[Server] = set()  # of half-updated servers: only a reload from the disk helps
        self.last_s = 0.0  # seconds the last update took

    def label(self, version: int) -> str:
        return f"{self._nonce}.{version}"

    def update(self, servers: Sequence[Server], weights: Any, version: int) -> None:
        """Bring `weights` to every living server and prove it; those that fail are left unusable, with the reason in
        `why`. Raises Unserved when none is left. No turn may be under way or begin meanwhile (rollout/routing.py)."""
        began, label = time.monotonic(), self.label(version)
        living = [s for s in servers if s.state != DEAD or s.alive(2.0)]
        self._tainted |= {s for s in living if s.state == DEAD}  # back from the dead: with which weights?
        for server in living:
            server.state, server.why = UNUSABLE, f"its update to version {version} is not finished"
        with ThreadPoolExecutor(max(1, 2 * len(living)), thread_name_prefix="update") as pool:
            expected = self.publisher.expected(weights)
            clean = [s for s in living if s not in self._tainted] if self._way == "broadcast" else []
            first = self._bring(_Round(pool, clean), self._broadcast, weights, label, expected)
            for server, why in first.failed.items():
                log.warning("rollout server %s: %s; it gets everything from the disk", server, why)
                self._tainted.add(server)
                self._leave(server)
            rest = [s for s in living if s not in first.living and s.alive(2.0)]
            second = self._bring(_Round(pool, rest), self._from_disk, weights, label, expected)
            for server in (*first.living, *second.living):
                server.state, server.why, server.label = SERVING, "", label
                self._tainted.discard(server)
            for server, why in {**first.failed, **second.failed}.items():
                if server not in second.living:
                    self._give_up(server, why)
        if not any(s.state == SERVING for s in servers):
            raise Unserved(f"no rollout server holds version {version}: " + "; ".join(f"{s}: {s.why}" for s in servers))
        self.last_s = time.monotonic() - began

    def _bring(self, run: "_Round", way: Callable[["_Round", Any, str], None], weights: Any, label: str,
               expected: Sequence[Sequence[float]]) -> "_Round":
        """One way of bringing the weights, between a pause and the proof; returns who came through and who did not."""
        if run.living:
            run.each("pause", lambda s: s.call("/pause_generation", {"mode": "abort"}, self._seconds))
            way(run, weights, label)
            run.each("flush", lambda s: s.flush(self._seconds))
            run.each("continue", lambda s: s.call("/continue_generation", {}, self._seconds))
            run.each("proof", lambda s: self._prove(s, expected, label))
        return run

    def close(self) -> None:
        for server in list(self._groups):
            self._leave(server)

    # --- the broadcast

    def _broadcast(self, run: "_Round", weights: Any, label: str) -> None:
        """Send every bucket to all servers at once."""
        run.each("joining the weights' group", self._join)
        run.each("begin", lambda s: s.call("/begin_weight_update", {}, self._seconds) if s.sessions else None)
        stream = self.publisher.buckets(weights)
        bucket = next(stream, None)
        while bucket is not None and run.living:
            replies = {s: run.pool.submit(s.call, "/update_weights_from_distributed", self._body(s, bucket, label),
                                          self._seconds) for s in run.living}
            works: dict[Server, Any] = {}
            for server in list(run.living):
                run.attempt(server, f"weights {bucket} to {_ranks(server)}",
                            lambda s: works.__setitem__(s, self._groups[s].send(bucket.data)))
            following = None if bucket.last else next(stream)  # filled while this one is on its way
            for server in list(run.living):
                run.attempt(server, f"weights {bucket} to {_ranks(server)}",
                            lambda s: self._finish(works[s], replies[s]))
            bucket = following
        run.each("end", lambda s: s.call("/end_weight_update", {}, self._seconds) if s.sessions else None)

    def _body(self, server: Server, bucket: Bucket, label: str) -> Mapping[str, Any]:
        body = {"names": bucket.names, "dtypes": bucket.dtypes, "shapes": bucket.shapes,
                "group_name": self._groups[server].name, "load_format": "flattened_bucket", "flush_cache": False,
                "abort_all_requests": False}
        return {**body, "weight_version": label} if bucket.last else body

    def _finish(self, work: Any, reply: Future) -> None:
        """Wait for a broadcast and the server's word on it. A server that refuses does not take part in the broadcast,
        which would then wait in vain."""
        until = time.monotonic() + self._seconds
        while not work.is_completed():
            if reply.done():
                reply.result()
            if time.monotonic() > until:
                raise Lost(f"the broadcast is not finished after {self._seconds:g} s")
            time.sleep(0.0002)
        work.wait()
        reply.result(max(0.0, until - time.monotonic()))

    def _join(self, server: Server) -> None:
        """Make the group with a server that has none yet: rank 0 is here, its ranks come after."""
        if server in self._groups:
            return
        group = self.publisher.group(1 + server.tensor_parallel, f"oprd-{self._nonce}-{secrets.token_hex(3)}")
        body = {"master_address": self._address or server.address_seen(), "master_port": group.port, "rank_offset": 1,
                "world_size": group.size, "group_name": group.name, "backend": self.publisher.backend}
        answer: list[BaseException] = []

        def ask() -> None:
            try:
                server.call("/init_weights_update_group", body, self._seconds)
            except (Lost, Refused) as problem:
                answer.append(problem)

        asked = threading.Thread(target=ask, daemon=True)
        asked.start()
        group.join()
        asked.join()
        if answer:
            raise answer[0]
        self._groups[server] = group

    def _leave(self, server: Server) -> None:
        """Close a server's group without waiting for a broadcast that hangs in it."""
        group = self._groups.pop(server, None)
        if group is not None:
            try:
                server.call("/destroy_weights_update_group", {"group_name": group.name}, 5.0)
            except (Lost, Refused):
                pass
            threading.Thread(target=group.close, daemon=True).start()

    # --- from the disk, and the proof

    def _from_disk(self, run: "_Round", weights: Any, label: str) -> None:
        self.publisher.write(weights, self._folder)
        body = {"model_path": str(self._folder.resolve()), "weight_version": label, "flush_cache": True,
                "abort_all_requests": False}

        def reload(server: Server) -> None:
            if server.sessions:
                try:
                    server.call("/end_weight_update", {}, self._seconds)
                except Refused:
                    pass  # none was open
            server.call("/update_weights_from_disk", body, self._seconds)

        run.each("reload from the disk", reload)

    def _prove(self, server: Server, expected: Sequence[Sequence[float]], label: str) -> None:
        """Compare the probes. Raises Strange when the server's weights are not the trainer's."""
        differences = []
        for ids, wanted in zip(self.publisher.probes, expected, strict=True):
            found, said = server.score(ids, self.publisher.vocab, self._seconds)
            if said != label:
                raise Strange(f"it calls its weights {said!r} instead of {label!r}")
            differences += [abs(a - b) for a, b in zip(found, wanted, strict=True)]
        mean, most = sum(differences) / len(differences), max(differences)
        if not (mean <= self._tolerance and most <= 10 * self._tolerance):
            raise Strange(f"its log-probabilities differ from the trainer's by {mean:.2g} in the mean and {most:.2g} "
                          f"at most, allowed are {self._tolerance:.2g} and {10 * self._tolerance:.2g}")

    def _give_up(self, server: Server, why: str) -> None:
        server.state, server.why = (UNUSABLE if server.alive(2.0) else DEAD), why
        self._tainted.add(server)
        self._leave(server)
        log.warning("rollout server %s is %s: %s", server, server.state, why)


def _ranks(server: Server) -> str:
    n = server.tensor_parallel
    return "rank 1" if n == 1 else f"ranks 1 to {n}"


class _Round:
    """Servers on one way through an update: each step is taken by all that are still living, at once."""

    def __init__(self, pool: ThreadPoolExecutor, servers: Sequence[Server]):
        self.pool, self.living, self.failed = pool, list(servers), {}

    def each(self, what: str, do: Callable[[Server], Any]) -> None:
        for server, future in [(s, self.pool.submit(do, s)) for s in self.living]:
            self.attempt(server, what, lambda _: future.result())

    def attempt(self, server: Server, what: str, do: Callable[[Server], Any]) -> None:
        try:
            do(server)
        except TROUBLE as problem:
            self.living.remove(server)
            self.failed[server] = f"{what}: {' '.join(str(problem).split())[:300]}"
