"""A repository task in the SWE-rebench V2 row shape (shared facts/data.md 1.1), and reading task files."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Mapping

from oprd.sandbox.jsonl import read_jsonl

REQUIRED = ("instance_id", "repo", "base_commit", "problem_statement", "patch", "test_patch",
            "FAIL_TO_PASS", "PASS_TO_PASS", "install_config")
LISTS = ("FAIL_TO_PASS", "PASS_TO_PASS")


@dataclass(frozen=True)
class Task:
    """One task. Field names follow the data set; `files` holds a MicroSWE repository's base tree, path -> text
    (real sets have an `image_name` instead). install_config.test_cmd is the command (or list of commands) that runs
    the hidden tests, install_config.log_parser the parser of its output (`unittest` or `pytest`)."""

    instance_id: str
    repo: str
    base_commit: str
    problem_statement: str
    patch: str
    test_patch: str
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    install_config: Mapping[str, Any]
    image_name: str | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)

    def to_row(self) -> dict[str, Any]:
        row = {"instance_id": self.instance_id, "repo": self.repo, "base_commit": self.base_commit,
               "problem_statement": self.problem_statement, "patch": self.patch, "test_patch": self.test_patch,
               "FAIL_TO_PASS": list(self.fail_to_pass), "PASS_TO_PASS": list(self.pass_to_pass),
               "install_config": dict(self.install_config), "meta": dict(self.meta)}
        if self.image_name:
            row["image_name"] = self.image_name
        if self.files:
            row["files"] = dict(self.files)
        return row


def task_from_row(row: Mapping[str, Any], where: str) -> Task:
    """Raises ValueError naming `where` and the field."""
    if not isinstance(row, Mapping):
        raise ValueError(f"{where}: a task must be a JSON object, got {type(row).__name__}")
    missing = [name for name in REQUIRED if name not in row]
    if missing:
        raise ValueError(f"{where}: task has no field {missing[0]}; a SWE-rebench V2 row needs {', '.join(REQUIRED)}")
    for name in REQUIRED:
        wanted = list if name in LISTS else Mapping if name == "install_config" else str
        if not isinstance(row[name], wanted):
            kind = {list: "list", Mapping: "JSON object", str: "string"}[wanted]
            raise ValueError(f"{where}: {name} must be a {kind}, got {type(row[name]).__name__}")
    if not row["FAIL_TO_PASS"]:
        raise ValueError(f"{where}: FAIL_TO_PASS must be a non-empty list; a task without one cannot be graded")
    return Task(row["instance_id"], row["repo"], row["base_commit"], row["problem_statement"], row["patch"],
                row["test_patch"], tuple(row["FAIL_TO_PASS"]), tuple(row["PASS_TO_PASS"]), row["install_config"],
                row.get("image_name"), row.get("files") or {}, row.get("meta") or {})


def read_tasks(path: str | Path) -> list[Task]:
    """All tasks of a JSONL file. Raises FileNotFoundError, or ValueError naming file, line and field."""
    tasks = [task_from_row(row, where) for where, row in read_jsonl(path)]
    if not tasks:
        raise ValueError(f"{path}: no tasks in the file")
    return tasks
