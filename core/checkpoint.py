"""Training checkpoints: everything a run needs to go on as if it had never stopped.

    FOLDER/step_40/
        state/          weights, the teacher's, the optimizer's moments (core/pieces.py), from every rank
        random_0.pt     states of Python's, numpy's and torch's generators, one file a rank
        position.json   where the run was: steps done, data position, whatever the caller needs
        COMPLETE        written last: every file's name and size

A checkpoint is written under another name beside its place, flushed to the disk, and published by one rename: there
is no moment at which a kill loses the previous one. All ranks of one run write to a folder (which they share), and
the first of them decides; nobody else does at a time.
"""

from __future__ import annotations

import json
import logging
import random
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Mapping

import numpy as np
import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from oprd.core.disk import sync
from oprd.parallel.collectives import all_objects
from oprd.parallel.mesh import Axis

log = logging.getLogger("oprd.checkpoint")

MARKER = "COMPLETE"
NAME = re.compile(r"step_(\d+)(?:\.replaced)?")
UNFINISHED = ".unfinished_"

WriteState = Callable[[Path], None]  # writes this rank's part of the state into the folder it is given, with the others


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint. `state` is a folder, for whoever builds models."""

    step: int
    state: Path
    random: Mapping[str, Any]
    position: Mapping[str, Any]


def save(folder: Path, step: int, *, state: WriteState, position: Mapping[str, Any], keep: int = 2,
         random: Mapping[str, Any] | None = None, axis: Axis = Axis("world")) -> Path:
    """Write checkpoint `step_<step>` in `folder` and keep the newest `keep` (at least 1). Returns its path.

    Every rank of axis must call it. random: the generators' states, as random_state() gives them; default: now. A full
    or unwritable disk, on whichever rank, is an OSError of one line on all; what was there before stays.
    """
    assert keep >= 1, keep
    place = folder / f"step_{step}"
    aside = folder / f"{UNFINISHED}{place.name}"
    first = axis.rank == 0

    def begin() -> None:
        _sweep(folder)
        (aside / "state").mkdir(parents=True)

    def fill() -> None:
        state(aside / "state")
        torch.save(random_state() if random is None else dict(random), aside / f"random_{axis.rank}.pt")
        sync(aside / f"random_{axis.rank}.pt")

    def publish() -> None:
        (aside / "position.json").write_text(json.dumps(position, indent=1, allow_nan=False), encoding="utf-8")
        _seal(aside)
        _publish(aside, place)
        _prune(folder, keep)

    for work in (begin if first else None, fill, publish if first else None):
        if reason := _failure(work, axis):
            if first:
                shutil.rmtree(aside, ignore_errors=True)
            raise OSError(f"checkpoint {place} was not written: {reason}; earlier checkpoints are untouched, free some "
                          "space or choose another run folder")
    return place


def _failure(work: Callable[[], None] | None, axis: Axis) -> str | None:
    """Do this rank's work; why the machine did not let it, or another rank's, be done."""
    reason = None
    try:
        if work is not None:
            work()
    # torch and safetensors report a full disk their own ways
    except (OSError, RuntimeError, SafetensorError, CheckpointException) as error:
        if isinstance(error, CheckpointException):
            error = next(iter(error.failures.values()))[0]
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())
    return next((r for r in all_objects(reason, axis) if r is not None), None)


def newest(folder: Path) -> Path | None:
    """The complete checkpoint of the highest step, or None where there is none at all. Incomplete ones are skipped,
    each with a log line; ValueError when there is nothing else: what is left of them is not for us to throw away."""
    problems = []
    for _, path in reversed(_found(folder)):
        problem = incomplete(path)
        if problem is None:
            return path
        log.warning("skipping checkpoint %s: %s", path, problem)
        problems.append(f"{path.name}: {problem}")
    if problems:
        raise ValueError(f"{folder}: no checkpoint is complete ({'; '.join(problems)}); put back what is missing, or "
                         "move the folder away to start from step 0")
    return None


def load(path: Path, rank: int = 0) -> Checkpoint:
    """Read one checkpoint. Nothing is restored: the caller builds the models, then calls `restore_random`. A rank that
    the run that wrote it had not goes on with the first one's generators.

    Raises ValueError naming the file that is missing or damaged.
    """
    problem = incomplete(path)
    if problem is not None:
        raise ValueError(f"checkpoint {path} is not complete: {problem}")
    return Checkpoint(
        step=int(NAME.fullmatch(path.name)[1]),
        state=path / "state",
        random=_read(own if (own := path / f"random_{rank}.pt").exists() else path / "random_0.pt", _tensors),
        position=_read(path / "position.json", lambda file: json.loads(file.read_text(encoding="utf-8"))),
    )


def _tensors(file: Path) -> Any:
    return torch.load(file, map_location="cpu", weights_only=True)


def _read(file: Path, read: Callable[[Path], Any]) -> Mapping[str, Any]:
    try:
        found = read(file)
        if not isinstance(found, dict):
            raise ValueError(f"it holds a {type(found).__name__}")
    except Exception as error:  # torch and pickle report damage with whatever they stumble over
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(f"{file} is damaged: {reason}; move {file.parent} away to go on from the checkpoint before "
                         "it") from None
    return found


def incomplete(path: Path) -> str | None:
    """Why `path` is not a complete checkpoint, or None if it is."""
    try:
        sizes = json.loads((path / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return f"no readable {MARKER} file (the writer was stopped)"
    if not isinstance(sizes, dict) or not sizes:
        return f"{MARKER} does not list files and their sizes"
    for name, size in sizes.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes instead of {size}"
    return None


def random_state() -> dict[str, Any]:
    """States of the process's generators: Python, numpy, torch, and every GPU's."""
    kind, keys, at, has_gauss, gauss = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), at, has_gauss, gauss),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_random(state: Mapping[str, Any]) -> None:
    """Put the generators back. The last thing to do on a resume: building models and data draws from them."""
    random.setstate(state["python"])
    kind, keys, at, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), at, has_gauss, gauss))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])


def _found(folder: Path) -> list[tuple[int, Path]]:
    """Everything named like a checkpoint, by step as a number; a replaced one before its replacement."""
    if not folder.is_dir():
        return []
    named = [(int(m[1]), p) for p in folder.iterdir() if p.is_dir() and (m := NAME.fullmatch(p.name))]
    return sorted(named, key=lambda found: (found[0], not found[1].suffix))


def _seal(aside: Path) -> None:
    """Everything onto the disk, then the marker, then the marker onto the disk."""
    files = [p for p in sorted(aside.rglob("*")) if p.is_file()]
    sizes = {str(p.relative_to(aside)): p.stat().st_size for p in files}
    for path in [*files, *(p for p in aside.rglob("*") if p.is_dir())]:
        sync(path)
    (aside / MARKER).write_text(json.dumps(sizes, indent=1), encoding="utf-8")
    sync(aside / MARKER)
    sync(aside)


def _publish(aside: Path, place: Path) -> None:
    """One rename. If the step was saved before, the old one stays readable until the new one is in place."""
    replaced = place.with_name(place.name + ".replaced")
    if place.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        place.rename(replaced)
    aside.rename(place)
    sync(place.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _prune(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` complete checkpoints, and what is older and incomplete."""
    complete = 0
    for _, path in reversed(_found(folder)):
        if complete >= keep:
            shutil.rmtree(path, ignore_errors=True)
        elif incomplete(path) is None:
            complete += 1


def _sweep(folder: Path) -> None:
    """Remove what a killed writer left."""
    for path in folder.glob(f"{UNFINISHED}*"):
        log.warning("removing %s, left by a save that was stopped", path)
        shutil.rmtree(path)
