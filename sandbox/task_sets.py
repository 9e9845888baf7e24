"""Rows of the published task sets, each brought to the one row shape of sandbox/task.py (that of SWE-rebench V2).

| set | told by | image | repository | tests run by |
|---|---|---|---|---|
| swe-rebench-v2 | install_config | image_name | /<name> | its test_cmd |
| multi-swe | org, number, fix_patch | mswebench/<org>_m_<repo>:pr-<number> | /home/<repo> | /home/run.sh (no patches) |
| swe-bench-pro | before_repo_set_cmd | jefzda/sweap-images:<dockerhub_tag> | /app | run_script.sh of its harness |
| r2e | expected_output_json | docker_image | /testbed | run_tests.sh |
| swe-bench | eval_script, or version | swebench/sweb.eval.x86_64.<id> | /testbed | its eval_script, or by repository |
| swe-gym | version, a repository of its | xingyaoww/sweb.eval.x86_64.<id> | /testbed | by repository |

A reader takes a row as data, structs and all, and returns a new row; what it cannot use is a ValueError that names the
field. A row's own image field goes before the name its set would give. Facts and traps: docs/data.md.
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Iterable, Mapping

from oprd.sandbox.log_lines import PASSED, clean, settled
from oprd.sandbox.log_python import PRO_MARK, r2e_log
from oprd.sandbox.patches import added_files
from oprd.sandbox.task import Task, task_from_row
from oprd.sandbox.test_commands import CONDA, from_eval_script, of_repository, pro_command

Row = Mapping[str, Any]
MULTI_SWE = {"go": "multi-swe-go", "golang": "multi-swe-go", "rust": "multi-swe-rust", "java": "multi-swe-maven",
             "c": "multi-swe-c", "cpp": "multi-swe-c", "c++": "multi-swe-c", "ts": "multi-swe-js",
             "typescript": "multi-swe-js", "js": "multi-swe-js", "javascript": "multi-swe-js", "ruby": "multi-swe-ruby",
             "python": "parse_log_pytest"}


@dataclass(frozen=True)
class SetOptions:
    """name: the set every row is of, or `auto`. strict: a row that cannot be used is an error, else it is left out.
    pro_scripts: SWE-bench Pro's folder run_scripts/."""

    name: str = "auto"
    strict: bool = True
    pro_scripts: str = ""


@dataclass(frozen=True)
class LeftOut:
    """A row that was not used: where it stands (file:line), its id if it has one, and why."""

    where: str
    id: str
    reason: str


@dataclass(frozen=True)
class TaskSet:
    name: str
    fits: Callable[[Row], bool]
    read: Callable[[Row, SetOptions], dict[str, Any]]


@dataclass
class Read:
    tasks: list[Task] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)


def read_rows(rows: Iterable[tuple[str, Any]], options: SetOptions = SetOptions()) -> Read:
    """Tasks of (place, row) pairs; a row may come as the ValueError that says why it is none.

    Raises ValueError naming place, id and field, if options.strict, and when no row can be used.
    """
    found, first = Read(), {}
    for where, row in rows:
        try:
            task = read_row(row, where, options)
            if first.setdefault(task.instance_id, where) != where:
                raise ValueError(f"{where}: {task.instance_id}: this instance_id stands already at "
                                 f"{first[task.instance_id]}; every task needs its own")
            found.tasks.append(task)
        except ValueError as problem:
            if options.strict:
                raise
            name, reason = shown_id(row), str(problem).removeprefix(f"{where}: ")
            found.left_out.append(LeftOut(where, name, reason.removeprefix(f"{name}: ")))
    if not found.tasks:
        why = f"; the first of {len(found.left_out)} rows: {found.left_out[0].reason}" if found.left_out else ""
        raise ValueError(f"no tasks in the file{why}")
    return found


def read_row(row: Any, where: str, options: SetOptions = SetOptions()) -> Task:
    """Raises ValueError naming `where`, the task and the field."""
    if isinstance(row, ValueError):
        raise ValueError(f"{where}: {row}")
    if not isinstance(row, Mapping):
        raise ValueError(f"{where}: a task must be a JSON object, got {type(row).__name__}")
    one = next((s for s in SETS if s.name == options.name), None) or next((s for s in SETS if s.fits(row)), None)
    if one is None:
        raise ValueError(f"{where}: {shown_id(row)}: the row is of no known task set (its fields: "
                         f"{', '.join(sorted(map(str, row)))}); known: {', '.join(s.name for s in SETS)}")
    try:
        same = one.read(row, options)
    except ValueError as problem:
        raise ValueError(f"{where}: {shown_id(row)}: {problem} ({one.name})") from None
    if not same.get("files"):  # else one of this program's own
        same.setdefault("source", one.name)
    return task_from_row(same, where)


