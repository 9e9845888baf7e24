"""What an agent asks of a rollout engine: token ids in, token ids and log-probabilities out.

The native engine (`rollout/native.py`) and a served SGLang stand behind this protocol. Calls block and are
thread-safe; many attempts call at once from their own threads.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, Sequence

from oprd.core.types import Span
from oprd.sandbox.box import Broke


class Unserved(Broke):
    """No server could finish a request: a machine's failure, which is retried, then dropped and counted."""


@dataclass(frozen=True)
class Sampling:
    """How to sample one turn. temperature 0 is greedy; stop_ids end the turn and are kept in the result."""

    temperature: float
    top_p: float
    max_new_tokens: int
    stop_ids: tuple[int, ...]


@dataclass(frozen=True)
class Completion:
    """One sampled turn. finish: `stop` (a stop id was sampled, it is the last id), `length`, or `time` (the seconds
    given were over; what was sampled until then is kept).

    logprobs[i] is the log-probability of ids[i] under softmax(logits / temperature), before any top-p cut
    (temperature 0: under softmax(logits)). version: of the first token, the oldest. spans: which version sampled which
    tokens, in order and without gaps, where an update came in between; empty: all are `version`'s.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int
    finish: str
    spans: tuple[Span, ...] = ()


class Engine(Protocol):
    version: int  # the policy version that serves now

    def worker(self) -> AbstractContextManager[None]:
        """Announce one thread that will call generate() again and again (the native engine's lock-step batching
        waits for all announced workers, so that batches, and with them every float, are reproducible)."""

    def generate(self, session: str, context_ids: Sequence[int], sampling: Sampling, seed: int,
                 seconds: float | None = None) -> Completion:
        """Sample one turn after `context_ids` (the whole conversation so far). `session` names the conversation so
        that its cache is reused; `seed` decides the samples; `seconds` bounds the wall clock. ValueError: a request
        that cannot be served. Unserved: the machines failed."""

    def forget(self, session: str) -> None:
        """Free what is cached for a conversation. Unknown sessions are fine."""

    def load(self, weights: Any, version: int) -> None:
        """Serve `weights` (the trainer's model) as `version` from now on; nothing cached under older ones is used."""

    def measured(self) -> dict[str, float]:
        """What there is to log of the time since the last call."""

    def close(self) -> None: ...


def check_request(session: str, context: Sequence[int], s: Sampling, seed: int, vocab: int) -> None:
    """ValueError for what no engine can serve (and what ends some servers, as an id outside the vocabulary does)."""
    if not context:
        raise ValueError(f"session {session!r}: the context is empty; give at least one token id")
    for name, ids in (("context_ids", context), ("stop_ids", s.stop_ids)):
        wrong = next((i for i in ids if not 0 <= i < vocab), None)
        if wrong is not None:
            raise ValueError(f"session {session!r}: {name} holds {wrong}, the vocabulary is 0..{vocab - 1}")
    if s.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens = {s.max_new_tokens} must be at least 1")
    if not s.temperature >= 0:
        raise ValueError(f"temperature = {s.temperature} must be at least 0")
    if not 0 < s.top_p <= 1:
        raise ValueError(f"top_p = {s.top_p} must be above 0 and at most 1")
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed = {seed} must be from 0 to 2^63 - 1")
