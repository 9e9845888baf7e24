"""Which reminder, if any, is inserted at an insertion boundary.

Hard rules are tried on the latest tool result before the judge is asked about the rest. Every proposal then passes
the gates in one order; what fails one is dropped with the gate's reason, and when nothing passes nothing is inserted.

Where the paper is silent: a "case" is one conversation; repeated texts are removed among contextual reminders, since
a hard rule's text is always its rubric's (hard ones repeat only with another error signature); one reminder at most
at a boundary, hard before contextual, then by confidence; hard rules have no family cap but share the budget.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Callable, Iterator, Mapping, Sequence

from oprd.core.types import Observation, Reminder, ToolCall, Trajectory
from oprd.rollout.judge import Candidate, Case, Judge
from oprd.rollout.rubric import CLASSES, Category, Rubric
from oprd.rollout.toolresult import is_validation

SCOPES = ("global", "local")


@dataclass(frozen=True)
class SelectSettings:
    """confidence: what a contextual candidate must reach. budget: local reminders in one conversation. family_cap:
    contextual reminders of one family in one conversation. classes, off, scopes: what is switched on (ablations);
    `off` names single categories."""

    confidence: float = 0.90
    budget: int = 8
    family_cap: int = 1
    classes: tuple[str, ...] = CLASSES
    off: tuple[str, ...] = ()
    scopes: tuple[str, ...] = SCOPES

    def __post_init__(self):
        if not 0 <= self.confidence <= 1:
            raise ValueError(f"confidence = {self.confidence} must be in 0..1")
        if min(self.budget, self.family_cap) < 0:
            raise ValueError(f"budget = {self.budget} and family_cap = {self.family_cap} must not be negative")
        for name, given, known in (("classes", self.classes, CLASSES), ("scopes", self.scopes, SCOPES)):
            if unknown := [x for x in given if x not in known]:
                raise ValueError(f"{name} holds {unknown[0]!r}, which is not one of {', '.join(known)}")


@dataclass(frozen=True)
class Dropped:
    """A candidate that a gate dropped at the boundary after observation `turn`."""

    category: str
    turn: int
    reason: str


@dataclass(frozen=True)
class Selection:
    """What is inserted at one boundary (None: nothing) and what was dropped."""

    reminder: Reminder | None
    dropped: tuple[Dropped, ...] = ()


@dataclass(frozen=True)
class Annotation:
    """The local reminders of one trajectory: observation k -> the reminder for turn k + 1, and all drops."""

    reminders: Mapping[int, Reminder]
    dropped: tuple[Dropped, ...]


def select(case: Case, rubric: Rubric, judge: Judge, settings: SelectSettings = SelectSettings()) -> Selection:
    """The reminder for the turn after the case's latest observation. Raises what the judge raises."""
    if "local" not in settings.scopes or not case.turns:
        return Selection(None)
    hard, dropped = _choose(hard_candidates(case, rubric), case, rubric, settings)
    if hard:
        return Selection(hard, dropped)
    if len(case.inserted) >= settings.budget:  # nothing could be inserted: a judge that costs is not asked
        return Selection(None, dropped)
    soft, more = _choose(contextual_candidates(case, judge), case, rubric, settings)
    return Selection(soft, dropped + more)


def annotate_trajectory(statement: str, trajectory: Trajectory, rubric: Rubric, judge: Judge,
                        settings: SelectSettings = SelectSettings()) -> Annotation:
    """Post hoc, every boundary of a finished trajectory; the decision at k sees turns 0..k and nothing later."""
    reminders: dict[int, Reminder] = {}
    dropped: list[Dropped] = []
    for k, turns in boundaries(trajectory):
        chosen = select(Case(statement, turns, tuple(reminders.values())), rubric, judge, settings)
        dropped += chosen.dropped
        if chosen.reminder:
            reminders[k] = chosen.reminder
    return Annotation(reminders, tuple(dropped))


