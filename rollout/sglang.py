"""The rollout engine that one or many SGLang servers make up: turns as pieces, weights that are known for every token.

A turn is one request, or several: a request that ended before its turn did (aborted by an update of the weights or by
anybody else, or lost with its server) is followed by one for the rest, from the tokens recorded so far, with the budget
that is left, on any server. What a lost request had sampled is unknown and gone; what was recorded is never sampled
again. Every reply names the weights it was sampled with; a reply that names others than its server was given is thrown
away and the server with it, until the next update.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
import time
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Sequence

from oprd.core.types import Span
from oprd.rollout.endpoint import Counts
from oprd.rollout.engine import Completion, Sampling, Unserved, check_request
from oprd.rollout.routing import Router
from oprd.rollout.server import DEAD, SERVING, UNUSABLE, Lost, Refused, Server
from oprd.rollout.update import Updater
from oprd.rollout.wire import Piece, Strange

log = logging.getLogger("oprd.rollout")
GRACE_S = 10.0  # how long an aborted request may take to say what it has
MISSED = 3  # health checks in a row without an answer, then a server is dead


@dataclass(eq=False)
class _Turn:
    """One generate() call and what it has sampled so far."""

    session: str
    context: list[int]
    sampling: Sampling
    seed: int
    until: float  # of the monotonic clock
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    failures: int = 0

    @property
    def left(self) -> int:
        return self.sampling.max_new_tokens - len(self.ids)

    def add(self, piece: Piece, version: int) -> None:
        start, end = len(self.ids), len(self.ids) + len(piece.ids)
        if self.spans and self.spans[-1].version == version:
            start = self.spans.pop().start
        if end > start:
            self.spans.append(Span(version, start, end))
        self.ids += piece.ids
        self.logprobs += piece.logprobs


class SGLangEngine:
    """Implements rollout.engine.Engine. It serves nothing before the first load().

    turn_s: wall clock of one turn at most; health_s: between health checks; retries: failures of one turn that are
    borne before it is given up (Unserved).
    """

    def __init__(self, servers: Sequence[Server], updater: Updater, vocab: int, turn_s: float = 600.0,
                 retries: int = 4, health_s: float = 10.0):
        self.version, self.counts = -1, Counts()
        self._router, self._updater, self._vocab = Router(servers), updater, vocab
        self._turn_s, self._retries, self._health_s = turn_s, retries, health_s
        self._nonce = secrets.token_hex(6)
        self._lock, self._running, self._numbers = threading.Lock(), {}, itertools.count()  # request id -> turn, server
        self._ended = threading.Event()
        self._watch = threading.Thread(target=self._watching, name="sglang-watch", daemon=True)
        self._watch.start()

    def worker(self) -> AbstractContextManager[None]:
        return nullcontext()

    def generate(self, session: str, context_ids: Sequence[int], sampling: Sampling, seed: int,
                 seconds: float | None = None) -> Completion:
        """Sample one turn after context_ids; blocks. ValueError: a request that cannot be served. Unserved: no server
        is left, or the turn failed too often."""
        context = [int(i) for i in context_ids]
        check_request(session, context, sampling, seed, self._vocab)
        limit = self._turn_s if seconds is None else min(self._turn_s, seconds)
        turn = _Turn(session, context, sampling, seed, time.monotonic() + limit)
        finish = "length"
        while turn.left > 0:
            if time.monotonic() >= turn.until:
                finish = "time"
                break
            if self._piece(turn) == "stop":
                finish = "stop"
                break
        if len({span.version for span in turn.spans}) > 1:
            self.counts.add("turns_of_several_versions")
        version = turn.spans[0].version if turn.spans else self.version
        spans = tuple(turn.spans) if len(turn.spans) > 1 else ()
        return Completion(tuple(turn.ids), tuple(turn.logprobs), version, finish, spans)

    def forget(self, session: str) -> None:
        self._router.forget(session)

    def load(self, weights: Any, version: int) -> None:
        """Bring the trainer's weights to all servers and prove them there. Turns that are under way are cut and go on
        under the new weights. Raises Unserved when no server came through."""
        for server in self._router.servers:  # while the others go on
            if server.state == DEAD:
                try:
                    self.revive(server)
                except (Lost, Refused) as problem:
                    log.warning("rollout server %s stays dead: %s", server, problem)
        self._router.close()
        self._quiet()
        self._updater.update(self._router.servers, weights, version)
        self.version = version
        self._router.open()

    def revive(self, server: Server) -> None:
        """Bring a dead server back, if it is ours to start."""

    def close(self) -> None:
        self._ended.set()
        self._router.end()
        self._watch.join()
        self._updater.close()

    def measured(self) -> dict[str, float]:
        """Of the time since the last call: what became of requests; servers that serve; the last update's seconds."""
        states = Counter(s.state for s in self._router.servers)
        return {**self.counts.take(), "servers": states[SERVING], "update_s": self._updater.last_s}

    # --- one request

    def _piece(self, turn: _Turn) -> str:
        """Ask one server for the rest of a turn and add what comes; returns how the request ended, `lost` included."""
        server, label = self._router.take(turn.session, turn.context, turn.until)
        # of one length: a server ends every request whose id begins with the one to be aborted
        version, request_id = self.version, f"{self._nonce}{next(self._numbers):012d}"
        with self._lock:
            self._running[request_id] = (turn, server)
        try:
            piece = server.generate(request_id, [*turn.context, *turn.ids], turn.sampling, turn.left,
                                    turn.seed + len(turn.ids), self._vocab,
                                    max(0.0, turn.until - time.monotonic()) + GRACE_S)
            if piece.label != label:
                raise Strange(f"it calls its weights {piece.label!r} instead of {label!r}")
        except (Lost, Refused, Strange) as problem:
            self._trouble(turn, server, label, problem)
            return "lost"
        finally:
            with self._lock:
                self._running.pop(request_id)
            self._router.give(server)
        turn.add(piece, version)
        if piece.finish == "abort":
            self.counts.add("aborted")
            if not piece.ids:
                self._bear(turn, server, "it ends requests without a token", count=time.monotonic() < turn.until)
        return piece.finish

    def _trouble(self, turn: _Turn, server: Server, label: str, problem: Exception) -> None:
        """Decide what a failed request says of its server. Raises ValueError for a request that will never pass."""
        if isinstance(problem, Refused) and 400 <= problem.status < 500 and problem.status not in (408, 429):
            raise ValueError(f"session {turn.session!r}: {server} refuses the request: {problem}")
        if isinstance(problem, Strange):
            self._drop(server, UNUSABLE, f"a reply cannot be used: {problem}", label)
        elif isinstance(problem, Lost) and not server.alive(min(GRACE_S, self._health_s)):
            self._drop(server, DEAD, str(problem), label)
        # a server that is being updated hangs up on us, and that is no failure of the turn
        self._bear(turn, server, str(problem), count=server.label == label and server.state != UNUSABLE
                   or isinstance(problem, Strange))

    def _bear(self, turn: _Turn, server: Server, why: str, count: bool) -> None:
        self.counts.add("failed")
        turn.failures += count
        if turn.failures > self._retries:
            raise Unserved(f"a turn failed {turn.failures} times, last on {server}: {why}")
        if count:
            time.sleep(min(0.1 * 2**turn.failures, max(0.0, turn.until - time.monotonic())))

    def _drop(self, server: Server, state: str, why: str, label: str) -> None:
        """Take a server out, unless it was given new weights since the request began."""
        with self._lock:
            if server.state != SERVING or server.label != label:
                return
            server.state, server.why = state, why
        log.warning("rollout server %s is %s: %s", server, state, why)
        self.counts.add("servers_lost")
        server.hang_up()

    # --- quiet, and the watch

    def _quiet(self) -> None:
        """Let every turn come back with what it has. A request that reached a server too late to be aborted would wait
        there until the update is over: it is hung up on."""
        for server in self._router.servers:
            if server.state == SERVING:
                try:
                    server.call("/pause_generation", {"mode": "abort"})
                except (Lost, Refused) as problem:
                    log.warning("rollout server %s does not pause: %s", server, problem)
        until = time.monotonic() + GRACE_S
        while not self._router.wait_idle(1.0):
            for server in self._router.servers:
                server.hang_up()
            if time.monotonic() > until + GRACE_S:
                raise Unserved("turns are still under way though every server was hung up on")

    def _watching(self) -> None:
        """End turns whose time is over; find servers that answer no more."""
        missed: Counter[Server] = Counter()
        aborted: set[str] = set()
        checked = time.monotonic()
        while not self._ended.wait(0.05):
            now = time.monotonic()
            with self._lock:
                late = {rid: server for rid, (turn, server) in self._running.items() if now > turn.until}
            aborted &= late.keys()
            for request_id in late.keys() - aborted:
                aborted.add(request_id)
                threading.Thread(target=late[request_id].abort, args=(request_id,), daemon=True).start()
            if now - checked > self._health_s:
                for server in self._router.servers:
                    label = server.label
                    well = server.state != SERVING or not self._router.is_open or server.healthy(self._health_s)
                    missed[server] = 0 if well else missed[server] + 1
                    if missed[server] >= MISSED:
                        self._drop(server, DEAD, f"{MISSED} health checks in a row went unanswered", label)
                checked = time.monotonic()
