"""The native rollout engine: many conversations decoded at once by one scheduler thread, in plain PyTorch.

The engine gets a model and calls only these of it: `config.vocab_size`, `new_cache()`, `hidden(ids, cu_seqlens,
caches=)`, `head_weight`, `decoder(rows)` (rows with join, leave and step) and `load_state_dict()`.

A request's life: generate() queues it and waits. The scheduler finds how much of its context the session's cache
holds, rewinds to that, runs the rest (short ones packed), then decodes all running requests together.

Lock-step (the default): a round starts when every announced worker waits with a request, runs them in order of session
name, and takes nothing new before all have ended. So the batches, and with them every float and every sample, are the
same however fast the tools between the turns were. Announce all workers before the first of them generates:

    with ExitStack() as stack:               # in the thread that starts the pool, or behind a barrier in each thread
        workers = [stack.enter_context(engine.worker()) for _ in range(8)]

Continuous (`lockstep=False`): a request joins as soon as a row is free; samples then depend on timing in the last bits.
"""

from __future__ import annotations

import copy
import math
import threading
import time
from collections import OrderedDict
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from oprd.rollout.engine import Completion, Sampling, check_request
from oprd.rollout.sampling import Sampler

PREFILL_TOKENS = 1024  # in one forward: more leave the processor's caches (4,800 tokens: 0.43 s at once, 0.33 s packed)


@dataclass(eq=False)
class _Request:
    """One generate() call. `ids` is everything sampled so far; `done` is set with either `completion` or `error`."""

    session: str
    context: list[int]
    sampling: Sampling
    seed: int
    stop: frozenset[int]
    until: float  # of the monotonic clock
    ids: list[int] = field(default_factory=list)
    completion: Completion | None = None
    error: BaseException | None = None
    done: threading.Event = field(default_factory=threading.Event)


