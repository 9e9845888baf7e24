"""Who works on what: the mesh of ranks. The only place that learns a rank.

An axis of size 1 moves nothing, so code written over axes runs on one process unchanged.

    rank = (dp_rank * cp + cp_rank) * tp + tp_rank          ep: blocks of ep neighbouring ranks

dp: ranks that read different micro-batches. cp x tp: the ranks that read one micro-batch together, each a part of its
tokens; cp exchanges them for heads (Ulysses), tp also cuts the weights (Megatron, with sequence parallelism around it).
As no two ranks hold the same token, ep may lie across all of the others.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from math import prod
from typing import Any, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist


PLANNED = "planned"  # the group of an axis that is only on paper: collectives count their bytes and move nothing


@dataclass(frozen=True)
class Axis:
    """One direction of the mesh. rank: this process's place in 0..size-1; group: None exactly when size is 1.

    traffic: bytes this rank has sent, by axis name (parallel/collectives.py counts them); shared by a mesh's axes.
    """

    name: str
    size: int = 1
    rank: int = 0
    group: Any = None
    traffic: Counter = field(default_factory=Counter, repr=False, compare=False)

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
class Sizes:
    """How many ranks an axis has. dp = 0: what the others leave of the world."""

    dp: int = 0
    cp: int = 1
    tp: int = 1
    ep: int = 1

    def fill(self, world: int) -> "Sizes":
        """With dp known, for a world of so many ranks; ValueError where they do not fit."""
        inner = self.cp * self.tp
        dp = self.dp or max(1, world // inner)
        if dp * inner != world:
            raise ValueError(f"parallel.dp = {self.dp or 'what is left'} x parallel.cp = {self.cp} x parallel.tp = "
                             f"{self.tp} must be the world of {world} ranks; change one of them or start "
                             f"{dp * inner} ranks")
        if world % self.ep:
            raise ValueError(f"parallel.ep = {self.ep} must divide the world of {world} ranks")
        return Sizes(dp, self.cp, self.tp, self.ep)


@dataclass(frozen=True)
class Mesh:
    """The axes of a run.

    sequence: cp x tp, the ranks of one micro-batch; world: all. Who holds the same numbers of a parameter, and so sums
    its gradient: shard_replicas (dp x cp) for one that tp cuts, expert_replicas for one that ep cuts, world for one
    that nothing cuts; `copies` gives the axis for one that groups of tp ranks share.
    """

    dp: Axis = Axis("dp")
    cp: Axis = Axis("cp")
    tp: Axis = Axis("tp")
    ep: Axis = Axis("ep")
    sequence: Axis = Axis("sequence")
    world: Axis = Axis("world")
    shard_replicas: Axis = Axis("shard_replicas")
    expert_replicas: Axis = Axis("expert_replicas")
    device: torch.device = torch.device("cpu")
    _copies: dict[int, Axis] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def from_environment(sizes: Sizes = Sizes(), environment: Mapping[str, str] = os.environ,
                         timeout_s: float = 600.0) -> "Mesh":
        """The mesh that the launcher (torchrun's WORLD_SIZE, RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) describes."""
        text = environment.get("WORLD_SIZE", "1")
        if not text.isdecimal() or int(text) < 1:
            raise ValueError(f"WORLD_SIZE = {text!r} must be a whole number of 1 or more; unset it for one process")
        sizes.fill(int(text))
        if int(text) == 1:
            return Mesh()
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.set_device(int(environment.get("LOCAL_RANK", "0")))
        if not dist.is_initialized():
            dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(seconds=timeout_s))
        return Mesh.of(sizes, torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu"))

    @staticmethod
    def of(sizes: Sizes, device: torch.device = torch.device("cpu")) -> "Mesh":
        """The mesh over the ranks of the process group that is already there. Every rank must call it."""
        sizes = sizes.fill(dist.get_world_size())
        grid = np.arange(dist.get_world_size()).reshape(sizes.dp, sizes.cp, sizes.tp)
        blocks = np.arange(grid.size).reshape(-1, sizes.ep)
        traffic: Counter = Counter()
        make = lambda name, grid, *dims: _axis(name, grid, dims, traffic)  # noqa: E731
        return Mesh(make("dp", grid, 0), make("cp", grid, 1), make("tp", grid, 2), make("ep", blocks, 1),
                    make("sequence", grid, 1, 2), make("world", grid, 0, 1, 2), make("shard_replicas", grid, 0, 1),
                    make("expert_replicas", blocks, 0), device)

    @staticmethod
    def planned(sizes: Sizes, world: int) -> "Mesh":
        """The mesh of the first of so many ranks, on paper: tensors of the meta device go through its collectives."""
        s, traffic = sizes.fill(world), Counter()
        make = lambda name, size: Axis(name, size, 0, PLANNED if size > 1 else None, traffic)  # noqa: E731
        return Mesh(make("dp", s.dp), make("cp", s.cp), make("tp", s.tp), make("ep", s.ep), make("sequence", s.cp * s.tp),
                    make("world", world), make("shard_replicas", s.dp * s.cp), make("expert_replicas", world // s.ep),
                    torch.device("meta"))

    @property
    def first(self) -> bool:
        """Whether this is the rank that decides, writes and speaks for all."""
        return self.world.rank == 0

    @property
    def traffic(self) -> Counter:
        """Bytes this rank has sent, by axis name."""
        return self.world.traffic

    def close(self) -> None:
        """Leave the other ranks, at the end of a run in which nothing failed."""
        if self.world.size > 1:
            dist.destroy_process_group()

    def saving(self) -> Axis:
        """All ranks once more, in a group of their own: for what goes on beside the training. Every rank must ask."""
        if 0 not in self._copies:
            self._copies[0] = _axis("saving", np.arange(self.world.size), (0,), self.traffic)
        return self._copies[0]

    def copies(self, count: int) -> Axis:
        """The ranks that hold the same part where `count` neighbours of tp share one. Every rank must ask alike."""
        if count == 1:
            return self.shard_replicas
        if count == self.tp.size:
            return self.world
        if count not in self._copies:
            name, size = f"copies_{count}", self.shard_replicas.size * count
            grid = np.arange(self.world.size).reshape(self.dp.size, self.cp.size, self.tp.size // count, count)
            self._copies[count] = (Axis(name, size, 0, PLANNED, self.traffic) if self.world.group == PLANNED else
                                   _axis(name, grid, (0, 1, 3), self.traffic))
        return self._copies[count]


def _axis(name: str, grid: np.ndarray, dims: Sequence[int], traffic: Counter) -> Axis:
    """The axis along dims of a grid of ranks: this rank's line, after every line's group was made."""
    size = prod(grid.shape[d] for d in dims)
    if size == 1:
        return Axis(name, traffic=traffic)
    own = dist.get_rank()
    lines = np.moveaxis(grid, dims, range(-len(dims), 0)).reshape(-1, size).tolist()
    found = None
    for line in lines:
        group = dist.new_group(line)
        if own in line:
            found = Axis(name, size, line.index(own), group, traffic)
    assert found is not None
    return found
