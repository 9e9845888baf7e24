"""Onto the disk, really."""

from __future__ import annotations

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
    """Raises ValueError when a path given as --output exists: nothing is overwritten."""
    if output and Path(output).exists():
        raise ValueError(f"{output} exists; name another --output")
