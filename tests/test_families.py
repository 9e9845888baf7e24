"""Every family against transformers: packed logits and all gradients, with every parameter randomised and odd lengths;
and against our own float64 definitions."""

import copy

import pytest
import torch
from families_help import FAMILIES, randomised
from tiny_models import MODELS, classes, text_name, tiny

from oprd.core import hf, mixers, moe
from oprd.core.architecture import ModelConfig
from oprd.core.model import Model
from oprd.core.names import pairs
from oprd.kernels.attention import attend_definition
from oprd.kernels.delta_rule import gated_delta_rule_definition
from oprd.kernels.experts import run_experts_definition
from oprd.kernels.short_conv import short_conv_definition

torch.set_num_threads(1)
LENGTHS = [70, 1, 131]


def packed(lengths, vocab=240, seed=1):
    ids = torch.randint(vocab, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    return ids, torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])


def distance(a, b):
    """Relative to the size of b."""
    return ((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30)).item()


def weighted_loss(logits):
    weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2)).to(logits.dtype)
    return (logits.log_softmax(-1) * weight).sum()


def gradients(model, ids, cu):
    logits = model.logits(ids, cu)
    weighted_loss(logits).backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", MODELS)
def test_packed_logits_and_all_gradients_equal_those_of_transformers_on_each_sequence_alone(name, tmp_path):
    theirs = tiny(name, tmp_path)
    ids, cu = packed(LENGTHS)
    wanted = torch.cat([theirs(input_ids=part[None]).logits[0] for part in ids.split(LENGTHS)])
    weighted_loss(wanted).backward()
    ours = hf.load(tmp_path)
    exact, true = gradients(copy.deepcopy(ours).double(), ids, cu)
    logits, grads = gradients(ours, ids, cu)
    assert distance(logits, wanted) < 1e-4
    compared = {}  # own name -> (transformers' gradient, ours, in float64)
    for stored, p in theirs.named_parameters():
        if p.grad is None:
            assert ".visual." in stored
            continue
        for own, gradient, mine in pairs(text_name(stored), p.grad, grads, ours.config):
            reference = next(x for n, _, x in pairs(text_name(stored), p.grad, true, ours.config)
                             if n == own and x.shape == mine.shape)
            compared.setdefault(own, []).append((gradient, mine, reference))
    assert set(compared) == set(grads)
    # 1e-4, or where float32 itself is worse (decays): what two computations may differ by that are both as far from
    # float64 as transformers' is at worst in parameters of this kind
    kind = lambda own: own.rsplit(".", 2)[-2:]  # noqa: E731
    for own, tensors in compared.items():
        off = max(distance(g, r) for other in compared if kind(other) == kind(own) for g, _, r in compared[other])
        for gradient, mine, _ in tensors:
            assert distance(mine, gradient) < max(1e-4, 3 * off), (own, distance(mine, gradient), off)
    assert distance(logits, exact) < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_the_whole_model_equals_itself_with_every_kernel_replaced_by_its_definition(family, monkeypatch):
    model = randomised(family).double()
    ids, cu = packed([67, 2, 12], vocab=37)
    used, grads = gradients(model, ids, cu)
    model.zero_grad()
    monkeypatch.setattr(mixers, "attend", attend_definition)
    monkeypatch.setattr(mixers, "gated_delta_rule", gated_delta_rule_definition)
    monkeypatch.setattr(mixers, "short_conv", short_conv_definition)
    monkeypatch.setattr(moe.MoE, "run", staticmethod(run_experts_definition))
    defined, wanted = gradients(model, ids, cu)
    assert distance(used, defined) < 1e-10
    for name, gradient in wanted.items():
        assert distance(grads[name], gradient) < 1e-10, name


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_sequences_have_the_logits_and_gradients_of_each_alone(family):
    model, lengths = randomised(family).double(), [5, 1, 70, 3]
    ids, cu = packed(lengths, vocab=37)
    together, grads = gradients(model, ids, cu)
    model.zero_grad()
    alone = torch.cat([model.logits(part, torch.tensor([0, len(part)])) for part in ids.split(lengths)])
    weighted_loss(alone).backward()
    assert distance(together, alone) < 1e-12
    for name, p in model.named_parameters():
        assert distance(grads[name], p.grad) < 1e-12, name


# published sizes of the full models (text config), and the parameters of the language model they give
FULL = {
    "Qwen3.5-4B": ("qwen3_5_text", dict(hidden_size=2560, num_hidden_layers=32, num_attention_heads=16,
                   num_key_value_heads=4, intermediate_size=9216, linear_num_value_heads=32, tie_word_embeddings=True)),
    "Qwen3.5-9B": ("qwen3_5_text", dict(hidden_size=4096, num_hidden_layers=32, num_attention_heads=16,
                   num_key_value_heads=4, intermediate_size=12288, linear_num_value_heads=32)),
    "Qwen3.5-35B-A3B": ("qwen3_5_moe_text", dict(hidden_size=2048, num_hidden_layers=40, num_attention_heads=16,
                        num_key_value_heads=2, num_experts=256, num_experts_per_tok=8, moe_intermediate_size=512,
                        shared_expert_intermediate_size=512, linear_num_value_heads=32)),
}
BILLIONS = {"Qwen3.5-4B": 4.206, "Qwen3.5-9B": 8.954, "Qwen3.5-35B-A3B": 34.66}


@pytest.mark.parametrize("name", FULL)
def test_full_size_models_have_the_published_parameters_and_transformers_names(name):
    model_type, sizes = FULL[name]
    common = dict(vocab_size=248320, head_dim=256, linear_num_key_heads=16, linear_key_head_dim=128,
                  linear_value_head_dim=128, linear_conv_kernel_dim=4,
                  rope_parameters=dict(rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25))
    with torch.device("meta"):
        ours = Model(ModelConfig.from_hf({"model_type": model_type, **common, **sizes}))
        config, model, _ = classes(model_type)
        theirs = model(config(**common, **sizes))
    count = sum(p.numel() for p in ours.parameters())
    assert round(count / 1e9, 3 if count < 1e10 else 2) == BILLIONS[name]
    assert {n: p.shape for n, p in ours.named_parameters()} == {n: p.shape for n, p in theirs.named_parameters()}
