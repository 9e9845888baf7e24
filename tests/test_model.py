"""core/model.py and core/mixers.py: what the packed decoder promises beyond equality with transformers (test_hf.py)."""

import json
from dataclasses import replace

import pytest
import torch

from oprd.core.mixers import RMSNorm, rotate, rope_tables
from oprd.core.model import Model, ModelConfig

torch.set_num_threads(1)
CONFIG = ModelConfig(vocab_size=41, hidden_size=24, intermediate_size=30, num_hidden_layers=2, num_attention_heads=6,
                     num_key_value_heads=3, head_dim=8, tie_word_embeddings=True, initializer_range=0.3)


def ids_of(n, seed=0):
    return torch.randint(41, (n,), generator=torch.Generator().manual_seed(seed))


def test_packing_changes_no_sequence():
    model = Model(CONFIG).init(0).double()
    parts = [ids_of(n, n) for n in (5, 1, 12)]
    packed = model.logits(torch.cat(parts), torch.tensor([0, 5, 6, 18]))
    alone = torch.cat([model.logits(p, torch.tensor([0, len(p)])) for p in parts])
    torch.testing.assert_close(packed, alone, atol=1e-12, rtol=1e-12)


def test_hidden_times_head_is_logits_and_the_tied_head_is_the_embedding():
    model = Model(CONFIG).init(0)
    ids, cu = ids_of(7), torch.tensor([0, 7])
    assert model.head_weight is model.model.embed_tokens.weight
    assert torch.equal(model.hidden(ids, cu) @ model.head_weight.T, model.logits(ids, cu))
    untied = Model(replace(CONFIG, tie_word_embeddings=False))
    assert untied.head_weight is untied.lm_head.weight


def test_positions_can_be_given_and_only_their_differences_matter():
    model = Model(CONFIG).init(0).double()
    ids, cu = ids_of(6), torch.tensor([0, 6])
    default = model.logits(ids, cu)
    assert torch.equal(model.logits(ids, cu, positions=torch.arange(6)), default)
    torch.testing.assert_close(model.logits(ids, cu, positions=torch.arange(6) + 9), default, atol=1e-10, rtol=1e-10)
    assert (model.logits(ids, cu, positions=torch.arange(6) * 2) - default).abs().max() > 1e-3


def test_rms_norm_and_rope_by_hand():
    norm = RMSNorm(2, eps=0.0)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, 2.0]))
    # [3, 4]: mean square 12.5, so [3, 4] / sqrt(12.5) = [0.8485, 1.1314], times the weight
    torch.testing.assert_close(norm(torch.tensor([3.0, 4.0])), torch.tensor([0.84853, 2.26274]), atol=1e-4, rtol=0)
    # head size 4, theta 100: frequencies 1 and 0.1; elements 0, 2 turn by the position, elements 1, 3 by a tenth
    cos, sin = rope_tables(torch.tensor([2]), 4, 100.0, torch.float64)
    turned = rotate(torch.tensor([[[1.0, 0.0, 0.0, 1.0]]], dtype=torch.float64), cos[:, None], sin[:, None])
    want = [torch.tensor(2.0).cos(), -torch.tensor(0.2).sin(), torch.tensor(2.0).sin(), torch.tensor(0.2).cos()]
    torch.testing.assert_close(turned.flatten(), torch.stack(want).double(), atol=1e-6, rtol=0)


def test_norms_are_computed_in_float32_for_half_precision_input():
    x = torch.full((1, 64), 300.0, dtype=torch.float16)  # 300^2 overflows float16
    assert torch.equal(RMSNorm(64, 1e-6)(x), torch.ones(1, 64, dtype=torch.float16))


def test_bfloat16_autocast_stays_near_float32_and_gives_every_parameter_a_gradient():
    model = Model(CONFIG).init(0)
    ids, cu = ids_of(20), torch.tensor([0, 13, 20])
    exact = model.logits(ids, cu)
    with torch.autocast("cpu", torch.bfloat16):
        rough = model.logits(ids, cu)
    assert (rough.float() - exact).norm() / exact.norm() < 0.03
    rough.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_init_is_a_function_of_the_seed():
    a, b, c = (Model(CONFIG).init(seed).state_dict() for seed in (5, 5, 6))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["model.embed_tokens.weight"], c["model.embed_tokens.weight"])
    assert a["model.layers.0.mlp.up_proj.weight"].std().item() == pytest.approx(0.3, rel=0.1)


def test_config_survives_json_in_the_new_and_in_the_old_form():
    config = replace(CONFIG, rope_theta=5e5, eos_token_id=(3, 4))
    raw = json.loads(json.dumps(config.to_hf()))
    assert ModelConfig.from_hf(raw) == config
    old = {k: v for k, v in raw.items() if k not in ("rope_parameters", "layer_types")}
    assert "rope_theta" in old and ModelConfig.from_hf(old) == config
    new = {k: v for k, v in raw.items() if k != "rope_theta"}
    assert ModelConfig.from_hf(new) == config


@pytest.mark.parametrize("change, words", [
    ({"model_type": "llama"}, "model_type = 'llama' must be one of qwen2, qwen3"),
    ({"attention_bias": True}, "attention_bias = True is not supported"),
    ({"use_sliding_window": True}, "use_sliding_window = True is not supported"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type = 'yarn' is not supported"),
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
    ({"vocab_size": None}, "vocab_size missing"),
    ({"num_key_value_heads": 4}, "num_attention_heads = 6 must be a multiple of num_key_value_heads = 4"),
    ({"layer_types": ["full_attention"]}, "layer_types names 1 layers, num_hidden_layers = 2"),
    ({"layer_types": ["full_attention", "mamba"]}, "layer_types holds 'mamba'"),
    ({"hidden_size": 0}, "hidden_size = 0 must be at least 1"),
    ({"intermediate_size": "x"}, "intermediate_size = 'x' must be a whole number"),
    ({"vocab_size": 256.0}, "vocab_size = 256.0 must be a whole number"),
    ({"num_hidden_layers": True}, "num_hidden_layers = True must be a whole number"),
    ({"rms_norm_eps": "x"}, "rms_norm_eps = 'x' must be a number"),
    ({"tie_word_embeddings": "false"}, "tie_word_embeddings = 'false' must be true or false"),
    ({"rope_parameters": 3}, "rope_parameters = 3 must be an object"),
    ({"rope_parameters": {"rope_theta": "x"}}, "rope_theta = 'x' must be a number"),
    ({"head_dim": 7}, "head_dim = 7 must be even"),
])
def test_a_config_we_cannot_run_is_one_line_that_says_why(change, words):
    with pytest.raises(ValueError) as error:
        ModelConfig.from_hf({**CONFIG.to_hf(), **change})
    assert words in str(error.value) and "\n" not in str(error.value)
