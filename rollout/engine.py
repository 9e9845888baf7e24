"""What an agent asks of a rollout engine: token ids in, token ids and log-probabilities out.

The native engine (`rollout/native.py`) and a served SGLang stand behind this protocol. Calls block and are
thread-safe; many attempts call at once from their own threads.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, Sequence


@dataclass(frozen=True)
class Sampling:
    """How to sample one turn. temperature 0 is greedy; stop_ids end the turn and are kept in the result."""

    temperature: float
    top_p: float
    max_new_tokens: int
    stop_ids: tuple[int, ...]


@dataclass(frozen=True)
class Completion:
    """One sampled turn. finish: `stop` (a stop id was sampled, it is the last id) or `length`.

    logprobs[i] is the log-probability of ids[i] under softmax(logits / temperature), before any top-p cut
    (temperature 0: under softmax(logits)).
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int
    finish: str


class Engine(Protocol):
    version: int  # the policy version that serves now

    def worker(self) -> AbstractContextManager[None]:
        """Announce one thread that will call generate() again and again (the native engine's lock-step batching
        waits for all announced workers, so that batches, and with them every float, are reproducible)."""

    def generate(self, session: str, context_ids: Sequence[int], sampling: Sampling, seed: int) -> Completion:
        """Sample one turn after `context_ids` (the whole conversation so far). `session` names the conversation so
        that its cache is reused; `seed` decides the samples."""

    def forget(self, session: str) -> None:
        """Free what is cached for a conversation. Unknown sessions are fine."""

    def close(self) -> None: ...
