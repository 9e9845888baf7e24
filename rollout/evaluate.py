"""Evaluation: the resolution rate of a policy without reminders, and the errors it makes, per reminder class; then, if
asked for, the same attempts with reminders while they run, and the failed ones afresh with a Global Reminder."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Callable, Iterable, Mapping, Sequence

from oprd.rollout.agent import Reminding
from oprd.rollout.attempts import Attempt, Attempts, Outcome
from oprd.rollout.events import Event, count_by_class
from oprd.rollout.following import Following, following
from oprd.rollout.following import table as following_table
from oprd.rollout.rubric import CLASSES
from oprd.rollout.tables import columns
from oprd.rollout.teach import Reminded
from oprd.sandbox.task import Task

RETRY = 500_009  # seeds of retries stand this far from those of first attempts


@dataclass(frozen=True)
class Retry:
    """Failed attempts made afresh with their Global Reminder. failed: judged and not resolved the first time; eligible:
    those with a reminder to begin with; judged, resolved: of these. ineligible: the others, by reason."""

    failed: int
    eligible: int
    judged: int
    resolved: int
    ineligible: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """One evaluated policy. Rates are over judged attempts; attempts - judged were dropped (a machine's failure).

    events: errors by class, each fine category at most once a trajectory. reminded: what became of reminders in a
    second pass over the tasks, None when not measured; retry: the failed ones once more, None when not asked for."""

    attempts: int
    judged: int
    resolved: int
    events: Mapping[str, int]
    endings: Mapping[str, int]
    tokens: float
    reminded: Following | None = None
    retry: Retry | None = None

    @property
    def rate(self) -> float:
        return self.resolved / self.judged if self.judged else 0.0

    @property
    def following(self) -> float | None:
        return self.reminded.rate if self.reminded else None

    def save(self, folder: Path, made: Mapping[str, Any]) -> None:
        """Write `report.json`, aside and renamed. made: what the evaluation was made from, as JSON."""
        aside = folder / "report.json.tmp"
        aside.write_text(json.dumps({**asdict(self), "made": made}), encoding="utf-8")
        aside.rename(folder / "report.json")

    @staticmethod
    def load(folder: Path) -> "tuple[Report, dict[str, Any]] | None":
        """What `save` wrote, and `made`; or None. ValueError: the file is damaged."""
        file = folder / "report.json"
        if not file.is_file():
            return None
        known = {f.name for f in fields(Report)}  # a report of an older version has others, and does not say what made it
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            made = found.pop("made", {"settings": {}, "inputs": {}})
            report = Report(**{name: value for name, value in found.items() if name in known})
            report = replace(report, reminded=Following(**report.reminded) if report.reminded else None,
                             retry=Retry(**report.retry) if report.retry else None)
            return report, {"settings": dict(made["settings"]), "inputs": dict(made["inputs"])}
        except (ValueError, TypeError, KeyError, AttributeError) as problem:
            raise ValueError(f"{file} is no report of this program ({type(problem).__name__}: {problem}); move it away "
                             "to evaluate anew") from None

    def scalars(self) -> dict[str, float]:
        """Flat names for the log."""
        found = {"eval/resolution_rate": self.rate, "eval/judged": self.judged,
                 "eval/dropped": self.attempts - self.judged, "eval/tokens_per_attempt": self.tokens}
        found |= {f"eval/error_events_{c}": n / max(1, self.judged) for c, n in self.events.items()}
        found |= {f"eval/ending_{e}": n / max(1, self.judged) for e, n in self.endings.items()}
        found |= self.reminded.scalars() if self.reminded else {}
        if self.retry:
            found |= {f"retry/{name}": n for name, n in asdict(self.retry).items() if name != "ineligible"}
            found |= {"retry/resolution_rate": self.retry.resolved / self.retry.judged} if self.retry.judged else {}
        return found


def attempts_at(tasks: Sequence[Task], n: int, seed: int, tag: str) -> list[Attempt]:
    """n attempts at every task, with ids and seeds that depend on nothing else (and leave room for a turn's number)."""
    return [Attempt(f"{tag}/{task.instance_id}/{i}", task, (seed * 1_000_003 + t * 1009 + i) % 2**49)
            for t, task in enumerate(tasks) for i in range(n)]


@dataclass(frozen=True)
class Passes:
    """What follows the reminder-free pass. reminding: of its outcomes, how the second pass is reminded; globals: of the
    failed ones, the Global Reminders of the third; None: no such pass."""

    reminding: Callable[[Sequence[Outcome]], Reminding] | None = None
    globals: Callable[[Sequence[Outcome]], Sequence[Reminded]] | None = None


def evaluate(attempts: Sequence[Attempt], pool: Attempts,
             events: Callable[[Sequence[Outcome]], Iterable[Sequence[Event]]], passes: Passes = Passes(),
             on_done=lambda outcome: None) -> Report:
    """Run the attempts without reminders, count their error events, and make the passes asked for."""
    outcomes = pool.run(attempts, on_done=on_done)
    judged = [o for o in outcomes if not o.trouble]
    counts = count_by_class(events(judged))
    reminding, reminded, retry = None, None, None
    if passes.reminding:
        reminding = passes.reminding(outcomes)
        again = [replace(a, id=f"{a.id}/reminded") for a in attempts]
        reminded = following(pool.run(again, reminding, on_done))
    if passes.globals:
        retry = _retry([o for o in judged if not o.verdict.resolved], pool, passes.globals, reminding, on_done)
    tokens = sum(o.trajectory.tokens() for o in judged) / max(1, len(judged))
    return Report(len(outcomes), len(judged), sum(o.verdict.resolved for o in judged), counts,
                  dict(Counter(o.trajectory.ending.value for o in judged)), tokens, reminded, retry)


def _retry(failed: Sequence[Outcome], pool: Attempts, globals_: Callable, reminding: Reminding | None,
           on_done) -> Retry:
    found = list(zip(failed, globals_(failed), strict=True))
    again = [Attempt(f"{o.attempt.id}/retry", o.attempt.task, o.attempt.seed + RETRY, origin="retry",
                     start=(r.control or r).global_)
             for o, r in found if r.global_]  # a control may withhold it: then the retry is just another try
    judged = [o for o in (pool.run(again, reminding, on_done) if again else []) if not o.trouble]
    why = Counter(d.reason for _, r in found if not r.global_ for d in r.dropped)
    return Retry(len(failed), len(again), len(judged), sum(o.verdict.resolved for o in judged), dict(why))


def reminders_table(rows: Sequence[tuple[str, Report]]) -> str:
    """The passes with reminders, of the reports that have them; empty when none has."""
    told = [(name, r.reminded) for name, r in rows if r.reminded]
    retried = [[name, f"{r.retry.eligible}/{r.retry.failed}", f"{r.retry.resolved}/{r.retry.judged}"]
               for name, r in rows if r.retry]
    parts = [following_table(told)] if told else []
    parts += [columns([["failed attempts again", "with a Global Reminder", "resolved"], *retried])] if retried else []
    return "\n\n".join(parts)


def table(rows: Sequence[tuple[str, Report]]) -> str:
    """The reports as a table for a terminal."""
    head = ["checkpoint", "resolved", "rate", *(f"{c} errors" for c in CLASSES), "following", "tokens"]
    body = [[name, f"{r.resolved}/{r.judged}", f"{100 * r.rate:.1f}%", *(str(r.events.get(c, 0)) for c in CLASSES),
             "-" if r.following is None else f"{100 * r.following:.1f}%", f"{r.tokens:.0f}"] for name, r in rows]
    return columns([head, *body])
