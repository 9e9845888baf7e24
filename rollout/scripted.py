"""The scripted judge of MicroSWE: decides contextual categories from visible facts, by script, with no model.

It stands where a model judge stands and sees what one would see. What it can know comes from the statement (the path
and the name in backticks), from which files the calls took, and from the lines a validation printed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Callable, Iterator

from oprd.rollout.judge import SLOT_TEXTS, Candidate, Case
from oprd.rollout.rubric import Rubric
from oprd.rollout.toolresult import PATH, ToolResult, clean_path, is_test, same_file

CODE = re.compile(r"`([^`]+)`")
TARGET = re.compile(r"(?P<name>[A-Za-z_][\w.]*)(?:\((?P<arguments>.*)\))?")
KEPT = re.compile(r"\s*(is|are) (right|correct|fine)\b|\s*(stays?|works|must stay|must not|should stay)\b")
TEST_FILE = re.compile(r"(^|/)(tests?/|test_|check\.py|conftest)|_test\.")
FAILURE = re.compile(r"^(?:FAIL|FAILED|ERROR|--- FAIL):?\s+(?P<test>(?:[\w./-]+::)*[\w./-]*\w)(?=[:\s(]|$)", re.M)
CONDITION = re.compile(r"^.*\b(?:if|elif|case|when)\b.*?[\"'](\w+)[\"']", re.M)
DEFINITION = re.compile(r"^\s*(?:async )?(?:def|func|function|fn)\s+(\w+)", re.M)


@dataclass(frozen=True)
class Ask:
    """What a statement asks for, as far as it can be read off: the one path to change (None unless there is exactly
    one that is not said to be right) and the target in backticks."""

    path: str | None
    target: str | None
    function: str | None
    literal: str | None  # the target's first quoted argument
    tests: bool  # the statement points at tests


def read_statement(statement: str) -> Ask:
    paths, target = [], None
    for quoted in CODE.finditer(statement):
        text = quoted[1].strip()
        if PATH.fullmatch(text):
            if not KEPT.match(statement, quoted.end()) and clean_path(text) not in paths:
                paths.append(clean_path(text))
        elif target is None:
            target = TARGET.fullmatch(text)
    literal = re.search(r"[\"'](\w+)[\"']", target["arguments"] or "") if target else None
    return Ask(paths[0] if len(paths) == 1 else None, target[0] if target else None,
               target["name"].rsplit(".", 1)[-1] if target else None, literal[1] if literal else None,
               bool(re.search(r"\btests?\b", CODE.sub("", statement))))


@dataclass(frozen=True)
class ScriptedJudge:
    """Texts are the rubric's actions with their slots filled; categories it does not hold are not proposed."""

    rubric: Rubric

    def decide(self, case: Case) -> list[Candidate]:
        ask, proposed = read_statement(case.statement), []
        if case.latest is None:
            return []
        for detect in DETECTORS + (PROBE_DETECTORS if case.planned else ()):
            for name, confidence, evidence, slots in detect(case, ask):
                if name in self.rubric:
                    known = {"path": ask.path, "target": ask.target}
                    filled = {**SLOT_TEXTS, **{slot: text for slot, text in known.items() if text}, **slots}
                    proposed.append(Candidate(name, self.rubric[name].text(**filled), evidence, confidence))
        return proposed


Found = Iterator[tuple[str, float, str, dict[str, str]]]  # category, confidence, evidence, slots


def _wrong_file(case: Case, ask: Ask) -> Found:
    """The latest call edited, or read before the named path, another source file than the one the task names."""
    path = case.latest.file
    if ask.path is None or path is None or case.latest.failed or same_file(path, ask.path) or TEST_FILE.search(path):
        return
    evidence = f"the task names {ask.path}; the latest call took {path}"
    if case.latest.kind == "edit":
        yield "edit_scope_evidence_guard", 0.96, evidence, {}
        yield "named_path_over_neighbor", 0.95, evidence, {}
    elif not any(r and same_file(r.file, ask.path) for r in case.results):
        yield "named_path_over_neighbor", 0.95, evidence, {}


def _test_not_read(case: Case, ask: Ask) -> Found:
    """The statement points at tests, the file to change has just been read, and no test was run or read."""
    if not ask.tests or case.edited or case.latest.kind == "edit" or not same_file(case.latest.file, ask.path):
        return
    if not any(r and (is_test(r) or TEST_FILE.search(r.file or "")) for r in case.results):
        yield "read_failing_test_first", 0.93, "the statement points at tests; none was run or read", {}


def _wrong_branch(case: Case, ask: Ask) -> Found:
    """The latest edit of the named file is anchored at another condition or function than the statement's."""
    edit = case.latest
    if edit.kind != "edit" or edit.failed or not same_file(edit.file, ask.path) or not ask.function:
        return
    old = str(edit.arguments.get("old_string", ""))
    conditions, definitions = CONDITION.findall(old), DEFINITION.findall(old)
    if ask.literal and conditions and ask.literal not in conditions:
        yield "strict_one_condition_literal", 0.95, f"the edit is anchored at {conditions[-1]!r}", {}
    elif definitions and ask.function not in definitions:
        evidence = f"the edit is anchored at {definitions[-1]}"
        yield "sibling_scenario_invariant", 0.95, evidence, {"name": definitions[-1]}


