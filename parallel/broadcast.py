"""Weights from the trainer to other programs: flattened buckets, and a process group in which rank 0 is the trainer.

A bucket is the raw bytes of whole tensors one after the other, as SGLang's `flattened_bucket` reads them: the widest
numbers first, so that every tensor begins at a multiple of its number's size. Two buffers take turns: one is filled
while the other is on its way, and no more is ever held.

A group stands beside torch's default group and needs none: an engine's ranks are 1..n, its own launcher knows them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta
from typing import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

Form = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]  # what is sent: name -> dtype and whole shape
Fill = Callable[[str, Tensor], None]  # writes the numbers of a named tensor into the given memory


@dataclass(frozen=True)
class Bucket:
    """Whole tensors in the order of their bytes. dtypes are named as `float32`; data: uint8 [bytes], valid until the
    bucket after the next is asked for. last: nothing comes after it."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    data: Tensor
    last: bool

    def __str__(self) -> str:
        return self.names[0] if len(self.names) == 1 else f"{self.names[0]} .. {self.names[-1]}"


def size_of(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Bytes of a tensor."""
    return math.prod(shape) * dtype.itemsize


def plan(form: Form, bucket_bytes: int) -> list[list[str]]:
    """Names by bucket: in the form's order, at most bucket_bytes (or one larger tensor) in each; within one the widest
    numbers come first."""
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes = {bucket_bytes} must be at least 1")
    parts: list[list[str]] = []
    room = 0
    for name, (dtype, shape) in form.items():
        size = size_of(dtype, shape)
        if not parts or size > room:
            parts.append([])
            room = bucket_bytes
        parts[-1].append(name)
        room -= size
    return [sorted(part, key=lambda name: -form[name][0].itemsize) for part in parts]


def buckets(form: Form, bucket_bytes: int, fill: Fill, device: str | torch.device = "cpu") -> Iterator[Bucket]:
    """All tensors of `form`, filled bucket by bucket. With a model split over ranks, `fill` gathers, so every rank must
    go through all buckets in step, and the bucket is whole before any other communicator is used."""
    parts = plan(form, bucket_bytes)
    most = max((sum(size_of(*form[name]) for name in part) for part in parts), default=0)
    buffers = [torch.empty(most, dtype=torch.uint8, device=device) for _ in parts[:2]]
    for i, part in enumerate(parts):
        buffer, end = buffers[i % 2], 0
        for name in part:
            dtype, shape = form[name]
            start, end = end, end + size_of(dtype, shape)
            fill(name, buffer[start:end].view(dtype).view(shape))
        yield Bucket(tuple(part), tuple(str(form[name][0]).removeprefix("torch.") for name in part),
                     tuple(tuple(form[name][1]) for name in part), buffer[:end], last=i == len(parts) - 1)


class Group:
    """The trainer (rank 0) and one engine (ranks 1..size-1). `port` is known at once; join() returns when all are in.

    backend: gloo for CPU tensors, nccl for GPU tensors. seconds: limit of joining, and of any one broadcast. name:
    unique in both programs. The engine's side must build its group in the same way: a TCP store, keys behind the
    group's name, torch's own helper. Raises RuntimeError (torch's) when the other side is gone or late.
    """

    def __init__(self, backend: str, size: int, name: str, seconds: float):
        self.name, self.size, self._backend, self._limit = name, size, backend, timedelta(seconds=seconds)
        self._store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False, timeout=self._limit)
        self.port, self._group = self._store.port, None

    def join(self) -> None:
        self._group, _ = c10d._new_process_group_helper(
            self.size, 0, [], dist.Backend(self._backend), dist.PrefixStore(self.name, self._store),
            group_name=self.name, timeout=self._limit)

    def send(self, data: Tensor) -> dist.Work:
        """Begin one broadcast from rank 0."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, self._limit
        return self._group.broadcast([data], options)

    def close(self) -> None:
        """Forget the group. A broadcast that hangs holds this up until its limit."""
        group, self._group = self._group, None
        if group is not None:
            for table in (c10d._world.pg_map, c10d._world.pg_names, c10d._world.pg_backend_config,
                          c10d._world.pg_to_tag):
                table.pop(group, None)
            for same_tag in c10d._world.tags_to_pg.values():
                if group in same_tag:
                    same_tag.remove(group)
            c10d._unregister_process_group(self.name)
        del group
        self._store = None
