"""Tools for real repositories, with the names, arguments and texts that models know from public coding agents:
`bash`, `read`, `write`, `edit`, `multi_edit`, `grep`, `glob`, `submit` (shared facts/data.md 3.3).

A `Coder` belongs to one attempt: its shell's folder persists from call to call (`cd` counts), and paths that are not
absolute are relative to it. Every command runs to its end: what it leaves in the background is ended with it, and said.
"""

from __future__ import annotations

import posixpath
from typing import Any, Callable, Mapping

from oprd.sandbox.box import Sandbox
from oprd.sandbox.searching import SearchFailed, glob_files, grep_files
from oprd.sandbox.toolargs import Arguments, WrongArguments, schema
from oprd.sandbox.tools import AMBIGUOUS, NOT_FOUND, SAME, Answer

READ_BYTES = 256 * 2**10  # of a file that is read without saying which lines
READ_LINES = 2000
LINE_LENGTH = 2000  # characters of a line that is shown
HEAD_LIMIT = 250  # lines or files a search shows
STRING, NUMBER, TRUTH = {"type": "string"}, {"type": "number"}, {"type": "boolean"}
EDIT = {"old_string": STRING, "new_string": STRING, "replace_all": TRUTH}

# tool: (what it does, required parameters, optional ones); a parameter: JSON type and what it is
TOOLS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "bash": ("Run a shell command. The working directory persists between calls; nothing else of the shell does. The "
             "command's input is empty, and what it leaves in the background is ended when it returns.",
             {"command": (STRING, "The command.")},
             {"timeout": (NUMBER, "Milliseconds after which it is ended."),
              "description": (STRING, "What the command does, in a few words.")}),
    "read": ("Read a text file; every line has its number before it.",
             {"file_path": (STRING, "The file.")},
             {"offset": (NUMBER, "The first line to read."), "limit": (NUMBER, "How many lines to read.")}),
    "write": ("Write a whole file, making its folders.",
              {"file_path": (STRING, "The file."), "content": (STRING, "All of its text.")}, {}),
    "edit": ("Replace a string in a file; it must occur exactly once, unless replace_all is true.",
             {"file_path": (STRING, "The file."), "old_string": (STRING, "The text to replace, exactly as it stands."),
              "new_string": (STRING, "The text to put there.")},
             {"replace_all": (TRUTH, "Replace every occurrence.")}),
    "multi_edit": ("Make several edits of one file, one after the other; all of them or none.",
                   {"file_path": (STRING, "The file."),
                    "edits": ({"type": "array", "items": {"type": "object", "properties": EDIT,
                                                          "required": ["old_string", "new_string"]}},
                              "The edits, in order.")}, {}),
    "grep": ("Search files for a regular expression.",
             {"pattern": (STRING, "The regular expression.")},
             {"path": (STRING, "File or folder; the working directory if not given."),
              "glob": (STRING, "Only files whose path matches, such as *.py or src/**/*.ts."),
              "output_mode": ({"type": "string", "enum": ["content", "files_with_matches", "count"]},
                              "content shows lines, files_with_matches (if not given) paths, count matches a file."),
              "-i": (TRUTH, "Ignore case."), "-n": (TRUTH, "Show line numbers (content)."),
              "-A": (NUMBER, "Lines after a match."), "-B": (NUMBER, "Lines before a match."),
              "-C": (NUMBER, "Lines around a match."),
              "head_limit": (NUMBER, f"Most lines or files shown ({HEAD_LIMIT} if not given)."),
              "multiline": (TRUTH, "Let a match reach over lines (needs ripgrep in the image)."),
              "type": (STRING, "Only files of a kind, such as py, go, js, rust.")}),
    "glob": ("Find files by name.",
             {"pattern": (STRING, "Such as **/*.py.")},
             {"path": (STRING, "Folder; the working directory if not given.")}),
    "submit": ("Hand in the work. Nothing can be done after it.", {}, {}),
}
SCHEMAS = [schema(name, *TOOLS[name]) for name in TOOLS]