def shown_id(row: Any) -> str:
    if not isinstance(row, Mapping):
        return ""
    if row.get("org") and row.get("repo"):
        return str(row.get("instance_id") or f"{row['org']}__{row['repo']}-{row.get('number')}")
    return str(row.get("instance_id") or row.get("docker_image") or "")


# --- one reader a set -----------------------------------------------------------------------------------------------

def _rebench(row: Row, options: SetOptions) -> dict[str, Any]:
    same = dict(row)
    config = row.get("install_config")
    if isinstance(config, str):
        config = _decoded(config, "install_config")
    if isinstance(config, Mapping):
        same["install_config"] = {name: value for name, value in config.items() if value is not None}
    for name in ("FAIL_TO_PASS", "PASS_TO_PASS"):
        if isinstance(row.get(name), str):
            same[name] = _decoded(row[name], name)
    same["image_name"] = row.get("image_name") or row.get("docker_image")
    interface = row.get("interface")
    if isinstance(interface, str) and interface.strip() and not interface.startswith("No new interface"):
        same["problem_statement"] = f"{row.get('problem_statement')}\n\nInterface:\n{interface}"
    if str(same["image_name"] or "").startswith(("docker.io/swerebench", "swerebench")) and "workdir" not in row:
        same["workdir"] = "/" + str(row.get("repo")).split("/")[-1] if "v2/" in same["image_name"] else "/testbed"
    return same


def _swe_bench(row: Row, options: SetOptions) -> dict[str, Any]:
    if row.get("eval_type") == "fail_only":
        raise ValueError("eval_type is fail_only: there an absent test counts as passed, so a run proves nothing")
    if row.get("eval_script"):
        command, parser = from_eval_script(_text(row, "eval_script")), _text(row, "log_parser")
    else:
        command, parser = of_repository(_text(row, "repo"), _text(row, "test_patch"), str(row.get("version")))
    name = _text(row, "instance_id").lower().replace("__", "_1776_")
    return _classic(row, command, parser, str(row.get("image") or f"swebench/sweb.eval.x86_64.{name}:latest"))


def _swe_gym(row: Row, options: SetOptions) -> dict[str, Any]:
    command, parser = of_repository(_text(row, "repo"), _text(row, "test_patch"), str(row.get("version")), gym=True)
    name = _text(row, "instance_id").lower().replace("__", "_s_")
    return _classic(row, command, parser, str(row.get("image") or f"xingyaoww/sweb.eval.x86_64.{name}:latest"))


def _classic(row: Row, command: str, parser: str, image: str) -> dict[str, Any]:
    return {**_same(row, "instance_id", "repo", "base_commit", "problem_statement", "patch", "test_patch"),
            "FAIL_TO_PASS": _tests(row, "FAIL_TO_PASS"), "PASS_TO_PASS": _tests(row, "PASS_TO_PASS"),
            "install_config": {"test_cmd": command, "log_parser": parser, "before": CONDA}, "image_name": image,
            "workdir": "/testbed",
            "meta": _kept(row, "version", "difficulty", "environment_setup_commit")}


