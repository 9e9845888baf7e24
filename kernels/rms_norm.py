"""The RMS norm over the last dim: y = x / sqrt(mean(x^2) + eps) * scale.

Rows of D elements. Computed in scale's dtype (float32 or wider), written in x's. F.rms_norm is a dozen operations forward
and two dozen backward on the CPU; this is five and eight, and keeps x and one number a row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from oprd.kernels.backend import use_triton


def rms_norm_definition(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """float64, in so many words; the oracle of the tests."""
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * scale.double()


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """x [..., D], scale [D] -> [..., D] in x's dtype; gradients to both."""
    if use_triton(x):
        from oprd.kernels import rms_norm_triton

        return rms_norm_triton.rms_norm(x, scale, eps)
    return _RMSNorm.apply(x, scale, eps)


def gated_rms_norm_definition(x: Tensor, z: Tensor, scale: Tensor, eps: float) -> Tensor:
    """float64, in so many words."""
    return rms_norm_definition(x, scale, eps) * z.double() * z.double().sigmoid()


def gated_rms_norm(x: Tensor, z: Tensor, scale: Tensor, eps: float) -> Tensor:
    """rms_norm(x) silu(z), the norm first: x, z [..., D], scale [D] -> [..., D] in z's dtype; gradients to all."""
    if use_triton(x):
        from oprd.kernels import rms_norm_triton

        return rms_norm_triton.gated_rms_norm(x, z, scale, eps)
    return (rms_norm(x.to(scale.dtype), scale, eps) * F.silu(z.to(scale.dtype))).to(z.dtype)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, scale: Tensor, eps: float) -> Tensor:
        size = x.shape[-1]
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=scale.dtype)
        # hypot(|x|, sqrt(D eps)) = sqrt(sum x^2 + D eps)
        inverse = size**0.5 / length.hypot_(length.new_tensor((size * eps) ** 0.5))
        ctx.save_for_backward(x, scale, inverse)
        return (x * inverse).mul_(scale).to(x.dtype)

    @staticmethod
    def backward(ctx, dy: Tensor):
        """With n = x * inverse: d_scale = sum of dy n; dx = inverse (g - n mean(g n)) where g = dy scale."""
        x, scale, inverse = ctx.saved_tensors
        n = x * inverse
        dy = dy.to(n.dtype)
        d_scale = (dy * n).flatten(0, -2).sum(0)
        g = dy * scale
        share = (g * n).sum(-1, keepdim=True).div_(-x.shape[-1])
        dx = g.addcmul_(n, share).mul_(inverse)
        return dx.to(x.dtype), d_scale, None
