"""Gradients summed over the ranks that hold the same parameter, while the backward pass goes on; and the part of every
parameter that this rank updates (ZeRO, arXiv 1910.02054).

    stage 0   gradients all-reduced; every rank updates everything
    stage 1   gradients reduce-scattered after the last micro-batch; masters and Adam's moments sharded
    stage 2   gradients reduce-scattered after every micro-batch, and only the shard of the sum is kept

A parameter of R rows (its first dim) is dealt to n ranks in shares of ceil(R / n) rows; the last ranks may have fewer,
or none. Parameters with the same ranks and dtype travel together in buckets, filled in the order of the backward pass
and sent in that order whatever finishes first, so that all ranks send alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Mapping

import torch
from torch import Tensor, nn

from oprd.parallel.collectives import all_gather_into, all_reduce, all_reduce_into, reduce_scatter_into
from oprd.parallel.mesh import Axis

LOW_PRECISION = (torch.bfloat16, torch.float16)


def wide(dtype: torch.dtype) -> torch.dtype:
    """What gradients are summed and updated in: float32 for half-precision parameters, else their own."""
    return torch.float32 if dtype in LOW_PRECISION else dtype


@dataclass
class _Slot:
    """One parameter's place in a bucket: its share of rows, and where each rank's share lies in the rank's part."""

    name: str
    parameter: nn.Parameter
    rows: int
    at: int
    size: int

    def part(self, flat: Tensor) -> Tensor:
        """This slot of a rank's part, as rows."""
        return flat[self.at : self.at + self.size].view(self.rows, *self.parameter.shape[1:])


