"""What a decoder is made of: the families this program knows, and the sizes that config.json gives.

A new family is an entry of FAMILIES, and a mixer (core/mixers.py) or a feed-forward (core/moe.py) if it has a new one.
Facts of the families: their config classes and model code in transformers 5.24.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Mapping

LAYERS = ("full_attention", "linear_attention")


@dataclass(frozen=True)
class Family:
    """What model_type says that no other field of config.json does.

    architecture: the class transformers builds. zero_centred: RMSNorm scales by 1 + weight (weight starts at 0).
    qkv_bias, qk_norm: of attention. output_gate: attention output is scaled by the sigmoid of half of q_proj.
    experts: the feed-forward is a mixture. nested: the sizes stand under text_config; `text` is then the model_type of
    the language model alone. defaults: what transformers assumes for a field that the file leaves out.
    """

    architecture: str
    zero_centred: bool = False
    qkv_bias: bool = False
    qk_norm: bool = True
    output_gate: bool = False
    experts: bool = False
    nested: bool = False
    text: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)


_HYBRID = {"head_dim": 256, "partial_rotary_factor": 0.25, "full_attention_interval": 4, "linear_conv_kernel_dim": 4,
           "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
           "linear_num_value_heads": 32}
_QWEN35 = dict(zero_centred=True, output_gate=True, defaults=_HYBRID)
_QWEN35_MOE = dict(zero_centred=True, output_gate=True, experts=True,
                   defaults={**_HYBRID, "norm_topk_prob": True, "moe_intermediate_size": 512,
                             "shared_expert_intermediate_size": 512, "num_experts": 256, "num_experts_per_tok": 8})

FAMILIES = {
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, qk_norm=False),
    "qwen3": Family("Qwen3ForCausalLM", defaults={"head_dim": 128}),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", experts=True,
                        defaults={"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}),
    "qwen3_next": Family("Qwen3NextForCausalLM", zero_centred=True, output_gate=True, experts=True,
                         defaults={**_QWEN35_MOE["defaults"], "num_experts": 512, "num_experts_per_tok": 10}),
    "qwen3_5_text": Family("Qwen3_5ForCausalLM", **_QWEN35),
    "qwen3_5": Family("Qwen3_5ForConditionalGeneration", nested=True, text="qwen3_5_text", **_QWEN35),
    "qwen3_5_moe_text": Family("Qwen3_5MoeForCausalLM", **_QWEN35_MOE),
    "qwen3_5_moe": Family("Qwen3_5MoeForConditionalGeneration", nested=True, text="qwen3_5_moe_text", **_QWEN35_MOE),
}


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a decoder; fields are named as in config.json. The token ids are carried, not used here.

    intermediate_size is 0 where every layer is a mixture. linear_* describe linear_attention layers, *expert* mixtures.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    model_type: str = "qwen3"
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 1.0
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 32768
    initializer_range: float = 0.02
    layer_types: tuple[str, ...] = ()  # empty: full_attention everywhere
    linear_conv_kernel_dim: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None

    def __post_init__(self):
        if not self.layer_types:
            object.__setattr__(self, "layer_types", ("full_attention",) * self.num_hidden_layers)
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types names {len(self.layer_types)} layers, num_hidden_layers = {self.num_hidden_layers}"
            )
        for kind in self.layer_types:
            if kind not in LAYERS:
                raise ValueError(f"layer_types holds {kind!r}; layers this program has: {', '.join(LAYERS)}")
        needed = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
                  "head_dim"]
        if not all(self.is_sparse(i) for i in range(self.num_hidden_layers)):
            needed.append("intermediate_size")
        if self.family.experts:
            needed += ["num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step"]
        if "linear_attention" in self.layer_types:
            needed += [f.name for f in fields(self) if f.name.startswith("linear_")]
        for name in needed:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least 1")
        for many, few in (("num_attention_heads", "num_key_value_heads"),
                          *([("linear_num_value_heads", "linear_num_key_heads")] if self.linear_num_key_heads else [])):
            if getattr(self, many) % getattr(self, few):
                raise ValueError(f"{many} = {getattr(self, many)} must be a multiple of {few} = {getattr(self, few)}")
        if self.head_dim % 2 or self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
            raise ValueError(f"head_dim = {self.head_dim} must be even, and so its rotated part {self.rotary_dim} "
                             f"(partial_rotary_factor = {self.partial_rotary_factor}): elements turn in pairs")
        if self.family.experts and self.num_experts_per_tok > self.num_experts:
            raise ValueError(f"num_experts_per_tok = {self.num_experts_per_tok} must not exceed num_experts = "
                             f"{self.num_experts}")

    @property
    def family(self) -> Family:
        return FAMILIES[self.model_type]

    @property
    def rotary_dim(self) -> int:
        """How many of a head's elements are rotated: the first ones."""
        return int(self.head_dim * self.partial_rotary_factor)

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer's feed-forward is a mixture of experts."""
        return (self.family.experts and layer not in self.mlp_only_layers
                and (layer + 1) % self.decoder_sparse_step == 0)

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], source: str = "config.json") -> "ModelConfig":
        """Read a config.json dict as any transformers since 4.50 writes it. ValueError: a family, or a feature of it,
        that this program does not have; a size that is missing."""
        model_type = raw.get("model_type")
        family = FAMILIES.get(model_type)
        if family is None:
            raise ValueError(f"{source}: model_type = {model_type!r} must be one of {', '.join(FAMILIES)}")
        text = raw.get("text_config") if family.nested else raw
        if not isinstance(text, Mapping):
            raise ValueError(f"{source}: model_type = {model_type!r} must come with a text_config")
        rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
        if not isinstance(rope, Mapping):
            raise ValueError(f"{source}: rope_parameters = {rope!r} must be an object")
        _refuse_unsupported(text, rope, source)
        given = {**family.defaults, **{name: value for name, value in text.items() if value is not None}}
        own = {f.name: given[f.name] for f in fields(cls) if f.name in given}
        for f in fields(cls):
            _check_type(f.name, own.get(f.name), f.type, source)
        own["model_type"] = model_type
        for name in ("rope_theta", "partial_rotary_factor"):
            if name in rope:
                own[name] = rope[name]
                _check_type(name, own[name], "float", source)
        own["rope_theta"] = float(own.get("rope_theta", 10000.0))
        own["tie_word_embeddings"] = raw.get("tie_word_embeddings", text.get("tie_word_embeddings", False)) or False
        _check_type("tie_word_embeddings", own["tie_word_embeddings"], "bool", source)
        if "num_local_experts" in given and family.experts:  # what transformers 5 calls it in qwen3_moe
            own["num_experts"] = given["num_local_experts"]
            _check_type("num_local_experts", own["num_experts"], "int", source)
        own.setdefault("intermediate_size", 0)
        missing = [f for f in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads") if f not in own]
        if missing:
            raise ValueError(f"{source}: {', '.join(missing)} missing")
        own.setdefault("num_key_value_heads", own["num_attention_heads"])
        own.setdefault("head_dim", own["hidden_size"] // own["num_attention_heads"])
        if "layer_types" not in own and (every := given.get("full_attention_interval")):
            own["layer_types"] = ["linear_attention" if (i + 1) % every else "full_attention"
                                  for i in range(own["num_hidden_layers"])]
        own = {name: tuple(value) if isinstance(value, list) else value for name, value in own.items()}
        try:
            return cls(**own)
        except ValueError as problem:
            raise ValueError(f"{source}: {problem}") from None

    def to_hf(self) -> dict[str, Any]:
        """The config.json dict of the language model alone; old and new readers both find their fields."""
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        own = {name: list(value) if isinstance(value, tuple) else value for name, value in own.items()}
        unused = [f.name for f in fields(self) if (f.name.startswith("linear_") and not self.linear_num_key_heads)
                  or (f.name in _EXPERT_FIELDS and not self.family.experts)]
        for name in (*unused, *(["intermediate_size"] if not self.intermediate_size else [])):
            del own[name]
        rope = {"rope_type": "default", "rope_theta": self.rope_theta}
        if self.partial_rotary_factor != 1.0:
            rope["partial_rotary_factor"] = self.partial_rotary_factor
        else:
            del own["partial_rotary_factor"]
        model_type = self.family.text or self.model_type
        return {
            "architectures": [FAMILIES[model_type].architecture],
            **own,
            "model_type": model_type,
            "rope_parameters": rope,
            "hidden_act": "silu",
            "attention_bias": False,
            "use_sliding_window": False,
        }


_EXPERT_FIELDS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size",
                  "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers")


_KINDS = {"int": (int, "a whole number"), "float": ((int, float), "a number"), "bool": (bool, "true or false")}


def _check_type(name: str, value: Any, kind: str, source: str) -> None:
    """ValueError unless a value that is there is of a field's type (lists and token ids are looked at elsewhere)."""
    if value is None or kind not in _KINDS:
        return
    wanted, words = _KINDS[kind]
    if not isinstance(value, wanted) or isinstance(value, bool) != (kind == "bool"):
        raise ValueError(f"{source}: {name} = {value!r} must be {words}")


def _refuse_unsupported(text: Mapping[str, Any], rope: Mapping[str, Any], source: str) -> None:
    """ValueError for a value that changes the forward in a way this program does not compute."""
    # "mrope" turns with three positions, which for text are equal: then it is the ordinary rotation
    wanted = {
        "hidden_act": (text.get("hidden_act", "silu"), ("silu",)),
        "attention_bias": (bool(text.get("attention_bias")), (False,)),
        "use_sliding_window": (bool(text.get("use_sliding_window")), (False,)),
        "rope_type": (rope.get("rope_type", rope.get("type", "default")), ("default", "mrope")),
        "output_gate_type": (text.get("output_gate_type") or "silu", ("silu", "swish")),
    }
    for name, (value, known) in wanted.items():
        if value not in known:
            raise ValueError(f"{source}: {name} = {value!r} is not supported, only {known[0]!r}")
