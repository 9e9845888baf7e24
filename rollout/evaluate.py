"""Evaluation: the resolution rate of a policy without reminders, and the errors it makes, per reminder class."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Callable, Mapping, Sequence

from oprd.core.types import Reminder
from oprd.rollout.attempts import Attempt, Attempts, Outcome
from oprd.rollout.follow import followed
from oprd.rollout.tables import columns
from oprd.sandbox.task import Task

CLASSES = ("R1", "R2", "R3", "R4")


@dataclass(frozen=True)
class Report:
    """One evaluated policy. Rates are over judged attempts; attempts - judged were dropped (a machine's failure).

    events: errors by class, each fine category at most once a trajectory. inserted, followed: reminders shown at run
    time and those whose next turn did what they ask, by class; empty when not measured. resolved_reminded: the
    resolution rate with those reminders."""

    attempts: int
    judged: int
    resolved: int
    events: Mapping[str, int]
    endings: Mapping[str, int]
    tokens: float
    inserted: Mapping[str, int]
    followed: Mapping[str, int]
    resolved_reminded: float | None = None

    @property
    def rate(self) -> float:
        return self.resolved / self.judged if self.judged else 0.0

    @property
    def following(self) -> float | None:
        total = sum(self.inserted.values())
        return sum(self.followed.values()) / total if total else None

    def save(self, folder: Path) -> None:
        """Write `report.json`, aside and renamed."""
        aside = folder / "report.json.tmp"
        aside.write_text(json.dumps(asdict(self)), encoding="utf-8")
        aside.rename(folder / "report.json")

    @staticmethod
    def load(folder: Path) -> "Report | None":
        """What `save` wrote, or None."""
        file = folder / "report.json"
        return Report(**json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else None

    def scalars(self) -> dict[str, float]:
        """Flat names for the log."""
        found = {"eval/resolution_rate": self.rate, "eval/judged": self.judged,
                 "eval/dropped": self.attempts - self.judged, "eval/tokens_per_attempt": self.tokens}
        found |= {f"eval/error_events_{c}": n / max(1, self.judged) for c, n in self.events.items()}
        found |= {f"eval/ending_{e}": n / max(1, self.judged) for e, n in self.endings.items()}
        for c, n in self.inserted.items():
            if n:
                found[f"eval/following_rate_{c}"] = self.followed.get(c, 0) / n
        if self.following is not None:
            found["eval/following_rate"] = self.following
            found["eval/resolution_rate_reminded"] = self.resolved_reminded
        return found


def attempts_at(tasks: Sequence[Task], n: int, seed: int, tag: str) -> list[Attempt]:
    """n attempts at every task, with ids and seeds that depend on nothing else."""
    return [Attempt(f"{tag}/{task.instance_id}/{i}", task, seed * 1_000_003 + t * 1009 + i)
            for t, task in enumerate(tasks) for i in range(n)]


def evaluate(attempts: Sequence[Attempt], pool: Attempts, events: Callable[[Outcome], Mapping[str, int]],
             remind=None, on_done=lambda outcome: None) -> Report:
    """Run the attempts without reminders; with `remind`, a second time with reminders inserted while they run."""
    outcomes = pool.run(attempts, on_done=on_done)
    judged = [o for o in outcomes if not o.trouble]
    counts: Counter = Counter({c: 0 for c in CLASSES})
    for outcome in judged:
        counts.update(events(outcome))
    inserted, obeyed, rate = {}, {}, None
    if remind is not None:
        again = [Attempt(f"{a.id}/reminded", a.task, a.seed) for a in attempts]
        reminded = [o for o in pool.run(again, remind, on_done) if not o.trouble]
        inserted, obeyed = following_counts(reminded)
        rate = sum(o.verdict.resolved for o in reminded) / max(1, len(reminded))
    tokens = sum(o.trajectory.tokens() for o in judged) / max(1, len(judged))
    return Report(len(outcomes), len(judged), sum(o.verdict.resolved for o in judged), dict(counts),
                  dict(Counter(o.trajectory.ending.value for o in judged)), tokens, inserted, obeyed, rate)


def following_counts(outcomes: Sequence[Outcome]) -> tuple[dict[str, int], dict[str, int]]:
    """(inserted, followed) by class. A reminder counts as inserted when a turn was sampled after it."""
    inserted: Counter = Counter({c: 0 for c in CLASSES})
    obeyed: Counter = Counter({c: 0 for c in CLASSES})
    for outcome in outcomes:
        turns = outcome.trajectory.turns
        for reminder in outcome.given:
            if (k := reminder.turn + 1) < len(turns):
                inserted[reminder.class_] += 1
                obeyed[reminder.class_] += followed(reminder, turns[: k], turns[k])
    return dict(inserted), dict(obeyed)


def table(rows: Sequence[tuple[str, Report]]) -> str:
    """The reports as a table for a terminal."""
    head = ["checkpoint", "resolved", "rate", *(f"{c} errors" for c in CLASSES), "following", "tokens"]
    body = [[name, f"{r.resolved}/{r.judged}", f"{100 * r.rate:.1f}%", *(str(r.events.get(c, 0)) for c in CLASSES),
             "-" if r.following is None else f"{100 * r.following:.1f}%", f"{r.tokens:.0f}"] for name, r in rows]
    return columns([head, *body])