def _pro(row: Row, options: SetOptions) -> dict[str, Any]:
    name = _text(row, "instance_id")
    if not options.pro_scripts:
        raise ValueError("no row says how its tests run; set data.pro_scripts to the folder run_scripts of its harness")
    folder = Path(options.pro_scripts) / name
    try:
        run, parse = ((folder / file).read_text(encoding="utf-8") for file in ("run_script.sh", "parser.py"))
    except OSError as problem:
        raise ValueError(f"{folder}: {problem.strerror}; it must hold run_script.sh and parser.py") from None
    files = _tests(row, "selected_test_files_to_run")
    parts = [_text(row, "problem_statement")]
    parts += [f"{title}\n{row[key]}" for key, title in (("requirements", "Requirements:"),
                                                         ("interface", "New interfaces introduced:")) if row.get(key)]
    tag = row.get("dockerhub_tag")
    image = row.get("image") or row.get("image_name") or (f"jefzda/sweap-images:{tag}" if tag else
                                                          f"ghcr.io/scaleapi/swe-bench_pro-v2:{name}")
    return {**_same(row, "repo", "base_commit", "patch", "test_patch"), "instance_id": name,
            "problem_statement": "\n\n".join(parts), "image_name": image, "workdir": "/app",
            "FAIL_TO_PASS": _tests(row, "fail_to_pass"), "PASS_TO_PASS": _tests(row, "pass_to_pass"),
            "install_config": {"test_cmd": pro_command(run, parse, files, PRO_MARK), "log_parser": "swe-bench-pro"},
            "meta": _kept(row, "repo_language", "issue_specificity", "issue_categories")}


def _multi_swe(row: Row, options: SetOptions) -> dict[str, Any]:
    org, repo = _text(row, "org"), _text(row, "repo")
    passing = {kind: _names(row, f"{kind}_tests") for kind in ("f2p", "s2p", "n2p", "p2p")}
    language = str(row.get("lang") or row.get("language") or "").lower()
    parser = MULTI_SWE.get(language)
    if parser is None:
        raise ValueError(f"lang = {language!r}: no parser for this language's logs; known: {', '.join(MULTI_SWE)}")
    if language == "java" and any(" > " in test or test.startswith(":") for test in sum(passing.values(), [])):
        parser = "multi-swe-gradle"
    base = row.get("base")
    issues = [f"{issue.get('title') or ''}\n\n{issue.get('body') or ''}".strip()
              for issue in row.get("resolved_issues") or () if isinstance(issue, Mapping)]
    statement = "\n\n".join(filter(None, issues)) or f"{row.get('title') or ''}\n\n{row.get('body') or ''}".strip()
    return {"instance_id": shown_id(row), "repo": f"{org}/{repo}", "problem_statement": statement,
            "base_commit": _text(base, "sha", "base.") if isinstance(base, Mapping) else _text(row, "base_commit"),
            "patch": _text(row, "fix_patch"), "test_patch": _text(row, "test_patch"),
            "FAIL_TO_PASS": list(dict.fromkeys(passing["f2p"] + passing["s2p"] + passing["n2p"])),
            "PASS_TO_PASS": passing["p2p"], "workdir": f"/home/{repo}",
            "image_name": row.get("image_name") or f"mswebench/{org}_m_{repo}:pr-{row.get('number')}".lower(),
            "install_config": {"test_cmd": "bash /home/run.sh", "log_parser": parser},
            "hidden": ["/home/fix.patch", "/home/test.patch"], "meta": _kept(row, "lang", "number", "tag")}


def _r2e(row: Row, options: SetOptions) -> dict[str, Any]:
    expected = _decoded(row.get("expected_output_json"), "expected_output_json")
    ran = _decoded(row.get("execution_result_content"), "execution_result_content")
    commit = _decoded(row.get("parsed_commit_content"), "parsed_commit_content")
    if not (isinstance(expected, Mapping) and isinstance(ran, Mapping) and isinstance(commit, Mapping)):
        raise ValueError("expected_output_json, execution_result_content and parsed_commit_content must be JSON "
                         "objects: they hold the expected results, the hidden tests and the fix")
    before = settled(r2e_log(clean(ran.get("old_commit_res_stdout") or "")))
    passing = [clean(test).split(" - ")[0] for test, status in expected.items() if status == PASSED]
    files = dict(zip(ran.get("test_file_names") or (), ran.get("test_file_codes") or ()))
    statement = str(row.get("problem_statement") or row.get("prompt") or "")
    issue = re.search(r"\[ISSUE\](.*)\[/ISSUE\]", statement, re.S)
    commit_hash, image = _text(row, "commit_hash"), _text(row, "docker_image")
    return {"instance_id": f"{row.get('repo_name')}-{commit_hash[:12]}", "repo": str(row.get("repo_name")),
            "base_commit": f"{commit_hash}^", "problem_statement": (issue[1] if issue else statement).strip(),
            "patch": _r2e_patch(commit),
            "test_patch": added_files({f"r2e_tests/{name}": str(code) for name, code in files.items()}),
            "FAIL_TO_PASS": [test for test in passing if before.get(test) != PASSED],
            "PASS_TO_PASS": [test for test in passing if before.get(test) == PASSED],
            "install_config": {"test_cmd": "bash run_tests.sh", "log_parser": "r2e"}, "image_name": image,
            "workdir": "/testbed", "hidden": ["/r2e_tests", "/testbed/r2e_tests", "/root/r2e_tests"],
            "meta": _kept(row, "commit_hash")}


