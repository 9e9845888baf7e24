"""Lines of JSON: tasks, recorded attempts, tool calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Iterator


def read_jsonl(path: str | Path) -> Iterator[tuple[str, Any]]:
    """(`file:line`, value) of every line that is not blank, one at a time. OSError; ValueError names the line.

    Read as bytes: text may hold line separators of Unicode's, which end no JSON line.
    """
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                where = f"{path}:{number}"
                try:
                    value = json.loads(line)
                except (ValueError, RecursionError) as problem:  # of the JSON or of its UTF-8
                    raise ValueError(f"{where}: not JSON ({problem}); is the line cut off?") from None
                yield where, value
