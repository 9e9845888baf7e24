"""Group policy gradient: attempts at the same task are compared with each other, and the advantage is the weight.

Judging is another's work: `score` gives every judged attempt a Reward. Here each attempt gets one fate:

    dropped_<trouble>         the machine failed, the grading cannot be trusted, a replay diverged
    masked_<ending>           it ended in a way that says little about the work (`masked` endings: context_limit ...)
    dropped_no_reward_<why>   the judge gave none (a verifier that hangs, answers garbage or is rate-limited)
    dropped_no_turn           nothing was sampled
    dropped_no_signal         its group's valid members agree
    dropped_too_long          no micro-batch can hold it
    trained_policy

Only members with a reward are in their group's statistics (`advantages.py`). An attempt that is too long to train keeps
its place there: its reward is right.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any, Mapping, Protocol, Sequence

import numpy as np

from oprd.core.types import Example, View
from oprd.rollout.advantages import Advantages, advantages
from oprd.rollout.attempts import Outcome
from oprd.rollout.teach import Forgetful, Lesson
from oprd.rollout.views import student_example


@dataclass(frozen=True)
class Reward:
    """A judged attempt's reward; value None: there is none, and why says the reason in one word."""

    value: float | None
    why: str = ""


class Score(Protocol):
    """Gives judged attempts their rewards, one an outcome. `notes`: what it has to say of each, for the record. The
    rest as a road.Teacher's."""

    notes: Sequence[Mapping[str, Any]]
    rows: Sequence[Example]

    def __call__(self, outcomes: Sequence[Outcome]) -> Sequence[Reward]: ...

    def measured(self) -> Mapping[str, tuple[float, int]]: ...

    def stop(self) -> str: ...

    def memory(self) -> Any: ...

    def recall(self, memory: Any) -> None: ...


class OutcomeRewards(Forgetful):
    """The verdict of the hidden tests (or of a prompt's constraints): 1 or 0."""

    notes: Sequence[Mapping[str, Any]] = ()

    def __call__(self, outcomes: Sequence[Outcome]) -> list[Reward]:
        return [Reward(float(o.verdict.resolved)) if o.verdict else Reward(None, "no_truth") for o in outcomes]


@dataclass(frozen=True)
class GroupSettings:
    """masked: endings that count as no measurement. kl: weight of the KL to the teacher, token by token, 0: none.
    most_tokens: of a micro-batch. patience: steps in a row without a group of signal that end the run, 0: never."""

    most_tokens: int
    estimator: str = "rloo"
    std: bool = False
    masked: tuple[str, ...] = ()
    kl: float = 0.0
    patience: int = 0


