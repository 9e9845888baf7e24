"""Opening a fresh sandbox at a task's base, of the kind a run asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oprd.sandbox.box import Limits, Unusable
from oprd.sandbox.local import LocalSandbox
from oprd.sandbox.repo import prepare
from oprd.sandbox.sweep import sweep
from oprd.sandbox.task import Task

if TYPE_CHECKING:  # the docker SDK is an extra
    from oprd.sandbox.docker_host import DockerSettings
    from oprd.sandbox.docker_opener import DockerOpener


class LocalOpener:
    """Called with a task it opens a local box at its base; raises Broke, Unusable."""

    def __init__(self, limits: Limits, label: str):
        self.limits, self.label = limits, label

    def __call__(self, task: Task) -> LocalSandbox:
        if not task.files:
            raise Unusable(f"{task.instance_id}: a local sandbox needs the task's files; use sandbox.kind docker")
        box = LocalSandbox({}, self.limits, self.label)
        try:
            prepare(task, box)
        except BaseException:
            box.close()
            raise
        return box

    def sweep(self) -> list[str]:
        """End what dead runs left on this machine; a line for each thing removed."""
        return sweep()

    def close(self) -> None:
        """Nothing is held."""


def opener(kind: str, limits: Limits, label: str, image: str = "",
           docker: "DockerSettings | None" = None) -> "LocalOpener | DockerOpener":
    """What opens fresh boxes of `kind` (`local` or `docker`); `label` names the run; `image` is used for tasks that
    name none (MicroSWE's; it needs python3 and git). close() it. Nothing is reached before the first box or sweep.

    ValueError: no such kind, or the docker SDK is not installed.
    """
    if kind not in ("local", "docker"):
        raise ValueError(f"sandbox kind = {kind!r} must be local or docker")
    if kind == "local":
        return LocalOpener(limits, label)
    try:
        from oprd.sandbox.docker_host import DockerSettings
        from oprd.sandbox.docker_opener import DockerOpener
    except ImportError:
        raise ValueError("sandbox.kind = docker needs the docker package; install oprd[docker]") from None
    return DockerOpener(limits, label, image, docker or DockerSettings())
