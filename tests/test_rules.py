"""The hard rules: the command decides, decoration is seen through, shell lines are read as a shell reads them."""

import pytest

from oprd.rollout.rules import RULES, matches
from oprd.rollout.shell import simple_commands
from oprd.rollout.toolresult import ToolResult, is_test, is_validation

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


UNDEFINED = "./a.go:1:2: undefined: x"
SHELLS = {  # how scaffolds show a failed command: tool, arguments, exit code, error flag, output
    "mini-swe-agent": ("bash", None, False, f"<returncode>1</returncode>\n<output>\n{UNDEFINED}\n</output>"),
    "R2E": ("execute_bash", None, False, f"Exit code: 1\nExecution output of [execute_bash]:\n{UNDEFINED}\n"),
    "OpenHands": ("execute_bash", None, False, f"{UNDEFINED}\n[Current working directory: /r]\n"
                                               "[The command completed with exit code 1.]"),
    "Codex": ("shell", None, False, f"Exit code: 1\nWall time: 0.2 seconds\nOutput:\n{UNDEFINED}"),
    "numbered lines": ("bash", 1, False, f"     1\t# x\n     2\t{UNDEFINED}"),
    "arrows": ("bash", 1, False, f"  1→# x\n  2→{UNDEFINED}"),
    "carriage returns": ("bash", 1, False, f"# x\r\n{UNDEFINED}\r\n"),
    "colours and links": ("bash", 1, False, f"\x1b[1;31m{UNDEFINED}\x1b[K\x1b[0m\x1b]8;;http://x\x07"),
    "a tool nobody knows": ("run_in_terminal", 1, False, UNDEFINED),
}


@pytest.mark.parametrize("scaffold", SHELLS)
def test_what_a_scaffold_adds_changes_nothing(scaffold):
    tool, code, is_error, output = SHELLS[scaffold]
    assert matches(tool, {"command": "go build ."}, code, is_error, output) == {"hard_go_compile_error": UNDEFINED}
    assert matches(tool, {"command": ["go", "build", "."]}, code, is_error, output)
    passed = output.replace("code 1", "code 0").replace("code: 1", "code: 0").replace(">1<", ">0<")
    assert matches(tool, {"command": "go build ."}, code and 0, False, passed) == {}


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
    ("go test ./a 2>&1 >log.txt | tee x", (("go", "test", "./a"), ("tee", "x"))),
    ("grep '|' a.txt", (("grep", "|", "a.txt"),)),
    ("cat > a.sh <<'EOF'\ngo build ./...\nEOF\nls", (("cat",), ("ls",))),
    ("ls # go test", (("ls",),)),
    ("timeout -k 5 60 sudo -u me nice -n 10 go test", (("go", "test"),)),
    ("find . -name a -exec rg x {} +",
     (("find", ".", "-name", "a", "-exec", "rg", "x", "{}", "+"), ("rg", "x", "{}", "+"))),
    ("if ! make; then ls; fi", (("make",), ("ls",), ("fi",))),
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
