"""Lines of JSON: tasks, recorded attempts, tool calls."""

from __future__ import annotations

import codecs
import json
from pathlib import Path
from typing import Any, Iterator


def read_jsonl(path: str | Path) -> Iterator[tuple[str, Any]]:
    """(`file:line`, value) of every line that is not blank, one at a time. OSError; ValueError names the line.

    Read as bytes: text may hold line separators of Unicode's, which end no JSON line. A byte-order mark of UTF-8 is
    passed over; other encodings than UTF-8 are errors.
    """
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                where = f"{path}:{number}"
                try:
                    value = json.loads(line.removeprefix(codecs.BOM_UTF8 if number == 1 else b"").decode("utf-8"))
                except UnicodeDecodeError as problem:
                    raise ValueError(f"{where}: not UTF-8 ({problem.reason} at byte {problem.start + 1} of the line); "
                                     "save the file as UTF-8") from None
                except (ValueError, RecursionError) as problem:
                    array = number == 1 and line.lstrip(codecs.BOM_UTF8).lstrip().startswith(b"[")
                    raise ValueError(f"{where}: not JSON ({problem}); " + (
                        "is the file one JSON array? Each line must be an object of its own (JSON lines)" if array else
                        "is the line cut off?")) from None
                if number == 1 and isinstance(value, list):
                    raise ValueError(f"{where}: holds a JSON array; each line must be an object of its own "
                                     "(JSON lines)")
                yield where, value
