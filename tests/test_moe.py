"""core/moe.py: routing, the whole layer and load balancing, against their definitions and transformers."""

import importlib

import pytest
import torch
from families_help import config_of

from oprd.core import moe
from oprd.core.moe import MLP, MoE, balance_loss, balance_loss_definition
from oprd.kernels.experts import run_experts_definition

torch.set_num_threads(1)


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def randomised(family="qwen3_5_moe_text", dtype=torch.float32, **change):
    layer = MoE(config_of(family, **change)).to(dtype)
    with torch.no_grad():
        for i, p in enumerate(layer.parameters()):
            p.copy_(0.3 * draw(*p.shape, seed=10 + i))
    return layer


def definition(layer, x, k, normed):
    """The layer token by token: softmax over all experts, the k largest, their experts, the gated shared expert."""
    chosen, weight = [], []
    for row in x:
        p = (layer.gate.weight @ row).exp()
        p = p / p.sum()
        best = sorted(range(len(p)), key=lambda e: -p[e].item())[:k]
        chosen.append(best)
        weight.append(p[best] / p[best].sum() if normed else p[best])
    experts, shared = layer.experts, layer.shared_expert
    y = run_experts_definition(x, experts.gate_up_proj, experts.down_proj, torch.tensor(chosen), torch.stack(weight))
    if shared is not None:
        gate = x @ shared.gate_proj.weight.T
        inner = gate * torch.sigmoid(gate) * (x @ shared.up_proj.weight.T)
        y = y + (inner @ shared.down_proj.weight.T) * torch.sigmoid(x @ layer.shared_expert_gate.weight.T)
    return y


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe_text"])
@pytest.mark.parametrize("k, normed", [(2, True), (2, False), (5, True), (1, False)])
@pytest.mark.parametrize("T", [1, 11])
def test_the_layer_equals_its_definition_in_values_and_all_gradients(family, k, normed, T):
    layer = randomised(family, torch.float64, num_experts_per_tok=k, norm_topk_prob=normed)
    x = draw(T, 20).requires_grad_()
    leaves = [x, *layer.parameters()]
    sides = [[y, *torch.autograd.grad(y, leaves, draw(T, 20, seed=4))] for y in
             (layer(x), definition(layer, x, k, normed))]
    for got, wanted in zip(*sides):
        torch.testing.assert_close(got, wanted, atol=1e-10, rtol=1e-10)


def test_no_token_gives_every_parameter_a_zero_gradient():
    layer = randomised()
    routers = []
    out = layer(torch.zeros(0, 20), routers)
    out.sum().backward()
    assert out.shape == (0, 20) and routers[0].shape == (0, 5)
    for name, p in layer.named_parameters():
        assert p.grad is not None and p.grad.abs().max() == 0, name


def test_each_token_is_computed_by_itself_whatever_its_strides():
    layer, x = randomised(dtype=torch.float64), draw(20, 9).T
    assert not x.is_contiguous()
    alone = torch.cat([layer(row) for row in x.split(1)])
    torch.testing.assert_close(layer(x), alone, atol=1e-12, rtol=1e-12)


def test_routers_collect_the_logits_of_each_layer_in_turn():
    first, second, x, routers = randomised(), randomised("qwen3_moe"), draw(3, 20, dtype=torch.float32), []
    second(first(x, routers), routers)
    torch.testing.assert_close(routers[0], x @ first.gate.weight.T)
    torch.testing.assert_close(routers[1], first(x) @ second.gate.weight.T)


def test_the_dense_feed_forward_by_hand_takes_and_leaves_the_routers():
    dense, routers = MLP(2, 1), []
    with torch.no_grad():
        for p, value in zip(dense.parameters(), ([[2.0, 0.0]], [[0.0, 3.0]], [[1.0], [-2.0]])):
            p.copy_(torch.tensor(value))
    # gate = 2, up = 3: silu(2) * 3 = 5.2848
    torch.testing.assert_close(dense(torch.tensor([[1.0, 1.0]]), routers), torch.tensor([[5.2847824, -10.5695648]]))
    assert routers == []


def test_half_precision_autocast_stays_near_float32():
    # k = E: rounding the router's logits to bfloat16 cannot change which experts are chosen
    layer, x = randomised(num_experts_per_tok=5), draw(30, 20, dtype=torch.float32)
    exact = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        rough = layer(x)
    assert ((rough.float() - exact).norm() / exact.norm()) < 0.03


