"""What a git patch touches, read without applying it."""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass
from typing import Iterator, Mapping

_HUNK = re.compile(rb"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")
_ESCAPES = {b"a": 7, b"b": 8, b"t": 9, b"n": 10, b"v": 11, b"f": 12, b"r": 13, b'"': 34, b"\\": 92}


@dataclass(frozen=True)
class FileChange:
    """One file of a patch. Paths relative to the repository; added, deleted: the file's own fate; link: the target
    of a symbolic link that the patch makes, else None; submodule: a link to another repository's commit."""

    path: str
    added: bool = False
    deleted: bool = False
    link: str | None = None
    submodule: bool = False


def file_changes(patch: bytes) -> list[FileChange]:
    """The files a git patch touches, in order; a rename counts as one deleted and one added file.

    Raises ValueError when the text is no git patch.
    """
    changes: list[FileChange] = []
    lines = patch.split(b"\n")
    at = 0
    while at < len(lines):
        if lines[at].startswith(b"diff --git "):
            found, at = _one_file(lines, at)
            changes += found
        else:
            at += 1
    if patch.strip() and not changes:
        raise ValueError("not a git patch: it has no line that starts with `diff --git`")
    return changes


def _one_file(lines: list[bytes], at: int) -> tuple[list[FileChange], int]:
    header, mode, old, new, body = lines[at], b"", None, None, []
    at += 1
    renamed = submodule = False
    while at < len(lines) and not lines[at].startswith(b"diff --git "):
        line = lines[at]
        at += 1
        if line.startswith((b"new file mode ", b"deleted file mode ")):
            mode = line
            submodule = submodule or line.endswith(b" 160000")
        elif line.startswith((b"index ", b"new mode ", b"old mode ")) and not body:
            submodule = submodule or line.rstrip(b"\r").endswith(b" 160000")
        elif line.startswith((b"rename from ", b"rename to ", b"copy to ")):
            renamed = True
            name = _unquoted(line.split(b" ", 2)[2])
            old, new = (name, new) if line.startswith(b"rename from ") else (old, name)
        elif line.startswith((b"--- ", b"+++ ")) and not body:
            name = _unquoted(line[4:].rstrip(b"\r").partition(b"\t")[0])
            name = None if name == "/dev/null" else name.partition("/")[2]
            old, new = (name, new) if line[:1] == b"-" else (old, name)
        elif hunk := _HUNK.match(line):
            body, at = _hunk(lines, at, *(int(n) if n else 1 for n in hunk.groups()))
    if renamed:
        return ([FileChange(old, deleted=True)] if old else []) + [FileChange(new, added=True)], at
    path = new or old or _from_header(header)
    link = b"\n".join(body).decode("utf-8", "replace") if mode == b"new file mode 120000" else None
    return [FileChange(path, mode.startswith(b"new"), mode.startswith(b"deleted"), link, submodule)], at


def _hunk(lines: list[bytes], at: int, old: int, new: int) -> tuple[list[bytes], int]:
    """Step over a hunk by its counts (a line inside may look like a header). (its added lines, next line)."""
    added = []
    while at < len(lines) and (old > 0 or new > 0):
        mark = lines[at][:1]
        old -= mark in (b"-", b" ", b"")
        new -= mark in (b"+", b" ", b"")
        if mark == b"+":
            added.append(lines[at][1:])
        at += 1
    return added or [b""], at


def _from_header(header: bytes) -> str:
    """The path of `diff --git a/P b/P` when nothing else names it (mode change, empty or binary file)."""
    rest = header[len(b"diff --git "):].rstrip(b"\r")
    if rest.startswith(b'"'):
        first = re.match(rb'"(?:[^"\\]|\\.)*"', rest)
        return _unquoted(first[0] if first else rest).partition("/")[2]
    return rest[:len(rest) // 2].decode("utf-8", "surrogateescape").partition("/")[2]


def _unquoted(name: bytes) -> str:
    """git's C-style quoting undone: \\"caf\\\\303\\\\251\\" -> café."""
    name = name.rstrip(b"\r")
    if name.startswith(b'"') and name.endswith(b'"') and len(name) > 1:
        name = re.sub(rb'\\([0-7]{3}|.)', lambda m: bytes([int(m[1], 8) & 255 if len(m[1]) == 3 else _ESCAPES.get(
            m[1], m[1][0])]), name[1:-1])
    return name.decode("utf-8", "surrogateescape")


def added_lines(patch: bytes) -> Iterator[tuple[str, str]]:
    """(path, text) of every line that a patch adds."""
    path, lines, at = "", patch.split(b"\n"), 0
    while at < len(lines):
        if lines[at].startswith(b"diff --git "):
            path = _from_header(lines[at])
        elif lines[at].startswith(b"+++ "):
            path = _unquoted(lines[at][4:].rstrip(b"\r").partition(b"\t")[0]).partition("/")[2] or path
        elif hunk := _HUNK.match(lines[at]):
            added, at = _hunk(lines, at + 1, *(int(n) if n else 1 for n in hunk.groups()))
            yield from ((path, line.decode("utf-8", "replace")) for line in added)
            continue
        at += 1


def added_files(files: Mapping[str, str]) -> str:
    """A git patch that adds files, path -> text."""
    patch = []
    for path, text in files.items():
        lines = text.split("\n")
        ends = lines[-1] == ""
        lines = lines[:-1] if ends else lines
        patch += [f"diff --git a/{path} b/{path}", "new file mode 100644"]
        if text:
            patch += ["--- /dev/null", f"+++ b/{path}", f"@@ -0,0 +1,{len(lines)} @@", *(f"+{line}" for line in lines)]
            patch += [] if ends else ["\\ No newline at end of file"]
    return "".join(f"{line}\n" for line in patch)


def unsafe(change: FileChange) -> str:
    """Why a change must not be applied anywhere, or "": it leaves the repository, or touches git's own data."""
    parts = change.path.split("/")
    if not change.path or change.path.startswith("/") or ".." in parts or "." in parts:
        return f"{change.path!r} is no path inside the repository"
    if any(part.lower() == ".git" for part in parts):
        return f"{change.path} is inside .git"
    if change.submodule:
        return f"{change.path} is a submodule: what changed inside it is in no patch of this repository"
    if change.link is not None:
        end = posixpath.normpath(posixpath.join(posixpath.dirname(change.path), change.link))
        if change.link.startswith("/") or end == ".." or end.startswith("../"):
            return f"{change.path} is a symbolic link that leaves the repository"
    return ""
