"""The hard rule about paths that do not exist, in the words of the tools of ten languages.

A file that a program misses at run time is the program's affair. What counts is a path the call itself names, or a
complaint by a program that the call runs (`cat: ...`) or by the shell it runs in.
"""

from __future__ import annotations

import re

from oprd.rollout.shell import program
from oprd.rollout.toolresult import QUOTE, ToolResult, is_test

NO_FILE = re.compile(
    r"No such file or directory|No such file$|cannot find the path|\bENOENT\b|no such file or directory|"
    r"can't open (file|patch)|couldn't read|could not open (input )?file|cannot open file|unable to open|"
    r"did not match any file|pathspec .* did not match|unknown revision or path not in|no such path|"
    r"does not exist in|path .*does not exist|The path .* does not exist|file .*(does not exist|not found)|"
    r"(source |project |build )?directory .*does not exist|directory not found|file not found|"
    r"ERROR: not found: |Cannot find module '/|cannot load such file|"
    r"Unable to access jarfile|manifest path .* does not exist|no required module provides package \S+\.go;|"
    r"Test file .* not found|No test files found: |No files matching|can't cd to|^\S*: (\d+: )?\./\S+: not found|"
    r"POM file .* does not exist|Project file does not exist|NoSuchFileException|no such file", re.I)
SHELLS = re.compile(r"^(?:/\S*/)?(?:bash|sh|dash|zsh|ksh|ash)(?:: (?:-c: )?line \d+|: \d+|:\d+)?: ")
SCRIPT = re.compile(r"^\S+: line \d+: ")  # a script complains, of its own affairs
QUOTING = re.compile(r"^(\s|E  |>)|^(\S+:)?\d+[:-]|^(AssertionError|panic|thread ')")  # a trace, a hit, a diff
DEPENDENCY = re.compile(r":\d+(:\d+)?: (fatal )?error: |cannot find -l")  # a header or a library, no path of the call
TESTS_OWN = re.compile(r"^(ERROR: (file or directory )?not found: |pattern \S+: |l?stat |go: |no required module|"
                       r"FAIL\s+\S+ \[setup failed\]|error: (manifest|couldn't read|file not found)|Test file |"
                       r"Error: No test files|\S*python[\d.]*: can't open|Cannot open file|Could not open|"
                       r"make(\[\d+\])?: |\[Errno 2\] No such file|\S*ld: |gcc: |g\+\+: |cc1: |"
                       r"clang|ninja: |CMake Error|javac: |error TS|"
                       r"POM file|MSBUILD|Error: Cannot find module|\S+: can't (read|open))", re.I)
SPEAKER = re.compile(r"^(?:/\S*/)?(?P<who>[\w.+-]+): ")
PATHS = re.compile(r"[^\s'\"`‘’“”:;,()\[\]<>]*[\w-][^\s'\"`‘’“”:;,()\[\]<>]*")
NO_TOOL_PATH = re.compile(r"^(\W*error\W+|\w+ failed: )?((the )?(file|path|directory)\b.*(does not exist|not found|"
                          r"doesn't exist)|.*no such (file|path|directory)|\S*[./]\S* (does not exist|not found)|"
                          r"ENOENT|(could not|cannot|failed to) (find|open|read) (the )?(file|path|directory)\b)", re.I)
REFUSED = re.compile(r"^ERROR\b|^The path .* does not exist")
QUOTED_BACK = re.compile(r"^(String|old_str(ing)?)\b.*", re.S | re.M)


def missing_file_path_narrow(result: ToolResult) -> str | None:
    if result.kind in ("read", "edit", "search", "glob"):
        said = QUOTED_BACK.sub("", result.text).split("\n")  # what an edit tool repeats is not its own word
        if not result.failed and not (result.kind == "edit" and REFUSED.match(result.text)):
            return None
        return next((line.strip()[:QUOTE] for line in said if NO_TOOL_PATH.search(line)), None)
    if result.kind != "bash":
        return None
    told = result.went_wrong or any("editor" in program(word) for words in result.commands for word in words[:2])
    if not told:  # some scaffolds' editors report success on errors
        return None
    tests, named = is_test(result), _named(result)
    for line in result.lines:
        if NO_FILE.search(line) and not QUOTING.match(line) and not DEPENDENCY.search(line) and \
                _complains(line, result, tests, named):
            return line.strip()[:QUOTE]
    return None


def _complains(line: str, result: ToolResult, tests: bool, named: frozenset[str]) -> bool:
    """Whether a line is about a path of the call. A test's own output may speak of files: there the runner counts."""
    if SHELLS.match(line):
        return not re.match(r"^\S+: \S+: line \d+: ", line)
    if SCRIPT.match(line):
        return False
    speaker = SPEAKER.match(line)
    speaks = bool(speaker) and speaker["who"] in result.heads
    about = {base for path in PATHS.findall(line) if (base := _base(path)) in named and _as_path(path, line)}
    if tests and not (speaks or TESTS_OWN.match(line)):
        return False
    if "did not match" in line or "unknown revision" in line:  # git: a path, or the name of a branch?
        return bool(re.search(r"\bgit (\S+ )*(add|rm|mv|ls-files|apply|blame)\b| -- ", result.command)) or \
            any("." in path.strip(".") for path in about)
    if speaks and speaker["who"] in ("go", "git", "make", "node", "ruby", "python", "python3", "npm"):
        return bool(about)
    return speaks or bool(about)


def _as_path(word: str, line: str) -> bool:
    """Whether a word of a line is spoken of as a path, not as a word."""
    plain = re.escape(word)
    return bool(re.search(r"\w[./]\w", word) or re.search(rf"'{plain}'|\b{plain}: no such|: {plain}$", line, re.I))


def _named(result: ToolResult) -> frozenset[str]:
    """The last parts of all paths the command line names, quoted programs included."""
    return frozenset(_base(path) for path in PATHS.findall(result.command.replace("=", " "))) - {""}


def _base(path: str) -> str:
    return path.rstrip("/.…*").rsplit("/", 1)[-1].lstrip("-")
