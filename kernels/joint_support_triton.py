"""joint_support.scan on a GPU: both models' logits of a tile never leave the chip.

Shapes: c tokens, D hidden, V vocabulary, k support, BM x BN the logits of one program, C entries a token can put
forward in one launch.

A program multiplies BM tokens with BN entries of both heads, and of the result writes a maximum and a sum of
exponentials per token, and those entries that lie above the token's k-th value so far, with the other model's logit.
Between launches torch takes the k best of old and new. Launches double in width, so that about k ln 2 .. k entries a
token come forward in each; if it ever is more than C, the launch is repeated in halves.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from oprd.kernels.joint_support import Best, Found, first_k

BLOCKS = {"BM": 64, "BN": 128, "BK": 64, "num_warps": 8, "num_stages": 3}
CANDIDATES = 512


@triton.jit
def _product(a, b, rows, entries, row_ok, entry_ok, D, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """fp32 [BM, BN]: rows of a [., D] times rows of b [., D]."""
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, D, BK):
        d = start + tl.arange(0, BK)
        x = tl.load(a + rows[:, None] * D + d[None, :], mask=row_ok[:, None] & (d[None, :] < D), other=0.0)
        y = tl.load(b + entries[None, :] * D + d[:, None], mask=entry_ok[None, :] & (d[:, None] < D), other=0.0)
        acc += tl.dot(x, y, input_precision="ieee")
    return acc


@triton.jit
def _keep(z, other, floor, rows, entries, row_ok, entry_ok, counts, ids, owns, others, C: tl.constexpr):
    """Append the entries above `floor` (all, if it is NaN) to the token's candidates; counts may exceed C."""
    number = tl.where(row_ok[:, None] & entry_ok[None, :], tl.where(z <= floor[:, None], 0, 1), 0)
    base = tl.atomic_add(counts + tl.where(row_ok, rows, 0), tl.sum(number, 1))  # rows there are not add 0 to row 0
    place = base[:, None] + tl.cumsum(number, 1) - 1
    fits = (number > 0) & (place < C)
    at = rows[:, None] * C + place
    tl.store(ids + at, entries[None, :] + tl.zeros_like(number), mask=fits)
    tl.store(owns + at, z, mask=fits)
    tl.store(others + at, other, mask=fits)


@triton.jit
def _sums(z, gap, T, rows, row_ok, columns, column, most, total, moment, MOMENTS: tl.constexpr):
    peak = tl.max(z, 1)
    origin = tl.where(peak == float("-inf"), 0.0, peak)
    e = tl.exp((z - origin[:, None]) / T)
    at = rows * columns + column
    tl.store(most + at, peak, mask=row_ok)
    tl.store(total + at, tl.sum(e, 1), mask=row_ok)
    if MOMENTS:
        tl.store(moment + at, tl.sum(tl.where(e > 0, e * gap, 0.0), 1), mask=row_ok)


