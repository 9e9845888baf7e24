"""What one tool call did, seen the same way whatever the tool set: the input of the hard rules.

Knows our tools (sandbox/toolbox.py), Claude-Code style names and those of other scaffolds, what the tools
of ten languages call a test or a build, and strips what a scaffold adds around a tool's own output.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from functools import cached_property
from typing import Mapping

from oprd.core.types import Observation, ToolCall
from oprd.rollout.shell import program, simple_commands, subcommand

KINDS = {  # by what tool sets call them: ours, Claude Code, OpenHands, SWE-agent, R2E, Codex, Gemini, Cline, Cursor
    "bash": "bash", "shell": "bash", "execute_bash": "bash", "run_command": "bash", "terminal": "bash",
    "exec_command": "bash", "local_shell": "bash", "container.exec": "bash", "run_shell_command": "bash",
    "run_terminal_cmd": "bash", "execute_command": "bash",
    "read": "read", "view": "read", "read_file": "read", "open_file": "read", "notebookread": "read",
    "read_many_files": "read",
    "edit": "edit", "multiedit": "edit", "multi_edit": "edit", "str_replace": "edit",
    "str_replace_editor": "edit", "file_editor": "edit",
    "str_replace_based_edit_tool": "edit", "notebookedit": "edit", "edit_file": "edit", "search_replace": "edit",
    "replace": "edit", "replace_in_file": "edit", "apply_patch": "edit", "insert": "edit",
    "write": "edit", "create_file": "edit", "write_file": "edit", "write_to_file": "edit",
    "grep": "search", "grep_search": "search", "search_file_content": "search", "search_files": "search",
    "glob": "glob", "ls": "glob", "list": "glob", "list_dir": "glob", "list_files": "glob", "list_directory": "glob",
    "file_search": "glob", "submit": "submit", "finish": "submit",
}
PATH = re.compile(r"[\w./-]*/[\w.-]+|[\w-]+\.\w{1,4}")  # a word that is a file's path
SHOWS_FILE = {"cat", "head", "tail", "less", "nl", "sed"}
PATH_ARGUMENTS = ("path", "file_path", "filename", "file", "notebook_path", "target_file", "absolute_path")
COMMAND_ARGUMENTS = ("command", "cmd", "script")
TESTERS = {"pytest", "py.test", "tox", "nox", "nosetests", "jest", "vitest", "mocha", "ava", "rspec", "phpunit", "pest",
           "phpstan", "ctest", "ruff", "tsc", "flake8", "pylint", "mypy", "pyright", "eslint", "gofmt", "goimports",
           "golangci-lint", "staticcheck", "gotestsum", "ginkgo", "javac", "kotlinc", "scalac", "rustc", "gcc", "g++",
           "cc", "c++", "clang", "clang++", "ninja", "make", "ant", "bats", "rubocop"}
SUBCOMMANDS = {"go": {"test", "build", "vet", "run", "fmt", "install"}, "npm": {"test", "t", "run", "run-script"},
               "yarn": {"test", "run", "jest", "vitest", "build", "lint"}, "pnpm": {"test", "t", "run"},
               "bun": {"test", "run"}, "deno": {"test", "check", "lint"},
               "cargo": {"test", "build", "check", "clippy", "fmt", "nextest"}, "mvn": None, "mvnw": None,
               "gradle": None, "gradlew": None, "git": {"diff", "status"}, "node": {"--test"}, "cmake": {"--build"},
               "rake": None, "rails": {"test"}, "dotnet": {"test", "build"}, "swift": {"test", "build"},
               "sbt": None, "bazel": {"test", "build"}, "mix": {"test", "compile"}, "composer": {"test", "run"},
               "meson": {"test", "compile"}, "stack": {"test", "build"}, "cabal": {"test", "build"},
               "zig": {"test", "build"}, "just": {"test", "build", "check"}, "mage": None, "task": {"test", "build"}}
PYTHON_MODULES = {"pytest", "unittest", "py_compile", "compileall", "tox", "mypy", "ruff", "doctest"}
PYTHON_SCRIPT = re.compile(r"(^|/)(check|run_?tests?|tests?|test_\w+|\w+_test)\.py$")
SCRIPT_TESTS = re.compile(r"(^|/)(tests?|specs?)/|(^|/)(test_|run_?tests?)|(_test|_spec|_check|\.test|\.spec)\.\w+$")
ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[()][A-Z0-9]|[=>])")
SCAFFOLD_BLOCK = re.compile(r"<(system-reminder|environment_details|NOTE)>.*?(?:</\1>|\Z)", re.S)
SCAFFOLD_TAG = re.compile(r"</?(?:tool_use_error|output|output_head|output_tail|returncode|exception)>[ \t]*")
SCAFFOLD_LINE = re.compile(r"^\[(?:The command completed with exit code|Current working directory:|Python interpreter:|"
                           r"Command finished with exit code)[^\n]*\]$\n?|^Execution output of \[\w+\]:[ \t]*\n?|"
                           r"^Shell cwd was reset to [^\n]*$\n?", re.M)
EXIT_CODE = re.compile(r"\A\s*(?:<exception>[^\n]*</exception>\s*)?"
                       r"(?:(?:Process exited with code|Exit code:?) (-?\d+)(?:\n|\Z)"
                       r"(?:Wall time:[^\n]*\n)?(?:Output:\n)?|<returncode>(-?\d+)</returncode>)")
EXIT_LINE = re.compile(r"^\[(?:The command completed|Command finished) with exit code (-?\d+)\.?\]", re.M)
LONGEST = 1000  # characters of a line that are looked at
QUOTE = 200  # characters of a line that are quoted as evidence
NUMBERED = re.compile(r"^\s*(\d+)(?:→|\t|\s?[|│] ?)(.*)$")


@dataclass(frozen=True)
class ToolResult:
    """One finished tool call. exit_code is None where no process ran or the scaffold does not tell it."""

    tool: str
    arguments: Mapping[str, object]
    exit_code: int | None
    is_error: bool
    output: str

    @cached_property
    def kind(self) -> str:
        """What the call does: an editor asked to `view` reads, and an unknown tool with a command is a shell."""
        kind = kind_of(self.tool)
        if kind == "other" and self.arguments.get("command") and not self.path:
            return "bash"
        return "read" if kind == "edit" and self.arguments.get("command") == "view" else kind

    @cached_property
    def command(self) -> str:
        """The shell line of a bash call (a list of words is joined), else empty."""
        given = next((self.arguments[a] for a in COMMAND_ARGUMENTS if self.arguments.get(a)), "")
        if self.kind != "bash":
            return ""
        return shlex.join(map(str, given)) if isinstance(given, (list, tuple)) else str(given)

    @cached_property
    def path(self) -> str | None:
        """The file a read, edit or search call names."""
        return next((str(self.arguments[a]) for a in PATH_ARGUMENTS if self.arguments.get(a)), None)

    @cached_property
    def file(self) -> str | None:
        """The file the call reads or edits: its path argument, or what cat, head, sed ... show."""
        if self.kind in ("read", "edit"):
            return clean_path(self.path) if self.path else None
        shown = [words[-1] for words in self.commands if words[0] in SHOWS_FILE and PATH.fullmatch(words[-1])]
        return clean_path(shown[-1]) if shown else None

    @cached_property
    def commands(self) -> tuple[tuple[str, ...], ...]:
        return simple_commands(self.command)

    @cached_property
    def heads(self) -> frozenset[str]:
        """The programs the shell line runs, without their folders."""
        return frozenset(program(words[0]) for words in self.commands)

    @cached_property
    def _plain(self) -> str:
        """Without colours and carriage returns; what a tool says is no longer than LONGEST in a line."""
        text = ANSI.sub("", self.output.replace("\r\n", "\n"))
        return "\n".join(line if line.startswith('{"') else line[:LONGEST] for line in text.split("\n"))

    @cached_property
    def text(self) -> str:
        """The output without terminal colours, carriage returns and what the scaffold put around it: reminder blocks,
        tags, exit state, line numbers. Marks of a cut stay."""
        text = SCAFFOLD_BLOCK.sub("", self._plain)
        text = SCAFFOLD_TAG.sub("", SCAFFOLD_LINE.sub("", EXIT_CODE.sub("", text)))
        return _without_numbers(text.strip("\n"))

    @cached_property
    def failed(self) -> bool:
        """An error was reported: exit code, error flag, or the exit code a scaffold wrote into the output."""
        if self.exit_code is not None:
            return self.exit_code != 0
        written = EXIT_CODE.search(self._plain) or EXIT_LINE.search(self._plain)
        return self.is_error or bool(written and any(int(code) for code in written.groups() if code))

    @cached_property
    def compound(self) -> bool:
        """The exit code may belong to another part of the line (a pipe or a list)."""
        return len(self.commands) > 1

    @cached_property
    def lines(self) -> tuple[str, ...]:
        """The text's lines; `go test -json` events unfolded into what they print."""
        return tuple(part[:LONGEST] for line in self.text.splitlines() for part in _unfold(line))

    @cached_property
    def went_wrong(self) -> bool:
        """Failed, or the exit code belongs to another part of the shell line."""
        return self.failed or self.compound

    def line(self, pattern: re.Pattern) -> str | None:
        """The first output line the pattern is found in, cut to a quotable length."""
        return next((line.strip()[:QUOTE] for line in self.lines if pattern.search(line)), None)

    def runs(self, head: str, *subcommands: str) -> bool:
        """Whether the line runs `head` with one of the sub-commands (any, when none is given)."""
        return any(program(words[0]) == head and (not subcommands or subcommand(words) in subcommands)
                   for words in self.commands)


