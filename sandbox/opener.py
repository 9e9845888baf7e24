"""Opening a fresh sandbox at a task's base, of the kind a run asks for."""

from __future__ import annotations

from typing import Callable

from oprd.sandbox.box import Limits, Sandbox
from oprd.sandbox.local import LocalSandbox
from oprd.sandbox.repo import prepare
from oprd.sandbox.task import Task


def opener(kind: str, limits: Limits, label: str, image: str = "", client=None) -> Callable[[Task], Sandbox]:
    """A function that opens a fresh box of `kind` (`local` or `docker`) at a task's base; `label` names the run;
    `image` is used for tasks that name none (MicroSWE's; it needs python3 and git).

    The function raises Broke when the machine fails, ValueError for a task that this kind cannot hold.
    """
    if kind not in ("local", "docker"):
        raise ValueError(f"sandbox kind = {kind!r} must be local or docker")

    def open_box(task: Task) -> Sandbox:
        if kind == "local":
            if not task.files:
                raise ValueError(f"{task.instance_id}: a local sandbox needs the task's files; use sandbox.kind docker")
            box = LocalSandbox({}, limits, label)
        else:
            if not (task.image_name or image):
                raise ValueError(f"{task.instance_id}: its row has no image_name for a docker sandbox; "
                                 "set sandbox.image")
            from oprd.sandbox.docker_box import DockerSandbox  # the docker SDK is an extra

            box = DockerSandbox(task.image_name or image, limits, label, client)
        try:
            prepare(task, box)
        except BaseException:
            box.close()
            raise
        return box

    return open_box
