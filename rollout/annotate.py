"""Diagnostic annotation (paper, section 2.2 and Figures 1 and 7): which process errors finished attempts show.

Events are found by the reminders' own detectors, hard rules first and the judge second; a fine category counts once in
an attempt, its coarse class comes from the rubric. Rates are events in 100 attempts.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Iterator, Sequence

from oprd.rollout.events import Event, count_by_category, count_by_class, error_events
from oprd.rollout.judge import Judge
from oprd.rollout.records import read_records
from oprd.rollout.rubric import CLASSES, Rubric
from oprd.rollout.tables import columns


@dataclass
class Annotation:
    """The attempts of one file: the events of each; judged and resolved: how many have a verdict, and a good one."""

    name: str
    found: list[tuple[Event, ...]] = field(default_factory=list)
    judged: int = 0
    resolved: int = 0

    @property
    def attempts(self) -> int:
        return len(self.found)

    @property
    def events(self) -> dict[str, int]:
        """Category -> attempts that show it."""
        return count_by_category(self.found)

    def rates(self) -> dict[str, float]:
        """Class -> events in an attempt."""
        return {class_: n / max(1, self.attempts) for class_, n in count_by_class(self.found).items()}

    def scalars(self) -> dict[str, float]:
        """Flat names for the log."""
        return {f"annotate/events_{class_}": rate for class_, rate in self.rates().items()} | {
            f"annotate/category_{category}": n / max(1, self.attempts) for category, n in self.events.items()} | {
            "annotate/attempts": self.attempts}


def annotate(path: Path, rubric: Rubric, judge: Judge) -> Iterator[tuple[dict[str, Any], Annotation]]:
    """One line for one attempt of a file, with the running Annotation: {"id", "task_id", "resolved", "events"}."""
    found = Annotation(path.stem)
    for row, trajectory in read_records(path):
        events = error_events(row["statement"], trajectory, rubric, judge)
        found.found.append(events)
        found.judged += row["resolved"] is not None
        found.resolved += bool(row["resolved"])
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
    rows = [[a.name, str(a.attempts), f"{a.resolved}/{a.judged}", *(f"{100 * rate:.1f}" for rate in a.rates().values())]
            for a in annotations]
    names = list(count_by_category(events for a in annotations for events in a.found))[:categories]
    fine = [["category", "class", *(a.name for a in annotations)]] + [
        [name, rubric[name].class_,
         *(f"{100 * a.events.get(name, 0) / max(1, a.attempts):.1f}" for a in annotations)] for name in names]
    return columns([head, *rows]) + ("\n\n" + columns(fine) if names else "")
