"""The rubric: every reminder category as data (rubric.toml), widened or changed by a user's file of the same form."""

from __future__ import annotations

import difflib
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterable, Mapping

from oprd.rollout.rules import RULES
from oprd.rollout.toolresult import QUOTE, ToolResult

CLASSES = ("R1", "R2", "R3", "R4")
FAMILIES = ("hard", "scope_patch_slot", "scenario_condition_slot", "source_path_slot", "post_edit_drift_slot",
            "validation_wrapup_slot")
PROVENANCES = ("paper", "ours")
PHASES = ("any", "before_edit", "after_edit", "validation")
REQUIRED = ("class", "family", "provenance", "trigger", "action")
PATTERNS = ("tool", "command", "output", "unless")  # of a hard rule in a file
OPTIONAL = ("phase", "enabled", *PATTERNS, "failed")
SLOTS = ("path", "name", "target", "line")
HERE = Path(__file__).resolve().parent
DEFAULT, MICRO = HERE / "rubric.toml", HERE / "rubric_micro.toml"


@dataclass(frozen=True)
class Category:
    """One reminder category. action may hold the slots {path}, {name}, {target}, {line} (contextual ones only).

    tool, command, output, unless, failed: a user's hard rule (ours are functions in rules.py). It fires on a call whose
    tool's name and shell line are found by `tool` and `command`, that failed (failed = true), on the first line that
    `output` finds, when `unless` is found neither in that line nor in the shell line.
    """

    name: str
    class_: str
    family: str
    provenance: str
    trigger: str
    action: str
    phase: str = "any"
    tool: str = ""
    command: str = ""
    output: str = ""
    unless: str = ""
    failed: bool = True

    @property
    def hard(self) -> bool:
        return self.family == "hard"

    def text(self, **slots: str) -> str:
        """The action with its slots filled. A slot nobody filled is a KeyError."""
        return re.sub(r"\{(\w+)\}", lambda slot: slots[slot[1]], self.action)

    def match(self, result: ToolResult) -> str | None:
        """Evidence when this hard category fires on a tool result, else None."""
        if not self.output:
            return RULES[self.name](result)
        if self.failed and not result.failed or not re.search(self.tool, result.tool):
            return None
        if not re.search(self.command, result.command) or self._exempt(result.command):
            return None
        found = (line for line in result.lines if re.search(self.output, line) and not self._exempt(line))
        return next((line.strip()[:QUOTE] for line in found), None)

    def _exempt(self, text: str) -> bool:
        return bool(self.unless and re.search(self.unless, text))


@dataclass(frozen=True)
class Rubric:
    """Categories by name, hard ones in the order they are tried."""

    categories: Mapping[str, Category]

    @property
    def hard(self) -> tuple[Category, ...]:
        return tuple(c for c in self.categories.values() if c.hard)

    @property
    def contextual(self) -> tuple[Category, ...]:
        return tuple(c for c in self.categories.values() if not c.hard)

    def __getitem__(self, name: str) -> Category:
        return self.categories[name]

    def __contains__(self, name: str) -> bool:
        return name in self.categories


def load_rubric(*files: str | Path) -> Rubric:
    """The built-in rubric with `files` on top, later ones winning.

    Raises FileNotFoundError, or ValueError naming file, category and field.
    """
    tables: dict[str, dict[str, Any]] = {}
    for file in (DEFAULT, *map(Path, files)):
        for name, table in _read(file).items():
            if not isinstance(table, dict):
                raise ValueError(f"{file}: {name} stands outside a category; write it under a header such as "
                                 f"[{nearest(name, tables)}]")
            unknown = [f for f in table if f not in REQUIRED + OPTIONAL]
            if unknown:
                raise ValueError(f"{file}: {name} has an unknown field {unknown[0]}; did you mean "
                                 f"{nearest(unknown[0], REQUIRED + OPTIONAL)}?")
            if name not in tables and any(field not in table for field in REQUIRED):
                missing = next(field for field in REQUIRED if field not in table)
                raise ValueError(f"{file}: {name} has no field {missing}; did you mean {nearest(name, tables)}? A new "
                                 f"category needs {', '.join(REQUIRED)}")
            tables[name] = {**tables.get(name, {}), **table}
            _check(file, name, tables[name])
    return Rubric({name: _category(name, table) for name, table in tables.items() if table.get("enabled", True)})


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name most like `name`."""
    return difflib.get_close_matches(name, list(known), n=1, cutoff=0)[0]


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise FileNotFoundError(f"rubric file {file} does not exist")
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        hint = "; is a category named twice?" if "twice" in str(problem) or "overwrite" in str(problem) else ""
        raise ValueError(f"{file}: not a TOML file: {problem}{hint}") from None


def _check(file: Path, name: str, table: Mapping[str, Any]) -> None:
    def wrong(field: str, why: str) -> ValueError:
        return ValueError(f"{file}: {name}: {field} {why}")

    for field, value in table.items():
        kind = bool if field in ("enabled", "failed") else str
        if not isinstance(value, kind) or value == "":
            raise wrong(field, f"= {value!r} must be {'true or false' if kind is bool else 'a non-empty text'}")
    for field, known in (("class", CLASSES), ("family", FAMILIES), ("provenance", PROVENANCES), ("phase", PHASES)):
        if table.get(field, known[0]) not in known:
            raise wrong(field, f"= {table[field]!r} must be one of {', '.join(known)}; did you mean "
                               f"{nearest(table[field], known)}?")
    for field in PATTERNS:
        try:
            re.compile(table.get(field, ""))
        except re.error as problem:
            raise wrong(field, f"= {table[field]!r} is no regular expression: {problem}") from None
    hard, slots = table["family"] == "hard", re.findall(r"\{(\w+)\}", table["action"])
    if hard and slots:
        raise wrong("action", f"holds the slot {{{slots[0]}}}, but a hard rule's action is inserted as it stands")
    if unknown := [slot for slot in slots if slot not in SLOTS]:
        raise wrong("action", f"holds an unknown slot {{{unknown[0]}}}; did you mean {nearest(unknown[0], SLOTS)}?")
    patterns = [field for field in (*PATTERNS, "failed") if field in table]
    if hard and "output" not in table and (patterns or name not in RULES):
        whose = f"{patterns[0]} does nothing without one" if patterns else "a hard rule that is not built in needs one"
        raise wrong("output", f"is missing, the pattern of the line to find; {whose}")
    if not hard and patterns:
        raise wrong(patterns[0], f"belongs to hard rules, but the family is {table['family']}")


def _category(name: str, table: Mapping[str, Any]) -> Category:
    fields = {field: table[field] for field in ("phase", *PATTERNS, "failed") if field in table}
    return Category(name, table["class"], table["family"], table["provenance"], table["trigger"], table["action"],
                    **fields)
