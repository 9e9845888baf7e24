"""Task files of a run: JSON lines or Parquet, of any published set (sandbox/task_sets.py)."""

from __future__ import annotations

import logging
from pathlib import Path

from oprd.core.settings import Data
from oprd.core.sources import rows
from oprd.sandbox.microif import read_prompts
from oprd.sandbox.task import Task
from oprd.sandbox.task_sets import LeftOut, SetOptions, read_rows

SHOWN = 20  # rows left out that are told one by one


def read_tasks(path: str | Path, data: Data, left_out: list[LeftOut] | None = None) -> list[Task]:
    """The tasks of a file, or of a folder of files. With data.strict = false, rows that cannot be used are logged,
    counted and added to `left_out`. Raises OSError, or ValueError naming file, line, task and field."""
    if data.world == "prompts":
        return read_prompts(path)
    try:
        found = read_rows(rows(path), SetOptions(data.task_set, data.strict, data.pro_scripts))
    except ValueError as problem:
        raise ValueError(str(problem) if str(path) in str(problem) else f"{path}: {problem}") from None
    for one in found.left_out[:SHOWN]:
        logging.warning("left out: %s: %s: %s", one.where, one.id or "(no id)", one.reason)
    if found.left_out:
        total = len(found.tasks) + len(found.left_out)
        logging.warning("%s: %d of %d tasks left out", path, len(found.left_out), total)
    if left_out is not None:
        left_out += found.left_out
    return found.tasks