class GroupPolicy(Forgetful):
    """A road.Teacher. After a call, `groups` has every group's statistics."""

    def __init__(self, score: Score, settings: GroupSettings):
        self.score, self.settings = score, settings
        self.rewards: list[float | None] = []
        self.groups: dict[str, Advantages] = {}
        self._members: dict[str, list[int]] = {}
        self._silent = 0

    def __call__(self, outcomes: Sequence[Outcome]) -> list[Lesson]:
        fates = [self._fate(o) for o in outcomes]
        judged = [i for i, fate in enumerate(fates) if not fate]
        self.rewards, notes = [None] * len(outcomes), [{}] * len(outcomes)
        for i, reward in zip(judged, self.score([outcomes[i] for i in judged]), strict=True):
            self.rewards[i] = reward.value
            if reward.value is None or not np.isfinite(reward.value):
                self.rewards[i], fates[i] = None, f"dropped_no_reward_{reward.why or 'not_finite'}"
        for i, note in zip(judged, self.score.notes):
            notes[i] = note
        weights = self._weigh(outcomes)
        self._silent = 0 if any(g.signal for g in self.groups.values()) else self._silent + 1
        lessons = [Lesson(fate, reward=reward) if fate else self._lesson(outcome, weight, reward)
                   for outcome, fate, weight, reward in zip(outcomes, fates, weights, self.rewards)]
        return [replace(lesson, notes=note) for lesson, note in zip(lessons, notes)]

    @property
    def rows(self) -> Sequence[Example]:
        """What the judge wants trained beside the attempts."""
        return self.score.rows

    def memory(self) -> Any:
        return self.score.memory()

    def recall(self, memory: Any) -> None:
        self.score.recall(memory)

    def stop(self) -> str:
        """Why the run should stop, or nothing."""
        if not self.settings.patience or self._silent < self.settings.patience:
            return self.score.stop()
        valid = [r for r in self.rewards if r is not None]
        mean = f"mean reward {sum(valid) / len(valid):.3f}" if valid else "no attempt has a reward"
        return (f"every group agreed in {self._silent} steps in a row ({mean}), so there is nothing to learn from: "
                "choose tasks of another difficulty, more attempts a task, prefix sampling, or a denser reward")

    def measured(self) -> dict[str, tuple[float, int]]:
        """Of the last step's groups, each as (total, count), by the name it has in the log."""
        groups = list(self.groups.values())
        rewards = [r for r in self.rewards if r is not None]
        spread = [float(np.std(own)) for name in self.groups if (own := self.rewards_of(name))]
        return {**self.score.measured(), "policy/reward": (sum(rewards), len(rewards)),
                "policy/groups_with_signal": (sum(g.signal for g in groups), 1),
                "policy/groups_without_signal": (sum(not g.signal for g in groups), 1),
                "policy/advantage_energy": (sum(g.energy for g in groups), max(1, len(groups))),
                "policy/reward_std_in_group": (sum(spread), len(spread))}

    def rewards_of(self, group: str) -> list[float]:
        """The rewards of a group's valid members."""
        return [r for i in self._members[group] if (r := self.rewards[i]) is not None]

    def _fate(self, outcome: Outcome) -> str:
        if outcome.trouble:
            return f"dropped_{outcome.trouble}"
        if outcome.trajectory.ending.value in self.settings.masked:
            return f"masked_{outcome.trajectory.ending.value}"
        return "" if any(not t.replayed for t in outcome.trajectory.turns) else "dropped_no_turn"

    def _weigh(self, outcomes: Sequence[Outcome]) -> list[float | None]:
        """Each attempt's advantage; None where its group has no signal or it has no reward."""
        members: dict[str, list[int]] = defaultdict(list)
        for i, outcome in enumerate(outcomes):
            members[outcome.attempt.group or outcome.attempt.task.instance_id].append(i)
        found: list[float | None] = [None] * len(outcomes)
        self.groups, self._members = {}, members
        for name, own in members.items():
            group = advantages([self.rewards[i] for i in own], self.settings.estimator, self.settings.std)
            self.groups[name] = group
            for i, value in zip(own, group.values):
                found[i] = value if group.signal else None
        return found

    def _lesson(self, outcome: Outcome, advantage: float | None, reward: float | None) -> Lesson:
        if advantage is None:
            return Lesson("dropped_no_signal", reward=reward)
        example = policy_example(outcome, advantage, self.settings.kl)
        read = len(example.row.ids) * (2 if self.settings.kl else 1)
        if read > self.settings.most_tokens:
            return Lesson("dropped_too_long", reward=reward)
        return Lesson("trained_policy", example, reward=reward)


def policy_example(outcome: Outcome, advantage: float, kl: float = 0.0) -> Example:
    """The student's row under its advantage; kl: also that much of the KL to a teacher that reads the same row."""
    losses = {"pg": advantage} | ({"kl": kl} if kl else {})
    plain = student_example(outcome.trajectory, {}, "policy")
    view = View((plain.row,), np.arange(len(plain.row.targets))) if kl else None
    return student_example(outcome.trajectory, losses, "policy", view, outcome.attempt.id)
