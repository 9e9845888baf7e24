"""One step of a stage that trains on its own attempts: what to attempt, how it went, what it teaches.

The parts are a stage's own (train.py puts them together); the road is the same for all. It is a pure function of the
step, the weights and its memory, which is saved with every checkpoint, so that a resume continues exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Mapping, Protocol, Sequence

from oprd.core.types import Example
from oprd.rollout import prefix
from oprd.rollout.ahead import Ahead
from oprd.rollout.attempts import Attempt, Outcome
from oprd.rollout.prefix import PrefixSampling
from oprd.rollout.teach import Forgetful, Lesson, OutcomeRouting, fates, gates
from oprd.rollout.teach import measured as measured_rollouts
from oprd.sandbox.task import Task


class Pool(Protocol):
    def run(self, attempts: Sequence[Attempt]) -> list[Outcome]: ...


class Teacher(Protocol):
    """From a step's outcomes to lessons, one an outcome. After a call: `rewards`, one an outcome, None where it is
    masked; `rows`, what else is to be trained; `measured()`, means as (total, count); `stop()`, why the run should end,
    or nothing; `memory()`, what it knows from earlier steps, as JSON, for `recall`."""

    rewards: Sequence[float | None]
    rows: Sequence[Example]

    def __call__(self, outcomes: Sequence[Outcome]) -> list[Lesson]: ...

    def measured(self) -> Mapping[str, tuple[float, int]]: ...

    def stop(self) -> str: ...

    def memory(self) -> Any: ...

    def recall(self, memory: Any) -> None: ...


class Routed(Forgetful):
    """A Teacher that looks at every attempt by itself (`teach`), with its reminders (see Harness.reminders)."""

    def __init__(self, teach: OutcomeRouting, reminders: Callable):
        self._teach, self._reminders = teach, reminders
        self.rewards: list[float | None] = []

    def __call__(self, outcomes: Sequence[Outcome]) -> list[Lesson]:
        self.rewards = [None if o.trouble else float(o.verdict.resolved) for o in outcomes]
        return list(map(self._teach, outcomes, self._reminders(outcomes, self._teach.distils)))


@dataclass(frozen=True)
class Taken:
    """What one step gives. means: (total, count); sums: counts that add up over a step."""

    examples: list[Example]
    means: dict[str, tuple[float, int]]
    sums: dict[str, int]
    stop: str = ""


@dataclass
class Road:
    """tasks: of a step. seed_of: a sample seed from (step, place, number). keep: writes a step's attempts
    down. ahead: how far making attempts may run ahead of training on them."""

    tasks: Callable[[int], Sequence[Task]]
    per_task: int
    seed_of: Callable[..., int]
    pool: Pool
    teach: Teacher
    keep: Callable[[int, Sequence[Outcome], Sequence[Lesson]], None]
    steer: PrefixSampling | None = None
    ahead: Ahead = field(default_factory=Ahead)

    def attempted(self, step: int) -> list[Outcome]:
        """Make a step's attempts, under the weights that serve meanwhile."""
        attempts = [Attempt(f"step{step}/{i}.{j}/{task.instance_id}", task, self.seed_of(step, i, j), f"step{step}/{i}")
                    for i, task in enumerate(self.tasks(step)) for j in range(self.per_task)]
        if self.steer:
            attempts += self.steer.attempts(step, lambda i, j: self.seed_of(step, "prefix", i, j))
        return self.pool.run(attempts)

    def __call__(self, step: int) -> Taken:
        outcomes = self.ahead.take(step, self.attempted)
        lessons = self.teach(outcomes)
        self.keep(step, outcomes, lessons)
        means = {**measured_rollouts(outcomes, lessons), **self.teach.measured()}
        sums = {f"fate/{name}": n for name, n in fates(lessons).items()} | {"rollout/attempts": len(outcomes)}
        sums |= {f"reminders/dropped_{gate}": n for gate, n in gates(lessons).items()}
        if self.steer:
            means |= prefix.measured(outcomes, self.teach.rewards)
            self.steer.observe(step, outcomes, self.teach.rewards)
            means |= self.steer.measured()
        examples = [lesson.example for lesson in lessons if lesson.example] + list(self.teach.rows)
        return Taken(examples, means, sums, self.teach.stop())

    def memory(self) -> dict[str, Any]:
        return {"steer": self.steer.memory() if self.steer else None, "teach": self.teach.memory()}

    def recall(self, memory: Mapping[str, Any] | None, tasks: Sequence[Task]) -> None:
        """Go on from what `memory` gave; None: from nothing."""
        if memory is None:
            return
        if self.steer and memory["steer"]:
            self.steer.recall(memory["steer"], {task.instance_id: task for task in tasks})
        self.teach.recall(memory["teach"])