def _failed_check(case: Case, ask: Ask) -> Found:
    """After an edit a validation fails: in a sibling that did not fail before, or in the target."""
    if not case.edits or not is_test(case.latest) or not case.latest.failed:
        return
    before = {test for r in case.results[: case.edits[0]] if r and is_test(r) for test, _ in _failures(r)}
    failures = _failures(case.latest)
    for test, line in [f for f in failures if not _is_target(f[0], ask) and f[0] not in before][:1]:
        yield "sibling_scenario_invariant", 0.97, line, {"name": test, "line": line}
    for test, line in [f for f in failures if _is_target(f[0], ask)][:1]:
        yield "assertion_diff_local_repair", 0.96, line, {"name": test, "line": line}


def _edit_after_pass(case: Case, ask: Ask) -> Found:
    """The latest edit follows a validation that passed with an earlier edit in place."""
    if len(case.edits) < 2 or case.edits[-1] != len(case.turns) - 1:
        return
    passed = [k for k, r in enumerate(case.results) if k > case.edits[0] and r and is_test(r) and not r.failed]
    if passed:
        shown = (case.results[passed[-1]].lines or ("",))[0][:100]
        yield "change_surface_budget_guard", 0.95, f"turn {passed[-1]} passed: {shown}", {}


def _wrapping_up(case: Case, ask: Ask) -> Found:
    """An edited file or the diff is looked at, and no test has run since the last edit."""
    if case.looks_back and not any(r and is_test(r) for r in case.results[case.edits[-1]:]):
        yield "diff_wrapup_format_test", 0.93, f"no test has run since the edit at turn {case.edits[-1]}", {}


def _plans_wrong_file(case: Case, ask: Ask) -> Found:
    """The probe would take another source file than the one the task names: edit it, or read it first."""
    path = case.planned.file
    if ask.path is None or path is None or same_file(path, ask.path) or TEST_FILE.search(path):
        return
    if case.planned.kind == "edit" or not any(r and same_file(r.file, ask.path) for r in case.results):
        yield "named_path_over_neighbor", 0.95, f"the task names {ask.path}; the next action takes {path}", {}


def _plans_unread_edit(case: Case, ask: Ask) -> Found:
    """The probe would edit although the statement points at tests and none was run or read."""
    if not ask.tests or case.edited or case.planned.kind != "edit":
        return
    if not any(r and (is_test(r) or TEST_FILE.search(r.file or "")) for r in case.results):
        yield "read_failing_test_first", 0.95, "the statement points at tests; the next action edits", {}


def _plans_wrong_branch(case: Case, ask: Ask) -> Found:
    """The probe would edit the named file at another condition or function than the statement's."""
    edit = case.planned
    if edit.kind != "edit" or not same_file(edit.file, ask.path) or not ask.function:
        return
    old = str(edit.arguments.get("old_string", ""))
    conditions, definitions = CONDITION.findall(old), DEFINITION.findall(old)
    if ask.literal and conditions and ask.literal not in conditions:
        yield "one_condition_repair", 0.95, f"the next edit is anchored at {conditions[-1]!r}", {}
    elif definitions and ask.function not in definitions:
        yield "one_condition_repair", 0.95, f"the next edit is anchored at {definitions[-1]}", {}


def _plans_unchecked_end(case: Case, ask: Ask) -> Found:
    """The probe would submit, and no test has run since the last edit."""
    if case.planned.kind == "submit" and case.edits and not any(
            r and is_test(r) for r in case.results[case.edits[-1]:]):
        yield "diff_wrapup_format_test", 0.95, f"the next action ends; no test since turn {case.edits[-1]}", {}


PROBE_DETECTORS: tuple[Callable[[Case, Ask], Found], ...] = (_plans_wrong_file, _plans_unread_edit,
                                                             _plans_wrong_branch, _plans_unchecked_end)
DETECTORS: tuple[Callable[[Case, Ask], Found], ...] = (_wrong_file, _test_not_read, _wrong_branch, _failed_check,
                                                       _edit_after_pass, _wrapping_up)


def _failures(result: ToolResult) -> list[tuple[str, str]]:
    """(test name, its line) of every failure a validation prints."""
    return [(m["test"].rsplit("::", 1)[-1], result.text[m.start():].split("\n", 1)[0].strip()[:120])
            for m in FAILURE.finditer(result.text)]


def _is_target(test: str, ask: Ask) -> bool:
    """Whether a test is the statement's: its name holds the function's, and the literal's where there is one."""
    if ask.function is None:
        return True
    name = f"_{test.rsplit('.', 1)[-1]}_".lower()
    return all(f"_{part.lower()}_" in name for part in (ask.function, ask.literal) if part)
