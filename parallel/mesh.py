"""Who works on what: the mesh of ranks. The only place that learns a rank.

An axis of size 1 moves nothing, so code written over axes runs on one process unchanged.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Mapping


@dataclass(frozen=True)
class Axis:
    """One direction of the mesh. rank: this process's place in 0..size-1; group: None exactly when size is 1."""

    name: str
    size: int = 1
    rank: int = 0
    group: Any = None

    def __post_init__(self):
        assert self.size >= 1 and 0 <= self.rank < self.size, (self.name, self.size, self.rank)
        assert (self.group is None) == (self.size == 1), f"axis {self.name} of size {self.size} and its group"

    def share(self, total: int, what: str) -> int:
        """This rank's part of `total` things, all parts equal; an uneven split is a ValueError."""
        if total % self.size:
            raise ValueError(f"{what} = {total} must be a multiple of the {self.name} axis = {self.size}; "
                             f"choose a {self.name} size that divides {total}")
        return total // self.size


@dataclass(frozen=True)
class Mesh:
    """The axes of a run. data: ranks that train on different examples."""

    data: Axis = Axis("data")

    @staticmethod
    def from_environment(environment: Mapping[str, str] = os.environ) -> "Mesh":
        """The mesh that the launcher describes. More than one rank (WORLD_SIZE) is a ValueError in this version."""
        world = environment.get("WORLD_SIZE", "1")
        if not world.isdecimal() or int(world) < 1:
            raise ValueError(f"WORLD_SIZE = {world!r} must be a whole number of 1 or more; unset it for one process")
        if int(world) > 1:
            raise ValueError(f"WORLD_SIZE = {world} must be 1: multi-rank training is not in this version; "
                             "start one process")
        return Mesh()
