"""Batched decoding, one token for every conversation at once: the model's forward laid out for few, large operations.

N rows (conversations) being decoded, L longest of them, D hidden, H query heads, G key/value heads, K head size,
V vocabulary.

Equal to Model.logits up to rounding, and faster for single tokens: q, k, v and gate, up are one product each, norm
weights are multiplied into the matrix that follows them, keys and values live in preallocated tensors written in place.
Rows 0..N-1 are always the occupied ones, so a step works on views and gathers nothing: leave(row) moves the last row
into the hole.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from oprd.core.cache import Cache, KVEntry
from oprd.core.mixers import rope_tables

STEP = 128  # room for tokens grows by multiples of this


@dataclass(frozen=True, eq=False)
class _Layer:
    qkv: Tensor  # [(H + 2 G) K, D], input norm multiplied in
    qk_norm: Tensor  # [H + G, K], the query part times K^-0.5
    o: Tensor  # [H K, D]
    gate_up: Tensor  # [2 inner, D], norm multiplied in
    down: Tensor  # [inner, D]


class Decoder:
    """Rows of conversations decoded together. Built from a Model whose layers are all full attention."""

    @torch.inference_mode()
    def __init__(self, model, rows: int):
        config = model.config
        if set(config.layer_types) != {"full_attention"}:
            raise ValueError(f"batched decoding knows full_attention layers only, the model has {config.layer_types}")
        self.config = config
        self.rows = rows
        self.lengths: list[int] = []  # tokens held, one per occupied row
        self._take_weights(model)
        self._make_room(STEP)

    @torch.inference_mode()
    def join(self, cache: Cache, room: int) -> int:
        """Copy a conversation in as the last row, with room for `room` more tokens; returns its row."""
        row, length = len(self.lengths), cache.length
        assert row < self.rows, f"all {self.rows} rows are taken"
        if length + room > self.room:
            self._make_room(-(-(length + room) // STEP) * STEP)
        for i, entry in enumerate(cache.entries):
            self.k[i, row, :, :length] = entry.k.transpose(0, 1)
            self.v[i, row, :, :length] = entry.v.transpose(0, 1)
        self.lengths.append(length)
        return row

    @torch.inference_mode()
    def leave(self, row: int) -> Cache:
        """Take a conversation out. The last row moves into its place: callers keep their lists in the same order."""
        length, last = self.lengths[row], len(self.lengths) - 1
        cache = Cache([KVEntry(k[row, :, :length].transpose(0, 1).clone(memory_format=torch.contiguous_format),
                               v[row, :, :length].transpose(0, 1).clone(memory_format=torch.contiguous_format))
                       for k, v in zip(self.k, self.v)])
        if row != last:
            self.k[:, row, :, : self.lengths[last]] = self.k[:, last, :, : self.lengths[last]]
            self.v[:, row, :, : self.lengths[last]] = self.v[:, last, :, : self.lengths[last]]
        self.lengths[row] = self.lengths[last]
        self.lengths.pop()
        return cache

    @torch.inference_mode()
    def step(self, ids: Tensor) -> Tensor:
        """Append one token to every occupied row, ids int64 [N]; returns the logits after it, [N, V]."""
        c, n = self.config, len(self.lengths)
        heads, groups, size = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        positions = torch.tensor(self.lengths)
        self.lengths = [length + 1 for length in self.lengths]
        longest = max(self.lengths)
        cos, sin = self.cos[positions, None], self.sin[positions, None]
        hidden_later = torch.arange(longest) > positions[:, None]
        bias = torch.zeros(n, longest).masked_fill_(hidden_later, float("-inf")).repeat_interleave(groups, 0)[:, None]
        # where each (row, head) writes its new key: rows of the [rows * G * room, K] view
        slots = (torch.arange(n * groups) * self.room).view(n, groups).add_(positions[:, None]).view(-1)
        x = self.embed[ids]
        for layer, k, v in zip(self.layers, self.k, self.v):
            qkv = F.linear(self._normed(x), layer.qkv).view(n, -1, size)
            qk = self._normed(qkv[:, : heads + groups]) * layer.qk_norm
            qk = torch.addcmul(qk * cos, torch.roll(qk, size // 2, -1), sin)
            k.view(-1, size).index_copy_(0, slots, qk[:, heads:].reshape(-1, size))
            v.view(-1, size).index_copy_(0, slots, qkv[:, heads + groups :].reshape(-1, size))
            q = qk[:, :heads].reshape(n * groups, heads // groups, size)
            seen_k, seen_v = (t[:n].view(n * groups, self.room, size)[:, :longest] for t in (k, v))
            weights = torch.softmax(torch.baddbmm(bias, q, seen_k.transpose(1, 2)), dim=-1)
            x = torch.addmm(x, torch.bmm(weights, seen_v).view(n, heads * size), layer.o)
            gate, up = F.linear(self._normed(x), layer.gate_up).chunk(2, dim=-1)
            x = torch.addmm(x, F.silu(gate) * up, layer.down)
        return F.linear(self._normed(x), self.head)

    def _normed(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], None, self.config.rms_norm_eps)

    def _take_weights(self, model) -> None:
        c = self.config

        def behind(norm, *matrices) -> Tensor:
            """(norm.weight * x) @ W.T = x @ (W * norm.weight).T"""
            return torch.cat([m.weight.float() for m in matrices]) * norm.weight.float()

        self.embed = model.model.embed_tokens.weight.float()
        self.head = model.head_weight.float() * model.model.norm.weight.float()
        self.layers = []
        for block in model.model.layers:
            attention, mlp = block.self_attn, block.mlp
            query_norm = attention.q_norm.weight.float() * c.head_dim**-0.5
            qk_norm = torch.cat([query_norm.expand(c.num_attention_heads, -1),
                                 attention.k_norm.weight.float().expand(c.num_key_value_heads, -1)])
            self.layers.append(_Layer(
                qkv=behind(block.input_layernorm, attention.q_proj, attention.k_proj, attention.v_proj),
                qk_norm=qk_norm,
                o=attention.o_proj.weight.float().T.contiguous(),
                gate_up=behind(block.post_attention_layernorm, mlp.gate_proj, mlp.up_proj),
                down=mlp.down_proj.weight.float().T.contiguous(),
            ))

    def _make_room(self, room: int) -> None:
        """Give every row room for `room` tokens, keeping what is there."""
        c = self.config
        shape = (c.num_hidden_layers, self.rows, c.num_key_value_heads, room, c.head_dim)
        k, v = torch.zeros(shape), torch.zeros(shape)
        for new, old in ((k, getattr(self, "k", None)), (v, getattr(self, "v", None))):
            if old is not None:
                new[..., : self.room, :] = old
        self.k, self.v, self.room = k, v, room
        self.cos, sin = rope_tables(torch.arange(room), c.head_dim, c.rope_theta, torch.float32)
        # rotate() adds (-high, low) * sin; rolled by half a head, (high, low) needs the sign in the table
        self.sin = torch.cat([-sin[:, : c.head_dim // 2], sin[:, c.head_dim // 2 :]], dim=-1)
