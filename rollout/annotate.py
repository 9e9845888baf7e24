"""Diagnostic annotation (paper, section 2.2 and Figures 1 and 7): which process errors finished attempts show.

Events are found by the reminders' own detectors, hard rules first and the judge second; a fine category counts once in
an attempt, its coarse class comes from the rubric. Rates are events in 100 attempts.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Iterator, Sequence

from oprd.rollout.events import error_events
from oprd.rollout.judge import Judge
from oprd.rollout.records import read_records
from oprd.rollout.rubric import CLASSES, Rubric
from oprd.rollout.tables import columns


@dataclass
class Annotation:
    """The events of one file of attempts. events: attempts that show a category; judged and resolved: attempts with a
    verdict, and those it was good for."""

    name: str
    attempts: int = 0
    judged: int = 0
    resolved: int = 0
    events: Counter = field(default_factory=Counter)

    def rate(self, rubric: Rubric, class_: str) -> float:
        """Events of a class in 100 attempts."""
        found = sum(n for category, n in self.events.items() if rubric[category].class_ == class_)
        return 100 * found / max(1, self.attempts)

    def scalars(self, rubric: Rubric) -> dict[str, float]:
        """Flat names for the log."""
        return {f"annotate/events_{c}": self.rate(rubric, c) / 100 for c in CLASSES} | {
            f"annotate/category_{category}": n / max(1, self.attempts) for category, n in self.events.items()} | {
            "annotate/attempts": self.attempts}


def annotate(path: Path, rubric: Rubric, judge: Judge) -> Iterator[tuple[dict[str, Any], Annotation]]:
    """One line for one attempt of a file, with the running Annotation: {"id", "task_id", "resolved", "events"}."""
    found = Annotation(path.stem)
    for row, trajectory in read_records(path):
        events = error_events(row["statement"], trajectory, rubric, judge)
        found.attempts += 1
        found.judged += row["resolved"] is not None
        found.resolved += bool(row["resolved"])
        found.events.update(event.category for event in events)
        yield {"id": row["id"], "task_id": row["task_id"], "resolved": row["resolved"],
               "events": [asdict(event) for event in events]}, found


def inputs(path: str | Path) -> list[Path]:
    """The files to annotate: one, or all .jsonl files of a folder by name. FileNotFoundError; ValueError: none there."""
    place = Path(path)
    if place.is_dir():
        files = sorted(place.glob("*.jsonl"))
        if not files:
            raise ValueError(f"{place}: holds no .jsonl file of attempts")
        return files
    if not place.is_file():
        raise FileNotFoundError(f"{place}: no such file or folder")
    return [place]


def table(annotations: Sequence[Annotation], rubric: Rubric, categories: int = 8) -> str:
    """Events in 100 attempts by class, one row a file, and below it the most frequent categories."""
    head = ["attempts of", "attempts", "resolved", *(f"{c} / 100" for c in CLASSES)]
    rows = [[a.name, str(a.attempts), f"{a.resolved}/{a.judged}", *(f"{a.rate(rubric, c):.1f}" for c in CLASSES)]
            for a in annotations]
    total: Counter = sum((a.events for a in annotations), Counter())
    names = [category for category, _ in total.most_common(categories)]
    fine = [["category", "class", *(a.name for a in annotations)]] + [
        [name, rubric[name].class_, *(f"{100 * a.events[name] / max(1, a.attempts):.1f}" for a in annotations)]
        for name in names]
    return columns([head, *rows]) + ("\n\n" + columns(fine) if names else "")
