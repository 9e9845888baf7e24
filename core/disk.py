"""Onto the disk, really."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any, Iterable


def sync(path: Path) -> None:
    """Flush one file or folder to the disk (fsync); a folder's flush makes the renames in it last."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Written aside and renamed, so a reader never sees half a file."""
    aside = path.with_name(path.name + ".tmp")
    aside.parent.mkdir(parents=True, exist_ok=True)
    aside.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    aside.rename(path)


def check_free(output: str | None) -> None:
    """Raises ValueError when a path given as --output exists: nothing is overwritten; OSError: it cannot be made."""
    if output:
        if Path(output).exists():
            raise ValueError(f"{output} exists; name another --output")
        check_makeable(Path(output))


def check_makeable(path: Path) -> None:
    """Raises OSError, naming the place, when a file or folder at `path` could not be made or written into."""
    place = next(p for p in (path, *path.absolute().parents) if p.exists())
    if place != path and not place.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"{path} cannot be made: this is no folder", str(place))
    if not os.access(place, os.W_OK):
        raise PermissionError(errno.EACCES, f"{path} cannot be written", str(place))
