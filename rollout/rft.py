"""Rubric-filtered fine-tuning: of the attempts that solved their task, imitate those that worked well.

In this order, so that no rubric can buy a wrong solution (the paper's abstract leaves the procedure open; ours):

    1  the verifier's gate: only attempts that hidden tests resolve        dropped_unresolved
    2  the GRM's answer must exist                                         dropped_unjudged
    3  hard disqualifiers                                                  dropped_disqualified
    4  rank by score within the task, the best `top` of a step             dropped_rank
    5  at most `cap` of one task over the whole run                        dropped_cap
    6  imitation (`nll`) of what is left                                   trained_success

Controls that differ in step 4 alone: `outcome` keeps every attempt that passes 1 (terminal reward only; the GRM is not
asked); `random` keeps as many attempts a task as the rubric would have kept, drawn from those that pass 1.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Callable, Mapping, Sequence

from oprd.core.types import Trajectory
from oprd.rollout.attempts import Outcome
from oprd.rollout.grm import Behaviour, Item
from oprd.rollout.tables import columns
from oprd.rollout.teach import Forgetful, Lesson
from oprd.rollout.views import student_example

SELECTIONS = ("rubric", "outcome", "random")
Judge = Callable[[Sequence[tuple[str, Trajectory]]], Sequence[Behaviour | None]]


@dataclass(frozen=True)
class FiltrationSettings:
    """top: kept attempts of a task in a step. cap: over the whole run, 0: none. seed: of the random control."""

    select: str = "rubric"
    top: int = 1
    cap: int = 0
    seed: int = 0
    most_tokens: int = 2**31


class Filtration(Forgetful):
    """A road.Teacher. `taken`: task -> attempts imitated so far (its memory)."""

    def __init__(self, items: Sequence[Item], judge: Judge, settings: FiltrationSettings):
        if settings.select not in SELECTIONS:
            raise ValueError(f"select = {settings.select!r} must be one of {', '.join(SELECTIONS)}")
        self.items, self.judge, self.settings = items, judge, settings
        self.taken: Counter[str] = Counter()
        self.rewards: list[float | None] = []
        self._kept: list[Behaviour] = []
        self._dropped: list[Behaviour] = []

    def __call__(self, outcomes: Sequence[Outcome]) -> list[Lesson]:
        self.rewards = [None if o.trouble else float(o.verdict.resolved) for o in outcomes]
        fates = [self._gate(o) for o in outcomes]
        passed = [i for i, fate in enumerate(fates) if not fate]
        found = self._judged(outcomes, passed)
        for i in passed:
            if self.settings.select != "outcome":
                fates[i] = self._qualify(found[i])
        self._rank(outcomes, passed, found, fates)
        self._cap(outcomes, fates)
        self._kept = [found[i] for i in passed if not fates[i] and found[i]]
        self._dropped = [found[i] for i in passed if fates[i] and found[i]]
        return [self._lesson(o, fate, found.get(i)) for i, (o, fate) in enumerate(zip(outcomes, fates))]

    def measured(self) -> dict[str, tuple[float, int]]:
        """Of what passed the verifier in the last step: how often each behaviour is in what is kept and dropped."""
        found = {"rft/kept": (float(len(self._kept)), 1)}
        for name, group in (("kept", self._kept), ("dropped", self._dropped)):
            if group:
                found[f"rft/score_{name}"] = (sum(b.score(self.items) for b in group), len(group))
                for item in self.items:
                    found[f"rft/{name}_{item.name}"] = (sum(item.name in b.shown for b in group), len(group))
        return found

    def memory(self) -> dict[str, int]:
        return dict(self.taken)

    def recall(self, memory: Mapping[str, int]) -> None:
        self.taken = Counter(memory)

    def _gate(self, outcome: Outcome) -> str:
        if outcome.trouble:
            return f"dropped_{outcome.trouble}"
        if not outcome.trajectory.turns:
            return "dropped_no_turn"
        return "" if outcome.verdict.resolved else "dropped_unresolved"

    def _judged(self, outcomes: Sequence[Outcome], passed: Sequence[int]) -> dict[int, Behaviour | None]:
        if self.settings.select == "outcome":
            return {i: None for i in passed}
        asked = [(outcomes[i].attempt.task.problem_statement, outcomes[i].trajectory) for i in passed]
        return dict(zip(passed, self.judge(asked), strict=True))

    def _qualify(self, behaviour: Behaviour | None) -> str:
        if behaviour is None:
            return "dropped_unjudged"
        return "dropped_disqualified" if behaviour.disqualified(self.items) else ""

    def _rank(self, outcomes, passed, found, fates) -> None:
        """Sets the fates of what is not among a task's best (or, for the control, not drawn)."""
        if self.settings.select == "outcome":
            return
        tasks: dict[str, list[int]] = defaultdict(list)
        for i in passed:
            tasks[outcomes[i].attempt.task.instance_id].append(i)
        for members in tasks.values():
            able = [i for i in members if not fates[i]]
            able.sort(key=lambda i: (-found[i].score(self.items), outcomes[i].trajectory.tokens(), i))
            kept = able[: self.settings.top]
            if self.settings.select == "random":
                drawn = random.Random(f"{self.settings.seed}/{outcomes[members[0]].attempt.group}")
                kept = drawn.sample(members, len(kept))
            for i in members:
                fates[i] = "" if i in kept else fates[i] or "dropped_rank"

    def _cap(self, outcomes: Sequence[Outcome], fates: list[str]) -> None:
        for i, outcome in enumerate(outcomes):
            task = outcome.attempt.task.instance_id
            if not fates[i] and self.settings.cap and self.taken[task] >= self.settings.cap:
                fates[i] = "dropped_cap"
            if not fates[i]:
                self.taken[task] += 1

    def _lesson(self, outcome: Outcome, fate: str, behaviour: Behaviour | None) -> Lesson:
        notes = {name: list(turns) for name, turns in behaviour.shown.items()} if behaviour else {}
        score = behaviour.score(self.items) if behaviour else None
        if fate:
            return Lesson(fate, reward=score, notes=notes)
        example = student_example(outcome.trajectory, {"nll": 1.0}, "success", source=outcome.attempt.id)
        if len(example.row.ids) > self.settings.most_tokens:
            return Lesson("dropped_too_long", reward=score, notes=notes)
        return Lesson("trained_success", example, reward=score, notes=notes)


