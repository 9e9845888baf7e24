"""Token mixers: the half of a decoder block in which tokens see each other. `MIXERS` names them as config.json does.

T packed tokens, S packed tokens of the cache and T, B sequences, D hidden. Attention: H query heads, G key/value heads,
K head size, R rotated part of it. Gated DeltaNet: H value heads of size V, G key heads of size K, C convolved channels
(2 G K + H V), W width of the convolution.

A mixer is `mixer(x_TD, layout, entries) -> [T, D]`; it says under which name Hugging Face stores it (`attribute`) and
makes the cache entry it needs (`new_entry()`). Over a mesh its heads are dealt to tp (with their weights) and to cp
(Ulysses): a rank then sees its tokens c outside, those of its tp ranks t between the projections and the exchange, and
all T with a share of the heads where tokens meet; G and H below are the heads it has there.
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
from oprd.kernels.rms_norm import gated_rms_norm, rms_norm
from oprd.kernels.short_conv import short_conv
from oprd.parallel.collectives import gather_rows
from oprd.parallel.layers import ColumnLinear, RowLinear, head_cut
from oprd.parallel.mesh import Mesh
from oprd.parallel.sequence import own_heads, spread, to_heads, to_tokens


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
    attend = staticmethod(attend)

    def __init__(self, config: ModelConfig, mesh: Mesh = Mesh()):
        super().__init__()
        family, self.mesh = config.family, mesh
        self.head_dim, self.gated, self.normed = config.head_dim, family.output_gate, family.qk_norm
        d, k = config.hidden_size, config.head_dim
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        q_cut = head_cut(mesh, "num_attention_heads", (heads, k * (2 if self.gated else 1)))
        kv_cut = head_cut(mesh, "num_key_value_heads", (groups, k), shared=True)
        self.q_proj = ColumnLinear(d, q_cut, bias=family.qkv_bias)
        self.k_proj = ColumnLinear(d, kv_cut, bias=family.qkv_bias)
        self.v_proj = ColumnLinear(d, kv_cut, bias=family.qkv_bias)
        self.o_proj = RowLinear(head_cut(mesh, "num_attention_heads", (heads, k), dim=1), d)
        mesh.cp.share(heads // mesh.tp.size, "attention heads of a rank")
        spread(self.k_proj.out_features // k, mesh.cp, "key/value heads")
        if self.normed:
            self.q_norm = RMSNorm(k, config.rms_norm_eps, family.zero_centred)
            self.k_norm = RMSNorm(k, config.rms_norm_eps, family.zero_centred)

    def forward(self, x: Tensor, layout: Layout, entries: Sequence[KVEntry] | None = None) -> Tensor:
        """x [T, D] -> [T, D]. With entries (one per packed sequence), each sequence goes on after its entry's past."""
        x = gather_rows(x, self.mesh.tp)
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim * (2 if self.gated else 1)))
        k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.k_proj, self.v_proj))
        if self.gated:
            q, gate = q.chunk(2, dim=-1)  # the gate stays with its tokens
        q, k, v = to_heads((q, k, v), self.mesh.cp)
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
        out = to_tokens(self.attend(q, k, v, layout.cu_seqlens, cu_keys), self.mesh.cp)
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
    rule = staticmethod(gated_delta_rule)

    def __init__(self, config: ModelConfig, mesh: Mesh = Mesh()):
        super().__init__()
        self.mesh = mesh
        d, all_heads, all_groups = config.hidden_size, config.linear_num_value_heads, config.linear_num_key_heads
        self.key_size, self.value_size = config.linear_key_head_dim, config.linear_value_head_dim
        cut = lambda *sections, dim=0: head_cut(mesh, "linear_num_key_heads", *sections, dim=dim)  # noqa: E731
        by_head, by_value = cut((all_groups, all_heads // all_groups)), cut((all_heads, self.value_size))
        qkv_cut = cut((all_groups, self.key_size), (all_groups, self.key_size), (all_heads, self.value_size))
        heads, groups = all_heads // mesh.tp.size, all_groups // mesh.tp.size
        self.key_dim, self.value_dim = groups * self.key_size, heads * self.value_size  # of this rank, as below
        channels = 2 * self.key_dim + self.value_dim
        self.in_proj_qkv = ColumnLinear(d, qkv_cut)
        self.in_proj_z = ColumnLinear(d, by_value)
        self.in_proj_b = ColumnLinear(d, by_head)
        self.in_proj_a = ColumnLinear(d, by_head)
        self.conv1d = nn.Conv1d(channels, channels, config.linear_conv_kernel_dim, groups=channels, bias=False)
        self.conv1d.cuts = {"weight": qkv_cut}
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.dt_bias = nn.Parameter(torch.ones(heads))
        self.cuts = {"A_log": by_head, "dt_bias": by_head}
        self.norm = RMSNorm(self.value_size, config.rms_norm_eps)  # plain in every family
        self.out_proj = RowLinear(cut((all_heads, self.value_size), dim=1), d)
        self.own_values = mesh.cp.share(heads, "linear value heads of a rank") * self.value_size
        self.own_keys = groups * spread(groups, mesh.cp, "linear key heads") // mesh.cp.size * self.key_size

    def forward(self, x: Tensor, layout: Layout, entries: Sequence[RecurrentEntry] | None = None) -> Tensor:
        """x [T, D] -> [T, D]. With entries (one per packed sequence), each sequence goes on from its entry's state."""
        x = gather_rows(x, self.mesh.tp)
        qkv, z = self.in_proj_qkv(x), self.in_proj_z(x)
        cu_seqlens, conv = layout.cu_seqlens, self.conv1d.weight.squeeze(1)
        qkv, conv, a, b = self.exchanged(qkv, conv, self.in_proj_a(x), self.in_proj_b(x))
        windows = states = None
        if entries is not None:
            fresh = self.fresh(qkv)
            states, windows = (torch.stack(t) for t in zip(*(e.held or fresh for e in entries)))
        qkv, windows = short_conv(qkv, conv.to(qkv.dtype), cu_seqlens, windows)
        out, states = self.rule(*self.heads(qkv), *self.gates(a, b), cu_seqlens, states)
        out = to_tokens(out, self.mesh.cp)
        if entries is not None:
            for entry, n, state, window in zip(entries, cu_seqlens.diff().tolist(), states, windows, strict=True):
                entry.append(n, state, window)
        return self.out_proj(self.gated_norm(out, z.unflatten(-1, (-1, self.value_size))).flatten(1))

    def exchanged(self, qkv: Tensor, conv: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Channels [t, C] and gates [t, H] of all heads for those [T, C] and [T, H] of the heads cp gives this rank, and
        their part of the convolution's weights [C, W]."""
        cp = self.mesh.cp
        if cp.size == 1:
            return qkv, conv, a, b
        channels = self._sections(qkv, self.key_dim, self.value_dim)
        *channels, a, b = to_heads((*channels, a[:, :, None], b[:, :, None]), cp)
        own = [own_heads(w, cp, dim=1).flatten(1) for w in self._sections(conv.T, self.key_dim, self.value_dim)]
        return torch.cat([x.flatten(1) for x in channels], dim=1), torch.cat(own, dim=1).T, a.squeeze(2), b.squeeze(2)

    def heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Convolved channels [T, C] as q and k [T, G, K] and v [T, H, V]."""
        return self._sections(qkv, self.own_keys, self.own_values)

    def _sections(self, x: Tensor, keys: int, values: int) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = x.split([keys, keys, values], dim=-1)
        return (q.unflatten(-1, (-1, self.key_size)), k.unflatten(-1, (-1, self.key_size)),
                v.unflatten(-1, (-1, self.value_size)))

    def gates(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Log decay g (<= 0) and step beta, both [T, H], in float32 or wider."""
        wide = torch.promote_types(a.dtype, torch.float32)
        A_log, dt_bias = (own_heads(p, self.mesh.cp).to(wide) for p in (self.A_log, self.dt_bias))
        return -A_log.exp() * F.softplus(a.to(wide) + dt_bias), b.to(wide).sigmoid()

    def gated_norm(self, out: Tensor, z: Tensor) -> Tensor:
        """norm(out) * silu(z), both [T, H, V]; the norm comes first."""
        return gated_rms_norm(out, z, self.norm.scale, self.norm.eps)

    def fresh(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """(state [H, K, V], window [W - 1, C]) before the first token."""
        wide = torch.promote_types(like.dtype, torch.float32)
        return (like.new_zeros(self.own_values // self.value_size, self.key_size, self.value_size, dtype=wide),
                like.new_zeros(self.conv1d.kernel_size[0] - 1, like.shape[-1]))


MIXERS = {"full_attention": Attention, "linear_attention": GatedDeltaNet}