def kind_of(tool: str) -> str:
    """What a tool of this name does: bash, read, edit, search, glob, submit, or other."""
    return KINDS.get(tool.lower(), "other")


def tool_result(call: ToolCall, observation: Observation) -> ToolResult:
    return ToolResult(call.name, call.arguments, observation.exit_code, observation.is_error, observation.output)


def clean_path(path: str) -> str:
    return path.strip().removeprefix("./")


def same_file(one: str | None, other: str | None) -> bool:
    """Whether two paths name the same file, where one of them may be absolute. None is no file."""
    return bool(one and other) and (one == other or one.endswith("/" + other) or other.endswith("/" + one))


def is_validation(result: ToolResult) -> bool:
    """Whether the call tests, builds, type-checks, formats or diffs."""
    return any(_validates(words) for words in result.commands)


def is_test(result: ToolResult) -> bool:
    """Like is_validation, without formatting and looking at the diff."""
    quiet = {"git", "gofmt", "goimports", "ruff"}
    return any(_validates(words) and words[0] not in quiet and subcommand(words) != "fmt" for words in result.commands)


def _validates(words: tuple[str, ...]) -> bool:
    head, rest = program(words[0]), words[1:]
    if re.fullmatch(r"python[\d.]*", head):
        module = rest[rest.index("-m") + 1:][:1] if "-m" in rest else ()
        return bool(set(module) & PYTHON_MODULES) or any(PYTHON_SCRIPT.search(word) for word in rest[:1]) \
            or rest[1:2] == ("test",)  # manage.py test
    if head in ("ruby", "node", "php", "perl", "bash", "sh"):
        return "--test" in rest or any(SCRIPT_TESTS.search(word) for word in rest if not word.startswith("-"))
    if head in SUBCOMMANDS:
        known = SUBCOMMANDS[head]
        return known is None or subcommand(words) in known or bool(set(rest[:1]) & known)
    return head in TESTERS or bool(re.fullmatch(r"(run_?)?tests?(\.sh)?", head) and "/" in words[0])


def _without_numbers(text: str) -> str:
    """Takes off line numbers, where every line that says anything has one and they count up by one."""
    lines = [NUMBERED.match(line) or line for line in text.split("\n")]
    numbers = [int(line[1]) for line in lines if isinstance(line, re.Match)]
    plain = [line for line in lines if isinstance(line, str) and line.strip()]
    if not numbers or plain or numbers != list(range(numbers[0], numbers[0] + len(numbers))):
        return text
    return "\n".join(line if isinstance(line, str) else line[2] for line in lines)


def _unfold(line: str) -> list[str]:
    if not line.startswith('{"'):
        return [line]
    try:
        event = json.loads(line)
    except json.JSONDecodeError:
        return [line]
    return str(event.get("Output", "")).splitlines() if "Action" in event else [line]
