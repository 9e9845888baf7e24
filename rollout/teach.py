"""From a judged attempt to what it teaches: which tokens, which loss, how much. One named fate an attempt."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Callable, Mapping, Sequence

from oprd.core.types import Example, Reminder
from oprd.rollout.attempts import Outcome
from oprd.rollout.select import Dropped
from oprd.rollout.views import student_example, teacher_view

Encode = Callable[[str], tuple[int, ...]]


@dataclass(frozen=True)
class Reminded:
    """The reminders of a finished attempt for its teacher: `local[k]` was fired by observation k.

    dropped: candidates that a gate dropped. utility: k -> nats by which the local reminder moves the teacher, where that
    was measured. control: what the teacher reads instead (controls.py); None: these."""

    global_: Reminder | None
    local: Mapping[int, Reminder]
    dropped: tuple[Dropped, ...] = ()
    utility: Mapping[int, float] = field(default_factory=dict)
    control: "Reminded | None" = None


@dataclass(frozen=True)
class Lesson:
    """What one attempt teaches. fate is `trained_success`, `trained_failure` or `dropped_<why>`; exactly the trained
    ones have an example. reminders: what was found for an attempt to be distilled, dropped or not; else None. reward:
    what a judge of attempts gave, where one was asked; notes: what it said, for the record."""

    fate: str
    example: Example | None = None
    reminders: Reminded | None = None
    reward: float | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)


class OutcomeRouting:
    """OPRD (paper 2.3): a verified success is imitated, a failure is distilled from the teacher that sees reminders.

    routing=False distils every attempt (the paper's OPSD row). without_reminder says what becomes of an attempt to be
    distilled for which no reminder was found: its teacher would read what the student read, so the loss could only
    pull towards an older self; `drop` is the default (open in the paper), `distil` keeps it. An attempt that student
    and teacher together cannot read within `most_tokens` (one micro-batch) is dropped.
    """

    def __init__(self, encode: Encode, most_tokens: int, routing: bool = True, without_reminder: str = "drop"):
        self.encode, self.most_tokens = encode, most_tokens
        self.routing, self.without_reminder = routing, without_reminder

    def distils(self, outcome: Outcome) -> bool:
        """Whether an attempt needs reminders: it is one to be distilled."""
        return not outcome.trouble and not all(turn.replayed for turn in outcome.trajectory.turns) and not (
            outcome.verdict.resolved and self.routing)

    def __call__(self, outcome: Outcome, reminders: Reminded | None) -> Lesson:
        """reminders: those of an attempt that `distils`."""
        if outcome.trouble:
            return Lesson(f"dropped_{outcome.trouble}")
        trajectory, source = outcome.trajectory, outcome.attempt.id
        if all(turn.replayed for turn in trajectory.turns):
            return Lesson("dropped_no_turn")
        if not self.distils(outcome):
            return Lesson("trained_success", student_example(trajectory, {"nll": 1.0}, "success", source=source))
        if not reminders.global_ and not reminders.local and self.without_reminder == "drop":
            return Lesson("dropped_no_reminder", reminders=reminders)
        read = reminders.control or reminders
        view = teacher_view(trajectory, self.encode, read.global_, read.local)
        example = student_example(trajectory, {"kl": 1.0}, "failure", view, source)
        if len(example.row.ids) + view.tokens() > self.most_tokens:
            return Lesson("dropped_too_long", reminders=reminders)
        return Lesson("trained_failure", example, reminders)


class Forgetful:
    """The half of a road.Teacher that has nothing to add."""

    rows: Sequence[Example] = ()

    def measured(self) -> Mapping[str, tuple[float, int]]:
        return {}

    def stop(self) -> str:
        return ""

    def memory(self) -> Any:
        return None

    def recall(self, memory: Any) -> None:
        pass


def fates(lessons: Sequence[Lesson]) -> Counter:
    """How many attempts ended in each fate; the counts add up to the attempts asked for."""
    return Counter(lesson.fate for lesson in lessons)


def gates(lessons: Sequence[Lesson]) -> Counter:
    """How many candidate reminders each gate dropped."""
    return Counter(d.gate for lesson in lessons if lesson.reminders for d in lesson.reminders.dropped)


def measured(outcomes: Sequence[Outcome], lessons: Sequence[Lesson]) -> dict[str, tuple[float, int]]:
    """Means of one step's rollouts, each as (total, count), by the name it has in the log."""
    judged = [o for o in outcomes if not o.trouble]
    graded = [o for o in judged if o.verdict]
    reminded = [lesson.reminders for lesson in lessons if lesson.reminders is not None]
    endings = Counter(o.trajectory.ending.value for o in judged)
    return {"rollout/pass_rate": (sum(o.verdict.resolved for o in graded), len(graded)),
            "rollout/tokens_per_attempt": (sum(o.trajectory.tokens() for o in judged), len(judged)),
            "oprd/local_reminders_per_failure": (sum(len(r.local) for r in reminded), len(reminded)),
            "oprd/global_reminders_per_failure": (sum(r.global_ is not None for r in reminded), len(reminded)),
            "oprd/reminder_utility": (sum(sum(r.utility.values()) for r in reminded),
                                      sum(len(r.utility) for r in reminded)),
            **{f"rollout/ending_{name}": (n, len(judged)) for name, n in endings.items()}}
