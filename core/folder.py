"""Writing a model's folder: beside its place, flushed to the disk, then renamed into it."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

from oprd.core.disk import sync

_LEFT = re.compile(r"(?P<pid>\d+)\.(?P<what>tmp|old)")  # how a save's own names end, behind the target's


@contextmanager
def new_folder(target: Path, overwrite: bool) -> Iterator[Path]:
    """A folder beside `target` to write into, which then takes its place; if anything fails, it is removed."""
    _sweep(target)
    _refuse_overwrite(target, overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.parent / f".{target.name}.{os.getpid()}.tmp"
    aside.mkdir()
    try:
        yield aside
        for file in aside.iterdir():
            sync(file)
        sync(aside)
        _publish(aside, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _sweep(target: Path) -> None:
    """Remove what killed saves to this target left beside it; an old model that had just been moved out comes back."""
    for left in list(target.parent.iterdir()) if target.parent.is_dir() else ():
        match = _LEFT.fullmatch(left.name.removeprefix(f".{target.name}."))
        if match is None or not left.name.startswith(f".{target.name}."):
            continue
        if int(match["pid"]) != os.getpid() and _alive(int(match["pid"])):
            continue  # another save is at work
        if match["what"] == "old" and not target.exists():
            left.rename(target)
        else:
            shutil.rmtree(left)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)  # signal 0 asks only
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _refuse_overwrite(target: Path, overwrite: bool) -> None:
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not (target / "config.json").is_file():
        raise ValueError(f"{target}: exists and is not a model directory; name another place")
    if not overwrite:
        raise ValueError(f"{target}: already holds a model; name another place")


def _publish(aside: Path, target: Path) -> None:
    """Rename `aside` to `target`; an old directory is moved out first and removed after."""
    old = None
    if target.exists():
        old = target.parent / f".{target.name}.{os.getpid()}.old"
        target.rename(old)
    aside.rename(target)
    sync(target.parent)
    if old is not None:
        shutil.rmtree(old)
