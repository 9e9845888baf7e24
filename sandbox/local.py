"""A sandbox made of a temp folder and subprocesses. It limits and cleans up; it is NO security boundary.

    /dev/shm/oprd-<run label>/box-XXXX/repo     the private copy; commands see it as /mnt
                                      /tmp      the commands' /tmp and HOME
                                      /private  our own git data (see sandbox/repo.py); hidden behind the commands' /tmp

Every command gets its own PID namespace when the kernel allows it (root, or unprivileged user namespaces). Its
first process is a small shell; when that one ends, for whatever reason, the kernel kills all that is left in the
namespace, `setsid` daemons included. The chain trainer -> unshare -> first process is tied with "kill me when my
parent dies", so a trainer killed with SIGKILL takes its commands along at once. A mount namespace gives every box
the same path, so that tracebacks do not differ between runs. A command costs about 6 ms more than a bare shell; on a
machine whose cores are all busy it waits (idle, not computing) some 20 ms for the kernel to bury the namespaces.

Where namespaces are refused (many containers), the command's session is killed and /proc/*/environ is searched
for the box's marker; a process that both starts a new session and wipes its environment escapes that search.

Limits: CPU seconds, address space and file size are rlimits and hold per process. RLIMIT_NPROC is of no use (it
does not bind root, and elsewhere counts all of the user's processes): the number of processes is looked at from
outside every TICK seconds, and from Linux 6.14 on the namespace's own pid_max bounds a fork bomb between two looks.
"""

from __future__ import annotations

import errno
import functools
import os
import re
import selectors
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Mapping

from oprd.sandbox.box import Broke, Limits, Ran
from oprd.sandbox.output import HeadTail
from oprd.sandbox.sweep import FOLDER_PREFIX, MARKER, descendants, folders, kill_marked

ROOT = "/mnt"  # exists on every Linux and is empty on nearly all
TICK = 0.02  # seconds between looks at the number of processes
GRACE = 1.0  # seconds in which what is already in the pipe is taken, once nobody should hold it any more
TEARDOWN = 30.0  # seconds the kernel may take to bury a killed tree (thousands of processes after a fork bomb)
TIE = ("setpriv", "--pdeathsig", "KILL", "unshare", "--pid", "--fork", "--kill-child=KILL", "--mount-proc")

KEEP_FOLDER = "trap '{ pwd -P >&9; } 2>/dev/null' 0; "
GONE = "(the working directory $2 is gone; this ran in $PWD)"

MOUNT = f'mount --bind "$1/repo" {ROOT} && '
MASK_TMP = 'mount --bind "$1/tmp" /tmp && '


@functools.lru_cache(maxsize=None)
def launcher() -> tuple[str, ...]:
    """The command prefix that gives a command its own namespaces; empty where the machine refuses them."""
    for extra in ((), ("--user", "--map-root-user")):
        probe = [*TIE, *extra, "sh", "-c", f"mount --bind /tmp {ROOT}"]
        try:
            if subprocess.run(probe, stdin=subprocess.DEVNULL, capture_output=True, timeout=10).returncode == 0:
                return (*TIE, *extra)
        except (OSError, subprocess.TimeoutExpired):
            pass
    return ()


def _new_folder(run_folder: Path) -> Path:
    """A folder of its own inside the run's. The run's goes whenever its last box closes, so it may go in between."""
    for attempt in range(100):
        try:
            run_folder.mkdir(mode=0o700, exist_ok=True)
            return Path(tempfile.mkdtemp(prefix="box-", dir=run_folder))
        except (FileNotFoundError, FileExistsError):
            if attempt == 99:
                raise


def environment(folder: Path, label: str) -> dict[str, str]:
    """A command's whole environment: nothing is inherited, so no token or key of the trainer's can leak."""
    tmp = "/tmp" if launcher() and _tmp_can_be_masked() else str(folder / "tmp")
    return {"PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": tmp,
            "TMPDIR": tmp, "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0",
            "TERM": "dumb", "PAGER": "cat", "EDITOR": "true", "GIT_PAGER": "cat", "GIT_EDITOR": "true",
            "GIT_TERMINAL_PROMPT": "0", "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": "/dev/null",
            MARKER: f"{label}/{folder.name}"}


def _tmp_can_be_masked() -> bool:
    """The interpreter must stay visible to the commands (a virtual environment may live in /tmp)."""
    return not any(p.startswith("/tmp/") for p in (sys.prefix, sys.base_prefix, sys.executable))


def _kernel() -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2])


