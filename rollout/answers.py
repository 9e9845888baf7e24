"""Attempts at prompts: one sampled reply each, no tools and no sandbox; ground truth where the task has it.

The same Outcome as an attempt at a repository: a trajectory of one turn, and a verdict by the task's constraints. A
prompt without constraints has no verdict: its reward is a verifier's business (`soft_reward.py`).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from typing import Callable, Sequence

from oprd.core.chat import Chat
from oprd.core.types import Ending, Trajectory, Turn
from oprd.rollout.attempts import Attempt, Outcome
from oprd.rollout.engine import Completion, Engine, Sampling
from oprd.sandbox.microif import constraints_of
from oprd.sandbox.verify import Verdict


@dataclass(frozen=True)
class Request:
    """One turn to sample; `session` is unique among those asked for at once."""

    session: str
    ids: tuple[int, ...]
    seed: int


def sample(engine: Engine, requests: Sequence[Request], sampling: Sampling, workers: int) -> list[Completion]:
    """All requests sampled, in order; at most `workers` at once, all announced to the engine before the first."""
    if len({r.session for r in requests}) != len(requests):
        raise ValueError("sessions of one sampling must be unique")
    found: list[Completion | None] = [None] * len(requests)
    numbers = count()

    def work(announced: ExitStack) -> None:
        with announced:
            while (i := next(numbers)) < len(requests):
                r = requests[i]
                try:
                    found[i] = engine.generate(r.session, r.ids, sampling, r.seed)
                finally:
                    engine.forget(r.session)

    stacks = [ExitStack() for _ in range(min(workers, len(requests)))]
    for stack in stacks:
        stack.enter_context(engine.worker())
    with ThreadPoolExecutor(max(1, len(stacks))) as pool:
        for done in [pool.submit(work, stack) for stack in stacks]:
            done.result()
    return found


class Answers:
    """A road.Pool."""

    def __init__(self, engine: Engine, chat: Chat, system: str, sampling: Sampling, workers: int):
        self.engine, self.chat, self.system = engine, chat, system
        self.sampling, self.workers = sampling, workers

    def run(self, attempts: Sequence[Attempt], reminding=None,
            on_done: Callable[[Outcome], None] = lambda outcome: None) -> list[Outcome]:
        """As Attempts.run; there is nothing in a single reply to remind of."""
        if reminding is not None:
            raise ValueError("prompts have one reply and no reminders; set eval.following = false")
        contexts = [self.chat.open(self.system, a.task.problem_statement) for a in attempts]
        requests = [Request(a.id, (*ids, *self.chat.generation_ids), a.seed) for a, ids in zip(attempts, contexts)]
        replies = sample(self.engine, requests, self.sampling, self.workers)
        outcomes = [self._outcome(*found) for found in zip(attempts, contexts, replies)]
        for outcome in outcomes:
            on_done(outcome)
        return outcomes

    def _outcome(self, attempt: Attempt, context: tuple[int, ...], done: Completion) -> Outcome:
        text = self.chat.parse(done.ids).content if done.finish == "stop" else self.chat.tokenizer.decode(done.ids)
        turn = Turn(context, done.ids, done.logprobs, done.version, text=text)
        ending = Ending.SUBMITTED if done.finish == "stop" else Ending.REPLY_LIMIT
        told = Trajectory(attempt.id, attempt.task.instance_id, (turn,), self.chat.generation_ids, ending)
        constraints = constraints_of(attempt.task)
        missed = [c.text() for c in constraints if not c.holds(text)]
        verdict = Verdict(not missed, reason="; ".join(missed)) if constraints else None
        return Outcome(attempt, told, patch=text.encode(), verdict=verdict)


def response_of(outcome: Outcome) -> str:
    """What a verifier is shown of an attempt: the reply of a prompt, or the patch of a repository task."""
    return outcome.patch.decode("utf-8", "replace")
