"""What a sandbox is: a private copy of a repository in which commands run under limits.

Two implementations: `sandbox/local.py` (a subprocess; no security boundary) and `sandbox/docker_box.py`.
A command that fails, floods or hangs is an ordinary `Ran`; a machine that fails raises `Broke`, which never
reaches the agent and never trains (docs/architecture.md, rule 8).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping, Protocol


class Broke(Exception):
    """The machine failed (engine gone, disk full, container died), not the command."""


@dataclass(frozen=True)
class Limits:
    """Per-command and per-sandbox limits. Memory and file sizes in MiB, times in seconds of wall clock."""

    command_s: float = 60.0
    cpu_s: float = 60.0
    memory_mib: int = 1024
    file_mib: int = 64
    processes: int = 128
    output_bytes: int = 16384  # kept head + tail; applied while reading


@dataclass(frozen=True)
class Ran:
    """One command's outcome. output: stdout and stderr as they came, decoded with replacement, capped head + tail
    with an elision note. code: exit status (128 + n for signal n); timed_out: killed by us at the wall limit."""

    output: str
    code: int
    timed_out: bool = False


class Sandbox(Protocol):
    root: str  # the repository's absolute path as commands inside see it

    def run(self, command: str, seconds: float | None = None, output_bytes: int | None = None) -> Ran:
        """Run `command` with sh -c in the repository root, for at most `seconds`, keeping `output_bytes` of its output
        (defaults: the limits'). Whatever it started has ended when this returns. Raises Broke."""

    def trusted(self, command: str, seconds: float = 60.0) -> tuple[int, bytes, bytes]:
        """Run a command of ours, never an agent's text, in the root; $PRIVATE names a folder outside of it for our own
        data. Exit code, stdout and stderr, whole. Raises Broke."""

    def put(self, files: Mapping[str, bytes], private: bool = False) -> None:
        """Write many files under the root, or under $PRIVATE. Raises Broke."""

    def read(self, path: str) -> bytes:
        """A file's bytes; path relative to the root. FileNotFoundError, IsADirectoryError, PermissionError (a path
        that leaves the root) are the caller's to report."""

    def write(self, path: str, data: bytes) -> None:
        """Write a file, making its folders. PermissionError for a path that leaves the root."""

    def close(self) -> None:
        """End every process and remove the copy. Idempotent."""

    def __enter__(self) -> "Sandbox": ...

    def __exit__(self, *exc) -> None: ...
