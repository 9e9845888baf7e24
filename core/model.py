"""The Qwen3-family decoder in plain PyTorch, over packed sequences; parameter names are Hugging Face's.

T packed tokens, B sequences, D hidden, H query heads, G key/value heads, K head size, V vocabulary.

    x_TD = embed(ids);  for each layer: x += mixer(norm(x)); x += mlp(norm(x));  h_TD = norm(x);  logits = h @ head.T
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oprd.core.cache import Cache
from oprd.core.decode import Decoder
from oprd.core.mixers import MIXERS, Layout, RMSNorm, rope_tables


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a Qwen3 decoder; fields are named as in config.json. The token ids are carried, not used here."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 32768
    initializer_range: float = 0.02
    layer_types: tuple[str, ...] = ()  # empty: full_attention everywhere
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None

    def __post_init__(self):
        for f in fields(self)[:7]:  # the sizes
            if getattr(self, f.name) < 1:
                raise ValueError(f"{f.name} = {getattr(self, f.name)} must be at least 1")
        if not self.layer_types:
            object.__setattr__(self, "layer_types", ("full_attention",) * self.num_hidden_layers)
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types names {len(self.layer_types)} layers, num_hidden_layers = {self.num_hidden_layers}"
            )
        for kind in self.layer_types:
            if kind not in MIXERS:
                raise ValueError(f"layer_types holds {kind!r}; layers this program has: {', '.join(MIXERS)}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads = {self.num_attention_heads} must be a multiple of "
                f"num_key_value_heads = {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim} must be even (rotary pairs)")

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], source: str = "config.json") -> "ModelConfig":
        """Read a config.json dict, with `rope_parameters` (transformers 5) or top-level `rope_theta` (before)."""
        if raw.get("model_type") != "qwen3":
            raise ValueError(f"{source}: model_type = {raw.get('model_type')!r} must be 'qwen3'")
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        refused = {
            "hidden_act": (raw.get("hidden_act", "silu"), "silu"),
            "attention_bias": (bool(raw.get("attention_bias")), False),
            "use_sliding_window": (bool(raw.get("use_sliding_window")), False),
            "rope_type": (rope.get("rope_type", rope.get("type", "default")), "default"),
        }
        for name, (value, wanted) in refused.items():
            if value != wanted:
                raise ValueError(f"{source}: {name} = {value!r} is not supported, only {wanted!r}")
        own = {f.name: raw[f.name] for f in fields(cls) if raw.get(f.name) is not None}
        own["rope_theta"] = float(rope.get("rope_theta", raw.get("rope_theta", 10000.0)))
        own.setdefault("num_key_value_heads", raw.get("num_attention_heads"))
        own.setdefault("head_dim", 128)  # what transformers takes when the file has none
        for name in ("layer_types", "eos_token_id"):
            if isinstance(own.get(name), list):
                own[name] = tuple(own[name])
        missing = [f for f in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                               "num_attention_heads") if f not in own]
        if missing:
            raise ValueError(f"{source}: {', '.join(missing)} missing")
        return cls(**own)

    def to_hf(self) -> dict[str, Any]:
        """The config.json dict; old and new readers both find their rope fields."""
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        own = {name: list(value) if isinstance(value, tuple) else value for name, value in own.items()}
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            **own,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "hidden_act": "silu",
            "attention_bias": False,
            "use_sliding_window": False,
        }


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)), [T, D] -> [T, D]."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        d, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(d, inner, bias=False)
        self.up_proj = nn.Linear(d, inner, bias=False)
        self.down_proj = nn.Linear(inner, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One layer: a token mixer (by config.layer_types) and an MLP, each behind a norm and added to the stream."""

    def __init__(self, config: ModelConfig, kind: str):
        super().__init__()
        self.mixer_name = MIXERS[kind].attribute
        setattr(self, self.mixer_name, MIXERS[kind](config))
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, layout: Layout, entries: Sequence | None) -> Tensor:
        x = x + getattr(self, self.mixer_name)(self.input_layernorm(x), layout, entries)
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    """Everything below the head (what Hugging Face prefixes with `model.`)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, kind) for kind in config.layer_types)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Model(nn.Module):
    """The decoder. Weights are uninitialised until init(seed) or a checkpoint is loaded."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def head_weight(self) -> Tensor:
        """The output matrix [V, D]: the embedding itself when tied."""
        return self.model.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight

    @torch.no_grad()
    def init(self, seed: int) -> "Model":
        """Fill every matrix with normal(0, initializer_range) and every norm with 1; same seed, same weights."""
        generator = torch.Generator().manual_seed(seed)
        for p in self.parameters():
            value = torch.ones(p.shape)
            if p.dim() > 1:
                value.normal_(0.0, self.config.initializer_range, generator=generator)
            p.copy_(value)
        return self

    def new_cache(self) -> Cache:
        """An empty cache for one conversation."""
        return Cache([MIXERS[kind].new_entry() for kind in self.config.layer_types])

    def decoder(self, rows: int) -> Decoder:
        """A batched decoder of up to `rows` conversations with the weights of now (copied, float32)."""
        return Decoder(self, rows)

    def hidden(
        self, ids: Tensor, cu_seqlens: Tensor, positions: Tensor | None = None, caches: Sequence[Cache] | None = None
    ) -> Tensor:
        """Final-normed hidden states [T, D] of packed ids [T].

        cu_seqlens: int [B + 1], boundaries from 0 to T. positions: int [T]; default: each sequence counts from 0, or
        from the length of its cache. caches: one per sequence; its tokens go on after the cached ones and are appended.
        """
        lengths = cu_seqlens.diff()
        if positions is None:
            positions = torch.arange(len(ids), device=ids.device) - cu_seqlens[:-1].repeat_interleave(lengths)
            if caches is not None:
                past = torch.tensor([cache.length for cache in caches], device=ids.device)
                positions = positions + past.repeat_interleave(lengths)
        x = self.model.embed_tokens(ids)
        cos, sin = rope_tables(positions, self.config.head_dim, self.config.rope_theta, x.dtype)
        layout = Layout(cu_seqlens, cos[:, None], sin[:, None])
        for i, block in enumerate(self.model.layers):
            x = block(x, layout, None if caches is None else [cache.entries[i] for cache in caches])
        return self.model.norm(x)

    def logits(self, ids: Tensor, cu_seqlens: Tensor, positions: Tensor | None = None, caches=None) -> Tensor:
        """Logits [T, V]; arguments as hidden(). Training uses hidden() and head_weight and never holds this."""
        return F.linear(self.hidden(ids, cu_seqlens, positions, caches), self.head_weight)