@pytest.mark.parametrize("normed", [True, False])
def test_a_bfloat16_layer_routes_bit_for_bit_as_transformers_with_its_softmax_in_float32(normed, monkeypatch):
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    layer, x, routes, routers = randomised("qwen3_moe", torch.bfloat16, norm_topk_prob=normed), draw(200, 20), [], []
    monkeypatch.setattr(moe.MoE, "run", staticmethod(lambda x, gate_up, down, *route: routes.extend(route) or x))
    layer(x.bfloat16(), routers)
    router = Qwen3MoeTopKRouter(Qwen3MoeConfig(hidden_size=20, num_experts=5, num_experts_per_tok=2,
                                               norm_topk_prob=normed))
    router.weight = layer.gate.weight
    logits, weight, chosen = router(x.bfloat16())
    for got, wanted in zip((*routers, *routes), (logits, chosen, weight), strict=True):
        torch.testing.assert_close(got, wanted, atol=0, rtol=0)  # dtypes too


def test_the_balance_of_bfloat16_logits_is_computed_in_float32():
    logits, cu = [draw(40, 6, seed=i).bfloat16() for i in range(2)], torch.tensor([0, 15, 40])
    got = balance_loss(logits, cu, 2)
    torch.testing.assert_close(got, balance_loss([part.float() for part in logits], cu, 2), atol=0, rtol=0)


@pytest.mark.parametrize("family, block, normed", [
    ("qwen3_moe", "qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock", True),
    ("qwen3_moe", "qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock", False),
    ("qwen3_next", "qwen3_next.modeling_qwen3_next.Qwen3NextSparseMoeBlock", True),
    ("qwen3_5_moe_text", "qwen3_5_moe.modeling_qwen3_5_moe.Qwen3_5MoeSparseMoeBlock", True),
])
def test_the_layer_is_the_block_of_transformers_in_values_and_gradients(family, block, normed):
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
    x, rate = draw(14, 20, dtype=torch.float32).requires_grad_(), draw(14, 20, seed=5, dtype=torch.float32)
    got, wanted = layer(x), theirs(x.view(2, 7, 20))
    wanted = (wanted[0] if isinstance(wanted, tuple) else wanted).view(14, 20)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    mine, yours = dict(layer.named_parameters()), dict(theirs.named_parameters())
    assert mine.keys() == yours.keys()
    sides = (torch.autograd.grad(got, [x, *mine.values()], rate),
             torch.autograd.grad(wanted, [x, *(yours[name] for name in mine)], rate))
    for name, a, b in zip(("x", *mine), *sides):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5, msg=lambda m: f"{name}: {m}")


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


@pytest.mark.parametrize("order", [[2, 0, 1], [1, 2, 0]])
def test_packing_changes_neither_the_balance_nor_its_gradient(order):
    rows = [[draw(n, 6, seed=10 * n + i).requires_grad_() for i in range(2)] for n in (4, 1, 7)]  # 3 rows, 2 layers
    alone = [balance_loss(row, torch.tensor([0, len(row[0])]), 2)[0] for row in rows]
    cu = torch.tensor([0, *(torch.tensor([len(rows[r][0]) for r in order]).cumsum(0)).tolist()])
    packed = balance_loss([torch.cat([rows[r][i] for r in order]) for i in range(2)], cu, 2)
    leaves = [part for row in rows for part in row]
    torch.testing.assert_close(packed, torch.stack([alone[r] for r in order]), atol=1e-12, rtol=1e-12)
    for a, b in zip(torch.autograd.grad(packed.sum(), leaves), torch.autograd.grad(sum(alone), leaves)):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


def test_the_balance_of_two_layers_by_hand_pools_their_tokens():
    # probabilities (3/4, 1/4) in one layer, (1/4, 3/4) in the other: f = p = (1/2, 1/2), so E (1/4 + 1/4) = 1, while
    # each layer by itself would give 2 * 3/4 = 1.5
    first = torch.tensor([[3.0, 1.0]], dtype=torch.float64).log()
    cu = torch.tensor([0, 1])
    assert balance_loss([first, first.flip(1)], cu, 1).item() == pytest.approx(1.0)
    assert balance_loss([first], cu, 1).item() == pytest.approx(1.5)


def test_even_routing_has_the_balance_k_and_one_sided_routing_more():
    even = torch.eye(4, dtype=torch.float64) * 20
    assert balance_loss([even], torch.tensor([0, 4]), 1).item() == pytest.approx(1.0)
    assert balance_loss([even[[0, 0, 0, 0]]], torch.tensor([0, 4]), 1).item() == pytest.approx(4.0, rel=1e-6)
