"""The hard rules on real tool outputs (when the corpus is there) and on hand-written near-misses."""

import csv
import json
import re
from pathlib import Path

import pytest

from oprd.rollout.rules import RULES, matches
from oprd.rollout.shell import simple_commands
from oprd.rollout.toolresult import ToolResult, is_test, is_validation

CORPUS = next((p for p in (Path("/work/shared/tool_outputs"), Path("shared/tool_outputs")) if p.is_dir()), None)
FIRES = {"positive", "positive-borderline", "positive-silent"}


def cases():
    """(case, rule, polarity, tool, arguments, exit_code, is_error, output) of every rule case in the corpus."""
    with open(CORPUS / "INDEX.tsv", newline="") as file:
        rows = [row for row in csv.DictReader(file, delimiter="\t") if row["rule"]]
    for row in rows:
        body, _, state = (CORPUS / f"{row['case']}.txt").read_text().rstrip("\n").rpartition("\n")
        first, *rest = body.split("\n")
        command = first.removeprefix("$ ")
        code, flag = re.search(r"\[exit (-?\d+)\]", state), re.search(r"\[is_error (\w+)\]", state)
        if not code and not flag:  # one scaffold writes its exit code into the output only
            rest.append(state)
        called = re.match(r"([A-Z]\w+) (\{.*\})$", command)
        tool, arguments = (called[1], json.loads(called[2])) if called else ("bash", {"command": command})
        yield (row["case"], row["rule"], row["polarity"], tool, arguments, int(code[1]) if code else None,
               bool(flag) and flag[1] == "True", "\n".join(rest))


@pytest.mark.skipif(CORPUS is None, reason="the corpus of real tool outputs is not on this machine")
def test_precision_and_recall_on_real_tool_outputs_are_at_least_095(capsys):
    hit, missed, wrong = [], [], []
    for case, rule, polarity, *call in cases():
        fired = rule in matches(*call)
        if polarity in FIRES:
            (hit if fired else missed).append(case)
        elif fired and polarity in ("near-miss", "truncation-marker"):
            wrong.append(case)
    recall, precision = len(hit) / (len(hit) + len(missed)), len(hit) / (len(hit) + len(wrong))
    with capsys.disabled():
        print(f"\nhard rules on {len(hit) + len(missed)} positives: recall {recall:.3f}, precision {precision:.3f}")
    assert recall >= 0.95 and precision >= 0.95, f"missed {missed}, wrong {wrong}"


@pytest.mark.skipif(CORPUS is None, reason="the corpus of real tool outputs is not on this machine")
def test_no_rule_fires_on_the_near_miss_of_another_rule_unless_the_case_is_its_own():
    own = {"hard_missing_file_path_narrow": {"neg__sweagent_missing_path", "neg__grep_missing_path",
                                             "neg__no_such_pkg"},
           "hard_go_compile_error": {"signature_callers", "mockey_compile_error"}}
    for case, rule, polarity, *call in cases():
        if polarity == "near-miss":
            for other in matches(*call):
                assert any(part in case for part in own.get(other, ())), (case, other)


def fired(tool, arguments, output, exit_code=None, is_error=False):
    return set(matches(tool, arguments, exit_code, is_error, output))


@pytest.mark.parametrize("tool, path", [("edit", "path"), ("Edit", "file_path"), ("MultiEdit", "file_path")])
def test_our_tools_and_claude_code_style_names_are_known(tool, path):
    text = "Found 2 matches of the string to replace, but replace_all is false."
    assert fired(tool, {path: "a.py"}, text, is_error=True) == {"hard_ambiguous_edit_old_string"}
    assert fired(tool, {path: "a.py"}, text) == set()  # no error flag: a success that talks about it
    assert fired(tool, {path: "a.py"}, "File does not exist: a.py", is_error=True) == {"hard_missing_file_path_narrow"}


@pytest.mark.parametrize("tool", ["bash", "Bash"])
def test_the_command_decides_what_the_same_words_mean(tool):
    undefined = "svc/x.go:3:4: undefined: foo"
    assert fired(tool, {"command": "go build ./svc"}, undefined, 1) == {"hard_go_compile_error"}
    assert fired(tool, {"command": "cat build.log"}, undefined, 0) == set()
    assert fired(tool, {"command": 'rg "go build" . || echo no'}, undefined, 0) == set()
    auth = "Error: 401 Unauthorized"
    assert fired(tool, {"command": "codesearch query foo"}, auth, 1) == {"hard_semantic_search_auth"}
    assert fired(tool, {"command": "pytest -q"}, auth, 1) == set()


def test_scaffold_decoration_is_seen_through():
    text = ("<tool_use_error>File does not exist.</tool_use_error>\n\n<system-reminder>\nregex parse error: multiple "
            "occurrences of\n</system-reminder>")
    assert fired("Read", {"file_path": "a"}, text, is_error=True) == {"hard_missing_file_path_narrow"}
    assert fired("Bash", {"command": "go build ."}, "Exit code 1\n\x1b[31m./a.go:1:2: undefined: x\x1b[0m",
                 is_error=True) == {"hard_go_compile_error"}


def test_the_rules_are_pure_and_have_no_opinion_on_plain_success():
    for rule in RULES.values():
        seen = ToolResult("bash", {"command": "python check.py"}, 0, False, "ok 4")
        assert rule(seen) is None and rule(seen) is None
    assert fired("submit", {}, "") == set() and fired("read", {"path": "a"}, "No such file or directory") == set()


@pytest.mark.parametrize("line, commands", [
    ("cd a && B=1 go test ./...; echo 'x; go build'", (("cd", "a"), ("go", "test", "./..."), ("echo", "x; go build"))),
    ("timeout 5 env A=b pytest -q | tail -3", (("pytest", "-q"), ("tail", "-3"))),
    ('bash -lc "go vet ./a || true"', (("go", "vet", "./a"), ("true",))),
    ("go build \\\n ./a\ngo test", (("go", "build", "./a"), ("go", "test"))),
    ("grep 'open", (("grep", "'open"),)),
    ("", ()),
])
def test_a_shell_line_is_taken_apart_into_its_simple_commands(line, commands):
    assert simple_commands(line) == commands


@pytest.mark.parametrize("command, validates, tests", [
    ("python check.py", True, True), ("python -m pytest -q x", True, True), ("python3.11 -m unittest", True, True),
    ("go test ./a", True, True), ("cargo check", True, True), ("git diff", True, False), ("gofmt -l .", True, False),
    ("go fmt ./...", True, False), ("git checkout .", False, False), ("cat check.py", False, False),
    ("python setup.py", False, False), ("echo pytest", False, False),
])
def test_what_counts_as_validation(command, validates, tests):
    seen = ToolResult("bash", {"command": command}, 0, False, "")
    assert (is_validation(seen), is_test(seen)) == (validates, tests)
