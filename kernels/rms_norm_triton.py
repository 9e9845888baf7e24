"""rms_norm and gated_rms_norm on a GPU, forward and backward: one program a row of D elements, R rows for d_scale."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 64  # rows of one program of the backward pass, which sums d_scale over them


@triton.jit
def _forward(x, z, scale, out, inverse, D, eps, GATED: tl.constexpr, B: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, B)
    ok = d < D
    a = tl.load(x + row * D + d, mask=ok, other=0.0).to(tl.float32)
    r = 1.0 / tl.sqrt(tl.sum(a * a, 0) / D + eps)
    y = a * r * tl.load(scale + d, mask=ok, other=0.0).to(tl.float32)
    if GATED:
        g = tl.load(z + row * D + d, mask=ok, other=0.0).to(tl.float32)
        y = y * g * tl.sigmoid(g)
    tl.store(out + row * D + d, y.to(out.dtype.element_ty), mask=ok)
    tl.store(inverse + row, r)


@triton.jit
def _backward(x, z, scale, inverse, dy, dx, dz, partial, N, D, GATED: tl.constexpr, B: tl.constexpr, R: tl.constexpr):
    d = tl.arange(0, B)
    ok = d < D
    s = tl.load(scale + d, mask=ok, other=0.0).to(tl.float32)
    d_scale = tl.zeros((B,), dtype=tl.float32)
    first = tl.program_id(0).to(tl.int64) * R
    for i in range(R):
        row = first + i + d * 0  # a block of the same number: masks are blocks
        here = ok & (row < N)
        at = row * D + d
        r = tl.load(inverse + row, mask=here, other=0.0)
        n = tl.load(x + at, mask=here, other=0.0).to(tl.float32) * r
        g = tl.load(dy + at, mask=here, other=0.0).to(tl.float32)
        if GATED:
            gate = tl.load(z + at, mask=here, other=0.0).to(tl.float32)
            sigmoid = tl.sigmoid(gate)
            d_gate = g * n * s * sigmoid * (1.0 + gate * (1.0 - sigmoid))
            tl.store(dz + at, d_gate.to(dz.dtype.element_ty), mask=here)
            g = g * gate * sigmoid
        d_scale += g * n
        g = g * s
        change = r * (g - n * (tl.sum(g * n, 0) / D))
        tl.store(dx + at, change.to(dx.dtype.element_ty), mask=here)
    tl.store(partial + tl.program_id(0) * D + d, d_scale, mask=ok)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, z: Tensor | None, scale: Tensor, eps: float) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        gate = rows if z is None else z.reshape(rows.shape).contiguous()
        out = torch.empty_like(rows, dtype=x.dtype if z is None else z.dtype)
        inverse = rows.new_empty(len(rows), dtype=torch.float32)
        if rows.numel():
            _forward[(len(rows),)](rows, gate, scale.contiguous(), out, inverse, rows.shape[1], eps,
                                   GATED=z is not None, B=triton.next_power_of_2(rows.shape[1]))
        ctx.save_for_backward(rows, gate, scale, inverse)
        ctx.gated = z is not None
        return out.view(x.shape)

    @staticmethod
    def backward(ctx, dy: Tensor):
        rows, gate, scale, inverse = ctx.saved_tensors
        shape, (N, D) = dy.shape, rows.shape
        dx, dz = torch.empty_like(rows), torch.empty_like(gate) if ctx.gated else None
        programs = triton.cdiv(N, ROWS)
        partial = rows.new_empty(programs, D, dtype=torch.float32)
        if rows.numel():
            _backward[(programs,)](rows, gate, scale.contiguous(), inverse, dy.reshape(N, D).contiguous(), dx,
                                   gate if dz is None else dz, partial, N, D, GATED=ctx.gated,
                                   B=triton.next_power_of_2(D), R=ROWS)
        return dx.view(shape), None if dz is None else dz.view(shape), partial.sum(0).to(scale.dtype), None


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """x [..., D], scale [D] -> [..., D] in x's dtype; gradients to both."""
    return _Norm.apply(x, None, scale, eps)


def gated_rms_norm(x: Tensor, z: Tensor, scale: Tensor, eps: float) -> Tensor:
    """rms_norm(x) silu(z) in z's dtype: x, z [..., D], scale [D]; gradients to all three."""
    return _Norm.apply(x, z, scale, eps)
