"""Collectives over an axis, and pairs of them that autograd knows.

T rows of all ranks, t rows of one. An axis of size 1 moves nothing: its tensors come back as they are. A gradient is
always this rank's part of the whole: what several ranks have for one number adds up to its gradient. So a sum going
forward is a copy going backward, and a gather is a sum that is scattered.

Every collective counts the bytes this rank sends at least, by the axis's name (`axis.traffic`): (n - 1)/n of the whole
for a gather, a scatter or an exchange, twice that for an all-reduce.
"""

from __future__ import annotations

from typing import Any, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from oprd.parallel.mesh import PLANNED, Axis


# --- plain ----------------------------------------------------------------------------------------------------------

def all_gather(x: Tensor, axis: Axis) -> Tensor:
    """The rows of all ranks, in their order: [t, ...] -> [n t, ...]."""
    if axis.size == 1:
        return x
    out = x.new_empty(axis.size * len(x), *x.shape[1:])
    all_gather_into(out, x.contiguous(), axis)
    return out


def all_gather_into(out: Tensor, x: Tensor, axis: Axis, wait: bool = True) -> Any:
    """all_gather into a tensor that is there; without wait, a handle to wait for."""
    _count(axis, x.nbytes * (axis.size - 1))
    return None if axis.group == PLANNED else dist.all_gather_single(out, x, group=axis.group, async_op=not wait)


def reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    """This rank's rows of the sum over ranks: [n t, ...] -> [t, ...]."""
    if axis.size == 1:
        return x
    out = x.new_empty(len(x) // axis.size, *x.shape[1:])
    reduce_scatter_into(out, x.contiguous(), axis)
    return out


def reduce_scatter_into(out: Tensor, x: Tensor, axis: Axis, wait: bool = True) -> Any:
    """reduce_scatter into a tensor that is there; without wait, a handle to wait for."""
    _count(axis, out.nbytes * (axis.size - 1))
    return None if axis.group == PLANNED else dist.reduce_scatter_single(out, x, group=axis.group, async_op=not wait)


def all_reduce(x: Tensor, axis: Axis, op: str = "sum") -> Tensor:
    """The sum (or `max`, `min`) over ranks, as a new tensor."""
    if axis.size == 1:
        return x
    return all_reduce_into(x.clone(memory_format=torch.contiguous_format), axis, op)


def all_reduce_into(x: Tensor, axis: Axis, op: str = "sum", wait: bool = True) -> Any:
    """all_reduce in place; returns x, or without wait a handle to wait for."""
    _count(axis, 2 * x.nbytes * (axis.size - 1) // axis.size)
    work = None
    if axis.group != PLANNED:
        work = dist.all_reduce(x, getattr(dist.ReduceOp, op.upper()), group=axis.group, async_op=not wait)
    return x if wait else work


def all_to_all(x: Tensor, axis: Axis, send: Sequence[int] | None = None, receive: Sequence[int] | None = None) -> Tensor:
    """Rows to the ranks they are for: `send` rows to each, in their order; `receive` from each (default: even)."""
    if axis.size == 1:
        return x
    rows = len(x) if receive is None else sum(receive)
    out = x.new_empty(rows, *x.shape[1:])
    kept = len(x) // axis.size if send is None else send[axis.rank]
    _count(axis, (len(x) - kept) * (x.nbytes // max(1, len(x))))
    if axis.group != PLANNED:
        dist.all_to_all_single(out, x.contiguous(), None if receive is None else list(receive),
                               None if send is None else list(send), group=axis.group)
    return out


def all_objects(value: Any, axis: Axis) -> list:
    """Every rank's value (anything that pickles), in their order."""
    if axis.size == 1:
        return [value]
    found: list = [None] * axis.size
    dist.all_gather_object(found, value, group=axis.group)
    return found


def from_first(value: Any, axis: Axis) -> Any:
    """The value of the axis's rank 0, on all its ranks."""
    if axis.size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, group_src=0, group=axis.group)
    return box[0]


def barrier(axis: Axis) -> None:
    """Wait until all ranks are here."""
    if axis.size > 1:
        dist.barrier(group=axis.group)


def _count(axis: Axis, sent: int) -> None:
    axis.traffic[axis.name] += sent


# --- pairs ----------------------------------------------------------------------------------------------------------

def gather_rows(x: Tensor, axis: Axis) -> Tensor:
    """[t, ...] -> [n t, ...], all ranks' rows; the gradient is summed over ranks and scattered back."""
    return x if axis.size == 1 else _Gather.apply(x, axis)


def scatter_rows(x: Tensor, axis: Axis) -> Tensor:
    """[n t, ...] -> [t, ...], own rows of the sum over ranks; the gradient is gathered."""
    return x if axis.size == 1 else _Scatter.apply(x, axis)


def sum_over(x: Tensor, axis: Axis) -> Tensor:
    """The sum over ranks, on each; the gradient passes unchanged, as every rank has the whole one already."""
    return x if axis.size == 1 else _Sum.apply(x, axis)


def exchange(x: Tensor, axis: Axis, send: Sequence[int] | None = None, receive: Sequence[int] | None = None) -> Tensor:
    """all_to_all of rows; the gradient goes the same ways back."""
    return x if axis.size == 1 else _Exchange.apply(x, axis, send, receive)


def gather_uneven(x: Tensor, axis: Axis, rows: Sequence[int]) -> Tensor:
    """gather_rows where rank r has rows[r] rows: [rows[r], ...] -> [sum(rows), ...]. Padded to the longest to travel."""
    if axis.size == 1:
        return x
    most = max(rows)
    padded = F.pad(x, (0, 0) * (x.ndim - 1) + (0, most - len(x)))
    kept = torch.cat([torch.arange(r * most, r * most + n) for r, n in enumerate(rows)]).to(x.device)
    return gather_rows(padded, axis).index_select(0, kept)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis = axis
        return all_gather(x, axis)

    @staticmethod
    def backward(ctx, grad):
        return reduce_scatter(grad, ctx.axis), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis = axis
        return reduce_scatter(x, axis)

    @staticmethod
    def backward(ctx, grad):
        return all_gather(grad, ctx.axis), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):
        return all_reduce(x, axis)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis, send, receive):
        ctx.axis, ctx.send, ctx.receive = axis, send, receive
        return all_to_all(x, axis, send, receive)

    @staticmethod
    def backward(ctx, grad):
        return all_to_all(grad, ctx.axis, ctx.receive, ctx.send), None, None, None
