"""Batched decoding, one token for every conversation at once: the model's forward laid out for few, large operations.

N rows (conversations) being decoded, L longest of them, D hidden. Attention: H query heads, G key/value heads, K head
size. Gated DeltaNet: H value heads, state [K, V], C convolved channels, W width of the convolution.

Equal to Model.logits up to rounding, and faster for single tokens: projections of one input are one product, norm
weights are multiplied into the matrix that follows them, and what a layer remembers lives in preallocated tensors
written in place. Rows 0..N-1 are always the occupied ones, so a step works on views and gathers nothing: leave(row)
moves the last row into the hole.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from oprd.core.architecture import ModelConfig
from oprd.core.cache import Cache, KVEntry, RecurrentEntry
from oprd.core.mixers import rope_tables
from oprd.core.moe import MLP
from oprd.kernels.delta_rule import gated_delta_rule_step
from oprd.kernels.short_conv import short_conv_step

STEP = 128  # room for tokens grows by multiples of this


class Decoder:
    """Rows of conversations decoded together, in the model's own precision; its weights must not change meanwhile."""

    @torch.inference_mode()
    def __init__(self, model, rows: int):
        self.config = c = model.config
        self.rows = rows
        self.lengths: list[int] = []  # tokens held, one per occupied row
        self.embed = model.model.embed_tokens.weight
        self.head = model.head_weight * model.model.norm.scale
        kinds = {"full_attention": _AttentionRows, "linear_attention": _DeltaRows}
        self.mixers = [kinds[kind](block, c, rows) for kind, block in zip(c.layer_types, model.model.layers)]
        self.feeds = [(_Dense if isinstance(block.mlp, MLP) else _Sparse)(block, c) for block in model.model.layers]
        self._make_room(STEP)

    @torch.inference_mode()
    def join(self, cache: Cache, room: int) -> int:
        """Copy a conversation in as the last row, with room for `room` more tokens; returns its row."""
        row, length = len(self.lengths), cache.length
        assert row < self.rows, f"all {self.rows} rows are taken"
        if length + room > self.room:
            self._make_room(-(-(length + room) // STEP) * STEP)
        for mixer, entry in zip(self.mixers, cache.entries):
            mixer.join(row, entry)
        self.lengths.append(length)
        self._now = None
        return row

    @torch.inference_mode()
    def leave(self, row: int) -> Cache:
        """Take a conversation out. The last row moves into its place: callers keep their lists in the same order."""
        last = len(self.lengths) - 1
        cache = Cache([mixer.leave(row, last, self.lengths) for mixer in self.mixers])
        self.lengths[row] = self.lengths[last]
        self.lengths.pop()
        self._now = None
        return cache

    @torch.inference_mode()
    def step(self, ids: Tensor) -> Tensor:
        """Append one token to every occupied row, ids int64 [N]; returns the logits after it, [N, V]."""
        now = self._now = self._begin() if self._now is None else self._now.after()
        self.lengths = [length + 1 for length in self.lengths]
        x = self.embed[ids]
        for mixer, feed in zip(self.mixers, self.feeds):
            x = feed(mixer(x, now))
        return F.linear(_normed(x, self.config.rms_norm_eps), self.head)

    def _begin(self) -> "_Now":
        """The first step after rows have come or gone."""
        n, groups = len(self.lengths), self.config.num_key_value_heads
        positions = torch.tensor(self.lengths)
        bias = self.embed.new_zeros(n, 1, self.room)
        bias.masked_fill_((torch.arange(self.room) > positions[:, None])[:, None], float("-inf"))
        slots = (torch.arange(n * groups) * self.room).view(n, groups).add_(positions[:, None]).view(-1)
        return _Now(self, n, max(self.lengths) + 1, positions, bias.repeat_interleave(groups, 0), slots)

    def _make_room(self, room: int) -> None:
        """Give every row room for `room` tokens, keeping what is there."""
        c, half = self.config, self.config.rotary_dim // 2
        for mixer in self.mixers:
            mixer.make_room(room)
        self.room, self._now = room, None
        cos, sin = rope_tables(torch.arange(room), c.rotary_dim, c.rope_theta, self.embed.dtype)
        # rotate() adds (-high, low) * sin; with element i beside its partner the sign stands in the table, and the
        # elements that are not rotated have cos 1, sin 0 and themselves as partner
        self.cos = torch.cat([cos, cos.new_ones(room, c.head_dim - 2 * half)], dim=-1)
        self.sin = torch.cat([-sin[:, :half], sin[:, half:], sin.new_zeros(room, c.head_dim - 2 * half)], dim=-1)
        at = torch.arange(c.head_dim)
        self.partner = torch.cat([at[half : 2 * half], at[:half], at[2 * half :]])


class _Now:
    """What all layers of one step share: n rows and the longest, positions [N], the mask [N G, 1, room], where keys
    are written (rows of the [rows * G * room, K] view) [N G], the rotary tables [N, 1, K], each element's partner."""

    def __init__(self, decoder: Decoder, n: int, longest: int, positions: Tensor, bias: Tensor, slots: Tensor):
        self.decoder, self.n, self.longest, self.positions, self.slots = decoder, n, longest, positions, slots
        self.whole_bias, self.bias = bias, bias[:, :, :longest]
        self.cos, self.sin = (t.index_select(0, positions)[:, None] for t in (decoder.cos, decoder.sin))
        self.partner = decoder.partner

    def after(self) -> "_Now":
        """The same rows one token later."""
        slots = self.slots + 1
        self.whole_bias.view(-1).index_fill_(0, slots, 0.0)  # the mask lies as the keys do
        return _Now(self.decoder, self.n, self.longest + 1, self.positions + 1, self.whole_bias, slots)


def _normed(x: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], None, eps)


def _behind(norm, *matrices: Tensor) -> Tensor:
    """The matrices stacked, the norm before them multiplied in: (scale * x) @ W.T = x @ (W * scale).T"""
    return torch.cat(matrices) * norm.scale


class _AttentionRows:
    """x + attention(norm(x)); keys and values [rows, G, room, K]."""

    def __init__(self, block, config: ModelConfig, rows: int):
        attention = block.self_attn
        self.eps, self.rows = config.rms_norm_eps, rows
        self.heads, self.groups, self.size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        scale = self.size**-0.5
        self.normed, self.gated = attention.normed, attention.gated
        q, k, v = attention.q_proj, attention.k_proj, attention.v_proj
        query, gates = q.weight, []
        if self.gated:  # per head: K rows of query, K rows of gate
            query, gate = (w.flatten(0, 1) for w in q.weight.unflatten(0, (self.heads, 2, self.size)).unbind(1))
            gates = [gate]
        if self.normed:
            self.qk_norm = torch.cat([(attention.q_norm.scale * scale).expand(self.heads, -1),
                                      attention.k_norm.scale.expand(self.groups, -1)])
        else:
            query = query * scale
        self.qkv = _behind(block.input_layernorm, query, k.weight, v.weight, *gates)
        self.bias = None if q.bias is None else torch.cat([q.bias * scale, k.bias, v.bias])
        self.o = attention.o_proj.weight.T.contiguous()
        self.k = self.v = k.weight.new_zeros(rows, self.groups, 0, self.size)

    def make_room(self, room: int) -> None:
        extra = self.k.new_zeros(self.rows, self.groups, room - self.k.shape[2], self.size)
        self.k, self.v = torch.cat([self.k, extra], dim=2), torch.cat([self.v, extra], dim=2)

    def join(self, row: int, entry: KVEntry) -> None:
        self.k[row, :, : entry.length] = entry.k.transpose(0, 1)
        self.v[row, :, : entry.length] = entry.v.transpose(0, 1)

    def leave(self, row: int, last: int, lengths: list[int]) -> KVEntry:
        own, moved = slice(lengths[row]), slice(lengths[last])
        taken = (t[row, :, own].transpose(0, 1).clone(memory_format=torch.contiguous_format) for t in (self.k, self.v))
        entry = KVEntry(*taken)
        if row != last:
            self.k[row, :, moved], self.v[row, :, moved] = self.k[last, :, moved], self.v[last, :, moved]
        return entry

    def __call__(self, x: Tensor, now: _Now) -> Tensor:
        heads, groups, size, n = self.heads, self.groups, self.size, now.n
        qkv = F.linear(_normed(x, self.eps), self.qkv, self.bias).view(n, -1, size)
        qk = qkv[:, : heads + groups]
        if self.normed:
            qk = _normed(qk, self.eps) * self.qk_norm
        qk = torch.addcmul(qk * now.cos, qk.index_select(-1, now.partner), now.sin)
        self.k.view(-1, size).index_copy_(0, now.slots, qk[:, heads:].reshape(-1, size))
        new_v = qkv[:, heads + groups : heads + 2 * groups]
        self.v.view(-1, size).index_copy_(0, now.slots, new_v.reshape(-1, size))
        q = qk[:, :heads].reshape(n * groups, heads // groups, size)
        k, v = (t[:n].view(n * groups, -1, size)[:, : now.longest] for t in (self.k, self.v))
        out = torch.bmm(torch.softmax(torch.baddbmm(now.bias, q, k.transpose(1, 2)), dim=-1), v).view(n, heads * size)
        if self.gated:
            out = out * torch.sigmoid(qkv[:, heads + 2 * groups :].reshape(n, -1))
        return torch.addmm(x, out, self.o)


class _DeltaRows:
    """x + gated_delta_net(norm(x)); states [rows, H, K, V], windows [rows, W - 1, C]."""

    def __init__(self, block, config: ModelConfig, rows: int):
        self.mixer = m = block.linear_attn
        self.eps = config.rms_norm_eps
        parts = m.in_proj_qkv, m.in_proj_z, m.in_proj_b, m.in_proj_a
        self.sizes = [part.out_features for part in parts]
        self.projections = _behind(block.input_layernorm, *(part.weight for part in parts))
        self.conv = m.conv1d.weight.squeeze(1)
        self.out = m.out_proj.weight.T.contiguous()
        self.decay, self.norm = -m.A_log.exp(), m.norm.scale
        state, window = m.fresh(m.conv1d.weight.new_empty(self.sizes[0]))
        self.states, self.windows = state.repeat(rows, 1, 1, 1), window.repeat(rows, 1, 1)
        self.entries: list[RecurrentEntry] = []  # as they joined, one per occupied row: the points to rewind to

    def make_room(self, room: int) -> None:
        """A state does not grow."""

    def join(self, row: int, entry: RecurrentEntry) -> None:
        self.states[row], self.windows[row] = entry.held
        self.entries.append(entry.fork())

    def leave(self, row: int, last: int, lengths: list[int]) -> RecurrentEntry:
        entry = self.entries[row]
        entry.append(lengths[row] - entry.length, self.states[row].clone(), self.windows[row].clone())
        self.entries[row] = self.entries[last]
        self.entries.pop()
        if row != last:
            self.states[row], self.windows[row] = self.states[last], self.windows[last]
        return entry

    def __call__(self, x: Tensor, now: _Now) -> Tensor:
        m, n = self.mixer, now.n
        qkv, z, b, a = F.linear(_normed(x, self.eps), self.projections).split(self.sizes, dim=-1)
        q, k, v = m.heads(short_conv_step(qkv, self.conv, self.windows[:n]))
        g = F.softplus(a + m.dt_bias) * self.decay
        out = gated_delta_rule_step(q, k, v, g, b.sigmoid(), self.states[:n])
        out = F.rms_norm(out, self.norm.shape, self.norm, self.eps).flatten(1) * F.silu(z)
        return torch.addmm(x, out, self.out)


class _Dense:
    """x + mlp(norm(x)), gate and up as one product."""

    def __init__(self, block, config: ModelConfig):
        self.eps = config.rms_norm_eps
        self.gate_up = _behind(block.post_attention_layernorm, block.mlp.gate_proj.weight, block.mlp.up_proj.weight)
        self.down = block.mlp.down_proj.weight.T.contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = F.linear(_normed(x, self.eps), self.gate_up).chunk(2, dim=-1)
        return torch.addmm(x, F.silu(gate) * up, self.down)


class _Sparse:
    """x + mixture(norm(x)), as the model computes it."""

    def __init__(self, block, config: ModelConfig):
        self.norm, self.mixture = block.post_attention_layernorm, block.mlp

    def __call__(self, x: Tensor) -> Tensor:
        return x + self.mixture(self.norm(x), None)
