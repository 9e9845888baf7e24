"""Removing a run's containers, with their anonymous volumes, and its networks, from an engine."""

from __future__ import annotations

from typing import Callable

import docker

from oprd.sandbox.docker_host import daemon

RUN_LABEL = "oprd.run"


def sweep_engine(client: docker.DockerClient, is_dead: Callable[[str], bool]) -> list[str]:
    """Remove what carries the label of a run that `is_dead`. One line for each thing removed. Raises Broke."""
    done = []
    with daemon("sweep"):
        for container in client.containers.list(all=True, filters={"label": RUN_LABEL}, ignore_removed=True):
            if is_dead(container.labels.get(RUN_LABEL, "")):
                remove(container)
                done.append(f"container {container.name}")
        for network in client.networks.list(filters={"label": RUN_LABEL}):
            if is_dead((network.attrs.get("Labels") or {}).get(RUN_LABEL, "")):
                network.remove()
                done.append(f"network {network.name}")
    return done


def remove(container) -> None:
    """The container and its anonymous volumes; that it is gone already is fine. Raises Broke."""
    with daemon("remove"):
        try:
            container.remove(force=True, v=True)
        except docker.errors.NotFound:
            pass
        except docker.errors.APIError as problem:
            if "already in progress" not in str(problem):
                raise
