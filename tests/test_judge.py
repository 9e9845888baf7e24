"""The scripted judge: each category by a conversation that must show it and a near one that must not."""

import pytest

from oprd.core.types import Observation, ToolCall
from oprd.rollout.judge import Case, NoJudge, Probe
from oprd.rollout.rubric import MICRO, load_rubric
from oprd.rollout.scripted import Ask, ScriptedJudge, read_statement

JUDGE = ScriptedJudge(load_rubric(MICRO))
SCOPE = '`kemi` in `src/zuvo.py` must return "lami", `src/bado.py` is right.'
BRANCH = '`kemi("dova")` in `src/zuvo.py` must return "lami".'
TESTS = "`kemi` in `src/zuvo.py` returns a wrong word, the tests tell the right one."
DONE = Observation("The file src/zuvo.py has been updated.")
OK = Observation("ok 4", exit_code=0)


def read(path):
    return ToolCall("read", {"path": path}), Observation("def kemi():\n    return \"rota\"")


def edit(path, old="return \"rota\"", seen=DONE):
    return ToolCall("edit", {"path": path, "old_string": old, "new_string": "return \"lami\""}), seen


def check(*lines):
    seen = Observation("\n".join(["Exit code 1", *lines, f"failed {len(lines)}"]), 1, True) if lines else OK
    return ToolCall("bash", {"command": "python check.py"}), seen


def bash(command, seen=Observation("(no output)", 0)):
    return ToolCall("bash", {"command": command}), seen


KEMI, SIBLING = "FAIL test_kemi: 'zuvo' != 'lami'", "FAIL test_bolo: 'lami' != 'bolo'"
NAMED, NEIGHBOUR = read("src/zuvo.py"), read("src/bado.py")
FIX = edit("src/zuvo.py")


def names(statement, *turns):
    return {c.category for c in JUDGE.decide(Case(statement, turns))}


@pytest.mark.parametrize("statement, turns, category", [
    (SCOPE, [NEIGHBOUR], "named_path_over_neighbor"),
    (SCOPE, [bash("cat src/bado.py")], "named_path_over_neighbor"),
    (SCOPE, [edit("src/bado.py")], "edit_scope_evidence_guard"),
    (TESTS, [NAMED], "read_failing_test_first"),
    (BRANCH, [NAMED, edit("src/zuvo.py", 'if mode == "rilo":\n        return "rota"')], "strict_one_condition_literal"),
    (SCOPE, [NAMED, edit("src/zuvo.py", 'def bolo():\n    return "rota"')], "sibling_scenario_invariant"),
    (SCOPE, [FIX, check(SIBLING)], "sibling_scenario_invariant"),
    (BRANCH, [FIX, check("FAIL test_kemi_rilo: 'lami' != 'rota'")], "sibling_scenario_invariant"),
    (SCOPE, [FIX, check(KEMI)], "assertion_diff_local_repair"),
    (BRANCH, [FIX, check("FAIL test_kemi_dova: 'x' != 'lami'")], "assertion_diff_local_repair"),
    (SCOPE, [FIX, check(), FIX], "change_surface_budget_guard"),
    (SCOPE, [FIX, bash("git diff")], "diff_wrapup_format_test"),
    (SCOPE, [FIX, NAMED], "diff_wrapup_format_test"),
])
def test_a_category_is_decided_when_its_facts_are_visible(statement, turns, category):
    assert names(statement, *turns) == {category} | ({"named_path_over_neighbor"} if "scope" in category and
                                                     category.startswith("edit") else set())


@pytest.mark.parametrize("statement, turns", [
    (SCOPE, []),
    (SCOPE, [NAMED]),
    (SCOPE, [NAMED, NEIGHBOUR]),  # the named file was read first: the neighbour is for reference
    (SCOPE, [(NEIGHBOUR[0], Observation("File does not exist: src/bado.py", is_error=True))]),
    (SCOPE, [read("tests/test_zuvo.py")]),
    (SCOPE, [NAMED, FIX]),
    (SCOPE, [NAMED, FIX, check()]),
    (SCOPE, [check(KEMI, SIBLING)]),  # before any edit a failing check is what was asked for
    (SCOPE, [check(SIBLING), FIX, check(SIBLING)]),  # it failed before
    (SCOPE, [FIX, bash("git checkout ."), check(KEMI)]),  # the edit was taken back
    (SCOPE, [FIX, check(), bash("git diff")]),
    (TESTS, [check(KEMI), NAMED]),
    (TESTS, [NAMED, read("tests/test_zuvo.py")]),
    (BRANCH, [NAMED, edit("src/zuvo.py", 'if mode == "dova":\n        return "rota"')]),
    (BRANCH, [NAMED, edit("src/zuvo.py", "x", Observation("String to replace not found in file.", is_error=True))]),
    (SCOPE, [(None, Observation("Invalid reply: no tool call found", is_error=True))]),
    ("Make it work.", [NEIGHBOUR, edit("src/bado.py")]),
])
def test_nothing_is_decided_without_them(statement, turns):
    assert names(statement, *turns) == set()


