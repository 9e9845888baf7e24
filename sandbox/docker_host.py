"""Docker engines: one client each, attempts spread over them, their images and their disks.

An engine is named as in DOCKER_HOST: `unix:///path`, `tcp://host:port` (TLS by DOCKER_TLS_VERIFY and
DOCKER_CERT_PATH), or `ssh://user@host[:port][/path/of/socket]`, which is reached through a tunnel of the machine's own
ssh (so its keys, its configuration and its agent count). An engine that fails gets no new boxes for REST_S seconds.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import tempfile
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator, Sequence
from urllib.parse import urlsplit

import docker
import requests

from oprd.sandbox.box import Broke, Unusable

DAEMON_S = 60.0  # the longest any call to an engine may take
PULL_S = 1800.0  # the longest silence of an engine that pulls an image
TUNNEL_S = 30.0  # how long ssh may take to open a tunnel
REST_S = 30.0
OUTAGE_S = 120.0  # how long attempts wait for an engine when none answers
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DockerSettings:
    """How containers are made. hosts: engines ("" and none: DOCKER_HOST or the machine's own). network: `none`, or an
    engine's network by name. mounts: "/on/the/engine's/machine:/inside", always read-only. environment: "NAME=value",
    on top of the image's. pulls: tries at an image that an engine lacks; 0: it must be there. free_gib: least free
    space on an engine's disk (known for engines of this machine). warm: boxes kept ready."""

    hosts: tuple[str, ...] = ()
    network: str = "none"
    mounts: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    pulls: int = 4
    free_gib: float = 4.0
    warm: int = 0


@contextmanager
def daemon(what: str) -> Iterator[None]:
    """Whatever the engine does wrong is the machine's failure."""
    try:
        yield
    except (docker.errors.DockerException, requests.RequestException, OSError) as problem:
        raise Broke(f"docker: {what}: {problem}") from problem


class DockerHost:
    """One engine. Safe to use from several threads. Raises Broke when it does not answer, ValueError for a bad name."""

    def __init__(self, url: str = "", client: docker.DockerClient | None = None):
        self.url, self.boxes, self.rests_until = url, 0, 0.0
        self.quota = True  # until the engine's storage says that it limits no container's disk
        self._tunnel: subprocess.Popen | None = None
        self._folder: str | None = None
        self._lock, self._pulling = threading.Lock(), {}
        self._folders: dict[str, str] = {}  # image -> its working folder
        self._mine: dict[str, float] = {}  # images that this run pulled -> when they were last asked for
        self._root: Path | None = None  # where the engine keeps its data, if that is on this machine
        self._lent = client is not None
        if client is not None:
            self.client = client
            return
        try:
            with daemon(f"no engine at {url or 'DOCKER_HOST'}"):
                self.client = self._connect(url)
                self.client.ping()
        except BaseException:
            self.close()
            raise

    def _connect(self, url: str) -> docker.DockerClient:
        if url and urlsplit(url).scheme not in ("unix", "tcp", "http", "https", "ssh"):
            raise ValueError(f"docker engine {url!r} must be unix://..., tcp://host:port or ssh://user@host")
        url = url or os.environ.get("DOCKER_HOST", "")
        if url.startswith("ssh://"):
            url = self._open_tunnel(url)
        environment = {**os.environ, **({"DOCKER_HOST": url} if url else {})}
        return docker.from_env(environment=environment, timeout=DAEMON_S, max_pool_size=64)

    def _open_tunnel(self, url: str) -> str:
        """Forward a socket of ours to the engine's; its URL."""
        parts = urlsplit(url)
        self._folder = self._folder or tempfile.mkdtemp(prefix="oprd-ssh-")
        socket = f"{self._folder}/engine"
        Path(socket).unlink(missing_ok=True)
        port = ["-p", str(parts.port)] if parts.port else []
        user = f"{parts.username}@" if parts.username else ""
        self._tunnel = subprocess.Popen(
            ["ssh", "-nNT", "-o", "BatchMode=yes", "-o", "ExitOnForwardFailure=yes", "-o", "ServerAliveInterval=15",
             *port, "-L", f"{socket}:{parts.path.rstrip('/') or '/var/run/docker.sock'}", f"{user}{parts.hostname}"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)
        deadline = time.monotonic() + TUNNEL_S
        while not os.path.exists(socket):
            if self._tunnel.poll() is not None:
                raise OSError(f"ssh: {self._tunnel.stderr.read().decode('utf-8', 'replace').strip()[-500:]}")
            if time.monotonic() > deadline:
                raise OSError(f"ssh has opened no tunnel in {TUNNEL_S:g} s")
            time.sleep(0.02)
        return f"unix://{socket}"

    def mend(self) -> None:
        """Open the tunnel again if it broke. Raises Broke."""
        with self._lock:
            if self._tunnel is not None and self._tunnel.poll() is not None:
                with daemon("tunnel"):
                    self._open_tunnel(self.url)

    def answers(self) -> bool:
        try:
            self.mend()
            return bool(self.client.ping())
        except (Broke, docker.errors.DockerException, requests.RequestException, OSError):
            return False

    def rest(self) -> None:
        self.rests_until = time.monotonic() + REST_S

    def close(self) -> None:
        """End the client and the tunnel. Idempotent."""
        client, self.client = getattr(self, "client", None), None
        if client is not None and not self._lent:
            client.close()
        tunnel, self._tunnel = self._tunnel, None
        if tunnel is not None:
            tunnel.kill()
            tunnel.wait()
            tunnel.stderr.close()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    # --- images and disk ------------------------------------------------------------------------------------------

    def folder_of(self, image: str, settings: DockerSettings) -> str:
        """The image's working folder; it is pulled if need be, once however many ask. Unusable: there is no such
        image anywhere."""
        with self._lock:
            lock = self._pulling.setdefault(image, threading.Lock())
        with lock:
            self.check_disk(settings.free_gib)
            if image in self._mine:
                self._mine[image] = time.monotonic()
            if image not in self._folders:
                self._folders[image] = self._look(image, settings)
            return self._folders[image]

    def _look(self, image: str, settings: DockerSettings) -> str:
        with daemon("image"):
            try:
                return self.client.images.get(image).attrs["Config"].get("WorkingDir") or ""
            except docker.errors.ImageNotFound as problem:
                if not settings.pulls:
                    raise Unusable(f"the docker engine has no image {image}; pull or build it first") from problem
        self._pull(image, settings.pulls)
        self._mine[image] = time.monotonic()
        with daemon("image"):
            return self.client.images.get(image).attrs["Config"].get("WorkingDir") or ""

    def lost(self, image: str) -> None:
        """The engine says that it has the image no more: somebody removed it."""
        self._folders.pop(image, None)

    def _pull(self, name: str, tries: int) -> None:
        repository, tag = docker.utils.parse_repository_tag(name)
        for attempt in range(tries):
            try:
                for line in self.client.api.pull(repository, tag or "latest", stream=True, decode=True):
                    if "error" in line:
                        raise docker.errors.DockerException(line["error"])
                return
            except (docker.errors.DockerException, requests.RequestException, OSError) as problem:
                text = str(problem).lower()
                if any(sign in text for sign in ("not found", "manifest unknown", "access denied", "does not exist",
                                                 "invalid reference")):
                    raise Unusable(f"the docker engine has no image {name} and cannot pull it: {problem}") from problem
                if attempt == tries - 1:
                    raise Broke(f"docker: image {name} not pulled in {tries} tries: {problem}") from problem
                log.warning("image %s: %s; trying again", name, problem)
                time.sleep(min(60.0, 2.0 ** attempt))

    def check_disk(self, least_gib: float) -> None:
        """Broke when the engine's disk has less than `least_gib` free, after images this run pulled were given up."""
        while (free := self.free_gib()) is not None and free < least_gib:
            if not self._forget_an_image():
                raise Broke(f"docker: {free:.1f} GiB free on the engine's disk, less than {least_gib:g}; remove images "
                            "or lower sandbox.free_gib")

    def free_gib(self) -> float | None:
        """Free space where the engine keeps its data; None for an engine on another machine."""
        if self._root is None:
            with daemon("info"):
                here = str(self.client.api.base_url).startswith("http+docker://") and self._tunnel is None
                self._root = Path(self.client.info().get("DockerRootDir") or "/nonexistent") if here else Path()
        if not self._root.is_absolute() or not self._root.exists():
            return None
        space = os.statvfs(self._root)
        return space.f_bavail * space.f_frsize / 2**30

    def _forget_an_image(self) -> bool:
        """Remove the image of ours that was not asked for the longest; one in use stays (the engine refuses)."""
        for name in sorted(self._mine, key=self._mine.get):
            self._mine.pop(name, None)
            self.lost(name)
            try:
                self.client.images.remove(name)
                log.warning("image %s removed: the engine's disk is nearly full", name)
                return True
            except (docker.errors.DockerException, requests.RequestException):
                continue
        return False


class DockerHosts:
    """The engines of a run. `one()` lends the least busy of those that work."""

    def __init__(self, urls: Sequence[str] = (), client: docker.DockerClient | None = None):
        """Raises Broke when one of them does not answer: a run starts with all it names."""
        self.all: list[DockerHost] = []
        self._lock = threading.Lock()
        try:
            for url in urls or ("",):
                self.all.append(DockerHost(url, client))
        except BaseException:
            self.close()
            raise

    def one(self, patience_s: float = OUTAGE_S) -> DockerHost:
        """The host with the fewest boxes; counts one more there, until `back`. Where all rest, the first that answers
        again: an engine that is being restarted must not cost every attempt its few tries. Broke when none does."""
        deadline = time.monotonic() + patience_s
        while True:
            with self._lock:
                able = [host for host in self.all if host.rests_until <= time.monotonic()]
                if able:
                    host = min(able, key=lambda host: host.boxes)
                    host.boxes += 1
                    return host
            for host in self.all:
                if host.answers():
                    host.rests_until = 0.0
            if time.monotonic() > deadline:
                raise Broke(f"docker: no engine has answered for {patience_s:g} s")
            time.sleep(0.2)

    def back(self, host: DockerHost) -> None:
        with self._lock:
            host.boxes -= 1

    def close(self) -> None:
        for host in self.all:
            host.close()