@dataclass(eq=False)
class _Bucket:
    """Parameters that travel together over `axis`, dealt to `ranks` (1 where nothing is sharded); width: numbers of one
    rank's part. sum: this rank's part of the gradients so far."""

    axis: Axis
    ranks: int
    dtype: torch.dtype
    slots: list[_Slot] = field(default_factory=list)
    width: int = 0
    waiting: int = 0
    sum: Tensor | None = None
    travelling: tuple[Tensor, Tensor, Any] | None = None  # what is sent, what arrives, the handle

    def add(self, name: str, p: nn.Parameter) -> None:
        rows = -(-len(p) // self.ranks)
        self.slots.append(_Slot(name, p, rows, self.width, rows * p[0].numel()))
        self.width += rows * p[0].numel()

    def lay(self, slot: _Slot, whole: Tensor, buffer: Tensor, back: bool = False) -> None:
        """Copy a whole parameter's rows to the ranks' parts [ranks, width], or back."""
        place = buffer[:, slot.at : slot.at + slot.size].unflatten(1, (slot.rows, *whole.shape[1:]))
        full = len(whole) // slot.rows
        pairs = [(place[:full], whole[: full * slot.rows].unflatten(0, (full, slot.rows)))] if full else []
        if rest := len(whole) - full * slot.rows:
            pairs.append((place[full, :rest], whole[full * slot.rows :]))
        for there, here in pairs:
            (here if back else there).copy_(there if back else here)


    def arrive(self) -> None:
        """Wait for what is travelling, if anything is, and add it."""
        if self.travelling is not None:
            _, arrived, handle = self.travelling
            if handle is not None:
                handle.wait()
            self.sum = arrived if self.sum is None else self.sum.add_(arrived)
            self.travelling = None


IN_FLIGHT = 3  # buckets on their way at once; an older one is waited for, so that its buffer goes


class Reducer:
    """See the top of the file. One optimizer step: for every micro-batch `begin(last)`, backward, `end()`; then
    `gradients()`, and after the update `publish()`."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], replicas: Mapping[str, Axis], world: Axis, stage: int,
                 bucket_bytes: int = 64 * 2**20):
        """replicas: the ranks that hold the same numbers of each parameter."""
        assert stage in (0, 1, 2), stage
        self.stage, self.world = stage, world
        self.buckets: list[_Bucket] = []
        self._of: dict[str, tuple[_Bucket, _Slot]] = {}
        open_: dict[tuple, _Bucket] = {}
        for name, p in reversed(parameters.items()):  # about the order in which the backward pass ends with them
            axis = replicas[name]
            bucket = open_.get(key := (axis.name, p.dtype))
            if bucket is None or bucket.width * bucket.ranks * wide(p.dtype).itemsize >= bucket_bytes:
                bucket = open_[key] = _Bucket(axis, axis.size if stage else 1, wide(p.dtype))
                self.buckets.append(bucket)
            bucket.add(name, p)
            self._of[name] = bucket, bucket.slots[-1]
            p.register_post_accumulate_grad_hook(lambda p, bucket=bucket, name=name: self._ready(bucket, name))
        self._main: dict[str, Tensor] = {}  # sums over micro-batches of half-precision gradients, stages 0 and 1
        self._sending = False

    def rows(self, name: str) -> tuple[int, int]:
        """Which rows of (this rank's part of) a parameter it updates: from, to."""
        bucket, slot = self._of[name]
        first = slot.rows * (bucket.axis.rank if self.stage else 0)
        return min(first, len(slot.parameter)), min(first + slot.rows, len(slot.parameter))

    def begin(self, last: bool) -> None:
        """Before a backward pass. last: it is the step's last micro-batch."""
        self._sending, self._next = last or self.stage == 2, 0
        for bucket in self.buckets:
            bucket.waiting = len(bucket.slots)

    def end(self) -> None:
        """After a backward pass: send what is left (parameters without a gradient count as zero), take what arrives."""
        if not self._sending:
            return
        for bucket in self.buckets[self._next :]:
            self._send(bucket)
        for bucket in self.buckets:
            bucket.arrive()

    def gradients(self) -> dict[str, Tensor]:
        """The whole step's gradient of the rows this rank updates, by name; a parameter none of whose rows it has is
        left out."""
        found = {}
        for name, (bucket, slot) in self._of.items():
            start, end = self.rows(name)
            if start < end:
                found[name] = slot.part(bucket.sum)[: end - start]
        return found

    def norm(self, gradients: Mapping[str, Tensor]) -> float:
        """L2 norm of the whole model's gradient, every number once."""
        total = torch.zeros((), dtype=torch.float64)
        for name, g in gradients.items():
            times = 1 if self.stage else self._of[name][0].axis.size  # as many ranks have the same numbers
            total += torch.linalg.vector_norm(g, dtype=wide(g.dtype)).double().cpu() ** 2 / times
        device = next(iter(self._of.values()))[1].parameter.device
        return math.sqrt(all_reduce(total.to(device), self.world).item())

    @torch.no_grad()
    def publish(self, masters: Mapping[str, Tensor]) -> None:
        """Write the updated rows, this rank's own and the others', into the parameters."""
        for bucket in self.buckets:
            dtype = bucket.slots[0].parameter.dtype
            part = torch.zeros(bucket.width, dtype=dtype, device=bucket.slots[0].parameter.device)
            for slot in bucket.slots:
                if slot.name in masters:
                    slot.part(part)[: len(masters[slot.name])].copy_(masters[slot.name])
            whole = part[None]
            if bucket.ranks > 1:
                whole = part.new_empty(bucket.ranks, bucket.width)
                all_gather_into(whole.view(-1), part, bucket.axis)
            for slot in bucket.slots:
                bucket.lay(slot, slot.parameter.data, whole, back=True)

    def clear(self) -> None:
        """Forget all gradients."""
        self._main.clear()
        for bucket in self.buckets:
            bucket.sum = bucket.travelling = None
            for slot in bucket.slots:
                slot.parameter.grad = None

    def _ready(self, bucket: _Bucket, name: str) -> None:
        """A parameter's gradient is whole, as far as this rank and micro-batch go."""
        p = self._of[name][1].parameter
        if p.dtype in LOW_PRECISION and self.stage < 2:
            main = self._main.get(name)
            self._main[name] = p.grad.float() if main is None else main.add_(p.grad)
            p.grad = None
        bucket.waiting -= 1
        while self._sending and self._next < len(self.buckets) and self.buckets[self._next].waiting == 0:
            self._send(self.buckets[self._next])

    @torch.no_grad()
    def _send(self, bucket: _Bucket) -> None:
        self._next += 1
        if self._next > IN_FLIGHT:
            self.buckets[self._next - 1 - IN_FLIGHT].arrive()
        buffer = torch.zeros(bucket.ranks, bucket.width, dtype=bucket.dtype, device=bucket.slots[0].parameter.device)
        for slot in bucket.slots:
            gradient = self._main.pop(slot.name, slot.parameter.grad)
            if gradient is not None:
                bucket.lay(slot, gradient, buffer)
            slot.parameter.grad = None
        if bucket.axis.size == 1:
            bucket.travelling = buffer, buffer[0], None
        elif bucket.ranks == 1:
            bucket.travelling = buffer, buffer[0], all_reduce_into(buffer, bucket.axis, wait=False)
        else:
            part = buffer.new_empty(bucket.width)
            bucket.travelling = buffer, part, reduce_scatter_into(part, buffer.view(-1), bucket.axis, wait=False)
