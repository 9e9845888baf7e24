"""Boxes of tasks on the engines of a run: one container an attempt, a fresh one to grade it, some kept ready."""

from __future__ import annotations

import threading
from collections import OrderedDict

from oprd.sandbox.box import Broke, Limits, Unusable
from oprd.sandbox.docker_box import DockerSandbox
from oprd.sandbox.docker_host import DockerHosts, DockerSettings
from oprd.sandbox.docker_sweep import sweep_engine
from oprd.sandbox.reaper import Reaper
from oprd.sandbox.repo import prepare
from oprd.sandbox.sealed import check_sealed
from oprd.sandbox.sweep import owner_is_dead
from oprd.sandbox.task import Task


class DockerOpener:
    """Called with a task it opens a fresh box at its base; raises Broke, Unusable. From several threads.

    The reaper starts before the first container. With settings.warm, the next box of the same kind (a task whose tree
    is the image's own, else an image) is made while this one is at work: the box for its grading is then there.
    """

    def __init__(self, limits: Limits, label: str, image: str = "", settings: DockerSettings = DockerSettings(),
                 client=None):
        self.limits, self.label, self.image, self.settings = limits, label, image, settings
        self.client = client
        self.hosts: DockerHosts | None = None
        self.reaper: Reaper | None = None
        self._lock = threading.Lock()
        self._open: set[DockerSandbox] = set()
        self._spare: OrderedDict[tuple[str, str], DockerSandbox] = OrderedDict()  # the one asked for last is last
        self._makers: set[threading.Thread] = set()
        self._sealed: set[tuple[str, str]] = set()
        self._closed = False

    def connect(self) -> DockerHosts:
        """Reach every engine and start the reaper, once. Raises Broke."""
        with self._lock:
            if self.hosts is None:
                hosts = DockerHosts(self.settings.hosts, self.client)
                try:
                    self.reaper = Reaper(self.label, self.settings.hosts)
                except BaseException:
                    hosts.close()
                    raise
                self.hosts = hosts
            return self.hosts

    def sweep(self) -> list[str]:
        """Remove what dead runs left on the engines; a line for each thing removed. Raises Broke."""
        return [line for host in self.connect().all for line in sweep_engine(host.client, owner_is_dead)]

    def __call__(self, task: Task) -> DockerSandbox:
        image = task.image_name or self.image
        if not image:
            raise Unusable(f"{task.instance_id}: its row has no image_name for a docker sandbox; set sandbox.image")
        self.connect()
        key = (image, "" if task.files else task.instance_id)
        with self._lock:
            box = self._spare.pop(key, None)
        box = box or self._make(task, image)
        try:
            if task.files:
                prepare(task, box)
        except BaseException:
            box.close()
            raise
        self._make_spare(key, task, image)
        return box

    def _make(self, task: Task, image: str) -> DockerSandbox:
        """A new box; of a task whose tree is the image's own, prepared and seen to hide its solution."""
        host = self.hosts.one()  # waits while no engine answers
        try:
            box = DockerSandbox(image, self.limits, self.label, host, self.settings, task.workdir)
        except BaseException as problem:
            self.hosts.back(host)
            if isinstance(problem, Broke):
                host.rest()
            raise
        box.give_back = self._give_back
        with self._lock:
            self._open.add(box)
        try:
            if not task.files:
                prepare(task, box)
                if (image, task.instance_id) not in self._sealed:
                    check_sealed(task, box)
                    self._sealed.add((image, task.instance_id))
        except BaseException:
            box.close()
            raise
        return box

    def _give_back(self, box: DockerSandbox) -> None:
        """End a box. One whose engine does not answer just now is tried again when everything is closed: what an
        attempt did is not lost by it."""
        with self._lock:
            if box not in self._open:
                return
        try:
            box.end()
        except Broke:
            box.host.rest()
            return
        with self._lock:
            self._open.discard(box)
        self.hosts.back(box.host)

    # --- boxes ahead of need ----------------------------------------------------------------------------------

    def _make_spare(self, key: tuple[str, str], task: Task, image: str) -> None:
        with self._lock:
            if self._closed or not self.settings.warm or key in self._spare \
                    or len(self._makers) >= self.settings.warm:
                return
            maker = threading.Thread(target=self._warm, args=(key, task, image), daemon=True)
            self._makers.add(maker)
        maker.start()

    def _warm(self, key: tuple[str, str], task: Task, image: str) -> None:
        try:
            box = self._make(task, image)
        except (Broke, Unusable):  # whoever needs one makes it himself, and is told then
            box = None
        surplus = []
        with self._lock:
            self._makers.discard(threading.current_thread())
            if box is not None:
                surplus = [box] if self._closed or key in self._spare else []
                if not surplus:
                    self._spare[key] = box
            while len(self._spare) > self.settings.warm:
                surplus.append(self._spare.popitem(last=False)[1])
        for box in surplus:
            box.close()

    def close(self) -> None:
        """Remove every box, let the reaper go, close the clients. Idempotent. What an engine does not let go of now is
        left to the reaper: it is then not told good-bye."""
        with self._lock:
            self._closed = True
            makers = list(self._makers)
        for maker in makers:
            maker.join()
        self._spare.clear()
        for box in list(self._open):
            box.close()
        if self.reaper is not None and not self._open:
            self.reaper.close()
        if self.hosts is not None:
            self.hosts.close()
