"""Whether an action did what its reminder asks: per category one that must count, one that must not, one that is unclear."""

import pytest

from oprd.core.types import Observation, Reminder, ToolCall, Turn
from oprd.rollout.follow import ASPECTS, CHECKS, check, check_turn, followed, result
from oprd.rollout.rubric import MICRO, load_rubric

RUBRIC, SHORT = load_rubric(), load_rubric(MICRO)
FILLED = {"path": "src/a.py", "name": "test_b", "target": 'f("x")', "line": "FAIL test_a"}


def turn(name, error=False, seen="", code=None, **arguments):
    return Turn((), (), call=ToolCall(name, arguments), observation=Observation(seen, code, is_error=error))


def edit(old, new, path="src/a.py", error=False):
    return turn("edit", error, path=path, old_string=old, new_string=new)


def run(command, error=False, seen=""):
    return turn("bash", error, seen, int(error), command=command)


def read(path, error=False):
    return turn("read", error, path=path)


SUBMIT, CHECK, LIST = Turn((), (), call=ToolCall("submit", {})), run("python check.py"), run("ls src")
BUILD = run("go build ./...", True, "# m\n./a.go:3:2: undefined: x")
SIGNATURE = run("go build ./...", True, "# m\n./a.go:3:2: not enough arguments in call to f")
FMT = run("go fmt a/x.go b/y.go", True, "named files must all be in one directory; have a/ and b/")
NOISY = run("pytest", True, "... output truncated ...")
CASES = [  # category, turns before, followed, not followed, unclear
    ("hard_go_fmt_cross_dir", [FMT], run("gofmt -w a/x.go b/y.go"), FMT, None),
    ("hard_go_fmt_cross_dir", [FMT], run("go fmt ./a && go fmt ./b"), run("go vet ./..."), None),
    ("hard_ambiguous_edit_old_string", [edit("x", "y", error=True)], edit("def f():\n  x", "y"), edit("x", "z", error=True), None),
    ("hard_ambiguous_edit_old_string", [edit("x", "y", error=True)], edit("w\nx", "y"), edit("w\nx", "y", path="b.py"), None),
    ("hard_go_signature_callers", [SIGNATURE], run("rg 'f\\('"), SUBMIT, None),
    ("hard_go_signature_callers", [SIGNATURE], edit("f()", "f(1)", path="m/a.go"), edit("f()", "f(1)", path="m/z.go"), None),
    ("hard_semantic_search_auth", [turn("semantic_search", True, query="x")], run("rg x"), turn("semantic_search", query="y"), None),
    ("hard_malformed_search", [run("rg '('", True)], run("rg -F '('"), edit("x", "y"), None),
    ("hard_malformed_search", [run("rg '('", True)], run("find . -name x"), run("rg '('", True), None),
    ("hard_mockey_gcflags", [run("go test ./a", True)], run('go test -gcflags="all=-N -l" ./a'), run("go test ./a", True), None),
    ("hard_go_toolchain_env", [run("go test ./...", True)], run("go env GOTOOLCHAIN"), edit("x", "y", path="a.go"), None),
    ("hard_noisy_validation_output_narrow", [NOISY], run("pytest tests/test_a.py -k x"), edit("x", "y"), None),
    ("hard_noisy_validation_output_narrow", [NOISY], read("tests/test_a.py"), NOISY, None),
    ("hard_go_compile_error", [BUILD], edit("x", "y", path="a.go"), edit("x", "y", path="b.go"), None),
    ("hard_missing_file_path_narrow", [read("a", True)], LIST, read("a", True), None),
    ("hard_missing_file_path_narrow", [read("a", True)], read("b"), read("c", True), None),
    ("patch_surface_from_task", [read("src/a.py")], edit("x", "y"), edit("x", "y", path="tests/test_a.py"), CHECK),
    ("fix_production_not_test", [read("src/a.py")], edit("x", "y"), edit("x", "y", path="tests/test_a.py"), CHECK),
    ("existing_helper_before_new", [read("src/a.py")], run("rg helper"), turn("write", path="n.py", content="x"), SUBMIT),
    ("public_contract_before_edit", [read("src/a.py")], edit("def f(a):\n  1", "def f(a):\n  2"),
     edit("def f(a):\n  1", "def f(a, b):\n  1"), CHECK),
    ("root_cause_before_symptom_patch", [CHECK], read("src/b.py"), edit("x", "y"), SUBMIT),
    ("scenario_matrix_guard", [CHECK], read("src/b.py"), edit("x", "y"), SUBMIT),
    ("sibling_scenario_invariant", [edit("x", "y"), CHECK], edit("y", "x"), SUBMIT, LIST),
    ("static_branch_pair_read_mature", [CHECK], read("src/b.py"), edit("x", "y"), SUBMIT),
    ("one_condition_repair", [read("src/a.py")], edit("if a:\n 1", "if b:\n 1"), edit("if a:\nif c:", "if b:\nif d:"), LIST),
    ("strict_one_condition_literal", [edit('if m == "z"', "y")], edit('if m == "x"', "y"), edit('if m == "z"', "y"), LIST),
    ("scenario_source_scope_guard", [CHECK], read("src/b.py"), edit("x", "y"), SUBMIT),
    ("named_path_source_guard", [read("src/b.py")], edit("x", "y"), edit("x", "y", path="src/b.py"), SUBMIT),
    ("named_path_over_neighbor", [read("src/b.py")], read("src/a.py"), read("src/b.py"), None),
    ("named_path_over_neighbor", [read("src/b.py")], run("cat ./src/a.py"), CHECK, None),
    ("prove_value_source_before_shared_change", [CHECK], run("git grep x"), edit("x", "y"), SUBMIT),
    ("read_failing_test_first", [read("src/a.py")], read("tests/test_a.py"), edit("x", "y"), LIST),
    ("change_surface_budget_guard", [edit("x", "y")], SUBMIT, edit("x", "y", path="src/b.py"), LIST),
    ("change_surface_budget_guard", [edit("x", "y")], edit("y", "x"), edit("p", "q", path="src/c.py"), LIST),
    ("edit_scope_evidence_guard", [edit("x", "y", path="src/b.py")], edit("y", "x", path="src/b.py"), SUBMIT, None),
    ("edit_scope_evidence_guard", [edit("x", "y", path="src/b.py")], run("git restore src/b.py"), edit("p", "q", path="src/b.py"), None),
    ("safe_default_or_data_model_path_guard", [edit("x", "y")], edit("y", "z"), edit("x", "y", path="src/b.py"), SUBMIT),
    ("assertion_diff_local_repair", [edit("x", "y"), CHECK], read("tests/test_a.py"), SUBMIT, run("echo hm")),
    ("test_failure_localization_guard", [edit("x", "y"), run("pytest", True)], run("pytest tests/a.py::t"), edit("y", "z"), run("echo")),
    ("compile_mechanical_only", [edit("x", "y", path="a.go"), BUILD], edit("p", "q", path="a.go"), SUBMIT, LIST),
    ("diff_wrapup_format_test", [edit("x", "y"), run("git diff")], run("pytest tests/a.py"), SUBMIT, LIST),
]