class Coder:
    """The tools over one box. Called like tools.call_tool, without the box. Raises Broke, and nothing else."""

    def __init__(self, box: Sandbox):
        self.box, self.folder = box, box.root

    def __call__(self, name: str, arguments: Mapping[str, str], seconds: float | None = None) -> Answer:
        if name not in TOOLS:
            return _error(f"Error: No such tool available: {name}. Available tools: {', '.join(TOOLS)}")
        try:
            given = Arguments(name, TOOLS[name], arguments)
            return DO[name](self, given, seconds)
        except WrongArguments as problem:
            return _error(str(problem))
        except FileNotFoundError:
            return _error(f"File does not exist. Note: your current working directory is {self.folder}.")
        except IsADirectoryError:
            return _error("EISDIR: illegal operation on a directory; it is no file.")
        except PermissionError as problem:
            return _error(f"{problem}; only files of the repository can be read or written, use bash for others.")
        except SearchFailed as problem:
            return _error(str(problem))
        except (OSError, ValueError) as problem:
            return _error(f"{name} failed: {problem}")

    def path(self, given: str) -> str:
        return posixpath.normpath(posixpath.join(self.folder, given))

    def bash(self, given: Arguments, seconds: float | None) -> Answer:
        asked = given.number("timeout")
        limit = self.box.limits.command_s if seconds is None else seconds
        limit = min(limit, asked / 1000) if asked else limit
        ran = self.box.run(given.text("command"), max(limit, 0.001), folder=self.folder)
        self.folder = ran.folder or self.folder
        output = ran.output.rstrip("\n")
        if ran.ended:
            output += "\n(processes left in the background were ended: they do not outlive their command)"
        if ran.code:
            output = f"Exit code {ran.code}\n{output}"
        return Answer(output.strip("\n") or "(no output)", ran.code, ran.code != 0)

    def read(self, given: Arguments, seconds: float | None) -> Answer:
        data = self.box.read(self.path(given.text("file_path")))
        offset, limit = given.number("offset"), given.number("limit")
        if len(data) > READ_BYTES and offset is None and limit is None:
            return _error(f"File content ({len(data) / 1024:.1f}KB) exceeds maximum allowed size (256KB). Please use "
                          "offset and limit parameters to read specific portions of the file, or use the grep tool "
                          "to search for specific content.")
        if b"\0" in data[:8192]:
            return _error("This is a binary file; use bash to look into it.")
        lines = data.decode("utf-8", "replace").split("\n")
        if lines[-1] == "":
            lines.pop()
        first = max(1, int(offset or 1))
        chosen = lines[first - 1:first - 1 + int(limit or READ_LINES)]
        if not lines:
            return Answer("(the file exists but is empty)")
        if not chosen:
            return _error(f"The file has {len(lines)} lines, fewer than the offset {first}.")
        text = "\n".join(f"{number:6d}→{line[:LINE_LENGTH]}" for number, line in enumerate(chosen, start=first))
        left = len(lines) - (first - 1 + len(chosen))
        return Answer(text + (f"\n({left} more lines; read on with offset {first + len(chosen)})" if left else ""))

    def write(self, given: Arguments, seconds: float | None) -> Answer:
        path = self.path(given.text("file_path"))
        try:
            self.box.read(path)
            said = f"The file {path} has been updated."
        except FileNotFoundError:
            said = f"File created successfully at: {path}"
        self.box.write(path, given.text("content").encode("utf-8", "surrogateescape"))
        return Answer(said)

    def edit(self, given: Arguments, seconds: float | None) -> Answer:
        path, old, new = self.path(given.text("file_path")), given.text("old_string"), given.text("new_string")
        everywhere = given.truth("replace_all")
        if not old:  # makes a file, as models know it
            try:
                if self.box.read(path).strip():
                    return _error("Cannot create new file - file already exists.")
            except FileNotFoundError:
                pass
            self.box.write(path, new.encode("utf-8", "surrogateescape"))
            return Answer(f"File created successfully at: {path}")
        text = self.box.read(path).decode("utf-8", "surrogateescape")
        edited, problem = replaced(text, old, new, everywhere)
        if problem:
            return _error(problem)
        self.box.write(path, edited.encode("utf-8", "surrogateescape"))
        every = f" All occurrences of '{old}' were successfully replaced with '{new}'." if everywhere else ""
        return Answer(f"The file {path} has been updated.{every}")

    def multi_edit(self, given: Arguments, seconds: float | None) -> Answer:
        path, edits = self.path(given.text("file_path")), given.edits("edits")
        text = self.box.read(path).decode("utf-8", "surrogateescape")
        for number, (old, new, everywhere) in enumerate(edits, start=1):
            text, problem = replaced(text, old, new, everywhere)
            if problem:
                return _error(f"{problem}\n(edit {number} of {len(edits)}; no edit was made)")
        self.box.write(path, text.encode("utf-8", "surrogateescape"))
        done = "\n".join(f'{i}. Replaced "{old}" with "{new}"' for i, (old, new, _) in enumerate(edits, start=1))
        return Answer(f"Applied {len(edits)} edit{'s' * (len(edits) != 1)} to {path}:\n{done}")

    def grep(self, given: Arguments, seconds: float | None) -> Answer:
        where = self.path(given.text("path", ""))
        most = int(given.number("head_limit") or HEAD_LIMIT)
        return Answer(grep_files(self.box, given, where, self.folder, most, seconds))

    def glob(self, given: Arguments, seconds: float | None) -> Answer:
        where = self.path(given.text("path", ""))
        return Answer(glob_files(self.box, given.text("pattern"), where, self.folder, seconds))

    def submit(self, given: Arguments, seconds: float | None) -> Answer:
        return Answer("", ends=True)


DO: dict[str, Callable[[Coder, Arguments, float | None], Answer]] = {name: getattr(Coder, name) for name in TOOLS}


def replaced(text: str, old: str, new: str, everywhere: bool) -> tuple[str, str]:
    """(the text with `old` replaced, "") or (the text, why not)."""
    if old == new:
        return text, SAME
    count = text.count(old) if old else 0
    if count == 0:
        return text, NOT_FOUND.format(old)
    if count > 1 and not everywhere:
        return text, AMBIGUOUS.format(count, old)
    return text.replace(old, new), ""


def _error(text: str) -> Answer:
    return Answer(text, is_error=True)