def remind(rubric: Rubric, judge: Judge, settings: SelectSettings = SelectSettings()) -> Callable:
    """The run-time use (passive mode): (task, visible turns, reminders given) -> reminder for the next turn."""
    def at(task, visible: Sequence[tuple[ToolCall | None, Observation]], given: Sequence[Reminder]) -> Reminder | None:
        return select(Case(task.problem_statement, tuple(visible), tuple(given)), rubric, judge, settings).reminder
    return at


def boundaries(trajectory: Trajectory) -> Iterator[tuple[int, tuple[tuple[ToolCall | None, Observation], ...]]]:
    """(k, visible turns 0..k) after every observation k."""
    turns: list[tuple[ToolCall | None, Observation]] = []
    for k, turn in enumerate(trajectory.turns):
        if turn.observation is None:
            return
        turns.append((turn.call, turn.observation))
        yield k, tuple(turns)


def hard_candidates(case: Case, rubric: Rubric) -> list[Candidate]:
    """What the hard rules find in the latest tool result, in the rubric's order."""
    if case.latest is None:
        return []
    found = ((category, category.match(case.latest)) for category in rubric.hard)
    return [Candidate(category.name, category.action, evidence, 1.0) for category, evidence in found if evidence]


def contextual_candidates(case: Case, judge: Judge) -> list[Candidate]:
    """What the judge proposes, the surest first."""
    return sorted(judge.decide(case), key=lambda candidate: -candidate.confidence)


def signature(category: str, evidence: str) -> str:
    """What makes two hard errors the same one: the rule and its evidence without numbers and spacing."""
    return f"{category}: {' '.join(re.sub(r'[0-9]+', '#', evidence.lower()).split())}"


def unsupported(candidate: Candidate, case: Case, rubric: Rubric, settings: SelectSettings) -> str | None:
    """The gates that look at the case alone: known, switched on, sure enough, in its phase."""
    if candidate.category not in rubric:
        return "unknown category"
    category = rubric[candidate.category]
    if category.class_ not in settings.classes or category.name in settings.off:
        return "switched off"
    if candidate.confidence < settings.confidence:
        return f"confidence {candidate.confidence:.2f} below {settings.confidence:.2f}"
    return None if in_phase(category, case) else f"phase {category.phase} is not visible"


def too_much(candidate: Candidate, case: Case, rubric: Rubric, settings: SelectSettings) -> str | None:
    """The gates that look at what was inserted before."""
    category = rubric[candidate.category]
    families = [rubric[r.category].family for r in case.inserted if r.category in rubric]
    if not category.hard and families.count(category.family) >= settings.family_cap:
        return f"family {category.family} is at its cap of {settings.family_cap}"
    if len(case.inserted) >= settings.budget:
        return f"the case's budget of {settings.budget} is spent"
    if not category.hard and _plain(candidate.text) in {_plain(r.text) for r in case.inserted}:
        return "the same text was inserted before"
    given = {signature(r.category, r.evidence) for r in case.inserted}
    if category.hard and signature(category.name, candidate.evidence) in given:
        return "the same error was answered before"
    return None


def in_phase(category: Category, case: Case) -> bool:
    """Whether the phase a category needs is visible."""
    if category.phase == "validation":
        return case.latest is not None and (is_validation(case.latest) or case.looks_back)
    return category.phase == "any" or case.edited == (category.phase == "after_edit")


def _choose(candidates: Sequence[Candidate], case: Case, rubric: Rubric,
            settings: SelectSettings) -> tuple[Reminder | None, tuple[Dropped, ...]]:
    """The first candidate that passes every gate, and why the others did not."""
    k, chosen, dropped = len(case.turns) - 1, None, []
    for candidate in candidates:
        reason = unsupported(candidate, case, rubric, settings) or too_much(candidate, case, rubric, settings)
        if reason is None and chosen is not None:
            reason = f"{chosen.category} is inserted at this boundary"
        if reason is not None:
            dropped.append(Dropped(candidate.category, k, reason))
            continue
        chosen = Reminder(candidate.category, rubric[candidate.category].class_, candidate.text, candidate.evidence, k,
                          candidate.confidence)
    return chosen, tuple(dropped)


def _plain(text: str) -> str:
    return " ".join(text.lower().split())