class LocalSandbox:
    """See the file's docstring. `label` names the run that owns the box (sweep.run_label)."""

    def __init__(self, files: Mapping[str, bytes], limits: Limits, label: str):
        """Raises Broke when the copy cannot be made."""
        self.limits = limits
        self.isolated = bool(launcher())
        self.root = ROOT
        self.base: object = None  # what prepare() recorded about the base tree
        try:
            run_folder = folders()[0] / f"{FOLDER_PREFIX}{label}"
            self.folder = _new_folder(run_folder)
            for name in ("repo", "tmp", "private"):
                (self.folder / name).mkdir()
        except OSError as problem:
            raise Broke(f"no folder for a sandbox: {problem}") from problem
        self.host_root = self.folder / "repo"
        self.env = environment(self.folder, label)
        limit = (f"ulimit -t {int(limits.cpu_s)}; ulimit -v {limits.memory_mib * 1024}; "
                 f"ulimit -f {limits.file_mib * 2048}; ulimit -c 0; ")
        if self.isolated and _kernel() >= (6, 14):  # before, pid_max is the whole machine's
            # after the first round of numbers the kernel gives out those from 300 on
            limit += f"echo {300 + limits.processes} > /proc/sys/kernel/pid_max; "
        mounts = MOUNT + (MASK_TMP if _tmp_can_be_masked() else "") + f"cd {ROOT} && " if self.isolated else ""
        # stderr joins stdout only inside: the launcher's own messages are not the command's. The marker file tells
        # "our launcher failed" from "the command failed". The inner shell keeps the namespace's first process ours:
        # default actions of signals are ignored there.
        # $2, where to start, is given when the command's last folder is asked for: it goes to a file opened by then.
        self.start = (f': > "$1/started" && {{ [ -z "$2" ] || exec 9>"$1/private/folder"; }} && {mounts}{{ {limit}}} '
                      f'2>/dev/null; exec 2>&1; [ -z "$2" ] || cd "$2" 2>/dev/null || echo "{GONE}"; '
                      'sh -c "$0"; exit $?')
        self.put(files)

    def run(self, command: str, seconds: float | None = None, output_bytes: int | None = None,
            folder: str | None = None) -> Ran:
        """See box.Sandbox.run. Nothing the command started outlives it."""
        limit = self.limits.command_s if seconds is None else seconds
        self.host_root.mkdir(exist_ok=True)  # `rm -rf "$PWD"` is the agent's mistake, not the machine's
        start = folder or ""
        if folder is not None:
            start, command = folder or ROOT, KEEP_FOLDER + command
        if not self.isolated:
            command = command.replace(ROOT + "/", f"{self.host_root}/")
            start = f"{self.host_root}{start.removeprefix(ROOT)}" if f"{start}/".startswith(ROOT + "/") else start
        argv = [*launcher(), "sh", "-c", self.start, command, str(self.folder), start]
        try:
            process = subprocess.Popen(argv, cwd=self.host_root, env=self.env, stdin=subprocess.DEVNULL,
                                       stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
        except (OSError, ValueError) as problem:
            if isinstance(problem, ValueError) or problem.errno == errno.E2BIG:  # a NUL byte, a too long command
                return Ran(f"sh: {problem}\n", 126, folder=folder)
            raise Broke(f"a command cannot be started: {problem}") from problem
        kept = HeadTail(output_bytes or self.limits.output_bytes)
        try:
            why = self._watch(process, kept, time.monotonic() + limit)
        finally:
            self._end(process, kept)
        ran = self._ran(process.returncode, kept, why, limit)
        return ran if folder is None else replace(ran, folder=self._last_folder() or folder or ROOT)

    def _last_folder(self) -> str:
        """Where the shell stood when it ended; "" when it did not come to say it."""
        said = (self.folder / "private" / "folder").read_text("utf-8", "surrogateescape").removesuffix("\n")
        if not self.isolated and f"{said}/".startswith(f"{self.host_root}/"):
            said = ROOT + said.removeprefix(str(self.host_root))
        return said

    def _watch(self, process: subprocess.Popen, kept: HeadTail, deadline: float) -> str:
        """Read until the command ends. Returns why it must be killed, or "" when it ended by itself."""
        pipe = process.stdout.fileno()
        look = time.monotonic() + TICK
        with selectors.DefaultSelector() as ready:
            ready.register(pipe, selectors.EVENT_READ)
            open_ = True
            while True:
                now = time.monotonic()
                if now >= deadline:
                    return "time"
                if now >= look:
                    if len(descendants(process.pid, self.limits.processes)) > self.limits.processes:
                        return "processes"
                    look = now + TICK
                wait = min(deadline, look) - now
                if not open_:  # the command closed its output and works on
                    try:
                        process.wait(wait)
                        return ""
                    except subprocess.TimeoutExpired:
                        continue
                if ready.select(wait if self.isolated else min(wait, 0.02)):
                    chunk = os.read(pipe, 65536)
                    kept.add(chunk)
                    open_ = bool(chunk)
                elif process.poll() is not None:  # ended, and a background child holds the pipe
                    return ""

    def _end(self, process: subprocess.Popen, kept: HeadTail) -> None:
        """Kill what is left of the command's tree, reap it, and take the output that is already in the pipe."""
        if process.poll() is None:
            first = descendants(process.pid, 1)[:1] if self.isolated else []
            _kill(*first or [process.pid])  # the namespace's first process: `unshare` ends after all of it is gone
        if not self.isolated:
            kill_marked(self.env[MARKER], group=process.pid)
        try:
            process.wait(TEARDOWN)
        except subprocess.TimeoutExpired as problem:
            raise Broke(f"process {process.pid} does not end after SIGKILL") from problem
        self._drain(process.stdout.fileno(), kept)
        process.stdout.close()

    @staticmethod
    def _drain(pipe: int, kept: HeadTail) -> None:
        deadline = time.monotonic() + GRACE
        with selectors.DefaultSelector() as ready:
            ready.register(pipe, selectors.EVENT_READ)
            while time.monotonic() < deadline and ready.select(0):
                chunk = os.read(pipe, 65536)
                if not chunk:
                    return
                kept.add(chunk)

    def _ran(self, status: int, kept: HeadTail, why: str, limit: float) -> Ran:
        started = self.folder / "started"
        if not started.exists():
            raise Broke(f"the launcher of a command failed with status {status}: {' '.join(launcher())}")
        started.unlink()
        text = kept.text()
        if not self.isolated:
            text = text.replace(str(self.host_root), ROOT)
        if why == "time":
            text += f"\n[timed out after {limit:g} s; the command and everything it started were killed]\n"
        if why == "processes":
            text += f"\n[killed: more than {self.limits.processes} processes]\n"
        code = 137 if why else status if status >= 0 else 128 - status
        return Ran(text, code, timed_out=why == "time")

    def trusted(self, command: str, seconds: float = 60.0) -> tuple[int, bytes, bytes]:
        """Run a command of ours (never the agent's text) in the root, outside the limits, with $PRIVATE naming the
        folder that agents cannot see. Returns exit code, stdout, stderr, whole. Raises Broke."""
        try:
            done = subprocess.run(["sh", "-c", command], cwd=self.host_root, stdin=subprocess.DEVNULL,
                                  capture_output=True, timeout=seconds,
                                  start_new_session=True,  # a terminal's Ctrl-C is the trainer's to answer
                                  env={**self.env, "PRIVATE": str(self.folder / "private")})
        except (OSError, subprocess.TimeoutExpired) as problem:
            raise Broke(f"a sandbox command of ours failed: {problem}") from problem
        return done.returncode, done.stdout, done.stderr

    def put(self, files: Mapping[str, bytes], private: bool = False) -> None:
        """Write many files under the root, or under $PRIVATE. Raises Broke, PermissionError."""
        if not private:
            for path, data in files.items():
                self.write(path, data)
            return
        try:
            for path, data in files.items():
                target = self.folder / "private" / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(data)
        except OSError as problem:
            raise Broke(f"sandbox folder cannot be written: {problem}") from problem

    def read(self, path: str) -> bytes:
        """See box.Sandbox.read."""
        with open(os.open(self._inside(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            return file.read()

    def write(self, path: str, data: bytes) -> None:
        """See box.Sandbox.write."""
        target = self._inside(path)
        try:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with open(target, "wb") as file:
                file.write(data)
        except OSError as problem:
            if problem.errno in (errno.ENOSPC, errno.EIO, errno.EDQUOT):
                raise Broke(f"sandbox folder cannot be written: {problem}") from problem
            raise

    def _inside(self, path: str) -> str:
        """The host path behind a path as commands see it; PermissionError when it leaves the root."""
        if "\0" in path:
            raise PermissionError(f"{path!r}: a path cannot hold a NUL byte")
        if path == self.root or path.startswith(self.root + "/"):
            path = os.path.relpath(path, self.root)
        root = os.path.realpath(self.host_root)
        target = os.path.realpath(os.path.join(root, path))
        if os.path.commonpath([root, target]) != root:
            raise PermissionError(f"{path}: is outside the repository")
        if os.path.exists(target):
            mode = os.stat(target).st_mode
            if stat.S_ISDIR(mode):
                raise IsADirectoryError(errno.EISDIR, "Is a directory", path)
            if not stat.S_ISREG(mode):
                raise PermissionError(f"{path}: is not a regular file")
        return target

    def close(self) -> None:
        """See box.Sandbox.close."""
        if not self.isolated:
            kill_marked(self.env[MARKER])
        remove_tree(self.folder)
        try:
            self.folder.parent.rmdir()
        except OSError:  # other boxes of the run are open
            pass

    def __enter__(self) -> "LocalSandbox":
        return self

    def __exit__(self, *exc) -> None:
        self.close()


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def remove_tree(folder: Path) -> None:
    """Remove a folder, also one whose subfolders were made read-only. Missing is fine."""

    def allow(function, path, _):
        try:
            os.chmod(os.path.dirname(path), 0o700)
            if os.path.isdir(path) and not os.path.islink(path):
                os.chmod(path, 0o700)
                shutil.rmtree(path, ignore_errors=True)
            else:
                os.unlink(path)
        except OSError:
            pass

    shutil.rmtree(folder, onerror=allow)
