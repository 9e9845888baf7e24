"""Commands inside a running container: the engine's stream of their output, and the scripts that wrap them.

A command runs under a wrapper. When the command ends, the wrapper kills everything else in the container (`kill -1`
spares process 1 and the caller, and leaves no gap for a fork), looks that nothing is left, and reports on stderr,
which the command never had: both of its own streams are one pipe, which keeps their order.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from dataclasses import dataclass
from typing import Callable

from oprd.sandbox.box import Broke

PRIVATE = "/.oprd"
LOOK_S = 2.0  # seconds between looks at what a container wrote

# What lives in the container but for this shell and the session of process 1, which nobody can join: process 1, its
# clock and its sleep.
# `read` and `echo` are the shell's own: nothing here starts a process.
PROOF = """
left() { left=0; for p in /proc/[0-9]*; do
        [ "$p" = "/proc/$$" ] || ! read -r line < "$p/stat" || {
            set -- ${line##*) }; case $1 in [ZX]) ;; *) [ "$4" = 1 ] || left=$((left + 1));; esac; }
    done; } 2>/dev/null
hits() { hits=0 kills=0; { if [ -e /sys/fs/cgroup/memory.events ]; then
        while read -r name n; do case $name in oom) hits=$n;; oom_kill) kills=$n;; esac; done \\
            < /sys/fs/cgroup/memory.events
    else
        read -r most < /sys/fs/cgroup/memory/memory.max_usage_in_bytes
        read -r limit < /sys/fs/cgroup/memory/memory.limit_in_bytes
        while read -r name n; do case $name in oom_kill) kills=$n;; esac; done \\
            < /sys/fs/cgroup/memory/memory.oom_control
        [ $((most + 1048576)) -lt "$limit" ] || hits=$kills; fi; } 2>/dev/null; }
report() { i=0; left; while [ "$left" -gt 0 ] && [ "$i" -lt 110 ]; do
        i=$((i + 1)); [ "$i" -lt 100 ] || sleep 1; kill -9 -1 2>/dev/null; left; done
    hits; echo "$left $hits $kills ${ended:-0}"; }
"""
# $0 the command, $1 the root, $2 the shell, $3 the folder to start in or nothing.
WRAP = PROOF + """
exec 3>&2 2>&1
mkdir -p "$1" && cd "$1" || exit 125
[ -z "$3" ] || cd "$3" 2>/dev/null || echo "(the working directory $3 is gone; this ran in $1)"
""" + f"""
: > {PRIVATE}/folder
"$2" -c "$0" </dev/null 3>&-
code=$?
left; ended=$left
kill -9 -1 2>/dev/null
""" + """
{ report; [ -z "$3" ] || cat """ + f"{PRIVATE}/folder; }} >&3\nexit $code"
KEEP_FOLDER = "trap '{ pwd -P >" + PRIVATE + "/folder; } 2>/dev/null' 0; "
KILL = PROOF + "kill -9 -1 2>/dev/null\nreport"


@dataclass(frozen=True)
class Report:
    """What a wrapper saw when all was over. left: processes that outlived the kill; kills: processes the kernel
    killed for want of memory since the container was made, hits: how often the container's own limit was why (with
    cgroups of version 1: `kills` if the limit was ever reached, else 0); ended: processes that were left running;
    folder: see Ran."""

    left: int
    hits: int
    kills: int
    ended: int = 0
    folder: str | None = None


def read_report(data: bytes) -> Report | None:
    """None when the wrapper was killed before it could say anything."""
    first, _, folder = data.partition(b"\n")
    numbers = first.split()
    if len(numbers) != 4 or not all(number.isdigit() for number in numbers):
        return None
    return Report(*map(int, numbers), folder.decode("utf-8", "surrogateescape").removesuffix("\n") or None)


class Frames:
    """Docker's multiplexed stream: frames of an 8-byte header (stream, 3 zeros, big-endian length) and their data."""

    def __init__(self, sock: socket.socket, begun: bytes = b""):
        """begun: what was read of the stream already."""
        self.sock, self._begun = sock, begun
        self._left, self._stream, self._header = 0, 1, b""

    def read(self, take: Callable[[int, bytes], None], deadline: float) -> bool:
        """Hand every piece (1 stdout, 2 stderr) to `take` until the stream ends; False when the deadline comes first
        (another call then goes on where this one stopped)."""
        while (wait := deadline - time.monotonic()) > 0:
            most = min(self._left or 8 - len(self._header), 65536)
            chunk, self._begun = self._begun[:most], self._begun[most:]
            try:
                self.sock.settimeout(wait)
                chunk = chunk or self.sock.recv(most)
            except TimeoutError:
                return False
            if not chunk:
                return True
            if self._left:
                take(self._stream, chunk)
                self._left -= len(chunk)
                continue
            self._header += chunk
            if len(self._header) == 8:
                stream, self._left = struct.unpack(">BxxxL", self._header)
                self._stream, self._header = 2 if stream == 2 else 1, b""
        return False


def hijacked(stream) -> tuple[socket.socket, bytes]:
    """(socket, first bytes) of what the SDK's exec_start(socket=True) gives.

    The SDK reads the answer's headers through a buffer. What the engine sends in the same breath, a quick command's
    whole output now and then, lies in that buffer and never comes out of the socket.
    """
    sock = getattr(stream, "_sock", stream)
    sock.settimeout(0)
    return sock, bytes(stream._response.raw._fp.fp.peek())


def drain(sock: socket.socket, seconds: float) -> None:
    """Read and forget, so that an engine which holds a container's lock while it writes gets on."""
    deadline = time.monotonic() + seconds
    try:
        while (wait := deadline - time.monotonic()) > 0:
            sock.settimeout(wait)
            if not sock.recv(65536):
                return
    except (OSError, ValueError):  # closed under us: the box is given up
        pass


class DiskWatch:
    """Looks every LOOK_S seconds at what a box wrote, where its engine cannot limit it, and ends its command beyond the
    limit. over: that it did."""

    def __init__(self, most_mib: int, written_mib: Callable[[], float], kill: Callable[[], object]):
        """most_mib 0: nothing to look at."""
        self.most_mib, self.written_mib, self.kill, self.over = most_mib, written_mib, kill, False
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        if self.most_mib:
            self._thread = threading.Thread(target=self._look, daemon=True)
            self._thread.start()

    def _look(self) -> None:
        while not self._end.wait(LOOK_S):
            try:
                if self.written_mib() > self.most_mib:
                    self.over = True
                    self.kill()
                    return
            except Broke:  # the command's own stream will tell
                return

    def __exit__(self, *exc) -> None:
        self._end.set()
        if self._thread:
            self._thread.join()
