"""A sandbox that is a Docker container: no network, no capabilities, memory, CPU and process limits.

Process 1 of the container is a small shell that only waits. Every command runs under a wrapper that, when the
command ends, kills everything else in the container (`kill -1` spares process 1 and the caller, and leaves no gap
for a fork). A command at its wall limit is ended the same way from a second exec; where even that cannot start (a
fork bomb ate all processes), the container is restarted, which keeps its files; where that fails, it Broke.
"""

from __future__ import annotations

import errno
import io
import re
import socket
import struct
import tarfile
import threading
import time
import uuid
from contextlib import contextmanager
from typing import Callable, Iterator, Mapping, Sequence

import docker
import requests
from docker.types import Ulimit

from oprd.sandbox.box import Broke, Limits, Ran
from oprd.sandbox.output import HeadTail

RUN_LABEL = "oprd.run"
DAEMON_S = 60.0  # the longest any call to the daemon may take
KILL_S = 5.0  # how long a kill inside the container may take before the container is restarted
LIFETIME_S = 24 * 3600  # a container whose owner cannot be found out ends by itself
PRIVATE = "/.oprd"
TRUSTED_BYTES = 256 * 2**20  # of our own commands' output; more is a failure, never a silent cut

WAIT = f'end=$(($(date +%s) + {LIFETIME_S})); while [ "$(date +%s)" -lt "$end" ]; do sleep 600; done'
# One pipe for both streams keeps their order.
WRAP = 'exec 2>&1; mkdir -p "$1" && cd "$1" || exit 125; ' \
       'sh -c "$0" </dev/null; code=$?; kill -9 -1 2>/dev/null; exit $code'
