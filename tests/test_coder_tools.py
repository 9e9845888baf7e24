"""The tools for real repositories: names, arguments and texts models know, a folder that persists. The same tests in a
local box and, where an engine answers, in a container."""

import json

import pytest

from docker_image import engine, image
from oprd.sandbox.box import Limits
from oprd.sandbox.coder_tools import SCHEMAS, TOOLS, Coder
from oprd.sandbox.local import LocalSandbox
from oprd.sandbox.searching import glob_to_regex
from oprd.sandbox.sweep import run_label

CLIENT, WHY_NOT = engine()
FILES = {"src/a.py": b"import os\n\ndef foo():\n    return 1\n\ndef bar():\n    return 1\n", "src/b.go": b"package b\n",
         "README.md": b"caf\xc3\xa9 foo(\n", ".gitignore": b"built/\n", "built/foo.py": b"foo\n",
         "deep/er/x.ts": b"let foo = 1\nlet bar = 2\nlet foo2 = 3\n", "binary": b"\0\1\2foo"}


@pytest.fixture(params=["local", "docker"])
def tools(request, tmp_path):
    limits = Limits(command_s=20)
    if request.param == "local":
        box = LocalSandbox({}, limits, run_label(tmp_path))
    else:
        if CLIENT is None:
            pytest.skip(WHY_NOT)
        from oprd.sandbox.docker_box import DockerSandbox

        box = DockerSandbox(image(CLIENT), limits, run_label(tmp_path), CLIENT)
    with box:
        box.put(FILES)
        yield Coder(box)


def say(tools, name, **arguments):
    return tools(name, {key.replace("minus_", "-"): value for key, value in arguments.items()}, 20)


def test_the_names_and_arguments_are_those_models_know():
    assert list(TOOLS) == ["bash", "read", "write", "edit", "multi_edit", "grep", "glob", "submit"]
    known = {schema["function"]["name"]: schema["function"]["parameters"] for schema in SCHEMAS}
    assert known["edit"]["required"] == ["file_path", "old_string", "new_string"]
    assert known["multi_edit"]["properties"]["edits"]["items"]["required"] == ["old_string", "new_string"]
    assert known["grep"]["required"] == ["pattern"] and known["grep"]["properties"]["-n"]["type"] == "boolean"
    json.dumps(SCHEMAS)


def test_the_working_directory_persists_and_relative_paths_follow_it(tools):
    root = tools.box.root
    assert say(tools, "bash", command="cd src && ls").output == "a.py\nb.go"
    assert say(tools, "bash", command="pwd").output == f"{root}/src"
    assert say(tools, "read", file_path="b.go").output == "     1→package b"
    failed = say(tools, "bash", command="cd ../deep; false")
    assert (failed.output, failed.exit_code, failed.is_error) == ("Exit code 1", 1, True)
    assert say(tools, "glob", pattern="*.ts").output == f"{root}/deep/er/x.ts"
    say(tools, "bash", command="cd /; rm -rf deep")
    assert say(tools, "bash", command="x=1; pwd").output == "/"
    assert say(tools, "bash", command="echo $x").output == "(no output)"


def test_a_folder_that_was_removed_is_said_and_the_root_used(tools):
    say(tools, "bash", command="mkdir gone; cd gone")
    say(tools, "bash", command="rmdir ../gone")
    assert "gone is gone" in say(tools, "bash", command="pwd").output or tools.folder == tools.box.root
    assert say(tools, "bash", command="pwd").output.endswith(tools.box.root)


