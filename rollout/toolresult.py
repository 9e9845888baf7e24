"""What one tool call did, seen the same way whatever the tool set: the input of the hard rules.

Knows our tools (`bash`, `read`, `edit`, `submit`), Claude-Code style names and the editors of other scaffolds, takes
a shell line apart into its simple commands, and strips what a scaffold adds around a tool's own output.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from functools import cached_property
from typing import Mapping

from oprd.core.types import Observation, ToolCall

KINDS = {
    "bash": "bash", "shell": "bash", "execute_bash": "bash", "run_command": "bash", "terminal": "bash",
    "read": "read", "view": "read", "read_file": "read", "open_file": "read", "notebookread": "read",
    "edit": "edit", "multiedit": "edit", "str_replace": "edit", "str_replace_editor": "edit", "file_editor": "edit",
    "str_replace_based_edit_tool": "edit", "notebookedit": "edit",
    "write": "edit", "create_file": "edit", "write_file": "edit",
    "grep": "search", "glob": "glob", "ls": "glob", "submit": "submit", "finish": "submit",
}
PATH = re.compile(r"[\w./-]*/[\w.-]+|[\w-]+\.\w{1,4}")  # a word that is a file's path
SHOWS_FILE = {"cat", "head", "tail", "less", "nl", "sed"}
PATH_ARGUMENTS = ("path", "file_path", "filename", "file", "notebook_path")
WRAPPERS = {"sudo": 0, "time": 0, "env": 0, "nice": 0, "command": 0, "exec": 0, "xargs": 0, "nohup": 0, "timeout": 1,
            "npx": 0}
RUNNERS = {"uv": "run", "poetry": "run", "pipenv": "run", "bundle": "exec"}  # wrappers with this word after them
TESTERS = {"pytest", "py.test", "tox", "nosetests", "jest", "vitest", "mocha", "rspec", "phpunit", "ctest", "ruff",
           "tsc", "flake8", "mypy", "eslint", "gofmt", "goimports", "golangci-lint", "javac", "gcc", "g++", "make"}
SUBCOMMANDS = {"go": {"test", "build", "vet", "run", "fmt", "install"}, "npm": {"test", "run"}, "yarn": {"test"},
               "pnpm": {"test"}, "cargo": {"test", "build", "check", "clippy", "fmt"}, "mvn": None, "gradle": None,
               "./gradlew": None, "git": {"diff", "status"}, "node": {"--test"}, "cmake": {"--build"},
               "rake": None, "dotnet": {"test", "build"}}
PYTHON_MODULES = {"pytest", "unittest", "py_compile", "compileall", "tox", "mypy", "ruff", "doctest"}
PYTHON_SCRIPT = re.compile(r"(^|/)(check|run_?tests?|tests?|test_\w+|\w+_test)\.py$")
ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
SCAFFOLD_BLOCK = re.compile(r"<system-reminder>.*?(</system-reminder>|\Z)", re.S)
EXIT_CODE = re.compile(r"\A\s*(?:Exit code (\d+)\n|<returncode>(-?\d+)</returncode>)")


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
        return kind_of(self.tool)

    @cached_property
    def command(self) -> str:
        """The shell line of a bash call, else empty."""
        return str(self.arguments.get("command", "")) if self.kind == "bash" else ""

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
        return frozenset(words[0].rsplit("/", 1)[-1] for words in self.commands)

    @cached_property
    def text(self) -> str:
        """The output without terminal colours and without what the scaffold put around it."""
        text = SCAFFOLD_BLOCK.sub("", ANSI.sub("", self.output))
        return EXIT_CODE.sub("", re.sub(r"</?tool_use_error>", "", text)).strip("\n")

    @cached_property
    def failed(self) -> bool:
        """An error was reported: exit code, error flag, or the exit code a scaffold wrote into the output."""
        if self.exit_code is not None:
            return self.exit_code != 0
        written = EXIT_CODE.search(self.output)
        return self.is_error or bool(written and int(written[1] or written[2]))

    @cached_property
    def compound(self) -> bool:
        """The exit code may belong to another part of the line (a pipe or a list)."""
        return len(self.commands) > 1

    @cached_property
    def lines(self) -> tuple[str, ...]:
        """The text's lines; `go test -json` events unfolded into what they print."""
        return tuple(part for line in self.text.splitlines() for part in _unfold(line))

    def runs(self, head: str, *subcommands: str) -> bool:
        """Whether the line runs `head` with one of the sub-commands (any, when none is given)."""
        return any(words[0].rsplit("/", 1)[-1] == head and (not subcommands or set(words[1:2]) & set(subcommands))
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
    quiet = ({"git"}, {"gofmt"}, {"goimports"}, {"ruff"})
    return any(_validates(words) and {words[0]} not in quiet and "fmt" not in words[1:2] for words in result.commands)


def _validates(words: tuple[str, ...]) -> bool:
    head, rest = words[0].rsplit("/", 1)[-1], words[1:]
    if re.fullmatch(r"python[\d.]*", head):
        module = rest[rest.index("-m") + 1:][:1] if "-m" in rest else ()
        return bool(set(module) & PYTHON_MODULES) or any(PYTHON_SCRIPT.search(word) for word in rest[:1])
    if head in SUBCOMMANDS:
        return SUBCOMMANDS[head] is None or bool(set(rest[:1]) & SUBCOMMANDS[head])
    return head in TESTERS


def simple_commands(line: str) -> tuple[tuple[str, ...], ...]:
    """A shell line's simple commands as words: split at ; & | and newlines, without assignments, wrappers (env,
    timeout 5) and redirections; `bash -c "..."` is opened. Quoted text stays a word, so a command that is only
    quoted is not seen. A line with an unclosed quote is split at blanks."""
    parts: list[list[str]] = [[]]
    for word in _words(line):
        if word and set(word) <= set(";&|()\n"):
            parts.append([])
        else:
            parts[-1].append(word)
    found: list[tuple[str, ...]] = []
    for part in parts:
        words = _bare(part)
        if len(words) > 2 and words[0] in ("bash", "sh") and words[1] in ("-c", "-lc"):
            found += simple_commands(words[2])
        elif words:
            found.append(tuple(words))
    return tuple(found)


def _words(line: str) -> list[str]:
    lexer = shlex.shlex(line.replace("\\\n", " "), posix=True, punctuation_chars=";&|()\n")
    lexer.whitespace = " \t\r"
    lexer.whitespace_split = True
    lexer.commenters = ""
    try:
        return list(lexer)
    except ValueError:
        return re.sub(r"([;&|()\n]+)", r" \1 ", line).split(" ")


def _bare(words: list[str]) -> list[str]:
    """Without leading assignments and wrapper programs."""
    words = [word for word in words if word]
    while words:
        if re.match(r"[A-Za-z_]\w*=", words[0]):
            words = words[1:]
        elif words[0] in RUNNERS and words[1:2] == [RUNNERS[words[0]]]:
            words = words[2:]
        elif words[0] in WRAPPERS:
            skip = WRAPPERS[words[0]]
            words = words[1:]
            while words and words[0].startswith("-"):
                words = words[1:]
            words = words[skip:]
        else:
            return words
    return words


def _unfold(line: str) -> list[str]:
    if not line.startswith('{"'):
        return [line]
    try:
        event = json.loads(line)
    except json.JSONDecodeError:
        return [line]
    return str(event.get("Output", "")).splitlines() if "Action" in event else [line]
