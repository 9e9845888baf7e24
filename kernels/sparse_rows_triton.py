"""sparse_rows on a GPU: a program sums one row's numbers times rows of the other matrix, BD columns of it.

Shapes: N tokens, m numbers a token, V rows of a head, D hidden, U different rows that are named.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BD = 512


@triton.jit
def _weigh(ids, numbers, starts, ends, W, out, D, BD: tl.constexpr):
    """out[row] = sum over starts[row] <= j < ends[row] of numbers[j] W[ids[j]], in fp32 and in this order."""
    row = tl.program_id(0)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    acc = tl.zeros((BD,), dtype=tl.float32)
    for j in range(tl.load(starts + row), tl.load(ends + row)):
        at = tl.load(ids + j).to(tl.int64) * D
        acc += tl.load(numbers + j) * tl.load(W + at + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(out + row.to(tl.int64) * D + d, acc, mask=d < D)


@triton.jit
def _add(tokens, numbers, starts, ends, rows, h, into, D, BD: tl.constexpr):
    """into[rows[u]] += sum of numbers[j] h[tokens[j]]; a row of `into` belongs to one program alone."""
    u = tl.program_id(0)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    acc = tl.zeros((BD,), dtype=tl.float32)
    for j in range(tl.load(starts + u), tl.load(ends + u)):
        at = tl.load(tokens + j).to(tl.int64) * D
        acc += tl.load(numbers + j) * tl.load(h + at + d, mask=d < D, other=0.0).to(tl.float32)
    here = into + tl.load(rows + u).to(tl.int64) * D + d
    old = tl.load(here, mask=d < D, other=0.0).to(tl.float32)
    tl.store(here, (old + acc).to(into.dtype.element_ty), mask=d < D)


def weigh_rows(ids: Tensor, numbers: Tensor, W: Tensor, block: int = BD) -> Tensor:
    """sum_j numbers[n, j] W[ids[n, j]]: int32 or int64 [N, m], fp32 [N, m], [V, D] -> fp32 [N, D]."""
    N, m = ids.shape
    W = W.contiguous()
    out = numbers.new_empty(N, W.shape[1])
    ends = torch.arange(1, N + 1, device=ids.device, dtype=torch.int32) * m
    if N and W.shape[1]:
        _weigh[(N, triton.cdiv(W.shape[1], block))](ids.contiguous(), numbers.contiguous(), ends - m, ends, W, out,
                                                    W.shape[1], BD=block)
    return out


def add_outer(into: Tensor, ids: Tensor, numbers: Tensor, h: Tensor, block: int = BD) -> None:
    """into[v] += sum over n, j with ids[n, j] = v of numbers[n, j] h[n], in the order of the tokens."""
    if not ids.numel():
        return
    assert into.is_contiguous(), "a gradient's rows lie one after the other"
    key, order = ids.flatten().sort(stable=True)
    tokens = (order // ids.shape[1]).to(torch.int32)
    rows, counts = key.unique_consecutive(return_counts=True)
    ends = counts.cumsum(0).to(torch.int32)
    _add[(len(rows), triton.cdiv(h.shape[1], block))](tokens, numbers.flatten()[order].contiguous(),
                                                      ends - counts.to(torch.int32), ends, rows, h.contiguous(), into,
                                                      h.shape[1], BD=block)
