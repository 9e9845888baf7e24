"""run_experts on a GPU: routes sorted by expert, and every product of all experts in one launch, backward as well.

T tokens, D hidden, E experts of width F, k experts a token, P = T k routes in the order of their experts, BM x BN one
program's part of a product.

Three kernels: `_grouped` multiplies the rows of each expert with its matrix (reading the rows through an index, which
is the permutation), `_outer` sums the outer products of an expert's rows into its matrix's gradient, and `_swiglu` with
`_swiglu_backward` are what lies between. A launch has as many row blocks as P rows can need when each expert's last
block is short: ceil(P / BM) + E; P counts duplicate routes, so two routes of one token to one expert are two rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCKS = {"BM": 64, "BN": 64, "BK": 32}


@triton.jit
def _grouped(x, index, w, out, block_expert, block_start, block_stop, K, N, w_expert, w_k, w_n, GATHER: tl.constexpr,
             BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """out[p] = x[index[p]] @ w[e] for the rows p of a block, which are all of expert e; w [E, K, N] by its strides."""
    block = tl.program_id(0)
    e = tl.load(block_expert + block).to(tl.int64)
    rows = tl.load(block_start + block) + tl.arange(0, BM)
    row_ok = rows < tl.load(block_stop + block)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    column_ok = columns < N
    source = tl.load(index + rows, mask=row_ok, other=0).to(tl.int64) if GATHER else rows.to(tl.int64)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        a = tl.load(x + source[:, None] * K + k[None, :], mask=row_ok[:, None] & (k[None, :] < K), other=0.0)
        b = tl.load(w + e * w_expert + k[:, None] * w_k + columns[None, :] * w_n,
                    mask=(k[:, None] < K) & column_ok[None, :], other=0.0)
        acc += tl.dot(a, b, input_precision="ieee")
    at = rows.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=row_ok[:, None] & column_ok[None, :])


@triton.jit
def _outer(a, a_index, b, b_index, out, ends, K, N, GATHER_A: tl.constexpr, GATHER_B: tl.constexpr, BK: tl.constexpr,
           BN: tl.constexpr, BM: tl.constexpr):
    """out[e] = a[rows of e].T @ b[rows of e], [K, N]; zero for an expert without a row."""
    e = tl.program_id(0)
    start = tl.load(ends + e)
    stop = tl.load(ends + e + 1)
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    n = tl.program_id(2) * BN + tl.arange(0, BN)
    acc = tl.zeros((BK, BN), dtype=tl.float32)
    for first in range(start, stop, BM):
        rows = first + tl.arange(0, BM)
        ok = rows < stop
        ra = tl.load(a_index + rows, mask=ok, other=0).to(tl.int64) if GATHER_A else rows.to(tl.int64)
        rb = tl.load(b_index + rows, mask=ok, other=0).to(tl.int64) if GATHER_B else rows.to(tl.int64)
        x = tl.load(a + ra[None, :] * K + k[:, None], mask=ok[None, :] & (k[:, None] < K), other=0.0)
        y = tl.load(b + rb[:, None] * N + n[None, :], mask=ok[:, None] & (n[None, :] < N), other=0.0)
        acc += tl.dot(x, y, input_precision="ieee")
    at = e.to(tl.int64) * K * N + k[:, None] * N + n[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=(k[:, None] < K) & (n[None, :] < N))


@triton.jit
def _swiglu(both, scale, out, F, B: tl.constexpr):
    """out[p] = scale[p] silu(gate) up for both [P, 2F], gate first."""
    p = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * B + tl.arange(0, B)
    ok = f < F
    gate = tl.load(both + p * 2 * F + f, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(both + p * 2 * F + F + f, mask=ok, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up * tl.load(scale + p).to(tl.float32)
    tl.store(out + p * F + f, y.to(out.dtype.element_ty), mask=ok)


@triton.jit
def _swiglu_backward(both, scale, d_inner, d_both, d_scale, F, B: tl.constexpr):
    """Gradients of both [P, 2F] and scale [P] from that of _swiglu's result; one program a row."""
    p = tl.program_id(0).to(tl.int64)
    s = tl.load(scale + p).to(tl.float32)
    total = tl.zeros((B,), dtype=tl.float32)
    for start in range(0, F, B):
        f = start + tl.arange(0, B)
        ok = f < F
        gate = tl.load(both + p * 2 * F + f, mask=ok, other=0.0).to(tl.float32)
        up = tl.load(both + p * 2 * F + F + f, mask=ok, other=0.0).to(tl.float32)
        d = tl.load(d_inner + p * F + f, mask=ok, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        total += d * silu * up
        d = d * s
        d_gate = d * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
        tl.store(d_both + p * 2 * F + f, d_gate.to(d_both.dtype.element_ty), mask=ok)
        tl.store(d_both + p * 2 * F + F + f, (d * silu).to(d_both.dtype.element_ty), mask=ok)
    tl.store(d_scale + p, tl.sum(total, 0))


class _Routes:
    """Which rows of the sorted routes are whose: `order` int64 [P], `token` int32 [P], `ends` int32 [E + 1], and of
    every block of BM rows its expert, its first row and the end of that expert's rows."""

    def __init__(self, chosen: Tensor, experts: int, BM: int):
        flat = chosen.flatten()
        self.order = flat.argsort(stable=True)
        self.token = (self.order // chosen.shape[1]).to(torch.int32)
        counts = torch.bincount(flat, minlength=experts)
        ends = counts.cumsum(0)
        blocks = (counts + BM - 1) // BM
        last = blocks.cumsum(0)
        place = torch.arange(triton.cdiv(len(flat), BM) + experts, device=flat.device)
        expert = torch.searchsorted(last, place, right=True)
        real = expert < experts  # the launch has room for more blocks than there are
        self.expert = expert.clamp(max=experts - 1)
        start = (ends - counts)[self.expert] + (place - (last - blocks)[self.expert]) * BM
        self.stop = torch.where(real, ends[self.expert], 0).to(torch.int32)
        self.start, self.expert = start.to(torch.int32), self.expert.to(torch.int32)
        self.ends = torch.cat([ends.new_zeros(1), ends]).to(torch.int32)

    def grouped(self, x: Tensor, w: Tensor, transposed: bool, gather: bool, blocks: dict[str, int]) -> Tensor:
        """[P, N]: rows of x [., K] (of their tokens with gather) times w [E, K, N] (or [E, N, K], transposed)."""
        K, N = (w.shape[2], w.shape[1]) if transposed else w.shape[1:]
        strides = (w.stride(2), w.stride(1)) if transposed else (w.stride(1), w.stride(2))
        out = x.new_empty(len(self.order), N)
        if out.numel():
            _grouped[(len(self.start), triton.cdiv(N, blocks["BN"]))](
                x, self.token, w, out, self.expert, self.start, self.stop, K, N, w.stride(0), *strides, GATHER=gather,
                **blocks)
        return out

    def outer(self, a: Tensor, b: Tensor, gather_a: bool, gather_b: bool, like: Tensor,
              blocks: dict[str, int]) -> Tensor:
        """[E, K, N], in like's dtype: the sums of outer products of rows of a [., K] and b [., N] per expert."""
        K, N, E = a.shape[1], b.shape[1], len(self.ends) - 1
        out = torch.empty(E, K, N, dtype=like.dtype, device=like.device)
        grid = (E, triton.cdiv(K, blocks["BM"]), triton.cdiv(N, blocks["BN"]))
        _outer[grid](a, self.token, b, self.token, out, self.ends, K, N, GATHER_A=gather_a, GATHER_B=gather_b,
                     BK=blocks["BM"], BN=blocks["BN"], BM=blocks["BK"])
        return out


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate_up, down, chosen, weight, blocks):
        routes = _Routes(chosen, len(gate_up), blocks["BM"])
        x, scale = x.contiguous(), weight.flatten()[routes.order].contiguous()
        both = routes.grouped(x, gate_up, True, True, blocks)
        inner = both.new_empty(len(both), both.shape[1] // 2)
        if inner.numel():
            _swiglu[(len(inner), triton.cdiv(inner.shape[1], 256))](both, scale, inner, inner.shape[1], B=256)
        rows = routes.grouped(inner, down, True, False, blocks)
        ctx.save_for_backward(x, gate_up, down, chosen, scale, both, inner)
        ctx.routes, ctx.blocks = routes, blocks
        return _unpermute(rows, routes.order, chosen).to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        x, gate_up, down, chosen, scale, both, inner = ctx.saved_tensors
        routes, blocks, dy = ctx.routes, ctx.blocks, dy.contiguous()
        d_inner = routes.grouped(dy, down, False, True, blocks)
        d_down = routes.outer(dy, inner, True, False, down, blocks)
        d_both, d_scale = torch.empty_like(both), torch.empty_like(scale, dtype=torch.float32)
        if len(both):
            _swiglu_backward[(len(both),)](both, scale, d_inner, d_both, d_scale, inner.shape[1], B=256)
        d_gate_up = routes.outer(d_both, x, False, True, gate_up, blocks)
        d_x = _unpermute(routes.grouped(d_both, gate_up, False, False, blocks), routes.order, chosen)
        d_weight = torch.empty_like(d_scale).scatter_(0, routes.order, d_scale).view(chosen.shape)
        return d_x.to(x.dtype), d_gate_up, d_down, None, d_weight.to(scale.dtype), None


def _unpermute(rows: Tensor, order: Tensor, chosen: Tensor) -> Tensor:
    """Sorted routes [P, D] summed per token [T, D], a token's routes in their order: the same bits every time."""
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return rows.index_select(0, place).unflatten(0, chosen.shape).sum(1, dtype=torch.float32)


def run_experts(x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weight: Tensor,
                blocks: dict[str, int] = BLOCKS) -> Tensor:
    """y [T, D] in x's dtype for x [T, D], gate_up [E, 2F, D] (gate rows first), down [E, D, F], chosen int64 and weight
    [T, k]; gradients for all but `chosen`."""
    return _Experts.apply(x, gate_up.to(x.dtype), down.to(x.dtype), chosen, weight, blocks)
