"""Who owns a sandbox, and ending what a killed run left behind.

Every box carries its run's label (in its folder's name, in its processes' environment, on its container). A label
names the owner exactly, so a sweep can tell a dead owner from a live one, another run from ours, and a process that
merely got the same pid. Nothing is ever found by a similar name.
"""

from __future__ import annotations

import hashlib
import os
import re
import signal
import tempfile
import time
from pathlib import Path
from typing import Callable

FOLDER_PREFIX = "oprd-"
SHARED_MEMORY = Path("/dev/shm")
MARKER = "OPRD_RUN"  # environment variable of every process in a local box: "<label>/<box>"
LABEL = re.compile(r"([0-9a-f]{12})\.(\d+)\.(\d+)\.([0-9a-f]{8})")


def run_label(run_folder: str | Path, pid: int | None = None) -> str:
    """The label of a run: run folder, owner's pid, owner's start time (clock ticks since boot), and where that pid
    means something (this boot of this machine, this PID namespace).

    Example: "3f2a90b1c4de.4711.88213.9c07be12".
    """
    pid = os.getpid() if pid is None else pid
    digest = hashlib.sha256(os.fsencode(Path(run_folder).resolve())).hexdigest()[:12]
    return f"{digest}.{pid}.{_start_time(pid)}.{_place()}"


def owner_is_dead(label: str) -> bool:
    """True only when it is certain: a label of another machine or PID namespace may be alive."""
    match = LABEL.fullmatch(label)
    if match is None or match[4] != _place():
        return False
    return _start_time(int(match[2])) != int(match[3])


def folders() -> list[Path]:
    """Where boxes may lie, the one for new boxes first: memory where there is room, because on some disks every
    removed folder costs milliseconds and a box has twenty; $TMPDIR overrides it."""
    places = [Path(tempfile.gettempdir())]
    if "TMPDIR" not in os.environ and SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK):
        room = os.statvfs(SHARED_MEMORY)
        places.insert(0 if room.f_bavail * room.f_frsize >= 2**30 else 1, SHARED_MEMORY)
    return places


def sweep(is_dead: Callable[[str], bool] = owner_is_dead) -> list[str]:
    """End the processes and remove the temp copies of dead owners (their containers: docker_sweep.py).

    Returns one line for each thing removed. Safe to call while other runs live on the same machine.
    """
    from oprd.sandbox.local import remove_tree  # local.py imports this file

    done = []
    for folder in sorted(f for place in folders() for f in place.glob(f"{FOLDER_PREFIX}*")):
        label = folder.name.removeprefix(FOLDER_PREFIX)
        if not is_dead(label) or folder.is_symlink() or folder.stat().st_uid != os.getuid():
            continue
        done += [f"process {pid} of {label}" for pid in kill_marked(label + "/")]
        remove_tree(folder)
        done.append(f"folder {folder}")
    return done


def kill_marked(marker: str, group: int | None = None, seconds: float = 2.0) -> list[int]:
    """SIGKILL the process group `group` and every process whose marker starts with `marker`, until none is left."""
    killed: list[int] = []
    deadline = time.monotonic() + seconds
    if group is not None:
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            pass
    while (found := _marked(marker)) and time.monotonic() < deadline:
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            killed.append(pid)
        time.sleep(0.002)
    return sorted(set(killed))


def descendants(pid: int, most: int = 2**31) -> list[int]:
    """The processes below `pid`, parents before children (a snapshot; empty when the process is gone). Stops
    looking once more than `most` are found."""
    found, waiting = [], [pid]
    while waiting and len(found) <= most:
        parent = waiting.pop()
        try:
            children = [int(p) for p in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
        except OSError:
            continue
        found += children
        waiting += children
    return found


def _marked(marker: str) -> list[int]:
    start = f"{MARKER}={marker}".encode()
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            with open(f"/proc/{entry.name}/environ", "rb") as file:
                environment = file.read()
        except OSError:  # ended meanwhile, or another user's
            continue
        if any(item.startswith(start) for item in environment.split(b"\0")):
            found.append(int(entry.name))
    return found


def _start_time(pid: int) -> int:
    """Field 22 of /proc/<pid>/stat; -1 when there is no such process (a zombie counts as none)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return -1
    return -1 if fields[0] in "ZX" else int(fields[19])


def _place() -> str:
    """Names this boot of this machine and the PID namespace: initial namespaces have one number on all machines, and
    an engine may serve several of them."""
    namespace = os.readlink("/proc/self/ns/pid")
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return hashlib.sha256(f"{boot} {namespace}".encode()).hexdigest()[:8]
