"""Metrics that know how they add up, and where they are written.

Two parts of one step (micro-batches, ranks) are joined with `merge`; the number shown is `value()`. Something that
was not measured is absent: never a zero.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Mapping, Protocol, TextIO


class Metric(Protocol):
    def join(self, other): ...

    def value(self) -> float | None: ...


@dataclass(frozen=True)
class Mean:
    """A mean over things: their total and how many there were. Without any, there is no value."""

    total: float
    count: float = 1

    def join(self, other: "Mean") -> "Mean":
        return Mean(self.total + other.total, self.count + other.count)

    def value(self) -> float | None:
        return self.total / self.count if self.count else None


@dataclass(frozen=True)
class Sum:
    total: float

    def join(self, other: "Sum") -> "Sum":
        return Sum(self.total + other.total)

    def value(self) -> float:
        return self.total


@dataclass(frozen=True)
class Max:
    most: float

    def join(self, other: "Max") -> "Max":
        return Max(max(self.most, other.most))

    def value(self) -> float:
        return self.most


@dataclass(frozen=True)
class Min:
    least: float

    def join(self, other: "Min") -> "Min":
        return Min(min(self.least, other.least))

    def value(self) -> float:
        return self.least


@dataclass(frozen=True)
class Last:
    """Something every part agrees on, or of which the latest counts (a learning rate)."""

    latest: float

    def join(self, other: "Last") -> "Last":
        return other

    def value(self) -> float:
        return self.latest


def merge(a: Mapping[str, Metric], b: Mapping[str, Metric]) -> dict[str, Metric]:
    """Both parts as one. A name present in one part only stays as it is."""
    for name in a.keys() & b.keys():
        assert type(a[name]) is type(b[name]), f"{name} is a {type(a[name]).__name__} and a {type(b[name]).__name__}"
    return {**a, **b, **{name: a[name].join(b[name]) for name in a.keys() & b.keys()}}


def values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """The numbers to show; a metric without a value is left out."""
    return {name: v for name, m in metrics.items() if (v := m.value()) is not None}


class Log:
    """Writes TensorBoard events and `metrics.jsonl` side by side in a run's folder.

    first_step: the step this run begins at. Everything an earlier run wrote at that step or later is dropped from
    both files, so a resumed run leaves one curve per tag. One JSON line a `write`: {"step": 12, "train/loss": 0.5}.
    """

    def __init__(self, folder: Path, first_step: int = 0):
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and only a run needs it

        folder.mkdir(parents=True, exist_ok=True)
        self._last = first_step
        _truncate(folder / "metrics.jsonl", first_step)
        self._lines = open(folder / "metrics.jsonl", "a", encoding="utf-8")
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)

    def write(self, step: int, metrics: Mapping[str, Metric]) -> None:
        """Record one step's (or one evaluation's) metrics. Steps must not go back."""
        assert step >= self._last, f"step {step} after step {self._last}"
        self._last = step
        found = values(metrics)
        for name, v in found.items():
            self._board.add_scalar(name, v, global_step=step)
        plain = {name: v if math.isfinite(v) else None for name, v in found.items()}  # JSON has no nan
        self._lines.write(json.dumps({"step": step, **plain}, allow_nan=False) + "\n")
        self._lines.flush()
        self._board.flush()

    def close(self) -> None:
        self._lines.close()
        self._board.close()

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def next_number(folder: Path) -> int:
    """How many lines a folder's log has: the number of the next evaluation or annotation."""
    file = folder / "metrics.jsonl"
    if not file.exists():
        return 0
    with file.open("rb") as lines:
        return sum(1 for _ in lines)


def _truncate(path: Path, first_step: int) -> None:
    """Keep the lines before `first_step`; a line that a kill cut short goes too."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            if json.loads(line)["step"] < first_step:
                kept.append(line + "\n")
        except (ValueError, TypeError, KeyError):  # cut short, or not written by us
            continue
    aside = path.with_name(path.name + ".tmp")
    aside.write_text("".join(kept), encoding="utf-8")
    os.replace(aside, path)


class Progress:
    """A tqdm bar on a terminal; elsewhere a plain line at most every `seconds`, and one at the end."""

    def __init__(self, total: int, done: int = 0, name: str = "step", out: TextIO | None = None, seconds: float = 10.0):
        self._out = out or sys.stderr
        self._total, self._done, self._name = total, done, name
        self._seconds, self._shown_at = seconds, -math.inf
        self._bar = None
        if self._out.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, initial=done, desc=name, file=self._out, dynamic_ncols=True)

    def advance(self, shown: Mapping[str, float]) -> None:
        """One more done; `shown` are the few numbers worth reading."""
        self._done += 1
        text = " ".join(f"{name}={v:.4g}" for name, v in shown.items())
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update()
            return
        now = time.monotonic()
        if now - self._shown_at >= self._seconds or self._done >= self._total:
            self._shown_at = now
            print(f"{self._name} {self._done}/{self._total} {text}".rstrip(), file=self._out, flush=True)

    def reach(self, done: int) -> None:
        """So many are done now. May be said again and again while nothing changes: a sign of life."""
        if self._bar is not None:
            self._bar.update(done - self._done)
        self._done = done
        now = time.monotonic()
        if self._bar is None and (now - self._shown_at >= self._seconds or done >= self._total):
            self._shown_at = now
            print(f"{self._name} {done}/{self._total}", file=self._out, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