def reminder(category, rubric=RUBRIC):
    return Reminder(category, rubric[category].class_, rubric[category].text(**FILLED), turn=0)


@pytest.mark.parametrize("category, before, good, bad, unclear", CASES)
def test_following_is_told_from_ignoring_and_from_what_a_call_does_not_tell(category, before, good, bad, unclear):
    asked = reminder(category)
    assert followed(asked, before, good) is True
    assert followed(asked, before, bad) is False
    assert unclear is None or followed(asked, before, unclear) is None
    assert set(check_turn(asked, before, good).aspects) <= set(ASPECTS)


def test_every_category_of_the_rubric_has_a_check_and_a_case():
    assert set(CHECKS) == {c.name for c in RUBRIC.hard + RUBRIC.contextual} == {case[0] for case in CASES}


UNDO = run("git checkout .")
SHORT_CASES = [  # MicroSWE's texts name what is to be done next
    ("assertion_diff_local_repair", [CHECK], UNDO, SUBMIT),
    ("edit_scope_evidence_guard", [edit("x", "y", path="src/b.py")], UNDO, read("src/a.py")),
    ("sibling_scenario_invariant", [edit("x", "y"), CHECK], UNDO, edit("y", "x")),
    ("read_failing_test_first", [read("src/a.py")], CHECK, read("tests/test_a.py")),
    ("diff_wrapup_format_test", [edit("x", "y")], CHECK, run("pytest")),
    ("change_surface_budget_guard", [edit("x", "y")], SUBMIT, LIST),
    ("change_surface_budget_guard", [edit("x", "y")], edit("y", "x"), edit("p", "q")),
    ("one_condition_repair", [read("src/a.py")], edit('if m == "x"', "y"), edit('if m == "z"', "y")),
    ("named_path_over_neighbor", [read("src/b.py")], read("src/a.py"), read("src/b.py")),
]


@pytest.mark.parametrize("category, before, good, bad", SHORT_CASES)
def test_a_text_that_names_a_command_or_an_end_is_followed_by_that_and_nothing_else(category, before, good, bad):
    asked = reminder(category, SHORT)
    assert followed(asked, before, good) is True and followed(asked, before, bad) is False


def test_the_same_checks_hold_for_the_tools_of_another_scaffold():
    before = [turn("Edit", True, file_path="/repo/a.py", old_string="x", new_string="y")]
    good = turn("Edit", file_path="/repo/a.py", old_string="w\nx", new_string="y")
    assert followed(reminder("hard_ambiguous_edit_old_string"), before, good) is True
    assert followed(reminder("named_path_over_neighbor"), before, turn("Read", file_path="/repo/src/a.py")) is True


def test_a_malformed_reply_follows_nothing_and_a_users_rule_without_a_command_is_unclear():
    assert followed(reminder("hard_missing_file_path_narrow"), [LIST], Turn((), ())) is False
    assert followed(Reminder("mine", "R1", "Be careful.", turn=0), [LIST], CHECK) is None
    assert followed(Reminder("mine", "R1", "Run `cargo fmt` now.", turn=0), [LIST], run("cargo fmt")) is True
    assert followed(Reminder("mine", "R1", "Run `cargo fmt` now.", turn=0), [LIST], CHECK) is False


def test_a_probe_has_no_result_so_its_follow_up_is_not_asked_about():
    asked, before = reminder("hard_ambiguous_edit_old_string"), [edit("x", "y", error=True)]
    again = edit("w\nx", "y", error=True)  # longer, and still an error
    assert check_turn(asked, before, again).aspects["follow_up"] is False
    probe = check(asked, [result(t) for t in before], result(again), executed=False)
    assert "follow_up" not in probe.aspects and probe.followed is True
