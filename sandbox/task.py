"""A repository task in the SWE-rebench V2 row shape (shared facts/data.md 1.1), and reading task files."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Mapping

from oprd.sandbox.jsonl import read_jsonl
from oprd.sandbox.logs import check_parser
from oprd.sandbox.patches import FileChange, file_changes, unsafe

REQUIRED = ("instance_id", "repo", "base_commit", "problem_statement", "patch", "test_patch",
            "FAIL_TO_PASS", "PASS_TO_PASS", "install_config")
LISTS = ("FAIL_TO_PASS", "PASS_TO_PASS")
KINDS = {name: list if name in LISTS else Mapping if name == "install_config" else str for name in REQUIRED}


@dataclass(frozen=True)
class Task:
    """One task. Field names follow the data set; `files` holds a MicroSWE repository's base tree, path -> text
    (real sets have an `image_name` instead). install_config.test_cmd is the command (or list of commands) that runs
    the hidden tests, install_config.log_parser the parser of its output (a name of sandbox/logs.py). workdir: where
    the image has the repository; None: in its working directory. hidden: absolute paths of the image that show the
    solution or its tests; grading does not need them. source: the set the row is of (sandbox/task_sets.py)."""

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
    workdir: str | None = None
    hidden: tuple[str, ...] = ()
    source: str | None = None

    def to_row(self) -> dict[str, Any]:
        row = {"instance_id": self.instance_id, "repo": self.repo, "base_commit": self.base_commit,
               "problem_statement": self.problem_statement, "patch": self.patch, "test_patch": self.test_patch,
               "FAIL_TO_PASS": list(self.fail_to_pass), "PASS_TO_PASS": list(self.pass_to_pass),
               "install_config": dict(self.install_config), "meta": dict(self.meta)}
        if self.image_name:
            row["image_name"] = self.image_name
        if self.files:
            row["files"] = dict(self.files)
        row |= {name: value for name, value in (("workdir", self.workdir), ("hidden", list(self.hidden)),
                                                ("source", self.source)) if value}
        return row


def task_from_row(row: Mapping[str, Any], where: str) -> Task:
    """Raises ValueError naming `where`, the task and the field: whatever a rollout could only fail with later."""
    if not isinstance(row, Mapping):
        raise ValueError(f"{where}: a task must be a JSON object, got {type(row).__name__}")
    if isinstance(row.get("instance_id"), str) and row["instance_id"]:
        where = f"{where}: {row['instance_id']}"
    missing = [name for name in REQUIRED if name not in row]
    if missing:
        raise ValueError(f"{where}: task has no field {missing[0]}; a SWE-rebench V2 row needs {', '.join(REQUIRED)}")
    for name, wanted in (*KINDS.items(), ("image_name", str), ("files", Mapping), ("meta", Mapping),
                         ("workdir", str), ("hidden", list), ("source", str)):
        if not isinstance(row.get(name), wanted) and (name in REQUIRED or row.get(name) is not None):
            kind = {list: "list", Mapping: "JSON object", str: "string"}[wanted]
            raise ValueError(f"{where}: {name} must be a {kind}, got {type(row[name]).__name__}")
    try:
        _check(row)
    except ValueError as problem:
        raise ValueError(f"{where}: {problem}") from None
    return Task(row["instance_id"], row["repo"], row["base_commit"], row["problem_statement"], row["patch"],
                row["test_patch"], tuple(row["FAIL_TO_PASS"]), tuple(row["PASS_TO_PASS"]), row["install_config"],
                row.get("image_name"), row.get("files") or {}, row.get("meta") or {}, row.get("workdir"),
                tuple(row.get("hidden") or ()), row.get("source"))


def _check(row: Mapping[str, Any]) -> None:
    """ValueError for what stands inside a row's fields, naming the field."""
    if not row["instance_id"].strip():
        raise ValueError("instance_id must not be empty")
    if not row["FAIL_TO_PASS"]:
        raise ValueError("FAIL_TO_PASS must be a non-empty list; a task without one cannot be graded")
    for name in LISTS:
        for i, test in enumerate(row[name]):
            if not isinstance(test, str) or not test:
                raise ValueError(f"{name}[{i}] = {test!r} must be a test's name, a non-empty string")
    for name in ("patch", "test_patch"):
        try:
            bad = next(filter(None, map(unsafe, file_changes(_utf8(row[name], name)))), "")
        except ValueError as problem:
            raise ValueError(f"{name}: {str(problem).removeprefix(f'{name}: ')}") from None
        if bad:
            raise ValueError(f"{name}: {bad}")
    for path in filter(None, [row.get("workdir"), *(row.get("hidden") or ())]):
        if not isinstance(path, str) or not re.fullmatch(r"(/[\w.+@-]+)+", path) or ".." in path.split("/"):
            raise ValueError(f"workdir and hidden must be absolute paths without blanks, got {path!r}")
    config = row["install_config"]
    command = config.get("test_cmd")
    parts = command if isinstance(command, list) else [command]
    if not parts or not all(isinstance(part, str) and part.strip() and "\0" not in part for part in parts):
        raise ValueError(f"install_config.test_cmd = {command!r} must be the test command, a string or a "
                         "list of strings")
    parser = config.get("log_parser", "pytest")
    if not isinstance(parser, str):
        raise ValueError(f"install_config.log_parser = {parser!r} must be a parser's name")
    try:
        check_parser(parser)
    except ValueError as problem:
        near = str(problem).partition("; ")[2].partition(" (")[0]
        raise ValueError(f"install_config.log_parser = {parser!r} must be a known log parser; {near}") from None
    files = row.get("files") or {}
    for path, text in files.items():
        if not isinstance(text, str):
            raise ValueError(f"files[{path!r}] must be a text, got {type(text).__name__}")
        _utf8(path + text, f"files[{path!r}]")
        bad = unsafe(FileChange(path)) or ("" if all(path.split("/")) and "\0" not in path else
                                           f"{path!r} is no path inside the repository")
        above = next((folder for folder in map(str, PurePosixPath(path).parents) if folder in files), None)
        if bad or above:
            raise ValueError(f"files: {bad or f'{above} is a file, and a folder of {path}'}")


def _utf8(text: str, name: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:  # JSON can spell lone surrogates
        raise ValueError(f"{name}: holds a lone surrogate, which no file can hold as UTF-8") from None


def read_tasks(path: str | Path) -> list[Task]:
    """All tasks of a JSONL file. Raises FileNotFoundError, or ValueError naming file, line, task and field."""
    tasks, first = [], {}
    for where, row in read_jsonl(path):
        tasks.append(task := task_from_row(row, where))
        if first.setdefault(task.instance_id, where) != where:
            raise ValueError(f"{where}: {task.instance_id}: this instance_id stands already at "
                             f"{first[task.instance_id]}; every task needs its own")
    if not tasks:
        raise ValueError(f"{path}: no tasks in the file")
    return tasks