class NativeEngine:
    """Implements rollout.engine.Engine on the CPU. The model is copied, in float32; load() brings new weights.

    rows: requests decoded together. cached_tokens: tokens kept over all idle sessions; beyond it the session whose
    last turn lies furthest back is dropped (it is prefilled again when it returns).
    """

    def __init__(self, model: Any, version: int = 0, rows: int = 32, cached_tokens: int = 100_000,
                 lockstep: bool = True):
        if rows < 1:
            raise ValueError(f"rows = {rows} must be at least 1")
        self.version = version
        self._model = copy.deepcopy(model).to("cpu", torch.float32).requires_grad_(False)
        self._model.zero_grad(set_to_none=True)  # deepcopy brought the gradients along
        self._rows, self._cached_tokens, self._lockstep = rows, cached_tokens, lockstep
        self._decoder = self._model.decoder(rows)
        self._sampler = Sampler(rows)
        self._sessions: OrderedDict[str, tuple[list[int], Any]] = OrderedDict()  # name -> (ids held, cache), old first
        self._changed = threading.Condition()  # guards everything below
        self._workers = 0
        self._pending: list[_Request] = []
        self._admitted: list[_Request] = []  # of this round, waiting for a free row
        self._running: list[_Request] = []  # in the order of the decoder's rows
        self._forgotten: set[str] = set()
        self._failure: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="native-engine", daemon=True)
        self._thread.start()

    # --- called from the agents' threads

    @contextmanager
    def worker(self) -> Iterator[None]:
        """Announce one thread that will generate again and again; lock-step rounds wait for it until it leaves."""
        with self._changed:
            self._workers += 1
        try:
            yield
        finally:
            with self._changed:
                self._workers -= 1
                self._changed.notify_all()

    def generate(self, session: str, context_ids: Sequence[int], sampling: Sampling, seed: int,
                 seconds: float | None = None) -> Completion:
        """Sample one turn after context_ids; blocks. ValueError: a request that cannot be served. RuntimeError: the
        engine is closed or has failed (the cause is chained). Past `seconds` the turn ends after its next token."""
        request = self._checked(session, context_ids, sampling, seed, seconds)
        with self._changed:
            self._refuse_if_down()
            if any(r.session == session for r in (*self._pending, *self._admitted, *self._running)):
                raise ValueError(f"session {session!r} already has a request running; a session takes one at a time")
            self._pending.append(request)
            self._changed.notify_all()
        request.done.wait()
        if request.error is not None:
            raise RuntimeError(f"rollout engine stopped: {request.error}") from request.error
        return request.completion

    def forget(self, session: str) -> None:
        """Free a session's cache, at the next moment when that cannot change any running batch."""
        with self._changed:
            self._forgotten.add(session)
            self._changed.notify_all()

    def load(self, weights: Any, version: int) -> None:
        """Take new weights (a model or its state dict), drop every cache, serve as `version`. RuntimeError while
        requests run or wait: their samples would come from two policies. ValueError: weights of another model; the
        old ones then go on serving."""
        state: Mapping[str, Tensor] = weights if isinstance(weights, Mapping) else weights.state_dict()
        with self._changed:
            self._refuse_if_down()
            busy = len(self._pending) + len(self._admitted) + len(self._running)
            if busy:
                raise RuntimeError(f"cannot load version {version} while {busy} requests run or wait")
            own = self._model.state_dict()
            wrong = sorted(own.keys() ^ state.keys() or (n for n in own if own[n].shape != state[n].shape))
            if wrong:
                raise ValueError(f"version {version}: weights do not fit the engine's model, first at {wrong[0]}")
            self._model.load_state_dict(state)
            self._decoder = self._model.decoder(self._rows)
            self._sessions.clear()
            self.version = version

    def measured(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Stop the scheduler; requests still waiting raise RuntimeError."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _checked(self, session: str, context_ids: Sequence[int], s: Sampling, seed: int,
                 seconds: float | None) -> _Request:
        context = [int(i) for i in context_ids]
        check_request(session, context, s, seed, self._model.config.vocab_size)
        until = time.monotonic() + seconds if seconds is not None else math.inf
        return _Request(session, context, s, seed, frozenset(s.stop_ids), until)

    def _refuse_if_down(self) -> None:
        if self._failure is not None:
            raise RuntimeError(f"rollout engine stopped: {self._failure}") from self._failure
        if self._closed:
            raise RuntimeError("rollout engine is closed")

    # --- the scheduler thread

    def _serve(self) -> None:
        failure: BaseException = RuntimeError("closed")
        try:
            with torch.inference_mode():
                while self._admit():
                    self._join()
                    if self._running:
                        self._token()
        except BaseException as error:  # whatever it was, the callers must hear of it instead of waiting for ever
            failure = error
        with self._changed:
            self._failure = failure
            for request in (*self._pending, *self._admitted, *self._running):
                request.error = failure
                request.done.set()
            self._pending, self._admitted, self._running = [], [], []

    def _admit(self) -> bool:
        """Move pending requests into the round when one may start, waiting while there is nothing to do; False: end."""
        with self._changed:
            while not self._closed:
                between = not self._admitted and not self._running
                if between or not self._lockstep:
                    self._drop_forgotten()
                if not self._lockstep or (between and len(self._pending) >= self._workers):
                    self._admitted += sorted(self._pending, key=lambda r: r.session)
                    self._pending = []
                if self._admitted or self._running:
                    return True
                self._changed.wait()
            return False

    def _drop_forgotten(self) -> None:
        busy = {r.session for r in (*self._admitted, *self._running)}
        for session in self._forgotten - busy:
            self._sessions.pop(session, None)
        self._forgotten &= busy

    def _join(self) -> None:
        """Take in as many admitted requests as rows are free: prefill, and sample their first token."""
        with self._changed:
            free = self._rows - len(self._running)
            new, self._admitted = self._admitted[:free], self._admitted[free:]
            first = len(self._running)
            self._running += new
        if not new:
            return
        pack, logits = [], []
        for request in new:
            held, cache = self._sessions.pop(request.session, ([], None))
            cache = cache if cache is not None else self._model.new_cache()
            # the last context token always runs: its logits give the first sample
            keep = min(_common_prefix(held, request.context), len(request.context) - 1)
            keep = cache.rewind(keep)
            piece = request.context[keep:]
            if pack and sum(len(p) for p, _, _ in pack) + len(piece) > PREFILL_TOKENS:
                logits.append(self._prefill(pack))
                pack = []
            pack.append((piece, cache, request.sampling.max_new_tokens))
            self._sampler.join(request.sampling, request.seed)
        logits.append(self._prefill(pack))
        self._take(self._sampler.sample(torch.cat(logits), first), first)

    def _prefill(self, pack: list[tuple[list[int], Any, int]]) -> Tensor:
        """Run (piece, cache, room) packed in one forward, each piece after its cache, and give each a row with room
        for so many new tokens; returns the last logits of each, [len(pack), V]."""
        pieces, caches, rooms = zip(*pack)
        ends = list(accumulate(len(piece) for piece in pieces))
        ids = torch.tensor([i for piece in pieces for i in piece])
        hidden = self._model.hidden(ids, torch.tensor([0, *ends]), caches=caches)
        for cache, room in zip(caches, rooms):
            self._decoder.join(cache, room)
        return F.linear(hidden[torch.tensor(ends) - 1], self._model.head_weight)

    def _token(self) -> None:
        """One token for every running request."""
        ids = torch.tensor([request.ids[-1] for request in self._running])
        self._take(self._sampler.sample(self._decoder.step(ids), 0), 0)

    def _take(self, sampled: list[int], first: int) -> None:
        """Hand sampled tokens to the requests of rows first..; those that ended leave."""
        ended, now = [], time.monotonic()
        for row, token in enumerate(sampled, start=first):
            request = self._running[row]
            request.ids.append(token)
            if token in request.stop or len(request.ids) == request.sampling.max_new_tokens or now > request.until:
                ended.append(row)
        for row in reversed(ended):  # from the end, so that the rows still to be handled keep their numbers
            self._leave(row)

    def _leave(self, row: int) -> None:
        """Finish one request. The last row takes its place, here as in the decoder and the sampler."""
        request = self._running[row]
        cache = self._decoder.leave(row)
        logprobs = self._sampler.leave(row, len(request.ids))
        full = len(request.ids) == request.sampling.max_new_tokens
        finish = "stop" if request.ids[-1] in request.stop else "length" if full else "time"
        self._remember(request.session, request.context + request.ids[:-1], cache)
        request.completion = Completion(tuple(request.ids), tuple(logprobs), self.version, finish)
        with self._changed:
            last = self._running.pop()
            if last is not request:
                self._running[row] = last
        request.done.set()

    def _remember(self, session: str, ids: list[int], cache: Any) -> None:
        """Keep a session's cache; over the budget, the oldest others go, then this one."""
        self._sessions[session] = (ids, cache)
        total = sum(len(held) for held, _ in self._sessions.values())
        while total > self._cached_tokens:
            _, (held, _) = self._sessions.popitem(last=False)
            total -= len(held)


def _common_prefix(a: list[int], b: list[int]) -> int:
    """How many first ids agree."""
    if a == b[: len(a)]:
        return len(a)
    return next(i for i, (x, y) in enumerate(zip([*a, None], [*b, None])) if x != y)
