"""A sandbox that is a Docker container: no network, no capabilities, memory, CPU, process and disk limits.

Process 1 of the container is a small shell that only waits. Every command runs under a wrapper (docker_exec.py) that
kills what the command left and proves it. A command at its wall limit is ended the same way from a second exec; where
even that cannot start (a fork bomb ate all processes) or something outlives it, the container is restarted, which
keeps its files; where that fails, it Broke.

Whose fault: a command killed for memory at the box's own limit is the agent's and says so; killed for memory with the
limit never reached, it is the machine that had no more (Broke). A full disk is the agent's at the box's limit, else the
machine's. A container that dies, an engine that does not answer: the machine's.
"""

from __future__ import annotations

import errno
import io
import re
import socket
import tarfile
import threading
import time
import uuid
from contextlib import nullcontext
from typing import Callable, Mapping, Sequence

import docker
import requests
from docker.types import Mount, Ulimit

from oprd.sandbox.box import Broke, Limits, Ran
from oprd.sandbox.docker_exec import (KEEP_FOLDER, KILL, PRIVATE, WRAP, LOOK_S, DiskWatch, Frames,
                                      Report, drain, hijacked, read_report)
from oprd.sandbox.docker_host import DAEMON_S, DockerHost, DockerSettings, daemon
from oprd.sandbox.docker_sweep import RUN_LABEL, remove
from oprd.sandbox.output import HeadTail

KILL_S = 15.0  # how long a kill inside the container may take before the container is restarted (a busy engine's exec)
LIFETIME_S = 24 * 3600  # a container whose owner cannot be found out ends by itself
ENOUGH_MIB = 64  # a disk with less is full
LONGEST = 100_000  # bytes of a command that go as an argument (Linux takes 128 KiB); longer ones go as a file
TRUSTED_BYTES = 256 * 2**20  # of our own commands' output; more is a failure, never a silent cut