ENVIRONMENT = {"HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0",
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


@contextmanager
def _daemon(what: str) -> Iterator[None]:
    """Whatever the engine does wrong is the machine's failure."""
    try:
        yield
    except (docker.errors.DockerException, requests.RequestException, OSError) as problem:
        raise Broke(f"docker: {what}: {problem}") from problem


class DockerSandbox:
    """See the file's docstring. `label` names the run that owns the box (sweep.run_label)."""

    def __init__(self, image: str, limits: Limits, label: str, client: docker.DockerClient | None = None):
        """Raises ValueError when the engine has no such image, Broke when it does not answer."""
        self.limits = limits
        self.base: object = None  # what prepare() recorded about the base tree
        self.container = None
        with _daemon("no engine"):
            self.client = client or docker.from_env(timeout=DAEMON_S)
        try:
            with _daemon("no sandbox"):
                workdir = self.client.images.get(image).attrs["Config"].get("WorkingDir") or ""
                self.root = workdir if workdir.strip("/") else "/repo"
                self.container = self._create(image, label)
                self.container.start()
                self.put({"data": b""}, private=True)
            code, _, err = self.trusted(f"mkdir -p '{self.root}' && chmod 700 {PRIVATE}", folder="/")
            if code:
                raise Broke(f"docker: image {image} cannot make {self.root}: {err[:200]!r}")
        except Broke as problem:
            self.close()
            if isinstance(problem.__cause__, docker.errors.ImageNotFound):
                raise ValueError(f"the docker engine has no image {image}; pull or build it first") from problem
            raise
        except BaseException:
            self.close()
            raise

    def _create(self, image: str, label: str):
        limits = self.limits
        seconds, size = int(limits.cpu_s), limits.file_mib * 2**20
        return self.client.containers.create(
            image, entrypoint=["/bin/sh", "-c", WAIT], command=[], name=f"oprd-{label}-{uuid.uuid4().hex[:12]}",
            labels={RUN_LABEL: label}, environment=ENVIRONMENT, working_dir="/", user="0", network_mode="none",
            cap_drop=["ALL"], security_opt=["no-new-privileges"], mem_limit=f"{limits.memory_mib}m",
            memswap_limit=f"{limits.memory_mib}m", pids_limit=limits.processes, nano_cpus=10**9,
            ulimits=[Ulimit(name="cpu", soft=seconds, hard=seconds), Ulimit(name="fsize", soft=size, hard=size),
                     Ulimit(name="core", soft=0, hard=0)], log_config={"Type": "none"})

    def run(self, command: str, seconds: float | None = None, output_bytes: int | None = None) -> Ran:
        """See box.Sandbox.run. Nothing the command started outlives it."""
        limit = self.limits.command_s if seconds is None else seconds
        if "\0" in command:
            return Ran("sh: a command cannot hold a NUL byte\n", 126)
        kept = HeadTail(output_bytes or self.limits.output_bytes)
        argv = ["sh", "-c", WRAP, command, self.root]  # `rm -rf "$PWD"` is the agent's mistake, not the machine's
        code = self._exec(argv, lambda stream, chunk: kept.add(chunk), limit, "/")
        if code is None:
            note = f"\n[timed out after {limit:g} s; the command and everything it started were killed]\n"
            return Ran(kept.text() + note, 137, timed_out=True)
        return Ran(kept.text(), code)

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
        return code, bytes(streams[1]), bytes(streams[2])

    def _exec(self, argv: Sequence[str], take: Callable[[int, bytes], None], seconds: float,
              folder: str) -> int | None:
        """Run argv in the container, handing every chunk (1 stdout, 2 stderr) to `take`. Exit code, or None when
        the time was up and everything in the container was killed."""
        deadline = time.monotonic() + seconds
        with _daemon("exec"):
            exec_id, stream = self._start(argv, folder)
            try:
                if not _read_frames(stream, take, deadline):
                    # Somebody must go on reading: while a flood is not taken off it, the engine holds the
                    # container's lock and answers nothing else about it.
                    drain = threading.Thread(target=_drain, args=(stream,), daemon=True)
                    drain.start()
                    self._kill_all()
                    drain.join(KILL_S)
                    return None
            finally:
                stream.close()
            while (state := self.client.api.exec_inspect(exec_id))["Running"]:
                if time.monotonic() > deadline + KILL_S:
                    raise Broke("docker: the output of a command ended, the command does not")
                time.sleep(0.005)
            code = state["ExitCode"]
            # Killed, or not started: the command's own doing, or the container's end?
            if code is None or code in (126, 128, 137) and not self._answers():
                raise Broke("docker: the container died under a command")
        return code

    def _start(self, argv: Sequence[str], folder: str) -> tuple[str, socket.socket]:
        api = self.client.api
        exec_id = api.exec_create(self.container.id, list(argv), workdir=folder,
                                  environment={"PRIVATE": PRIVATE})["Id"]
        stream = api.exec_start(exec_id, socket=True)
        return exec_id, getattr(stream, "_sock", stream)

    def _answers(self) -> bool:
        """Whether the container still takes commands. The engine's own word for its state may be late."""
        _, stream = self._start(["sh", "-c", "echo up"], "/")
        answer = bytearray()
        _read_frames(stream, lambda _, chunk: answer.extend(chunk), time.monotonic() + KILL_S)
        stream.close()
        return answer == b"up\n"

    def _kill_all(self) -> None:
        """End everything in the container but process 1. Raises Broke when that cannot be made sure."""
        try:
            _, stream = self._start(["sh", "-c", "kill -9 -1"], "/")
            ended = _read_frames(stream, lambda *_: None, time.monotonic() + KILL_S)
            stream.close()
            if ended and not self._left():
                return
        except (docker.errors.APIError, OSError):
            pass
        with _daemon("restart"):
            self.container.restart(timeout=0)
            if not self._answers() or self._left():
                raise Broke("docker: the container does not come back after a command that could not be killed")

    def _left(self) -> int:
        """Running processes beside process 1 and the ones it waits for, which it started itself."""
        table = self.container.top(ps_args="-eo pid,ppid,stat")["Processes"] or []
        alive = {pid: parent for pid, parent, state in table if not state.startswith("Z")}
        first = next((pid for pid, parent in alive.items() if parent not in alive), None)
        return sum(1 for pid, parent in alive.items() if first not in (pid, parent))

    def put(self, files: Mapping[str, bytes], private: bool = False) -> None:
        """Write many files under the root, or under $PRIVATE, in one call. Raises Broke."""
        folder = (PRIVATE if private else self.root).strip("/")
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as tar:
            for path, data in files.items():
                entry = tarfile.TarInfo(f"{folder}/{path}")
                entry.size, entry.mode, entry.mtime = len(data), 0o644, int(time.time())
                tar.addfile(entry, io.BytesIO(data))
        with _daemon("put files"):
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
        """See box.Sandbox.close."""
        container, self.container = self.container, None
        if container is not None:
            _remove(container)

    def __enter__(self) -> "DockerSandbox":
        return self

    def __exit__(self, *exc) -> None:
        self.close()


def sweep_containers(client: docker.DockerClient, is_dead: Callable[[str], bool]) -> list[str]:
    """Remove the containers whose run label has a dead owner. One line for each."""
    done = []
    with _daemon("sweep"):
        for container in client.containers.list(all=True, filters={"label": RUN_LABEL}, ignore_removed=True):
            if is_dead(container.labels.get(RUN_LABEL, "")):
                _remove(container)
                done.append(f"container {container.name}")
    return done


def _remove(container) -> None:
    """The container and its anonymous volumes; that it is gone already is fine."""
    with _daemon("remove"):
        try:
            container.remove(force=True, v=True)
        except docker.errors.NotFound:
            pass
        except docker.errors.APIError as problem:
            if "already in progress" not in str(problem):
                raise


def _drain(stream: socket.socket) -> None:
    try:
        _read_frames(stream, lambda *_: None, time.monotonic() + 4 * KILL_S)
    except (OSError, ValueError):  # closed under us: the box is given up
        pass


def _read_frames(sock: socket.socket, take: Callable[[int, bytes], None], deadline: float) -> bool:
    """Read Docker's multiplexed stream (8-byte header: stream, 3 zeros, big-endian length) until it ends.

    False when the deadline came first."""
    left, stream, header = 0, 1, b""
    while (wait := deadline - time.monotonic()) > 0:
        sock.settimeout(wait)
        try:
            chunk = sock.recv(min(left or 8 - len(header), 65536))
        except TimeoutError:
            return False
        if not chunk:
            return True
        if left:
            take(stream, chunk)
            left -= len(chunk)
        else:
            header += chunk
            if len(header) == 8:
                stream, left = struct.unpack(">BxxxL", header)
                stream, header = 2 if stream == 2 else 1, b""
    return False
