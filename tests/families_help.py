"""A small random model of every family, all parameters moved away from their initial values."""

import torch

from oprd.core.architecture import ModelConfig
from oprd.core.model import Model

SIZES = dict(vocab_size=37, hidden_size=20, intermediate_size=28, num_hidden_layers=2, num_attention_heads=6,
             num_key_value_heads=2, head_dim=8, initializer_range=0.3)
LINEAR = dict(linear_conv_kernel_dim=4, linear_key_head_dim=4, linear_value_head_dim=6, linear_num_key_heads=2,
              linear_num_value_heads=4, partial_rotary_factor=0.5, layer_types=("linear_attention", "full_attention"))
EXPERTS = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=12, norm_topk_prob=True)
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 10, "intermediate_size": 0}
FAMILIES = {"qwen2": {}, "qwen3": {"tie_word_embeddings": True}, "qwen3_moe": {**EXPERTS, "mlp_only_layers": (1,)},
            "qwen3_next": {**LINEAR, **SHARED}, "qwen3_5_text": LINEAR, "qwen3_5_moe_text": {**LINEAR, **SHARED}}


def config_of(family: str, **change) -> ModelConfig:
    return ModelConfig(**{**SIZES, **FAMILIES[family], "model_type": family, **change})


def randomised(family: str, seed: int = 0, **change) -> Model:
    """Every parameter random, norms and biases included, so that one left out anywhere shows."""
    model = Model(config_of(family, **change)).init(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * 0.15)
    return model
