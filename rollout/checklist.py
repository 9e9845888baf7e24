"""Checklists: what a task asks for, as atomic requirements that can be checked one by one.

A file of them is JSON lines, to be read and edited by people:

    {"task_id": "...", "items": [{"text": "Begin with gali.", "weight": 1.0, "gate": false}]}

or they stand in the task's row (`checklist`). gate: without it the whole answer is worth nothing. `check` (MicroIF) is
the truth that an item can be held against. `problems` says what is wrong with a checklist: items that ask several
things at once, that nobody can check, that say the same twice.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping, Sequence

from oprd.sandbox.jsonl import read_jsonl
from oprd.sandbox.microif import KINDS, Constraint
from oprd.sandbox.task import Task

MAX_TEXT = 400
_VAGUE = re.compile(r"\b(good|nice|appropriate(ly)?|suitable|proper(ly)?|high[- ]quality|well[- ]written|reasonable|"
                    r"as needed|if possible|etc|and so on|overall)\b", re.I)
_SEVERAL = re.compile(r"[;\n]|\b(and|as well as|in addition|also)\b(?=.*\b(must|should|is|are|has|have|does|do|use|"
                      r"write|begin|end|avoid|contains?|includes?|returns?)\b)|[.!?]\s+\S", re.I)
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class CheckItem:
    """One requirement; see above."""

    text: str
    weight: float = 1.0
    gate: bool = False
    check: Constraint | None = None

    def truth(self, response: str) -> bool | None:
        """Whether the answer really meets it; None where nobody knows."""
        return None if self.check is None else self.check.holds(response)


Checklist = tuple[CheckItem, ...]


def item_from(entry: Any, at: str) -> CheckItem:
    """Raises ValueError that begins with `at`."""
    if isinstance(entry, str):
        entry = {"text": entry}
    if not isinstance(entry, Mapping) or entry.keys() - {"text", "weight", "gate", "check"}:
        raise ValueError(f"{at} must be a text, or an object with text, weight, gate and check")
    text, weight, gate = entry.get("text"), entry.get("weight", 1.0), entry.get("gate", False)
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{at}.text must be a text that is not empty")
    if type(weight) not in (int, float) or not 0 < weight < math.inf:
        raise ValueError(f"{at}.weight = {weight!r} must be a number above 0")
    if type(gate) is not bool:
        raise ValueError(f"{at}.gate = {gate!r} must be true or false")
    check = entry.get("check")
    if check is not None and (not isinstance(check, Mapping) or check.get("kind") not in KINDS):
        raise ValueError(f"{at}.check must be a constraint of MicroIF ({', '.join(KINDS)})")
    return CheckItem(text.strip(), float(weight), gate, Constraint(**check) if check else None)


def problems(items: Sequence[CheckItem]) -> list[str]:
    """What is wrong with a checklist, one line each; nothing: it can be used."""
    found = [] if items else ["there is no item"]
    for i, item in enumerate(items):
        at = f"item {i} ({item.text[:60]!r})"
        if len(item.text) > MAX_TEXT:
            found.append(f"{at} is longer than {MAX_TEXT} characters")
        if _SEVERAL.search(item.text):
            found.append(f"{at} asks for several things; one item, one requirement")
        if vague := _VAGUE.search(item.text):
            found.append(f"{at} cannot be checked: {vague[0]!r} is a matter of taste")
        for j, other in enumerate(items[:i]):
            if _alike(item.text, other.text):
                found.append(f"{at} says the same as item {j}")
    return found


def checklists(tasks: Sequence[Task], path: str | Path = "") -> dict[str, Checklist]:
    """Every task's checklist, from the file or the task's row. ValueError names file, line or task, and item."""
    given: dict[str, Checklist] = {}
    for where, row in read_jsonl(path) if path else ():
        if not isinstance(row.get("task_id"), str) or not isinstance(row.get("items"), list):
            raise ValueError(f"{where}: a checklist must be an object with task_id and items")
        given[row["task_id"]] = _whole(row["items"], f"{where}: {row['task_id']}")
    for task in tasks:
        if task.instance_id not in given:
            if "checklist" not in task.meta:
                raise ValueError(f"{task.instance_id} has no checklist, neither in its row nor in a file "
                                 "(checklist.path); --stage checklists writes one")
            given[task.instance_id] = _whole(task.meta["checklist"], task.instance_id)
    return {task.instance_id: given[task.instance_id] for task in tasks}


def _whole(entries: Sequence[Any], at: str) -> Checklist:
    items = tuple(item_from(entry, f"{at}: items[{i}]") for i, entry in enumerate(entries))
    if wrong := problems(items):
        raise ValueError(f"{at}: {wrong[0]}")
    return items


def _alike(a: str, b: str) -> bool:
    """The same words, or nearly: what differs in a name or number is no duplicate."""
    one, two = (_WORD.findall(t.lower()) for t in (a, b))
    return one == two or (len(one) > 6 and sorted(one) == sorted(two))