def _r2e_patch(commit: Row) -> str:
    """The Python source files of a parsed commit as a git patch (the set's own tests are not the commit's)."""
    marks = {"context": " ", "added": "+", "deleted": "-", "note": "\\ "}
    lines: list[str] = []
    for change in commit.get("file_diffs") or ():
        path = change["header"]["file"]["path"]
        if not path.endswith(".py") or re.search(r"(^|/)([Tt]ests?/|test_[^/]*$)|_test\.py$", path):
            continue
        lines += [f"diff --git a/{path} b/{path}", *filter(None, [change["header"].get("misc_line")])]
        if change.get("minus_file") and change.get("plus_file"):
            lines += [f"--- {change['minus_file']['path']}", f"+++ {change['plus_file']['path']}"]
        for hunk in change.get("hunks") or ():
            old, new = (",".join(str(part) for part in (span["start"], span.get("length")) if part is not None)
                        for span in (hunk["descriptor"]["old_range"], hunk["descriptor"]["new_range"]))
            lines.append(f"@@ -{old} +{new} @@ {hunk['descriptor'].get('section') or ''}".rstrip())
            lines += [marks[line["type"]] + line["content"] for line in hunk["line_group"]["all_lines"]]
    return "".join(f"{line}\n" for line in lines)


# --- what several of them need --------------------------------------------------------------------------------------

def _same(row: Row, *names: str) -> dict[str, str]:
    return {name: _text(row, name) for name in names}


def _kept(row: Row, *names: str) -> dict[str, Any]:
    return {name: row[name] for name in names if row.get(name) is not None}


def _text(row: Row, name: str, at: str = "") -> str:
    value = row.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{at}{name} must be text, got {'nothing' if value is None else type(value).__name__}")
    return value


def _decoded(value: Any, name: str) -> Any:
    """A value that may be spelled as JSON or as a Python literal."""
    if not isinstance(value, str):
        return value
    for read in (json.loads, ast.literal_eval):
        try:
            return read(value)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    raise ValueError(f"{name} is text, but neither JSON nor a Python literal")


def _tests(row: Row, name: str) -> list[Any]:
    """Names as a list, a JSON list or a Python literal of one; absent: none."""
    value = _decoded(row.get(name), name)
    if value is None:
        return []
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{name} must be a list of tests, got {type(value).__name__}")
    return list(value)


def _names(row: Row, name: str) -> list[str]:
    """The tests of a map test -> results, or of its columnar form {"name": [...], "fix": [...]}."""
    value = _decoded(row.get(name), name)
    if value is None:
        return []
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a map of tests, got {type(value).__name__}")
    columns = value.get("name")
    return [str(test) for test in (columns if isinstance(columns, (list, tuple)) else value)]


GYM_REPOS = frozenset({"getmoto/moto", "python/mypy", "project-monai/monai", "dask/dask", "pandas-dev/pandas",
                       "facebookresearch/hydra", "conan-io/conan", "pydantic/pydantic", "modin-project/modin",
                       "iterative/dvc", "bokeh/bokeh"})
SETS = (
    TaskSet("swe-bench-pro", lambda row: "before_repo_set_cmd" in row or "selected_test_files_to_run" in row, _pro),
    TaskSet("multi-swe", lambda row: "org" in row and "fix_patch" in row, _multi_swe),
    TaskSet("r2e", lambda row: "expected_output_json" in row, _r2e),
    TaskSet("swe-rebench-v2", lambda row: row.get("install_config") is not None, _rebench),
    TaskSet("swe-gym", lambda row: str(row.get("repo")).lower() in GYM_REPOS and "version" in row
            and not row.get("eval_script"), _swe_gym),
    TaskSet("swe-bench", lambda row: bool(row.get("eval_script")) or {"version", "test_patch"} <= set(row), _swe_bench),
)
