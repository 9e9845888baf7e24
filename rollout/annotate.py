"""Diagnostic annotation (paper, section 2.2 and Figures 1 and 7): which process errors finished attempts show.

Events are found by the hard rules first and by an audit of the whole attempt second; a fine category counts once in an
attempt, its coarse class comes from the rubric. Rates are events in 100 attempts.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence

from oprd.rollout.audit import Audit
from oprd.rollout.events import Event, count_by_category, count_by_class, error_events
from oprd.rollout.records import read_records, reminder_free
from oprd.rollout.rubric import CLASSES, Rubric
from oprd.rollout.tables import columns

AT_ONCE = 256  # attempts held in memory
CHECKPOINTS = ("base", "coding-sft", "if-sft", "oprd")  # folders of a run, in the order of the recipe


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


def annotate(path: Path, rubric: Rubric, audit: Audit,
             each: Callable[[Callable, Sequence], list] = lambda do, items: [do(item) for item in items],
             ) -> Iterator[tuple[dict[str, Any], Annotation]]:
    """One line for one attempt of a file, with the running Annotation: {"id", "task_id", "resolved", "events"}.
    Attempts that ran with reminders are left out: their errors are not the policy's own. each: does several at once."""
    found = Annotation(name_of(path))
    free = ((row, trajectory) for row, trajectory in read_records(path) if reminder_free(row))
    while some := list(islice(free, AT_ONCE)):
        events_of = each(lambda one: error_events(one[0]["statement"], one[1], rubric, audit), some)
        for (row, _), events in zip(some, events_of):
            found.found.append(events)
            found.judged += row["resolved"] is not None
            found.resolved += bool(row["resolved"])
            yield {"id": row["id"], "task_id": row["task_id"], "resolved": row["resolved"],
                   "events": [asdict(event) for event in events]}, found


def name_of(path: Path) -> str:
    """What a file is called in a table: the folder of its stage, where it is a run's, and its own name."""
    if path.parent.name != "attempts":
        return path.stem
    stage = path.resolve().parent.parent
    return f"{(stage.parent if stage.name == 'eval' else stage).name}/{path.stem}"


def inputs(path: str | Path) -> list[Path]:
    """The files to annotate: one, or all .jsonl files of a folder by name, or the newest evaluation of every checkpoint
    of a run's folder. FileNotFoundError; ValueError: none there."""
    place = Path(path)
    if place.is_dir():
        newest = [max(folder.glob("*.jsonl"), default=None) for folder in
                  (place / stage / "eval" / "attempts" for stage in CHECKPOINTS)]
        files = sorted(place.glob("*.jsonl")) or [file for file in newest if file]
        if not files:
            raise ValueError(f"{place}: holds no .jsonl file of attempts, nor evaluations of "
                             f"{', '.join(CHECKPOINTS)}")
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