def test_texts_are_filled_from_visible_evidence():
    [found] = JUDGE.decide(Case(SCOPE, (FIX, check(KEMI))))
    assert found.text == f"{KEMI}: undo with `git checkout .` and give `kemi` the expected word."
    assert found.evidence == KEMI
    [found] = JUDGE.decide(Case(SCOPE, (NEIGHBOUR,)))
    assert found.text == "Not this file: the task names src/zuvo.py. Read src/zuvo.py and edit only there."


@pytest.mark.parametrize("statement, ask", [
    (SCOPE, Ask("src/zuvo.py", "kemi", "kemi", None, False)),
    ('`src/bado.py` is right, but `kemi` in `./src/zuvo.py` must return "x".',
     Ask("src/zuvo.py", "kemi", "kemi", None, False)),
    (BRANCH, Ask("src/zuvo.py", 'kemi("dova")', "kemi", "dova", False)),
    (TESTS, Ask("src/zuvo.py", "kemi", "kemi", None, True)),
    ("Change `a/b.go` and `a/c.go`.", Ask(None, None, None, None, False)),
    ("Nothing in code.", Ask(None, None, None, None, False)),
])
def test_a_statement_gives_the_path_to_change_and_the_target(statement, ask):
    assert read_statement(statement) == ask


def test_no_judge_decides_nothing_and_a_category_the_rubric_lacks_is_not_proposed(tmp_path):
    assert NoJudge().decide(Case(SCOPE, (NEIGHBOUR,))) == []
    file = tmp_path / "off.toml"
    file.write_text("[named_path_over_neighbor]\nenabled = false\n")
    assert ScriptedJudge(load_rubric(MICRO, file)).decide(Case(SCOPE, (NEIGHBOUR,))) == []


# --- the probe of active mode

OTHER_BRANCH = edit("src/zuvo.py", 'if mode == "rilo":\n        return "rota"')[0]
RIGHT_BRANCH = edit("src/zuvo.py", 'if mode == "dova":\n        return "rota"')[0]


@pytest.mark.parametrize("statement, turns, probe, category", [
    (SCOPE, [bash("ls")], NEIGHBOUR[0], "named_path_over_neighbor"),
    (SCOPE, [NAMED], edit("src/bado.py")[0], "named_path_over_neighbor"),
    (TESTS, [bash("ls")], FIX[0], "read_failing_test_first"),
    (BRANCH, [NAMED], OTHER_BRANCH, "one_condition_repair"),
    (SCOPE, [NAMED], edit("src/zuvo.py", 'def bolo():\n    return "rota"')[0], "one_condition_repair"),
    (SCOPE, [NAMED, FIX], ToolCall("submit", {}), "diff_wrapup_format_test"),
])
def test_a_planned_mistake_is_decided_before_it_is_made(statement, turns, probe, category):
    found = {c.category for c in JUDGE.decide(Case(statement, tuple(turns), probe=Probe(probe)))}
    assert category in found and category not in names(statement, *turns)


@pytest.mark.parametrize("statement, turns, probe", [
    (SCOPE, [bash("ls")], NAMED[0]),
    (SCOPE, [NAMED], NEIGHBOUR[0]),  # the named file was read first: the neighbour is for reference
    (SCOPE, [NAMED], read("tests/test_zuvo.py")[0]),
    (TESTS, [check(KEMI)], FIX[0]),
    (BRANCH, [NAMED], RIGHT_BRANCH),
    (SCOPE, [NAMED, FIX, check()], ToolCall("submit", {})),
    (SCOPE, [NAMED], ToolCall("submit", {})),  # nothing was edited: there is nothing to test
    (SCOPE, [NAMED], None),
])
def test_a_plan_that_is_right_or_cannot_be_read_is_left_alone(statement, turns, probe):
    assert JUDGE.decide(Case(statement, tuple(turns), probe=Probe(probe))) == []
