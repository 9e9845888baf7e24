"""Onto the disk, really."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Flush one file or folder to the disk (fsync); a folder's flush makes the renames in it last."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
