"""Token mixers: the half of a decoder block in which tokens see each other. `MIXERS` names them as config.json does.

T packed tokens, S packed tokens of the cache and T, B sequences, D hidden. Attention: H query heads, G key/value heads,
K head size, R rotated part of it. Gated DeltaNet: H value heads of size V, G key heads of size K, C convolved channels
(2 G K + H V), W width of the convolution.

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

from oprd.core.architecture import ModelConfig
from oprd.core.cache import KVEntry, RecurrentEntry
from oprd.kernels.attention import attend
from oprd.kernels.delta_rule import gated_delta_rule
from oprd.kernels.rms_norm import rms_norm
from oprd.kernels.short_conv import short_conv


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * scale over the last dim, computed in float32 or wider; y in x's dtype.

    scale is weight, or 1 + weight where the family stores it zero-centred.
    """

    def __init__(self, size: int, eps: float, zero_centred: bool = False):
        super().__init__()
        self.zero_centred = zero_centred
        self.weight = nn.Parameter(torch.zeros(size) if zero_centred else torch.ones(size))
        self.eps = eps

    @property
    def scale(self) -> Tensor:
        """What the normed values are multiplied with, in float32 or wider."""
        wide = self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))
        return 1 + wide if self.zero_centred else wide

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale
        return rms_norm(x, scale, self.eps)


@dataclass(frozen=True, eq=False)
class Layout:
    """How the packed tokens lie: sequence boundaries (int [B + 1], from 0 to T) and rotary tables, each [T, 1, R]."""

    cu_seqlens: Tensor
    cos: Tensor
    sin: Tensor


def rope_tables(positions: Tensor, rotary_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [T, rotary_dim] of the rotary angles at `positions` [T]; angles in float32 (float64 for float64)."""
    wide = torch.promote_types(dtype, torch.float32)
    exponent = torch.arange(0, rotary_dim, 2, dtype=wide, device=positions.device) / rotary_dim
    angles = positions.to(wide)[:, None] * theta**-exponent
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the first R elements of x [T, heads, K]: element i turns with i + R/2; cos, sin [T, 1, R]."""
    turned, kept = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
    low, high = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat([-high, low], dim=-1) * sin
    return torch.cat([turned, kept], dim=-1) if kept.shape[-1] else turned


class Attention(nn.Module):
    """Grouped-query causal attention with rotary positions; by family with q/k norm over each head, qkv biases, and an
    output gate (q_proj then holds, per head, K rows of query and K rows of gate)."""

    attribute = "self_attn"
    new_entry = KVEntry

    def __init__(self, config: ModelConfig):
        super().__init__()
        family = config.family
        self.head_dim, self.gated, self.normed = config.head_dim, family.output_gate, family.qk_norm
        d, k = config.hidden_size, config.head_dim
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(d, heads * k * (2 if self.gated else 1), bias=family.qkv_bias)
        self.k_proj = nn.Linear(d, groups * k, bias=family.qkv_bias)
        self.v_proj = nn.Linear(d, groups * k, bias=family.qkv_bias)
        self.o_proj = nn.Linear(heads * k, d, bias=False)
        if self.normed:
            self.q_norm = RMSNorm(k, config.rms_norm_eps, family.zero_centred)
            self.k_norm = RMSNorm(k, config.rms_norm_eps, family.zero_centred)

    def forward(self, x: Tensor, layout: Layout, entries: Sequence[KVEntry] | None = None) -> Tensor:
        """x [T, D] -> [T, D]. With entries (one per packed sequence), each sequence goes on after its entry's past."""
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim * (2 if self.gated else 1)))
        k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.k_proj, self.v_proj))
        if self.gated:
            q, gate = q.chunk(2, dim=-1)
        if self.normed:
            q, k = self.q_norm(q), self.k_norm(k)
        # the tables are in the residual stream's dtype: rotate in it, then go back (under autocast, to bfloat16)
        q, k = (rotate(t, layout.cos, layout.sin).to(v.dtype) for t in (q, k))
        cu_keys = None
        if entries is not None:
            lengths = layout.cu_seqlens.diff().tolist()
            pairs = [e.append(a, b) for e, a, b in zip(entries, k.split(lengths), v.split(lengths), strict=True)]
            k, v = torch.cat([a for a, _ in pairs]), torch.cat([b for _, b in pairs])
            cu_keys = torch.tensor([0, *accumulate(len(a) for a, _ in pairs)], device=x.device)
        out = attend(q, k, v, layout.cu_seqlens, cu_keys)
        if self.gated:
            out = out * torch.sigmoid(gate)
        return self.o_proj(out.flatten(1))