def test_every_hard_command_is_handled(tools):
    assert say(tools, "bash", command="cat; read x; echo end").output == "end"  # waits for input
    flood = say(tools, "bash", command="yes", timeout="3000")
    assert "timed out after 3 s" in flood.output and "bytes left out" in flood.output and len(flood.output) < 17000
    assert say(tools, "bash", command=r"printf '\377\376ok\200'").output == "\ufffd\ufffdok\ufffd"
    server = say(tools, "bash", command="sleep 76 >/dev/null 2>&1 & sleep 0.5; echo started")
    assert server.output.startswith("started") and server.exit_code == 0
    forks = "for i in 1 2 3; do (setsid sh -c 'sleep 77 & sleep 78' &) ; done; (sleep 79 &) & sleep 80"
    tree = say(tools, "bash", command=forks, timeout="700")
    assert tree.exit_code == 137 and "timed out" in tree.output
    if hasattr(tools.box, "container"):
        assert "processes left in the background were ended" in server.output
    left = say(tools, "bash", command="for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline 2>/dev/null; echo; done")
    assert "sleep 7" not in left.output and "sleep 80" not in left.output
    assert say(tools, "bash", command="echo fine").output == "fine"


def test_read_numbers_lines_and_says_what_it_leaves_out(tools):
    tools.box.write("long", b"".join(b"line %d\n" % i for i in range(1, 2502)))
    text = say(tools, "read", file_path="long").output
    assert text.startswith("     1→line 1\n")
    assert text.endswith("\n  2000→line 2000\n(501 more lines; read on with offset 2001)")
    assert say(tools, "read", file_path="long", offset="2500", limit="9").output == "  2500→line 2500\n  2501→line 2501"
    assert say(tools, "read", file_path="long", offset="9999").is_error
    tools.box.write("big", b"x" * 300_000)
    assert "File content (293.0KB) exceeds maximum allowed size (256KB)" in say(tools, "read", file_path="big").output
    assert "binary" in say(tools, "read", file_path="binary").output
    assert say(tools, "read", file_path="none").output == \
        f"File does not exist. Note: your current working directory is {tools.box.root}."
    assert say(tools, "read", file_path="src").is_error and say(tools, "read", file_path="/etc/hostname").is_error


def test_edits_are_exact_or_explained(tools):
    path = f"{tools.box.root}/src/a.py"
    assert say(tools, "edit", file_path="src/a.py", old_string="return 1", new_string="return 2").output == (
        "Found 2 matches of the string to replace, but replace_all is false. To replace all occurrences, set "
        "replace_all to true. To replace only one occurrence, please provide more context to uniquely "
        "identify the instance.\nString: return 1")
    done = say(tools, "edit", file_path=path, old_string="return 1", new_string="return 2", replace_all="true")
    assert done.output == (f"The file {path} has been updated. All occurrences of 'return 1' were successfully "
                           "replaced with 'return 2'.")
    assert say(tools, "edit", file_path=path, old_string="nope", new_string="x").output == \
        "String to replace not found in file.\nString: nope"
    assert "exactly the same" in say(tools, "edit", file_path=path, old_string="foo", new_string="foo").output
    assert say(tools, "edit", file_path="new/x.py", old_string="", new_string="a = 1\n").output == \
        f"File created successfully at: {tools.box.root}/new/x.py"
    assert "File does not exist" in say(tools, "edit", file_path="gone.py", old_string="a", new_string="b").output
    edits = [{"old_string": "foo", "new_string": "fuzz"}, {"old_string": "fuzz()", "new_string": "fizz()"}]
    assert say(tools, "multi_edit", file_path=path, edits=json.dumps(edits)).output == (
        f'Applied 2 edits to {path}:\n1. Replaced "foo" with "fuzz"\n2. Replaced "fuzz()" with "fizz()"')
    assert b"def fizz():" in tools.box.read("src/a.py")
    before = tools.box.read("src/a.py")
    edits[1] = {"old_string": "import os", "new_string": "x"}
    bad = say(tools, "multi_edit", file_path=path, edits=json.dumps(edits))
    assert "(edit 1 of 2; no edit was made)" in bad.output and tools.box.read("src/a.py") == before
    assert say(tools, "write", file_path="w/y", content="caf\u00e9").output.startswith("File created successfully at: ")
    assert tools.box.read("w/y") == "caf\u00e9".encode()
    assert say(tools, "write", file_path="w/y", content="").output == \
        f"The file {tools.box.root}/w/y has been updated."


