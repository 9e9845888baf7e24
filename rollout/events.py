"""Error events: which process errors a finished trajectory shows, for the tables of eval and annotate.

The same categories as the reminders (hard rules first, an audit second) with other counting: no caps and no budget,
but each category at most once in a trajectory. Its coarse class comes from the rubric. A reminder of phase
`before_edit` warns in time; an error it is only when the next call edits all the same, which an audit may look at.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Iterable

from oprd.core.types import Trajectory
from oprd.rollout.audit import Audit
from oprd.rollout.judge import Candidate, Case
from oprd.rollout.rubric import CLASSES, Rubric
from oprd.rollout.select import SelectSettings, boundaries, hard_candidates, unsupported
from oprd.rollout.toolresult import kind_of


@dataclass(frozen=True)
class Event:
    """The first time a trajectory shows an error of this category: after observation `turn`."""

    category: str
    class_: str
    turn: int
    evidence: str


def error_events(statement: str, trajectory: Trajectory, rubric: Rubric, audit: Audit,
                 settings: SelectSettings = SelectSettings()) -> tuple[Event, ...]:
    """The events of one trajectory in turn order; settings' scopes, budget and family cap play no part."""
    events: dict[str, Event] = {}
    contextual: dict[int, list[Candidate]] = {}
    for k, candidate in audit(statement, trajectory):
        contextual.setdefault(k, []).append(candidate)
    for k, turns in boundaries(trajectory):
        case = Case(statement, turns)
        for candidate in [*hard_candidates(case, rubric), *contextual.get(k, ())]:
            if candidate.category in events or unsupported(candidate, case, rubric, settings):
                continue
            if rubric[candidate.category].phase != "before_edit" or _edits(trajectory, k + 1):
                events[candidate.category] = Event(candidate.category, rubric[candidate.category].class_, k,
                                                   candidate.evidence)
    return tuple(events.values())


def _edits(trajectory: Trajectory, k: int) -> bool:
    call = trajectory.turns[k].call if k < len(trajectory.turns) else None
    return call is not None and kind_of(call.name) == "edit"


def count_by_class(trajectories_events: Iterable[Iterable[Event]]) -> dict[str, int]:
    """Class -> events over many trajectories; all four classes are present."""
    counts = Counter(event.class_ for events in trajectories_events for event in events)
    return {class_: counts[class_] for class_ in CLASSES}


def count_by_category(trajectories_events: Iterable[Iterable[Event]]) -> dict[str, int]:
    """Category -> trajectories that show it, the most frequent first."""
    return dict(Counter(event.category for events in trajectories_events for event in events).most_common())
