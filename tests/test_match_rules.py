"""--stage match-rules: recorded tool calls in, the hard rules that fire out."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from oprd.rollout.match_rules import match_lines
from oprd.rollout.rubric import load_rubric

ROOT = Path(__file__).resolve().parent.parent
GO = {"id": "g", "tool": "bash", "arguments": {"command": "go build ."}, "exit_code": 1,
      "output": "# x\n./a.go:3:9: too many return values\n\thave (int)\n\twant ()"}
READ = {"id": 7, "tool": "Read", "arguments": {"file_path": "/r/a"}, "exit_code": None, "is_error": True,
        "output": "<tool_use_error>File does not exist.</tool_use_error>"}
FINE = {"id": "ok", "tool": "bash", "arguments": {"command": "ls"}, "exit_code": 0, "output": "a"}
WORKED = re.search(r"```toml\n(.*?)```", (ROOT / "docs/rubric.md").read_text(encoding="utf-8"), re.S)[1]


def write(path, *lines):
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def answers(path, rubric=None, off=()):
    return {line["id"]: {found["rule"]: found["evidence"] for found in line["rules"]}
            for line in match_lines(path, rubric or load_rubric(), off)}


def test_one_line_for_one_line_with_every_rule_and_its_evidence_the_most_specific_first(tmp_path):
    lines = list(match_lines(write(tmp_path / "c.jsonl", GO, READ, "", FINE), load_rubric()))
    said = "./a.go:3:9: too many return values"
    missing = {"rule": "hard_missing_file_path_narrow", "evidence": "File does not exist."}
    assert lines == [{"id": "g", "rules": [{"rule": "hard_go_signature_callers", "evidence": said},
                                           {"rule": "hard_go_compile_error", "evidence": said}]},
                     {"id": 7, "rules": [missing]}, {"id": "ok", "rules": []}]


@pytest.mark.parametrize("change", [{"is_error": False}, {"is_error": None}, {"exit_code": 0}])
def test_a_call_that_did_not_fail_fires_nothing(tmp_path, change):
    assert answers(write(tmp_path / "c.jsonl", {**READ, **change})) == {7: {}}


@pytest.mark.parametrize("arguments", ['{"command": "go build ."}', "go build .", {"cmd": ["go", "build", "."]}])
def test_arguments_may_be_text_or_a_list_of_words(tmp_path, arguments):
    assert "hard_go_compile_error" in answers(write(tmp_path / "c.jsonl", {**GO, "arguments": arguments}))["g"]


def test_the_worked_file_of_the_documentation_adds_replaces_and_disables(tmp_path):
    mine = tmp_path / "mine.toml"
    mine.write_text(WORKED)
    rubric = load_rubric(mine)
    assert len(rubric.hard) == 10 and "hard_mockey_gcflags" not in rubric
    assert "Use Glob" in rubric["hard_missing_file_path_narrow"].action
    rust = {"id": "r", "tool": "Bash", "arguments": {"command": "cargo check"}, "exit_code": 101,
            "output": "error[E0382]: borrow of moved value: `x`\n --> src/a.rs:3:4"}
    python = {"id": "p", "tool": "Bash", "arguments": {"command": "pytest -q"}, "exit_code": 2,
              "output": "E   ModuleNotFoundError: No module named 'x'"}
    lines = [rust, python, {**python, "id": "q", "tool": "shell"}, {**rust, "id": "s", "exit_code": 0}, READ,
             {**python, "id": "t", "arguments": {"command": "pytest --collect-only"}}]
    assert {name: list(found) for name, found in answers(write(tmp_path / "c.jsonl", *lines), rubric).items()} == {
        "r": ["hard_rust_borrow"], "p": ["hard_python_import"], "q": [], "s": [],
        7: ["hard_missing_file_path_narrow"], "t": []}


def test_a_rule_switched_off_is_not_tried_and_an_unknown_one_is_named(tmp_path):
    calls = write(tmp_path / "c.jsonl", GO)
    assert list(answers(calls, off=("hard_go_compile_error",))["g"]) == ["hard_go_signature_callers"]
    with pytest.raises(ValueError, match="did you mean hard_go_compile_error"):
        answers(calls, off=("hard_go_compile_eror",))


@pytest.mark.parametrize("line, message", [
    ("{", "not JSON"), ("[]", "must be a JSON object with id, tool, arguments, exit_code, output, got list"),
    ({k: v for k, v in GO.items() if k != "output"}, "has no field output"),
    ({"argument": {}, **{k: v for k, v in GO.items() if k != "arguments"}},
     "has no field arguments; is 'argument' meant for it?"),
    ({**GO, "exit_code": "1"}, "exit_code = '1' must be an integer or null"),
    ({**GO, "exit_code": True}, "exit_code = True must be an integer or null"),
    ({**READ, "is_error": "no"}, "is_error = 'no' must be true, false or null"),
    ({**GO, "arguments": 3}, "arguments = 3 must be an object"), ({**GO, "tool": None}, "tool = None must be"),
    ({**READ, "arguments": "x"}, "arguments = 'x' must be an object"), ({**GO, "output": 1}, "output = 1 must be"),
])
def test_a_bad_line_is_named_after_the_lines_before_it_are_answered(tmp_path, line, message):
    path = write(tmp_path / "c.jsonl", FINE, "", line, FINE)
    found = match_lines(path, load_rubric())
    assert next(found)["id"] == "ok"
    with pytest.raises(ValueError) as raised:
        next(found)
    assert str(raised.value).startswith(f"{path}:3: ") and message in str(raised.value)


def test_lines_are_answered_as_they_come_from_a_pipe(tmp_path):
    command = ["--stage", "match-rules", "--input", "/dev/stdin"]
    with subprocess.Popen([sys.executable, "train.py", *command], cwd=ROOT, stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, text=True) as program:
        program.stdin.write(json.dumps(GO) + "\n" * 10_000)
        program.stdin.flush()
        assert json.loads(program.stdout.readline())["rules"][0]["rule"] == "hard_go_signature_callers"
        program.stdin.close()
        assert program.wait() == 0


@pytest.mark.parametrize("rubric, calls, message", [
    ("[hard_go_compile_eror]\nenabled = false\n", FINE,
     "mine.toml: hard_go_compile_eror has no field class; did you mean hard_go_compile_error?"),
    ("[hard_go_compile_error]\nenabeld = false\n", FINE,
     "mine.toml: hard_go_compile_error has an unknown field enabeld; did you mean enabled?"),
    ("", "{", "calls.jsonl:1: not JSON"),
])
def test_a_persons_mistake_is_one_line_and_exit_code_2(tmp_path, rubric, calls, message):
    (tmp_path / "mine.toml").write_text(rubric)
    done = subprocess.run([sys.executable, "train.py", "--stage", "match-rules", "--reminders.rubric",
                           str(tmp_path / "mine.toml"), "--input", str(write(tmp_path / "calls.jsonl", calls))],
                          cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "" and message in done.stderr and done.stderr.count("\n") == 1