def test_wrong_arguments_are_named(tools):
    head = "InputValidationError: {} failed due to the following issue:\n"
    assert say(tools, "read").output == head.format("read") + "The required parameter `file_path` is missing"
    assert say(tools, "read", path="x", file_path="y").output.endswith("An unexpected parameter `path` was provided")
    assert say(tools, "read", file_path="x", offset="two").output.endswith(
        "The parameter `offset` type is expected as `number` but provided as `string`")
    assert "one of content, files_with_matches, count" in say(tools, "grep", pattern="x", output_mode="all").output
    assert "`edits[0].old_string` is missing" in say(tools, "multi_edit", file_path="src/a.py", edits="[{}]").output
    assert "No such tool available: Bash" in say(tools, "Bash", command="x").output
    assert say(tools, "submit").ends


def test_grep_shows_files_lines_or_counts_and_leaves_out_what_git_ignores(tools):
    assert say(tools, "grep", pattern=r"foo\d?\b", glob="*.py").output == "Found 1 file\nsrc/a.py"
    assert say(tools, "grep", pattern="foo").output == "Found 3 files\nREADME.md\ndeep/er/x.ts\nsrc/a.py"
    assert say(tools, "grep", pattern="^let", path="deep", output_mode="content", minus_n="true").output == \
        "deep/er/x.ts:1:let foo = 1\ndeep/er/x.ts:2:let bar = 2\ndeep/er/x.ts:3:let foo2 = 3"
    assert say(tools, "grep", pattern="BAR", output_mode="content", minus_i="true", type="ts").output == \
        "deep/er/x.ts:let bar = 2"
    assert say(tools, "grep", pattern="return", output_mode="count").output == "src/a.py:2"
    assert say(tools, "grep", pattern="foo", path="src/a.py", output_mode="content").output == "src/a.py:def foo():"
    assert say(tools, "grep", pattern="let bar", output_mode="content", minus_C="1", minus_n="true").output == \
        "deep/er/x.ts-1-let foo = 1\ndeep/er/x.ts:2:let bar = 2\ndeep/er/x.ts-3-let foo2 = 3"
    assert say(tools, "grep", pattern="foo", head_limit="1").output.startswith(
        "Found 3 files\nREADME.md\n(showing 1 of 3")
    assert say(tools, "grep", pattern="nowhere").output == "No files found"
    say(tools, "bash", command="cd deep")
    assert say(tools, "grep", pattern="package", path="../src", output_mode="content").output == "../src/b.go:package b"
    bad = say(tools, "grep", pattern="foo(")
    assert bad.is_error and bad.output.startswith("Search failed")
    assert "unrecognized file type: golang" in say(tools, "grep", pattern="x", type="golang").output
    assert say(tools, "grep", pattern="x", path="none").output.startswith("Path does not exist: ")


def test_glob_finds_files_by_path(tools):
    root = tools.box.root
    assert say(tools, "glob", pattern="**/*.py").output == f"{root}/built/foo.py\n{root}/src/a.py"
    assert say(tools, "glob", pattern=f"{root}/src/*").output == f"{root}/src/a.py\n{root}/src/b.go"
    assert say(tools, "glob", pattern="*.{go,ts}").output == f"{root}/deep/er/x.ts\n{root}/src/b.go"
    assert say(tools, "glob", pattern="*.none").output == "No files found"
    assert say(tools, "glob", pattern="*", path="none").output.startswith("Directory does not exist: ")


@pytest.mark.parametrize("pattern,yes,no", [("src/*.py", ["src/a.py"], ["src/b/a.py", "a.py"]),
                                            ("**/t[!x]?.go", ["ta1.go", "a/b/ta1.go"], ["tx1.go"]),
                                            ("a/**", ["a/b/c", "a/x"], ["b/a/x"]),
                                            ("{a,b*}/c.d", ["a/c.d", "bb/c.d"], ["c/c.d", "a/cxd"])])
def test_glob_patterns(pattern, yes, no):
    import re

    wanted = re.compile(glob_to_regex(pattern))
    assert all(wanted.fullmatch(path) for path in yes) and not any(wanted.fullmatch(path) for path in no)
