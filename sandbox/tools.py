"""MicroSWE's tools: `bash`, `read`, `edit`, `submit`, each a small function from arguments to text. (Those for real
repositories: coder_tools.py; which a run uses: toolbox.py.)

A model's mistake (missing argument, missing file, ambiguous edit, failing command) is an answer it reads; only a
machine's mistake (`Broke`) is an exception. Texts are those models already know from public coding agents.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping

from oprd.sandbox.box import Sandbox
from oprd.sandbox.output import HeadTail

READ_BYTES = 64 * 2**10  # of a file that `read` shows, head and tail; no context holds more
PARAMETERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # tool -> (required, optional)
    "bash": (("command",), ()),
    "read": (("path",), ()),
    "edit": (("path", "old_string", "new_string"), ("replace_all",)),
    "submit": ((), ()),
}

_TEXT = {
    "bash": ("Run a shell command in the repository.", {"command": "The command; its input is empty."}),
    "read": ("Read a text file.", {"path": "Path relative to the repository."}),
    "edit": ("Replace a string that occurs once in a file.",
             {"path": "Path relative to the repository.", "old_string": "The text to replace, exactly as in the file.",
              "new_string": "The text to put there.", "replace_all": "true to replace every occurrence."}),
    "submit": ("Hand in the work. Nothing can be done after it.", {}),
}
SAME = "No changes to make: old_string and new_string are exactly the same."
NOT_FOUND = "String to replace not found in file.\nString: {}"
AMBIGUOUS = ("Found {} matches of the string to replace, but replace_all is false. To replace all occurrences, set "
             "replace_all to true. To replace only one occurrence, please provide more context to uniquely identify "
             "the instance.\nString: {}")
SCHEMAS = [{"type": "function", "function": {
    "name": name, "description": _TEXT[name][0], "parameters": {
        "type": "object",
        "properties": {p: {"type": "string", "description": text} for p, text in _TEXT[name][1].items()},
        "required": list(required)}}} for name, (required, _) in PARAMETERS.items()]


@dataclass(frozen=True)
class Answer:
    """A tool's answer. exit_code is None where no process ran; `ends` is True when the agent submitted."""

    output: str
    exit_code: int | None = None
    is_error: bool = False
    ends: bool = False


def call_tool(box: Sandbox, name: str, arguments: Mapping[str, str], seconds: float | None = None) -> Answer:
    """Run one tool call. Raises Broke when the machine fails, never for what the model wrote."""
    if name not in PARAMETERS:
        return Answer(f"No such tool: {name}. Available tools: {', '.join(PARAMETERS)}", is_error=True)
    required, optional = PARAMETERS[name]
    missing = [p for p in required if p not in arguments]
    unknown = [p for p in arguments if p not in required + optional]
    if missing or unknown:
        what = f"missing required parameter `{missing[0]}`" if missing else f"unexpected parameter `{unknown[0]}`"
        return Answer(f"{name} failed: {what}", is_error=True)
    if name == "submit":
        return Answer("", ends=True)
    if name == "bash":
        return _bash(box, arguments["command"], seconds)
    try:
        return _read(box, arguments["path"]) if name == "read" else _edit(box, **arguments)
    except FileNotFoundError:
        return Answer(f"File does not exist: {arguments['path']}", is_error=True)
    except IsADirectoryError:
        return Answer(f"{arguments['path']} is a directory, not a file", is_error=True)
    except PermissionError:
        return Answer(f"{arguments['path']} is outside the repository", is_error=True)
    except (OSError, ValueError) as problem:  # a path that no file system takes: too long, a NUL byte
        return Answer(f"{name} failed: {problem}", is_error=True)


def _bash(box: Sandbox, command: str, seconds: float | None) -> Answer:
    ran = box.run(command, seconds)
    output = ran.output.rstrip("\n")
    if ran.code != 0:
        output = f"Exit code {ran.code}\n{output}" if output else f"Exit code {ran.code}"
    return Answer(output or "(no output)", exit_code=ran.code, is_error=ran.code != 0)


def _read(box: Sandbox, path: str) -> Answer:
    kept = HeadTail(READ_BYTES)
    kept.add(box.read(path))
    return Answer(kept.text().rstrip("\n") or "(empty file)")


def _edit(box: Sandbox, path: str, old_string: str, new_string: str, replace_all: str = "false") -> Answer:
    text = box.read(path).decode("utf-8", errors="surrogateescape")
    if old_string == new_string:
        return Answer(SAME, is_error=True)
    everywhere = replace_all.strip().lower() == "true"
    count = text.count(old_string) if old_string else 0
    if count == 0:
        return Answer(NOT_FOUND.format(old_string), is_error=True)
    if count > 1 and not everywhere:
        return Answer(AMBIGUOUS.format(count, old_string), is_error=True)
    edited = text.replace(old_string, new_string) if everywhere else text.replace(old_string, new_string, 1)
    box.write(path, edited.encode("utf-8", errors="surrogateescape"))
    return Answer(f"The file {path} has been updated.")
