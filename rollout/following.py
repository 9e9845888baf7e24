"""What became of reminders inserted while agents ran: four counts, each with its own denominator (paper, appendix C).

    captured   conversations that ran to an ending          of the attempts asked for
    reminded   conversations into which a reminder went     of the captured ones
    followed   reminders whose next action does as asked    of those whose next action tells (by class and category)
    verified   final patches that pass the hidden tests     of the conversations that could be graded

None stands for another: a followed reminder is no solved task, and a solved task needs no reminder.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any, Mapping, Sequence

from oprd.rollout.attempts import Outcome
from oprd.rollout.follow import check_turn
from oprd.rollout.rubric import CLASSES
from oprd.rollout.tables import columns


@dataclass(frozen=True)
class Following:
    """Counts over many attempts. inserted: reminders by category that a turn was sampled after; unclear: those whose
    next action neither does nor denies what they ask; followed: those that it does. classes: category -> class.
    probes: actions sampled to decide (active mode); discarded: those thrown away for a reminder. dropped: candidates by
    the gate that dropped them."""

    asked: int
    captured: int
    reminded: int
    graded: int
    verified: int
    inserted: Mapping[str, int] = field(default_factory=dict)
    unclear: Mapping[str, int] = field(default_factory=dict)
    followed: Mapping[str, int] = field(default_factory=dict)
    classes: Mapping[str, str] = field(default_factory=dict)
    probes: int = 0
    discarded: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)

    def told(self, class_: str | None = None) -> tuple[int, int]:
        """(followed, reminders whose next action tells) of a class; None: of all."""
        names = [c for c in self.inserted if class_ in (None, self.classes[c])]
        return (sum(self.followed.get(c, 0) for c in names),
                sum(self.inserted[c] - self.unclear.get(c, 0) for c in names))

    @property
    def rate(self) -> float | None:
        """Share of followed reminders; None: none was inserted that could be told."""
        followed, told = self.told()
        return followed / told if told else None

    def scalars(self) -> dict[str, float]:
        """Flat names for the log: every count, and every rate that has a denominator."""
        followed, told = self.told()
        pairs = {"captured": (self.captured, self.asked), "reminded": (self.reminded, self.captured),
                 "followed": (followed, told), "verified": (self.verified, self.graded),
                 **{f"followed_{c}": self.told(c) for c in CLASSES}}
        found: dict[str, float] = {}
        for name, (n, of) in pairs.items():
            found |= {f"following/n_{name}": n, f"following/of_{name}": of}
            found |= {f"following/rate_{name}": n / of} if of else {}
        return found | {"following/n_inserted": sum(self.inserted.values()), "following/probes": self.probes,
                        "following/discarded": self.discarded,
                        **{f"following/dropped_{gate}": n for gate, n in self.dropped.items()}}

    def json(self) -> dict[str, Any]:
        return asdict(self)


def following(outcomes: Sequence[Outcome]) -> Following:
    """Count attempts that ran with reminders. One that the last observation fired was read by no turn: not inserted."""
    inserted: Counter = Counter()
    unclear: Counter = Counter()
    done: Counter = Counter()
    classes: dict[str, str] = {}
    captured = [o for o in outcomes if o.trajectory is not None]
    graded = [o for o in captured if not o.trouble]
    for outcome in captured:
        turns = outcome.trajectory.turns
        for reminder in outcome.given:
            if (k := reminder.turn + 1) < len(turns):
                does = check_turn(reminder, turns[:k], turns[k]).followed
                classes[reminder.category] = reminder.class_
                inserted[reminder.category] += 1
                unclear[reminder.category] += does is None
                done[reminder.category] += bool(does)
    return Following(
        len(outcomes), len(captured), sum(any(r.turn + 1 < len(o.trajectory.turns) for r in o.given) for o in captured),
        len(graded), sum(o.verdict.resolved for o in graded), dict(inserted), dict(+unclear), dict(+done), classes,
        sum(o.probes for o in outcomes), sum(bool(t.probe) for o in captured for t in o.trajectory.turns),
        dict(Counter(d.gate for o in captured for d in o.dropped)))


def table(rows: Sequence[tuple[str, Following]]) -> str:
    """The four counts with their denominators, and the following rate by class."""
    head = ["with reminders", "captured", "reminded", "followed", "verified", *(f"{c} followed" for c in CLASSES),
            "unclear"]

    def pair(n: int, of: int) -> str:
        return f"{n}/{of}" + (f" {100 * n / of:.1f}%" if of else "")

    return columns([head] + [
        [name, pair(f.captured, f.asked), pair(f.reminded, f.captured), pair(*f.told()), pair(f.verified, f.graded),
         *(pair(*f.told(c)) for c in CLASSES), str(sum(f.unclear.values()))] for name, f in rows])