@triton.jit
def _scan_tile(h, W, ht, Wt, floor, floor_t, begin, stop, N, D, Dt, T, columns, most, total, moment, counts,
               ids, owns, others, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, C: tl.constexpr,
               MOMENTS: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    column = tl.program_id(1)
    entries = begin + column * BN + tl.arange(0, BN)
    row_ok, entry_ok = rows < N, entries < stop
    wide_rows, wide_entries = rows.to(tl.int64), entries.to(tl.int64)
    inside = row_ok[:, None] & entry_ok[None, :]
    z = tl.where(inside, _product(h, W, wide_rows, wide_entries, row_ok, entry_ok, D, BM, BN, BK), float("-inf"))
    zt = tl.where(inside, _product(ht, Wt, wide_rows, wide_entries, row_ok, entry_ok, Dt, BM, BN, BK), float("-inf"))
    gap = tl.where((z == float("-inf")) & (zt == float("-inf")), 0.0, z - zt)
    size = N * columns
    _sums(z, gap, T, rows, row_ok, columns, column, most, total, moment, MOMENTS)
    _sums(zt, gap, T, rows, row_ok, columns, column, most + size, total + size, moment + size, MOMENTS)
    low = tl.load(floor + rows, mask=row_ok, other=float("inf"))
    low_t = tl.load(floor_t + rows, mask=row_ok, other=float("inf"))
    _keep(z, zt, low, rows, entries, row_ok, entry_ok, counts, ids, owns, others, C)
    _keep(zt, z, low_t, rows, entries, row_ok, entry_ok, counts + N, ids + N * C, owns + N * C, others + N * C,
          C)


def scan(h: Tensor, W: Tensor, ht: Tensor, Wt: Tensor, k: int, temperature: float, dtype: torch.dtype,
         rounded: bool = False, moments: bool = False, blocks: dict[str, int] = BLOCKS,
         candidates: int = CANDIDATES) -> Found:
    """joint_support.scan for fp32 or half-precision inputs; products accumulate in fp32 (`rounded` changes nothing)."""
    assert dtype == torch.float32, dtype
    h, ht, W, Wt = h.to(W.dtype).contiguous(), ht.to(Wt.dtype).contiguous(), W.contiguous(), Wt.contiguous()
    V, C = len(W), max(candidates, k)
    none = Best(*(h.new_empty(len(h), 0, dtype=t) for t in (torch.int64, dtype, dtype)))
    bests, parts, begin, width = [none, none], [], 0, C
    while begin < V:
        stop = min(V, begin + width)
        sums, new = _launch(h, W, ht, Wt, bests, begin, stop, k, temperature, blocks, C, moments)
        if new is None:
            width = max(1, (stop - begin) // 2)
            continue
        bests = [_merge(old, one, k) for old, one in zip(bests, new)]
        parts.append(sums)
        begin, width = stop, max(width, stop)
    return _found(bests, parts, len(h), temperature, moments)


def _launch(h, W, ht, Wt, bests, begin: int, stop: int, k: int, temperature: float, blocks, C: int, moments: bool):
    """(maxima, sums, moments) of every BN entries, and per model the candidates; None if a token has more than C."""
    N, filling = len(h), bests[0].ids.shape[1] < k
    columns = triton.cdiv(stop - begin, blocks["BN"])
    most, total, moment = (h.new_empty(2, N, columns, dtype=torch.float32) for _ in range(3))
    counts = torch.zeros(2, N, dtype=torch.int32, device=h.device)
    ids = torch.empty(2, N, C, dtype=torch.int32, device=h.device)
    owns, others = (h.new_empty(2, N, C, dtype=torch.float32) for _ in range(2))
    floors = [h.new_full((N,), float("nan"), dtype=torch.float32) if filling else best.own.amin(1) for best in bests]
    if N and columns:
        _scan_tile[(triton.cdiv(N, blocks["BM"]), columns)](
            h, W, ht, Wt, *floors, begin, stop, N, h.shape[1], ht.shape[1], temperature, columns, most,
            total, moment, counts, ids, owns, others, C=C, MOMENTS=moments, **blocks)
    if N and int(counts.max()) > C:
        return None, None
    here = torch.arange(C, device=h.device) < counts[..., None]
    own = owns.masked_fill_(~here, float("-inf"))
    ids = ids.long().masked_fill_(~here, 2**24 - 1)  # behind all real entries, also those of -inf
    return (most, total, moment), [Best(ids[i], own[i], others[i]) for i in range(2)]


def _merge(old: Best, new: Best, k: int) -> Best:
    """The k best of both; while fewer than k entries were read, all of them."""
    ids, own, other = (torch.cat(pair, 1) for pair in zip(old, new))
    real = int((ids < 2**24 - 1).sum(1).max()) if len(ids) else 0
    keep = first_k(own, min(k, real), ids)
    return Best(ids.gather(1, keep), own.gather(1, keep), other.gather(1, keep))


def _found(bests: list[Best], parts: list, rows: int, T: float, moments: bool) -> Found:
    norms, means = [], []
    for model in range(2):
        most, total, moment = (torch.cat([part[i][model] for part in parts], 1).double() for i in range(3))
        peak = most.amax(1, keepdim=True)
        weight = ((most - peak) / T).exp()
        total = (weight * total).sum(1)
        norms.append(peak.squeeze(1) + T * total.log())
        if moments:
            means.append((weight * moment).sum(1) / total)
    return Found(*norms, *bests, *means)
