"""kernels/experts.py and core/moe.py: routing, experts and load balancing, against their definitions and transformers."""

import pytest
import torch
from families_help import config_of

from oprd.core.moe import MoE, balance_loss, balance_loss_definition
from oprd.kernels.experts import run_experts, run_experts_definition

torch.set_num_threads(1)


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def routes(T, k, E, seed=0):
    chosen = draw(T, E, seed=seed).topk(k, -1).indices
    return chosen, draw(T, k, seed=seed + 1).softmax(-1)


@pytest.mark.parametrize("T, D, E, F, k", [(9, 5, 4, 3, 2), (1, 4, 6, 2, 3), (7, 3, 3, 4, 3), (20, 6, 1, 5, 1)])
def test_experts_equal_the_definition_in_values_and_all_gradients(T, D, E, F, k):
    chosen, weight = routes(T, k, E)
    sides = []
    for run in (run_experts, run_experts_definition):
        leaves = [t.clone().requires_grad_() for t in (draw(T, D), draw(E, 2 * F, D, seed=2), draw(E, D, F, seed=3))]
        w = weight.clone().requires_grad_()
        out = run(*leaves, chosen, w)
        (out * draw(T, D, seed=4)).sum().backward()
        sides.append([out.detach(), *(t.grad for t in (*leaves, w))])
    for got, wanted in zip(*sides):
        torch.testing.assert_close(got, wanted, atol=1e-12, rtol=1e-12)


def test_one_token_by_hand():
    # expert 1 of width 1: gate = 2, up = 3, silu(2) = 1.7616; down [10, 0]; weight 0.5
    gate_up = torch.tensor([[[9.0, 9.0], [9.0, 9.0]], [[2.0, 0.0], [3.0, 0.0]]])
    down = torch.tensor([[[9.0], [9.0]], [[10.0], [0.0]]])
    got = run_experts(torch.tensor([[1.0, 7.0]]), gate_up, down, torch.tensor([[1]]), torch.tensor([[0.5]]))
    torch.testing.assert_close(got, torch.tensor([[0.5 * 10 * 3 * 1.7615942, 0.0]]))


def test_an_idle_expert_and_no_token_at_all_give_zero_gradients_not_missing_ones():
    for T in (3, 0):
        gate_up, down = draw(4, 6, 5).requires_grad_(), draw(4, 5, 3).requires_grad_()
        out = run_experts(draw(T, 5), gate_up, down, torch.full((T, 1), 2), torch.ones(T, 1, dtype=torch.float64))
        out.sum().backward()
        assert out.shape == (T, 5)
        for grad in (gate_up.grad, down.grad):
            assert grad[[0, 1, 3]].abs().max() == 0 and (grad[2].abs().max() > 0) == (T > 0)


def test_half_precision_autocast_stays_near_float32():
    layer, x = randomised(), draw(30, 20, dtype=torch.float32)
    exact = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        rough = layer(x)
    assert ((rough.float() - exact).norm() / exact.norm()) < 0.03


def randomised(family="qwen3_5_moe_text", **change):
    layer = MoE(config_of(family, **change))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in layer.parameters():
            p.normal_(0, 0.3, generator=generator)
    return layer


@pytest.mark.parametrize("family, block, normed", [
    ("qwen3_moe", "qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock", True),
    ("qwen3_moe", "qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock", False),
    ("qwen3_next", "qwen3_next.modeling_qwen3_next.Qwen3NextSparseMoeBlock", True),
    ("qwen3_5_moe_text", "qwen3_5_moe.modeling_qwen3_5_moe.Qwen3_5MoeSparseMoeBlock", True),
])
def test_the_layer_is_the_block_of_transformers_in_values_and_gradients(family, block, normed):
    import importlib

    from tiny_models import classes

    module, name = block.rsplit(".", 1)
    config_class = classes(family)[0]
    ours = config_of(family, norm_topk_prob=normed)
    config = config_class(**{n: getattr(ours, n) for n in (
        "hidden_size", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size",
        "norm_topk_prob")})
    config._experts_implementation = "eager"
    theirs = getattr(importlib.import_module(f"transformers.models.{module}"), name)(config).float()
    layer = randomised(family, norm_topk_prob=normed)
    theirs.load_state_dict(layer.state_dict())
    x = draw(2, 7, 20, dtype=torch.float32)
    got, wanted = layer(x.view(14, 20)), theirs(x)
    wanted = (wanted[0] if isinstance(wanted, tuple) else wanted).view(14, 20)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    for out in (got, wanted):
        (out * draw(14, 20, seed=5, dtype=torch.float32)).sum().backward()
    for (name, p), q in zip(sorted(layer.named_parameters()), dict(sorted(theirs.named_parameters())).values()):
        torch.testing.assert_close(p.grad, q.grad, atol=1e-4, rtol=1e-4, msg=lambda m: f"{name}: {m}")


def test_the_balance_is_its_definition_for_every_sequence_and_transformers_for_one():
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    lengths = [5, 0, 1, 9]
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    logits = [draw(15, 6, seed=i).requires_grad_() for i in range(3)]
    got = balance_loss(logits, cu, 2)
    torch.testing.assert_close(got, balance_loss_definition(logits, cu, 2), atol=1e-12, rtol=1e-12)
    assert got[1] == 0
    one = [part[6:] for part in logits]
    alone = balance_loss(one, torch.tensor([0, 9]), 2)[0]
    torch.testing.assert_close(got[3], alone, atol=1e-12, rtol=1e-12)
    theirs = load_balancing_loss_func(tuple(one), 6, 2)  # part of it is computed in float32
    assert got[3].item() == pytest.approx(theirs.item(), rel=1e-6)
    for a, b in zip(torch.autograd.grad(got[3], logits), torch.autograd.grad(theirs, logits)):
        torch.testing.assert_close(a, b, atol=1e-7, rtol=1e-5)


def test_even_routing_has_the_balance_k_and_one_sided_routing_more():
    even = torch.eye(4, dtype=torch.float64) * 20
    assert balance_loss([even], torch.tensor([0, 4]), 1).item() == pytest.approx(1.0)
    assert balance_loss([even[[0, 0, 0, 0]]], torch.tensor([0, 4]), 1).item() == pytest.approx(4.0, rel=1e-6)