class GatedDeltaNet(nn.Module):
    """Linear attention by the gated delta rule behind a short convolution (arXiv 2412.06464; Qwen3.5's layout).

    Per value head a state S [K, V]: S <- exp(g) S + k (beta (v - (exp(g) S)^T k))^T, read by q. Decay and recurrence
    are computed in float32 or wider.
    """

    attribute = "linear_attn"
    new_entry = RecurrentEntry

    def __init__(self, config: ModelConfig):
        super().__init__()
        d, heads, groups = config.hidden_size, config.linear_num_value_heads, config.linear_num_key_heads
        self.key_size, self.value_size = config.linear_key_head_dim, config.linear_value_head_dim
        self.key_dim, self.value_dim = groups * self.key_size, heads * self.value_size
        channels = 2 * self.key_dim + self.value_dim
        self.in_proj_qkv = nn.Linear(d, channels, bias=False)
        self.in_proj_z = nn.Linear(d, self.value_dim, bias=False)
        self.in_proj_b = nn.Linear(d, heads, bias=False)
        self.in_proj_a = nn.Linear(d, heads, bias=False)
        self.conv1d = nn.Conv1d(channels, channels, config.linear_conv_kernel_dim, groups=channels, bias=False)
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.dt_bias = nn.Parameter(torch.ones(heads))
        self.norm = RMSNorm(self.value_size, config.rms_norm_eps)  # plain in every family
        self.out_proj = nn.Linear(self.value_dim, d, bias=False)

    def forward(self, x: Tensor, layout: Layout, entries: Sequence[RecurrentEntry] | None = None) -> Tensor:
        """x [T, D] -> [T, D]. With entries (one per packed sequence), each sequence goes on from its entry's state."""
        cu_seqlens, conv = layout.cu_seqlens, self.conv1d.weight.squeeze(1)
        qkv, z = self.in_proj_qkv(x), self.in_proj_z(x)
        b, a = self.in_proj_b(x), self.in_proj_a(x)
        windows = states = None
        if entries is not None:
            fresh = self.fresh(qkv)
            states, windows = (torch.stack(t) for t in zip(*(e.held or fresh for e in entries)))
        qkv, windows = short_conv(qkv, conv.to(qkv.dtype), cu_seqlens, windows)
        out, states = gated_delta_rule(*self.heads(qkv), *self.gates(a, b), cu_seqlens, states)
        if entries is not None:
            for entry, n, state, window in zip(entries, cu_seqlens.diff().tolist(), states, windows, strict=True):
                entry.append(n, state, window)
        return self.out_proj(self.gated_norm(out, z.unflatten(-1, (-1, self.value_size))).flatten(1))

    def heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Convolved channels [T, C] as q and k [T, G, K] and v [T, H, V]."""
        q, k, v = qkv.split([self.key_dim, self.key_dim, self.value_dim], dim=-1)
        return (q.unflatten(-1, (-1, self.key_size)), k.unflatten(-1, (-1, self.key_size)),
                v.unflatten(-1, (-1, self.value_size)))

    def gates(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Log decay g (<= 0) and step beta, both [T, H], in float32 or wider."""
        wide = torch.promote_types(a.dtype, torch.float32)
        return -self.A_log.to(wide).exp() * F.softplus(a.to(wide) + self.dt_bias.to(wide)), b.to(wide).sigmoid()

    def gated_norm(self, out: Tensor, z: Tensor) -> Tensor:
        """norm(out) * silu(z), both [T, H, V]; the norm comes first."""
        wide = torch.promote_types(out.dtype, torch.float32)
        return (self.norm(out.to(wide)) * F.silu(z.to(wide))).to(z.dtype)

    def fresh(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """(state [H, K, V], window [W - 1, C]) before the first token."""
        wide = torch.promote_types(like.dtype, torch.float32)
        return (like.new_zeros(len(self.A_log), self.key_size, self.value_size, dtype=wide),
                like.new_zeros(self.conv1d.kernel_size[0] - 1, like.shape[-1]))


MIXERS = {"full_attention": Attention, "linear_attention": GatedDeltaNet}
