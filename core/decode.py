"""Batched decoding, one token for every conversation at once: the model's forward laid out for few, large operations.

N rows (conversations) being decoded, L longest of them, D hidden. Attention: H query heads, G key/value heads, K head
size. Gated DeltaNet: H value heads, state [K, V], C convolved channels, W width of the convolution.

Equal to Model.logits up to rounding, and faster for single tokens, where a step is as slow as its operations are many:
projections of one input are one product, norm weights are multiplied into the matrix that follows them, and what a layer
remembers, and what it computes, lies in preallocated tensors. Rows 0..N-1 are always the occupied ones, so a step works
on views, made when rows come or go, and gathers nothing: leave(row) moves the last row into the hole.
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
SPAN = 16  # keys in view grow by multiples of this: in between every view stays as it is


class Decoder:
    """Rows of conversations decoded together, in the model's own precision; its weights must not change meanwhile."""

    @torch.inference_mode()
    def __init__(self, model, rows: int):
        self.config = c = model.config
        self.rows = rows
        self.lengths: list[int] = []  # tokens held, one per occupied row
        self.embed = model.model.embed_tokens.weight
        self.norm, self.head = _Norm(self.embed, c.rms_norm_eps), _behind(model.model.norm, model.head_weight).T
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
        now = self._now = self._now or self._begin()
        now.advance(self)
        self.lengths = [length + 1 for length in self.lengths]
        x = self.embed.index_select(0, ids)
        for mixer, feed in zip(self.mixers, self.feeds):
            x = feed(mixer(x, now))
        return torch.mm(self.norm(x), self.head)

    def _begin(self) -> "_Now":
        """The first step after rows have come or gone."""
        now = _Now(self)
        self.norm.prepare(now.n)
        for part in (*self.mixers, *self.feeds):
            part.prepare(now.n)
        return now

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
    """What all layers share while the same n rows stay: positions [n] of the token in hand, `span` keys in view (all
    that are held, rounded up), the mask [n G, 1, span], where keys are written (rows of the [rows * G * room, K] view)
    [n G], the rotary tables [n, 1, K], each element's partner."""

    def __init__(self, decoder: Decoder):
        n, groups, room = len(decoder.lengths), decoder.config.num_key_value_heads, decoder.room
        self.n, self.longest, self.span, self.partner = n, max(decoder.lengths), 0, decoder.partner
        self.positions = torch.tensor(decoder.lengths) - 1
        hidden = torch.arange(room) > self.positions[:, None]
        bias = decoder.embed.new_zeros(n, 1, room).masked_fill_(hidden[:, None], float("-inf"))
        self.whole_bias = bias.repeat_interleave(groups, 0)
        self.slots = (torch.arange(n * groups) * room).view(n, groups).add_(self.positions[:, None]).view(-1)
        self.cos, self.sin = (decoder.cos.new_empty(n, decoder.config.head_dim) for _ in range(2))

    def advance(self, decoder: Decoder) -> None:
        """The same rows one token later."""
        self.longest += 1
        self.slots += 1
        self.positions += 1
        self.whole_bias.view(-1).index_fill_(0, self.slots, 0.0)  # the mask lies as the keys do
        torch.index_select(decoder.cos, 0, self.positions, out=self.cos)
        torch.index_select(decoder.sin, 0, self.positions, out=self.sin)
        if self.longest > self.span:
            self.span = min(-(-self.longest // SPAN) * SPAN, decoder.room)
            self.bias = self.whole_bias[:, :, : self.span]
            for mixer in decoder.mixers:
                mixer.look(self.n, self.span)


class _Norm:
    """x / sqrt(sum of squares + size * eps), over the last dim: the RMS norm but for a factor sqrt(size), which stands
    in the weights that follow (`_weight`). Three operations; F.rms_norm is a dozen on the CPU, a quarter of a step."""

    def __init__(self, like: Tensor, eps: float, size: int | None = None):
        self.size = size or like.shape[-1]
        self.like, self.wide = like, torch.promote_types(like.dtype, torch.float32)
        self.floor = torch.tensor((self.size * eps) ** 0.5, dtype=self.wide)

    def prepare(self, *shape: int) -> None:
        self.length = self.like.new_empty(*shape, 1, dtype=self.wide)
        self.out = self.like.new_empty(*shape, self.size)

    def __call__(self, x: Tensor) -> Tensor:
        torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=self.wide, out=self.length)
        return torch.div(x, self.length.hypot_(self.floor), out=self.out)


def _behind(norm, *matrices: Tensor) -> Tensor:
    """The matrices stacked, the norm before them multiplied in: (scale * x) @ W.T = x @ (W * scale).T"""
    return torch.cat(matrices) * _weight(norm.scale)


def _weight(scale: Tensor) -> Tensor:
    """What makes _normed(x) * weight the RMS norm with this scale."""
    return scale * scale.shape[-1] ** 0.5


class _AttentionRows:
    """x + attention(norm(x)); keys and values [rows, G, room, K]."""

    def __init__(self, block, config: ModelConfig, rows: int):
        attention = block.self_attn
        self.rows, self.groups, self.size = rows, config.num_key_value_heads, config.head_dim
        self.heads, scale = config.num_attention_heads, self.size**-0.5
        self.normed, self.gated = attention.normed, attention.gated
        q, k, v = attention.q_proj, attention.k_proj, attention.v_proj
        query, gates = q.weight, []
        if self.gated:  # per head: K rows of query, K rows of gate
            query, gate = (w.flatten(0, 1) for w in q.weight.unflatten(0, (self.heads, 2, self.size)).unbind(1))
            gates = [gate]
        if self.normed:
            self.qk_norm = _Norm(k.weight, config.rms_norm_eps, self.size)
            self.qk_scale = torch.cat([(_weight(attention.q_norm.scale) * scale).expand(self.heads, -1),
                                       _weight(attention.k_norm.scale).expand(self.groups, -1)])
        else:
            query = query * scale
        self.norm = _Norm(q.weight, config.rms_norm_eps)
        self.qkv = _behind(block.input_layernorm, query, k.weight, v.weight, *gates).T
        self.bias = None if q.bias is None else torch.cat([q.bias * scale, k.bias, v.bias])
        self.o = attention.o_proj.weight.T.contiguous()
        self.k = self.v = k.weight.new_zeros(rows, self.groups, 0, self.size)

    def make_room(self, room: int) -> None:
        extra = self.k.new_zeros(self.rows, self.groups, room - self.k.shape[2], self.size)
        self.k, self.v = torch.cat([self.k, extra], dim=2), torch.cat([self.v, extra], dim=2)

    def prepare(self, n: int) -> None:
        """Buffers and their views for n rows."""
        heads, groups, size = self.heads, self.groups, self.size
        empty = self.k.new_empty
        self.norm.prepare(n)
        self.all = empty(n, self.qkv.shape[1])
        qkv = self.all.view(n, -1, size)
        self.qk, self.new_v = qkv[:, : heads + groups], qkv[:, heads + groups : heads + 2 * groups]
        self.gate = self.all[:, (heads + 2 * groups) * size :]
        if self.normed:
            self.qk_norm.prepare(n, heads + groups)
        self.turned, self.rotated = empty(n, heads + groups, size), empty(n, heads + groups, size)
        self.q, self.new_k = self.rotated[:, :heads], self.rotated[:, heads:]
        self.grouped_q = empty(n * groups, heads // groups, size)
        self.q_copy = self.grouped_q.view(n, heads, size)
        self.out = empty(n * groups, heads // groups, size)
        self.k_rows, self.v_rows = self.k.view(-1, size), self.v.view(-1, size)

    def look(self, n: int, span: int) -> None:
        """Views of the first `span` keys and values of n rows."""
        k, self.v_seen = (t[:n].view(n * self.groups, -1, self.size)[:, :span] for t in (self.k, self.v))
        self.k_seen = k.transpose(1, 2)
        self.scores = self.k.new_empty(n * self.groups, self.heads // self.groups, span)

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
        torch.mm(self.norm(x), self.qkv, out=self.all)
        if self.bias is not None:
            self.all += self.bias
        qk = self.qk_norm(self.qk).mul_(self.qk_scale) if self.normed else self.qk
        torch.index_select(qk, -1, now.partner, out=self.turned)
        torch.mul(qk, now.cos.unsqueeze(1), out=self.rotated).addcmul_(self.turned, now.sin.unsqueeze(1))
        self.k_rows.index_copy_(0, now.slots, self.new_k.reshape(-1, self.size))
        self.v_rows.index_copy_(0, now.slots, self.new_v.reshape(-1, self.size))
        self.q_copy.copy_(self.q)
        torch.baddbmm(now.bias, self.grouped_q, self.k_seen, out=self.scores)
        torch.softmax(self.scores, dim=-1, out=self.scores)
        out = torch.bmm(self.scores, self.v_seen, out=self.out).view(now.n, -1)
        if self.gated:
            out = out * torch.sigmoid(self.gate)
        return torch.addmm(x, out, self.o)


class _DeltaRows:
    """x + gated_delta_net(norm(x)); states [rows, H, K, V], windows [rows, W - 1, C]."""

    def __init__(self, block, config: ModelConfig, rows: int):
        self.mixer = m = block.linear_attn
        parts = m.in_proj_qkv, m.in_proj_z, m.in_proj_b, m.in_proj_a
        self.sizes = [part.out_features for part in parts]
        self.norm = _Norm(parts[0].weight, config.rms_norm_eps)
        self.projections = _behind(block.input_layernorm, *(part.weight for part in parts)).T
        self.conv = m.conv1d.weight.squeeze(1)
        self.out = m.out_proj.weight.T.contiguous()
        self.decay, self.scale = -m.A_log.exp(), _weight(m.norm.scale)
        self.out_norm = _Norm(m.norm.scale, config.rms_norm_eps)
        state, window = m.fresh(m.conv1d.weight.new_empty(self.sizes[0]))
        self.states, self.windows = state.repeat(rows, 1, 1, 1), window.repeat(rows, 1, 1)
        self.entries: list[RecurrentEntry] = []  # as they joined, one per occupied row: the points to rewind to

    def make_room(self, room: int) -> None:
        """A state does not grow."""

    def look(self, n: int, span: int) -> None:
        """A state is always in view."""

    def prepare(self, n: int) -> None:
        self.norm.prepare(n)
        self.out_norm.prepare(n, len(self.decay))
        self.state, self.window = self.states[:n], self.windows[:n]

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
        m = self.mixer
        qkv, z, b, a = torch.mm(self.norm(x), self.projections).split(self.sizes, dim=-1)
        q, k, v = m.heads(short_conv_step(qkv, self.conv, self.window))
        g = F.softplus(a + m.dt_bias) * self.decay
        out = gated_delta_rule_step(q, k, v, g, b.sigmoid(), self.state)
        out = self.out_norm(out).mul_(self.scale).flatten(1) * F.silu(z)
        return torch.addmm(x, out, self.out)


class _Dense:
    """x + mlp(norm(x)), gate and up as one product."""

    def __init__(self, block, config: ModelConfig):
        gate, up = block.mlp.gate_proj.weight, block.mlp.up_proj.weight
        self.norm = _Norm(gate, config.rms_norm_eps)
        self.gate_up = _behind(block.post_attention_layernorm, gate, up).T
        self.down = block.mlp.down_proj.weight.T.contiguous()

    def prepare(self, n: int) -> None:
        self.norm.prepare(n)
        self.both = self.down.new_empty(n, self.gate_up.shape[1])
        self.gate, self.up = self.both.chunk(2, dim=-1)

    def __call__(self, x: Tensor) -> Tensor:
        torch.mm(self.norm(x), self.gate_up, out=self.both)
        return torch.addmm(x, F.silu(self.gate).mul_(self.up), self.down)


class _Sparse:
    """x + mixture(norm(x)), as the model computes it."""

    def __init__(self, block, config: ModelConfig):
        self.norm, self.mixture = block.post_attention_layernorm, block.mlp

    def prepare(self, n: int) -> None:
        """Nothing is kept between steps."""

    def __call__(self, x: Tensor) -> Tensor:
        return x + self.mixture(self.norm(x), None)
