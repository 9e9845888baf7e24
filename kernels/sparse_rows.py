"""Products of a matrix that has m known numbers a row with a dense one: what a sparse gradient of logits turns into.

Shapes: N tokens, m numbers a token, V rows of a head, D hidden. Where m is a good part of V (a tiny vocabulary) the
matrix is written out, ROWS tokens at a time, and multiplied as any other.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from oprd.kernels.backend import use_triton

DENSE = 16  # a vocabulary of up to so many times m entries is tiny
ROWS = 128
BLOCK_ELEMENTS = {"cpu": 2**21, "cuda": 2**26}  # of rows gathered at once


def weigh_rows(ids: Tensor, numbers: Tensor, W: Tensor) -> Tensor:
    """sum_j numbers[n, j] W[ids[n, j]] for ids, numbers [N, m] and W [V, D]: [N, D] in numbers' dtype."""
    if not ids.numel():
        return numbers.new_zeros(len(ids), W.shape[1])
    if len(W) <= DENSE * ids.shape[1]:
        # rows that nothing names are multiplied by zero, and may hold -inf
        W = W.to(numbers.dtype).nan_to_num(nan=float("nan"), posinf=0.0, neginf=0.0)
        parts = zip(ids.split(ROWS), numbers.split(ROWS))
        return torch.cat([_written_out(i, some, len(W)) @ W for i, some in parts])
    if use_triton(numbers):
        from oprd.kernels import sparse_rows_triton

        return sparse_rows_triton.weigh_rows(ids, numbers, W)
    if W.dtype == numbers.dtype:
        return F.embedding_bag(ids, W, mode="sum", per_sample_weights=numbers)
    out = numbers.new_empty(len(ids), W.shape[1])
    step = max(1, BLOCK_ELEMENTS.get(W.device.type, 2**21) // max(1, ids.shape[1] * W.shape[1]))
    for i in range(0, len(ids), step):
        rows = F.embedding(ids[i : i + step], W).to(numbers.dtype)
        torch.bmm(numbers[i : i + step, None], rows, out=out[i : i + step, None])
    return out


def add_outer(into: Tensor, ids: Tensor, numbers: Tensor, h: Tensor) -> None:
    """into[v] += sum over n, j with ids[n, j] = v of numbers[n, j] h[n]: into [V, D], h [N, D].

    The numbers of a row of `into` are summed first, in the order of the tokens, and added once: the same bits every
    time, without atomics. They are summed in numbers' dtype.
    """
    if not ids.numel():
        return
    if len(into) <= DENSE * ids.shape[1]:
        sums = torch.zeros_like(into, dtype=numbers.dtype)
        for i, some, rows in zip(ids.split(ROWS), numbers.split(ROWS), h.to(numbers.dtype).split(ROWS)):
            sums.addmm_(_written_out(i, some, len(into)).T, rows)
        into += sums
        return
    if use_triton(numbers) and into.is_contiguous():
        from oprd.kernels import sparse_rows_triton

        return sparse_rows_triton.add_outer(into, ids, numbers, h)
    h = h.to(numbers.dtype)
    key, order = ids.flatten().sort(stable=True)
    token = order.to(torch.int32).div_(ids.shape[1], rounding_mode="floor")
    numbers = numbers.flatten()[order]
    del order
    rows, counts = key.unique_consecutive(return_counts=True)
    ends = counts.cumsum(0).tolist()
    starts = [0, *ends[:-1]]
    step = max(1, BLOCK_ELEMENTS.get(h.device.type, 2**21) // max(1, h.shape[1]))
    for i in range(0, len(starts), step):
        begin, end = starts[i], ends[min(i + step, len(ends)) - 1]
        offsets = torch.tensor(starts[i : i + step], dtype=torch.int32, device=h.device) - begin
        sums = F.embedding_bag(token[begin:end], h, offsets, mode="sum", per_sample_weights=numbers[begin:end])
        into.index_add_(0, rows[i : i + step].long(), sums.to(into.dtype))


def _written_out(ids: Tensor, numbers: Tensor, V: int) -> Tensor:
    return numbers.new_zeros(len(ids), V).scatter_add_(1, ids.long(), numbers)