@dataclass(frozen=True)
class Rates:
    """How often each behaviour is shown in the attempts of one file. unjudged: attempts without an answer."""

    name: str
    judged: int
    unjudged: int
    shown: Mapping[str, int]

    def discouraged(self, items: Sequence[Item]) -> float:
        """Discouraged behaviours an attempt."""
        return sum(self.shown[i.name] for i in items if i.sign < 0) / max(1, self.judged)


def rates(name: str, found: Sequence[Behaviour | None], items: Sequence[Item]) -> Rates:
    judged = [b for b in found if b is not None]
    return Rates(name, len(judged), len(found) - len(judged),
                 {item.name: sum(item.name in b.shown for b in judged) for item in items})


def table(files: Sequence[Rates], items: Sequence[Item]) -> str:
    """One row a behaviour, one column a file: the share of judged attempts that show it."""
    head = ["behaviour", *(f.name for f in files)]
    share = lambda f, name: f"{100 * f.shown[name] / f.judged:.1f}%" if f.judged else "-"  # noqa: E731
    rows = [[f"{'+' if i.sign > 0 else '-'} {i.name}", *(share(f, i.name) for f in files)] for i in items]
    rows.append(["discouraged an attempt", *(f"{f.discouraged(items):.2f}" for f in files)])
    rows += [["judged", *(str(f.judged) for f in files)], ["unjudged", *(str(f.unjudged) for f in files)]]
    return columns([head, *rows])
