"""Nine tiny models built by transformers, every parameter randomised: the oracle of the architecture and of the files.

`tiny(name, folder)` builds one, saves it into the folder with transformers, and returns it. Multi-modal models come with
their vision tower; their text model is what is compared.
"""

import os
from pathlib import Path

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")

BASE = dict(vocab_size=256, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-6,
            max_position_embeddings=512, tie_word_embeddings=False)
LINEAR = dict(linear_conv_kernel_dim=4, linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2,
              linear_num_value_heads=4)
ROPE = dict(rope_type="default", rope_theta=1e6)
ROPE_PARTIAL = dict(rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25)
ROPE_35 = dict(ROPE_PARTIAL, mrope_section=[1, 1, 0], mrope_interleaved=True)
EXPERTS = dict(moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2)
DENSE_35 = dict(BASE, **LINEAR, intermediate_size=96, num_hidden_layers=4, rope_parameters=ROPE_35)
SPARSE_35 = dict(BASE, **LINEAR, **EXPERTS, shared_expert_intermediate_size=32, num_hidden_layers=4,
                 rope_parameters=ROPE_35)
VISION = dict(depth=2, hidden_size=32, intermediate_size=64, num_heads=2, patch_size=4, out_hidden_size=64,
              num_position_embeddings=16)
IMAGES = dict(image_token_id=250, video_token_id=251, vision_start_token_id=248, vision_end_token_id=249)

# name: (config class, model class, settings)
MODELS = {
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", dict(
        {k: v for k, v in BASE.items() if k != "head_dim"}, intermediate_size=96, num_hidden_layers=2,
        rope_parameters=ROPE)),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", dict(BASE, intermediate_size=96, num_hidden_layers=2,
                                                      rope_parameters=ROPE)),
    "qwen3_tied": ("Qwen3Config", "Qwen3ForCausalLM", dict(BASE, tie_word_embeddings=True, intermediate_size=96,
                                                           num_hidden_layers=2, rope_parameters=ROPE)),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", dict(BASE, **EXPERTS, intermediate_size=96,
                  norm_topk_prob=True, num_hidden_layers=2, rope_parameters=ROPE)),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", dict(BASE, **LINEAR, **EXPERTS, intermediate_size=96,
                   shared_expert_intermediate_size=32, num_hidden_layers=4, rope_parameters=ROPE_PARTIAL)),
    "qwen3_5_text": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", DENSE_35),
    "qwen3_5_vl": ("Qwen3_5Config", "Qwen3_5ForConditionalGeneration", dict(text_config=DENSE_35, vision_config=VISION,
                                                                            **IMAGES)),
    "qwen3_5_moe_text": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", SPARSE_35),
    "qwen3_5_moe_vl": ("Qwen3_5MoeConfig", "Qwen3_5MoeForConditionalGeneration", dict(
        text_config=SPARSE_35, vision_config=VISION, **IMAGES)),
}


def classes(name: str):
    """(config class, model class, settings) of a model."""
    import transformers
    from transformers.models import qwen3_5, qwen3_5_moe

    config, model, settings = MODELS[name]
    where = next(m for m in (transformers, qwen3_5, qwen3_5_moe) if hasattr(m, config))
    return getattr(where, config), getattr(where, model), settings


def tiny(name: str, folder: Path, seed: int = 0, **save):
    """The model, in float32 with eager attention, every parameter moved by 0.15 randn; saved into `folder`."""
    config, model, settings = classes(name)
    torch.manual_seed(seed)
    theirs = model(config(**settings)).float().eval()
    theirs.set_attn_implementation("eager")
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(0.15 * torch.randn(p.shape))
    theirs.save_pretrained(folder, **save)
    return theirs


def text_name(name: str) -> str:
    """A parameter's name in the language model alone."""
    return name.replace("model.language_model.", "model.")