# A killed `date` says nothing; that must not end it.
WAIT = f'end=$(($(date +%s) + {LIFETIME_S})); while now=$(date +%s); [ "${{now:-0}}" -lt "$end" ]; do sleep 600; done'
ENVIRONMENT = {"LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0",
               "TERM": "dumb", "PAGER": "cat", "EDITOR": "true", "GIT_PAGER": "cat", "GIT_EDITOR": "true",
               "GIT_TERMINAL_PROMPT": "0", "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": "/dev/null",
               "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}

# $1 path. The nearest existing folder decides where a path really is. Exit: 41 outside, 42 folder, 43 special file.
RESOLVE = """case "$1" in /*) p=$1;; *) p=$PWD/$1;; esac
rest=; while ! real=$(readlink -f -- "$p") || [ ! -e "$real" ]; do
    [ -L "$p" ] && exit 41; rest=/${p##*/}$rest; p=${p%/*}; [ -n "$p" ] || p=/; done
case "$rest/" in */../*) exit 41;; esac
case "$real/" in "$PWD"/*) ;; *) exit 41;; esac
target=$real$rest; [ -d "$target" ] && exit 42; [ -e "$target" ] && [ ! -f "$target" ] && exit 43
"""
READ = RESOLVE + '[ -e "$target" ] || exit 44; cat -- "$target"'
WRITE = RESOLVE + 'mkdir -p -- "${target%/*}" && cat "$PRIVATE/data" > "$target"'
# Prints the shell that commands get: bash where there is one, which is what the real sets' commands are written for.
START = f"""mkdir -p "$1" && chmod 700 {PRIVATE} && {{ [ -x /bin/bash ] && echo bash || echo sh; }}
""" + KILL


class DockerSandbox:
    """See the file's docstring. `label` names the run that owns the box (sweep.run_label)."""

    def __init__(self, image: str, limits: Limits, label: str, host: DockerHost | docker.DockerClient | None = None,
                 settings: DockerSettings = DockerSettings(pulls=0), root: str | None = None):
        """root: where the repository is; None: in the image's working directory. Raises Unusable when there is no such
        image, Broke when the engine fails."""
        self.limits, self.settings = limits, settings
        self.base: object = None  # what prepare() recorded about the base tree
        self.container = None
        self.give_back: Callable[[DockerSandbox], None] | None = None  # who lent it, and hears of its end
        self._memory = (0, 0)  # see Report: hits and kills when the last command ended
        self._own = None if isinstance(host, DockerHost) else DockerHost(client=host)
        self.host = self._own or host
        try:
            self.host.mend()
            workdir = self.host.folder_of(image, settings)  # an engine that lacks the image gets it here
            workdir = root or workdir
            self.root = workdir if workdir.strip("/") else "/repo"
            with daemon("no sandbox"):
                self.container = self._create(image, label)
                self.container.start()
                self.put({"data": b""}, private=True)
            code, out, err = self.trusted(START, folder="/", argument=self.root)
            if code:
                raise Broke(f"docker: image {image} cannot make {self.root}: {err[:200]!r}")
            self.shell, _, report = out.decode("ascii", "replace").partition("\n")
            self._seen(read_report(report.encode()))
        except BaseException as problem:
            if isinstance(problem.__cause__, docker.errors.ImageNotFound):
                self.host.lost(image)
            self.close()
            raise

    def _create(self, image: str, label: str):
        limits, settings = self.limits, self.settings
        seconds, size = max(1, int(limits.cpu_s)), limits.file_mib * 2**20
        how = dict(
            entrypoint=["/bin/sh", "-c", WAIT], command=[], name=f"oprd-{label}-{uuid.uuid4().hex[:12]}",
            labels={RUN_LABEL: label}, environment=ENVIRONMENT | dict(e.split("=", 1) for e in settings.environment),
            working_dir="/", user="0", network_mode=settings.network, cap_drop=["ALL"],
            security_opt=["no-new-privileges"], mem_limit=f"{limits.memory_mib}m",
            memswap_limit=f"{limits.memory_mib}m", pids_limit=limits.processes, nano_cpus=int(limits.cpus * 10**9),
            mounts=[Mount(target, source, type="bind", read_only=True)
                    for source, target in (mount.rsplit(":", 1) for mount in settings.mounts)],
            ulimits=[Ulimit(name="cpu", soft=seconds, hard=seconds), Ulimit(name="fsize", soft=size, hard=size),
                     Ulimit(name="core", soft=0, hard=0)], log_config={"Type": "none"})
        if limits.disk_mib and self.host.quota:
            try:
                return self.host.client.containers.create(image, storage_opt={"size": f"{limits.disk_mib}m"}, **how)
            except docker.errors.APIError as problem:
                if "storage-opt" not in str(problem) and "pquota" not in str(problem):
                    raise
                self.host.quota = False
        return self.host.client.containers.create(image, **how)

    # --- commands -------------------------------------------------------------------------------------------------

    def run(self, command: str, seconds: float | None = None, output_bytes: int | None = None,
            folder: str | None = None) -> Ran:
        """See box.Sandbox.run. Nothing the command started outlives it."""
        limit = self.limits.command_s if seconds is None else seconds
        if "\0" in command:
            return Ran("sh: a command cannot hold a NUL byte\n", 126, folder=folder)
        keep = KEEP_FOLDER if folder is not None else ""
        if len(command.encode("utf-8", "surrogateescape")) > LONGEST:
            self.put({"command": command.encode("utf-8", "surrogateescape")}, private=True)
            command = f". {PRIVATE}/command"
        kept, told, watch = HeadTail(output_bytes or self.limits.output_bytes), bytearray(), self._watch()
        take = lambda stream, chunk: kept.add(chunk) if stream == 1 else told.extend(chunk[:8192])  # noqa: E731
        code = self._exec(["sh", "-c", WRAP, keep + command, self.root, self.shell, folder or ""], take, limit, "/",
                          watch)
        report = None if code is None else read_report(bytes(told))
        if report is None or report.left:  # over time, over its disk, or it killed its wrapper: from outside, then
            report = self._kill_all()
        text = kept.text()
        text += self._blame(code, report, watch.over, text)
        if code is None:
            text += f"\n[timed out after {limit:g} s; the command and everything it started were killed]\n"
        return Ran(text, 137 if code is None else code, code is None, (report.folder or folder) if keep else None,
                   report.ended > 0)

    def _blame(self, code: int | None, report: Report, over: bool, text: str) -> str:
        """What the agent is told about limits it ran into. Raises Broke for those that were the machine's."""
        note = ""
        hits, kills = self._seen(report)
        if kills and not hits:
            raise Broke("docker: the machine ran out of memory under a command")
        if kills:
            note += f"\n[killed: more than {self.limits.memory_mib} MiB of memory]\n"
        if over:
            note += f"\n[killed: more than {self.limits.disk_mib} MiB written to the disk]\n"
        elif code != 0 and "No space left on device" in text and self._disk_is_full():
            raise Broke("docker: the engine's disk is full")
        return note

    def _seen(self, report: Report | None) -> tuple[int, int]:
        """How often the memory limit was hit, and a process killed for memory, since the last report."""
        if report is None:
            return 0, 0
        before, self._memory = self._memory, (report.hits, report.kills)
        hits, kills = (new - old if new >= old else new for old, new in zip(before, self._memory))
        return hits, kills

    def _disk_is_full(self) -> bool:
        """Whether the engine's disk is full; a box's own full share (storage quota) is its agent's doing."""
        if self.limits.disk_mib and self.host.quota:
            return False
        code, out, _ = self.trusted("df -Pk .", folder="/")
        words = out.split(b"\n")[1].split() if not code and out.count(b"\n") > 1 else []
        return len(words) > 3 and words[3].isdigit() and int(words[3]) < ENOUGH_MIB * 1024

    def trusted(self, command: str, seconds: float = DAEMON_S, folder: str | None = None,
                argument: str = "") -> tuple[int, bytes, bytes]:
        """Run a command of ours (never the agent's text) with $PRIVATE naming our own folder and $1 the argument.

        Returns exit code, stdout, stderr, whole. Raises Broke."""
        streams = {1: bytearray(), 2: bytearray()}

        def take(stream: int, chunk: bytes) -> None:
            streams[stream] += chunk
            if len(streams[stream]) > TRUSTED_BYTES:
                raise Broke(f"docker: more than {TRUSTED_BYTES} bytes of output from a command of ours")

        code = self._exec(["sh", "-c", command, "sh", argument], take, seconds, folder or self.root)
        if code is None:
            raise Broke(f"docker: a command of ours ran longer than {seconds:g} s")
        if code == 137:
            raise Broke("docker: a command of ours was killed")
        if code in (126, 128):  # not started: is that the container's end?
            self._check_alive()
        return code, bytes(streams[1]), bytes(streams[2])

    def _exec(self, argv: Sequence[str], take: Callable[[int, bytes], None], seconds: float, folder: str,
              watch: DiskWatch | None = None) -> int | None:
        """Run argv in the container, handing every piece of output (1 stdout, 2 stderr) to `take`. Exit code, or None
        when the time was up; then what runs is the caller's to end."""
        with daemon("exec"):
            exec_id, sock, frames = self._start(argv, folder)
            start = time.monotonic()  # the engine's own time is not the command's
            deadline = start + seconds
            try:
                ended = frames.read(take, min(deadline, start + LOOK_S))
                if not ended and deadline > start + LOOK_S:
                    with watch or nullcontext():
                        ended = frames.read(take, deadline)
                if not ended:
                    # Somebody must go on reading: while a flood is not taken off it, the engine holds the
                    # container's lock and answers nothing else about it.
                    threading.Thread(target=drain, args=(sock, 60.0), daemon=True).start()
                    sock = None
                    return None
            finally:
                if sock is not None:
                    sock.close()
            while (state := self.host.client.api.exec_inspect(exec_id))["Running"]:
                if time.monotonic() > deadline + KILL_S:
                    raise Broke("docker: the output of a command ended, the command does not")
                time.sleep(0.005)
            if state["ExitCode"] is None:
                raise Broke("docker: the container died under a command")
            return state["ExitCode"]

    def _start(self, argv: Sequence[str], folder: str) -> tuple[str, socket.socket, Frames]:
        api = self.host.client.api
        exec_id = api.exec_create(self.container.id, list(argv), workdir=folder,
                                  environment={"PRIVATE": PRIVATE})["Id"]
        sock, begun = hijacked(api.exec_start(exec_id, socket=True))
        return exec_id, sock, Frames(sock, begun)

    def _quick(self, command: str, seconds: float = KILL_S) -> bytes:
        """A short command's stdout, for when the container is in trouble: what came within so many seconds."""
        answer = bytearray()
        try:
            _, sock, frames = self._start(["sh", "-c", command], "/")
            try:
                frames.read(lambda stream, chunk: answer.extend(chunk) if stream == 1 else None,
                            time.monotonic() + seconds)
            finally:
                sock.close()
        except (docker.errors.APIError, OSError, requests.RequestException):
            pass
        return bytes(answer)

    def _check_alive(self) -> None:
        """Broke when the container takes no commands any more."""
        if self._quick("echo up") != b"up\n":
            raise Broke("docker: the container died under a command")

    def _kill_all(self) -> Report:
        """End everything in the container but process 1. Raises Broke when that cannot be made sure."""
        report = read_report(self._quick(KILL))
        if report is not None and not report.left:
            return report
        with daemon("restart"):
            for _ in range(10):  # the engine's word for a container's state may be late
                self.container.reload()
                if self.container.status != "running":
                    raise Broke("docker: the container died under a command")
                time.sleep(0.05)
            self.container.restart(timeout=0)
        report = read_report(self._quick(KILL, DAEMON_S))
        if report is None or report.left:
            raise Broke("docker: the container does not come back after a command that could not be killed")
        return report

    def _watch(self) -> DiskWatch:
        most = 0 if self.host.quota else self.limits.disk_mib
        return DiskWatch(most, self.written_mib, lambda: self._quick(KILL))

    def written_mib(self) -> float:
        """What the container holds beyond its image. Raises Broke."""
        with daemon("size"):
            found = self.host.client.api.containers(all=True, size=True, filters={"id": self.container.id})
        return found[0].get("SizeRw", 0) / 2**20 if found else 0.0

    # --- files ----------------------------------------------------------------------------------------------------

    def put(self, files: Mapping[str, bytes], private: bool = False) -> None:
        """Write many files under the root, or under $PRIVATE, in one call. Raises Broke."""
        folder = (PRIVATE if private else self.root).strip("/")
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as tar:
            for path, data in files.items():
                entry = tarfile.TarInfo(f"{folder}/{path}")
                entry.size, entry.mode, entry.mtime = len(data), 0o644, int(time.time())
                tar.addfile(entry, io.BytesIO(data))
        with daemon("put files"):
            if not self.container.put_archive("/", archive.getvalue()):
                raise Broke("docker: the engine did not take the files")

    def read(self, path: str) -> bytes:
        """See box.Sandbox.read."""
        code, data, err = self.trusted(READ, argument=path)
        self._raise_for(code, path, err)
        return data

    def write(self, path: str, data: bytes) -> None:
        """See box.Sandbox.write."""
        self.put({"data": data}, private=True)
        code, _, err = self.trusted(WRITE, argument=path)
        self._raise_for(code, path, err)

    @staticmethod
    def _raise_for(code: int, path: str, err: bytes) -> None:
        if code in (41, 43):
            raise PermissionError(f"{path}: is " + ("outside the repository" if code == 41 else "not a regular file"))
        if code == 42:
            raise IsADirectoryError(errno.EISDIR, "Is a directory", path)
        if code == 44:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        if code:
            text = err.decode("utf-8", "replace").strip()
            if re.search("No space left|Input/output error", text):
                raise Broke(f"docker: {text}")
            raise OSError(f"{path}: {text}")

    def close(self) -> None:
        """See box.Sandbox.close. Raises Broke when the engine does not let go of it; a box on loan goes back."""
        self.give_back(self) if self.give_back else self.end()

    def end(self) -> None:
        """Remove the container with its volumes. Raises Broke, and may be called again."""
        if self.container is not None:
            remove(self.container)
            self.container = None
        if self._own:
            self._own.close()

    def __enter__(self) -> "DockerSandbox":
        return self

    def __exit__(self, *exc) -> None:
        self.close()
