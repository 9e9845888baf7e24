"""What a sandbox is: a private copy of a repository in which commands run under limits.

Two implementations: `sandbox/local.py` (a subprocess; no security boundary) and `sandbox/docker_box.py` (a container).
A command that fails, floods or hangs is an ordinary `Ran`; a machine that fails raises `Broke`, which never
reaches the agent and never trains (docs/architecture.md, rule 8).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping, Protocol


class Broke(Exception):
    """The machine failed (engine gone, disk full, container died), not the command."""


class Unusable(ValueError):
    """A task that cannot be attempted as it stands: its image does not exist, or shows its solution. No other try
    helps, and it is nobody's failure: the attempt is dropped and counted."""


@dataclass(frozen=True)
class Limits:
    """Per-command and per-sandbox limits. Memory, file sizes and disk in MiB, times in seconds of wall clock.

    cpus and disk_mib (what a box may write in all; 0: no limit) bind in a container only.
    """

    command_s: float = 60.0
    cpu_s: float = 60.0
    memory_mib: int = 1024
    file_mib: int = 64
    processes: int = 128
    output_bytes: int = 16384  # kept head + tail; applied while reading
    cpus: float = 1.0
    disk_mib: int = 0


@dataclass(frozen=True)
class Ran:
    """One command's outcome. output: stdout and stderr as they came, decoded with replacement, capped head + tail
    with an elision note. code: exit status (128 + n for signal n); timed_out: killed by us at the wall limit;
    folder: where the shell stood when it ended, if that was asked for and can be told; ended: whether it left processes
    in the background, which were killed (a container can tell)."""

    output: str
    code: int
    timed_out: bool = False
    folder: str | None = None
    ended: bool = False


class Sandbox(Protocol):
    root: str  # the repository's absolute path as commands inside see it

    def run(self, command: str, seconds: float | None = None, output_bytes: int | None = None,
            folder: str | None = None) -> Ran:
        """Run `command` in a shell, for at most `seconds`, keeping `output_bytes` of its output (defaults: the
        limits'), in the root; or in `folder` (of the box; the root if it is gone), then Ran.folder is told. Whatever
        the command started has ended when this returns. Raises Broke."""

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
