"""The hard rules on recorded tool calls, one line in and one line out: what `--stage match-rules` writes.

A line in is {"id", "tool", "arguments", "exit_code", "output"}; exit_code may be null, and "is_error" then says whether
the call failed (absent or null: it did not). arguments may be the JSON text of an object, or a bare command line of a
shell tool. A line out is {"id", "rules": [{"rule", "evidence"}]}, the most specific rule first.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Iterator, Mapping

from oprd.rollout.rubric import Rubric, nearest
from oprd.rollout.toolresult import ToolResult, kind_of
from oprd.sandbox.jsonl import read_jsonl

FIELDS = ("id", "tool", "arguments", "exit_code", "output", "is_error")


def match_lines(path: str | Path, rubric: Rubric, off: tuple[str, ...] = ()) -> Iterator[dict[str, Any]]:
    """The answer to each line of a file, read and answered one by one; rules in `off` are not tried.

    Raises FileNotFoundError, or ValueError naming file, line and field, or a rule that does not exist.
    """
    for name in off:
        if name not in rubric:
            raise ValueError(f"reminders.disabled names {name!r}, which is no category of the rubric; "
                             f"did you mean {nearest(name, rubric.categories)}?")
    if not Path(path).exists() or Path(path).is_dir():  # a pipe will do
        raise FileNotFoundError(f"--input {path} is no file")
    rules = [category for category in rubric.hard if category.name not in off]
    for where, row in read_jsonl(path):
        identity, result = _read(row, where)
        found = ((category.name, category.match(result)) for category in rules)
        yield {"id": identity, "rules": [{"rule": name, "evidence": said} for name, said in found if said]}


def _read(row: Any, where: str) -> tuple[Any, ToolResult]:
    if not isinstance(row, dict):
        raise ValueError(f"{where}: must be a JSON object with {', '.join(FIELDS[:5])}, got {type(row).__name__}")
    for field in FIELDS[:5]:
        if field not in row:
            close = [name for name in row if name not in FIELDS and nearest(name, FIELDS) == field]
            raise ValueError(f"{where}: has no field {field}" + (f"; is {close[0]!r} meant for it?" if close else ""))
    tool, output, code, is_error = row["tool"], row["output"], row["exit_code"], row.get("is_error")
    for field, value, fits, must in (("tool", tool, isinstance(tool, str), "a tool's name"),
                                     ("output", output, output is None or isinstance(output, str), "a text"),
                                     ("exit_code", code, code is None or type(code) is int, "an integer or null"),
                                     ("is_error", is_error, is_error in (None, True, False), "true, false or null")):
        if not fits:
            raise ValueError(f"{where}: {field} = {value!r} must be {must}")
    return row["id"], ToolResult(tool, _arguments(row["arguments"], tool, where), code, bool(is_error), output or "")


def _arguments(given: Any, tool: str, where: str) -> Mapping[str, object]:
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            given = {"command": given} if kind_of(tool) == "bash" else given
    if not isinstance(given, dict):
        raise ValueError(f"{where}: arguments = {given!r} must be an object such as {{\"command\": \"ls\"}}")
    return given
