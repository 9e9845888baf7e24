"""Which reminder, if any, is inserted at an insertion boundary.

Hard rules are tried on the latest tool result before the judge is asked about the rest. Every proposal then passes
the gates in one order; what fails one is dropped with the gate's reason, and when nothing passes nothing is inserted.

Where the paper is silent: a "case" is one conversation; repeated texts are removed among contextual reminders, since
a hard rule's text is always its rubric's (hard ones repeat only with another error signature); one reminder at most
at a boundary, hard before contextual, then by confidence; hard rules have no family cap but share the budget. In
active mode a candidate that the probe follows already is not needed, and a probe that submits is completion evidence.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Callable, Iterator, Mapping, Sequence

from oprd.core.types import Observation, Reminder, ToolCall, Trajectory
from oprd.rollout.follow import check
from oprd.rollout.judge import Candidate, Case, Judge, Probe
from oprd.rollout.rubric import CLASSES, Category, Rubric
from oprd.rollout.toolresult import is_validation

SCOPES = ("global", "local")
Gate = tuple[str, str]  # the gate's name, and why it dropped a candidate


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
    """A candidate that a gate dropped at the boundary after observation `turn` (-1: the Global Reminder). gate: one word
    to count by; reason: the whole story."""

    category: str
    turn: int
    reason: str
    gate: str


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
    if len(case.inserted) >= settings.budget or not any(_possible(c, case, rubric, settings) for c in rubric.contextual):
        return Selection(None, dropped)  # nothing could be inserted: a judge that costs is not asked
    soft, more = _choose(contextual_candidates(case, judge), case, rubric, settings)
    return Selection(soft, dropped + more)


def annotate_trajectory(statement: str, trajectory: Trajectory, rubric: Rubric, judge: Judge,
                        settings: SelectSettings = SelectSettings(), unread: bool = True) -> Annotation:
    """Post hoc, every boundary of a finished trajectory; the decision at k sees turns 0..k and nothing later. unread:
    also at the last one, if no turn follows that could read a reminder."""
    reminders: dict[int, Reminder] = {}
    dropped: list[Dropped] = []
    for k, turns in boundaries(trajectory):
        if not unread and k + 1 == len(trajectory.turns):
            break
        chosen = select(Case(statement, turns, tuple(reminders.values())), rubric, judge, settings)
        dropped += chosen.dropped
        if chosen.reminder:
            reminders[k] = chosen.reminder
    return Annotation(reminders, tuple(dropped))


def decide(rubric: Rubric, judge: Judge, settings: SelectSettings = SelectSettings()) -> Callable:
    """The run-time use (agent.Decide): (task, visible turns, reminders given, probe or None) -> Selection."""
    def at(task, visible: Sequence[tuple[ToolCall | None, Observation]], given: Sequence[Reminder],
           probe: Probe | None = None) -> Selection:
        return select(Case(task.problem_statement, tuple(visible), tuple(given), probe), rubric, judge, settings)
    return at


def remind(rubric: Rubric, judge: Judge, settings: SelectSettings = SelectSettings()) -> Callable:
    """The same beside a script (agent.Remind): (task, visible turns, reminders given) -> reminder for the next turn."""
    at = decide(rubric, judge, settings)
    return lambda task, visible, given: at(task, visible, given).reminder


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


def unsupported(candidate: Candidate, case: Case, rubric: Rubric, settings: SelectSettings) -> Gate | None:
    """The gates that look at the case alone: known, switched on, sure enough, in its phase."""
    if candidate.category not in rubric:
        return "unknown", "unknown category"
    category = rubric[candidate.category]
    if category.class_ not in settings.classes or category.name in settings.off:
        return "off", "switched off"
    if candidate.confidence < settings.confidence:
        return "confidence", f"confidence {candidate.confidence:.2f} below {settings.confidence:.2f}"
    return None if in_phase(category, case) else ("phase", f"phase {category.phase} is not visible")


def too_much(candidate: Candidate, case: Case, rubric: Rubric, settings: SelectSettings) -> Gate | None:
    """The gates that look at what was inserted before."""
    category = rubric[candidate.category]
    families = [rubric[r.category].family for r in case.inserted if r.category in rubric]
    if not category.hard and families.count(category.family) >= settings.family_cap:
        return "family_cap", f"family {category.family} is at its cap of {settings.family_cap}"
    if len(case.inserted) >= settings.budget:
        return "budget", f"the case's budget of {settings.budget} is spent"
    if not category.hard and _plain(candidate.text) in {_plain(r.text) for r in case.inserted}:
        return "repeated_text", "the same text was inserted before"
    given = {signature(r.category, r.evidence) for r in case.inserted}
    if category.hard and signature(category.name, candidate.evidence) in given:
        return "same_error", "the same error was answered before"
    return None


def unneeded(candidate: Candidate, case: Case) -> Gate | None:
    """Active mode: the gate for what the probe does unasked."""
    if case.probe is None:
        return None
    reminder = Reminder(candidate.category, "", candidate.text, candidate.evidence, len(case.turns) - 1)
    does = check(reminder, case.results, case.planned, executed=False).followed
    return ("unneeded", "the probe already does what it asks") if does else None


def in_phase(category: Category, case: Case) -> bool:
    """Whether the phase a category needs is visible."""
    if category.phase == "validation":
        ends = case.edited and case.planned is not None and case.planned.kind == "submit"
        return case.latest is not None and (is_validation(case.latest) or case.looks_back or ends)
    return category.phase == "any" or case.edited == (category.phase == "after_edit")


def _possible(category: Category, case: Case, rubric: Rubric, settings: SelectSettings) -> bool:
    """Whether a contextual category could pass the gates that do not depend on what a judge says."""
    sure = Candidate(category.name, "", "", 1.0)
    return not (unsupported(sure, case, rubric, settings) or too_much(sure, case, rubric, settings))


def _choose(candidates: Sequence[Candidate], case: Case, rubric: Rubric,
            settings: SelectSettings) -> tuple[Reminder | None, tuple[Dropped, ...]]:
    """The first candidate that passes every gate, and why the others did not."""
    k, chosen, dropped = len(case.turns) - 1, None, []
    for candidate in candidates:
        gate = (unsupported(candidate, case, rubric, settings) or too_much(candidate, case, rubric, settings)
                or unneeded(candidate, case))
        if gate is None and chosen is not None:
            gate = "outranked", f"{chosen.category} is inserted at this boundary"
        if gate is not None:
            dropped.append(Dropped(candidate.category, k, gate[1], gate[0]))
            continue
        chosen = Reminder(candidate.category, rubric[candidate.category].class_, candidate.text, candidate.evidence, k,
                          candidate.confidence)
    return chosen, tuple(dropped)


def _plain(text: str) -> str:
    return " ".join(text.lower().split())
