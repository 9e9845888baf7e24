"""The two halves of a softmax over a vocabulary, whole or this rank's part of it, on a GPU.

Shapes: c tokens, D hidden, v entries of the vocabulary here, w of one tile, BM x BN the logits of one program.

lse_and_target multiplies, and of the logits writes a maximum and a sum per BN entries and the target's logit; what is
kept of c tokens is three numbers each. softmax_gradient turns logits into their gradient in place, one read and one
write. Between the two, ranks that share a vocabulary add up their numbers (kernels/vocabulary_parallel.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from oprd.kernels.joint_support_triton import BLOCKS, _product


@triton.jit
def _lse_tile(h, W, local, N, V, D, columns, most, total, wanted, BM: tl.constexpr, BN: tl.constexpr,
              BK: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    column = tl.program_id(1)
    entries = column * BN + tl.arange(0, BN)
    row_ok, entry_ok = rows < N, entries < V
    z = _product(h, W, rows.to(tl.int64), entries.to(tl.int64), row_ok, entry_ok, D, BM, BN, BK)
    z = tl.where(row_ok[:, None] & entry_ok[None, :], z, float("-inf"))
    peak = tl.max(z, 1)
    origin = tl.where(peak == float("-inf"), 0.0, peak)
    at = rows * columns + column
    tl.store(most + at, peak, mask=row_ok)
    tl.store(total + at, tl.sum(tl.exp(z - origin[:, None]), 1), mask=row_ok)
    target = tl.load(local + rows, mask=row_ok, other=-1)
    hit = (target[:, None] == entries[None, :]) & entry_ok[None, :]
    # a target is in one program's entries, and that one writes it
    tl.store(wanted + rows, tl.sum(tl.where(hit, z, 0.0), 1), mask=row_ok & (tl.sum(hit.to(tl.int32), 1) > 0))


@triton.jit
def _gradient(z, lse, local, scale, stride, w, start, BN: tl.constexpr):
    row = tl.program_id(0)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = column < w
    at = z + row.to(tl.int64) * stride + column
    p = tl.exp(tl.load(at, mask=inside, other=float("-inf")) - tl.load(lse + row))
    p = tl.where(start + column == tl.load(local + row), p - 1.0, p)
    tl.store(at, p * tl.load(scale + row), mask=inside)


def lse_and_target(h: Tensor, W: Tensor, local: Tensor, blocks: dict[str, int] = BLOCKS) -> tuple[Tensor, Tensor]:
    """logsumexp over these entries, float64 [c], and the target's logit, fp32 [c] (0 where it is not among them):
    h [c, D], W [v, D], local int64 [c], the target's place in W or anything outside."""
    N, (V, D) = len(h), W.shape
    columns = triton.cdiv(V, blocks["BN"])
    most, total = (h.new_empty(N, columns, dtype=torch.float32) for _ in range(2))
    wanted = h.new_zeros(N, dtype=torch.float32)
    if N and columns:
        _lse_tile[(triton.cdiv(N, blocks["BM"]), columns)](h.to(W.dtype).contiguous(), W.contiguous(), local, N, V, D,
                                                           columns, most, total, wanted, **blocks)
    most, total = most.double(), total.double()
    return (most + total.log()).logsumexp(1), wanted


def softmax_gradient(z: Tensor, lse: Tensor, local: Tensor, scale: Tensor, start: int, block: int = 1024) -> Tensor:
    """z [c, w] fp32, logits of entries start .. start + w, becomes scale (exp(z - lse) - one-hot of local) in place."""
    assert z.stride(1) == 1 and z.dtype == torch.float32
    if z.numel():
        _gradient[(len(z), triton.cdiv(z.shape[1], block))](z, lse.float(), local, scale.float(), z.stride(0),
                                                            z.shape[1], start, BN=block)
    return z
