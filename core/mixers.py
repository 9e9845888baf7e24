"""Token mixers: the half of a decoder block in which tokens see each other. `MIXERS` names them as config.json does.

T packed tokens, S packed tokens of the cache and T, D hidden, H query heads, G key/value heads, K head size.

A mixer is `mixer(x_TD, layout, entries) -> [T, D]`; it says under which name Hugging Face stores it (`attribute`) and
makes the cache entry it needs (`new_entry()`).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oprd.core.cache import KVEntry
from oprd.kernels.attention import attend


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dim, computed in float32 or wider; y in x's dtype."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(wide), self.weight.shape, self.weight.to(wide), self.eps).to(x.dtype)


@dataclass(frozen=True, eq=False)
class Layout:
    """How the packed tokens lie: sequence boundaries (int [B + 1], from 0 to T) and rotary tables, each [T, 1, K]."""

    cu_seqlens: Tensor
    cos: Tensor
    sin: Tensor


def rope_tables(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [T, head_dim] of the rotary angles at `positions` [T]; angles in float32 (float64 for float64)."""
    wide = torch.promote_types(dtype, torch.float32)
    exponent = torch.arange(0, head_dim, 2, dtype=wide, device=positions.device) / head_dim
    angles = positions.to(wide)[:, None] * theta**-exponent
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [T, heads, K]: element i turns with element i + K/2; cos, sin [T, 1, K]."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], dim=-1) * sin


class Attention(nn.Module):
    """Grouped-query causal attention with q/k norm over each head and rotary positions."""

    attribute = "self_attn"
    new_entry = KVEntry

    def __init__(self, config):
        super().__init__()
        self.head_dim = config.head_dim
        d, k = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(d, config.num_attention_heads * k, bias=False)
        self.k_proj = nn.Linear(d, config.num_key_value_heads * k, bias=False)
        self.v_proj = nn.Linear(d, config.num_key_value_heads * k, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * k, d, bias=False)
        self.q_norm = RMSNorm(k, config.rms_norm_eps)
        self.k_norm = RMSNorm(k, config.rms_norm_eps)

    def forward(self, x: Tensor, layout: Layout, entries: Sequence[KVEntry] | None = None) -> Tensor:
        """x [T, D] -> [T, D]. With entries (one per packed sequence), each sequence goes on after its entry's past."""
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        # the tables are in the residual stream's dtype: rotate in it, then go back (under autocast, to bfloat16)
        q = rotate(self.q_norm(q), layout.cos, layout.sin).to(v.dtype)
        k = rotate(self.k_norm(k), layout.cos, layout.sin).to(v.dtype)
        cu_keys = None
        if entries is not None:
            lengths = layout.cu_seqlens.diff().tolist()
            pairs = [e.append(a, b) for e, a, b in zip(entries, k.split(lengths), v.split(lengths), strict=True)]
            k, v = torch.cat([a for a, _ in pairs]), torch.cat([b for _, b in pairs])
            cu_keys = torch.tensor([0, *accumulate(len(a) for a, _ in pairs)], device=x.device)
        return self.o_proj(attend(q, k, v, layout.cu_seqlens, cu_keys).flatten(1))


MIXERS = {"full_attention": Attention}
