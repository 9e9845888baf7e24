"""AdamW against torch's own, the schedule of Table 5, and the clip."""

import math

import pytest
import torch
from torch import nn

from oprd.core.optim import AdamW, clip_gradients, global_norm, learning_rate

torch.set_num_threads(1)


def net(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)).to(dtype)


def backward(model, seed):
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))
    model(x.to(next(model.parameters()).dtype)).pow(2).sum().backward()


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def test_fp32_training_equals_torch_adamw_with_decay_on_matrices_only():
    ours, theirs = net(), net()
    optimizer = AdamW(ours.named_parameters(), betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    matrices, vectors = ([p for p in theirs.parameters() if (p.ndim > 1) == m] for m in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    oracle = torch.optim.AdamW(groups, betas=(0.8, 0.9), eps=1e-6, fused=False, foreach=False)
    for step in range(5):
        for model in (ours, theirs):
            model.zero_grad()
            backward(model, step)
        for group in oracle.param_groups:
            group["lr"] = 0.01 / (step + 1)
        oracle.step()
        optimizer.step(0.01 / (step + 1))
    for a, b in zip(weights(ours), weights(theirs)):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_one_step_by_hand():
    p = nn.Parameter(torch.tensor([[2.0]]))
    optimizer = AdamW([("p", p)], betas=(0.9, 0.95), eps=0.0, weight_decay=0.5)
    p.grad = torch.tensor([[-3.0]])
    optimizer.step(0.1)  # decay to 2 * (1 - 0.05), then one full-size Adam step against the gradient's sign
    assert p.item() == pytest.approx(1.9 + 0.1)


def test_small_updates_of_bf16_parameters_are_not_lost():
    p = nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))
    optimizer = AdamW([("p", p)])
    for _ in range(100):
        p.grad = torch.ones_like(p)
        optimizer.step(1e-4)  # far below bf16's spacing of 2^-8 at 1
    assert p.dtype == torch.bfloat16 and p[0, 0].item() == pytest.approx(0.99, abs=0.004)


def test_learning_rate_zero_leaves_loaded_weights_alone():
    for dtype in (torch.float32, torch.bfloat16):
        model = net(dtype)
        optimizer, before = AdamW(model.named_parameters(), weight_decay=0.1), weights(model)
        backward(model, 0)
        optimizer.step(0.0)
        assert all(torch.equal(a, b) for a, b in zip(before, weights(model)))


def test_a_parameter_without_gradient_stays_and_does_not_decay():
    model = net()
    optimizer, before = AdamW(model.named_parameters(), weight_decay=0.5), weights(model)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    optimizer.step(0.1)
    changed = [not torch.equal(a, b) for a, b in zip(before, weights(model))]
    assert changed == [True] + [False] * 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_restored_optimizer_goes_on_bit_for_bit_also_where_no_gradient_came(dtype, tmp_path):
    def run(model, optimizer, steps):
        for step in steps:
            optimizer.zero_grad()
            backward(model, step)
            model[2].weight.grad = None if step < 4 else model[2].weight.grad
            optimizer.step(0.01)

    straight = net(dtype)
    optimizer = AdamW(straight.named_parameters(), weight_decay=0.1)
    run(straight, optimizer, range(3))
    torch.save(optimizer.state_dict(), tmp_path / "o.pt")
    resumed = net(dtype, seed=1)
    resumed.load_state_dict(straight.state_dict())
    run(straight, optimizer, range(3, 7))
    again = AdamW(resumed.named_parameters(), weight_decay=0.1)
    again.load_state_dict(torch.load(tmp_path / "o.pt", weights_only=True))
    run(resumed, again, range(3, 7))
    assert all(torch.equal(a, b) for a, b in zip(weights(straight), weights(resumed)))


def test_a_state_of_another_model_is_refused():
    optimizer = AdamW(net().named_parameters())
    other = nn.Linear(5, 7)
    for name in ("0.weight", "9.weight"):
        source = AdamW([(name, other.weight)] if name[0] == "9" else [(name, nn.Parameter(torch.ones(2, 2)))])
        for p in source.parameters.values():
            p.grad = torch.ones_like(p)
        source.step(0.1)
        with pytest.raises(ValueError, match=name):
            optimizer.load_state_dict(source.state_dict())


def test_the_schedule_of_table_5_by_hand():
    lr = [learning_rate(s, 375, 1e-5, 1e-6, 0.005) for s in range(375)]
    assert lr[:3] == pytest.approx([0.0, 5e-6, 1e-5]) and lr[-1] == 1e-6
    assert max(lr) == lr[2] and all(a > b for a, b in zip(lr[2:], lr[3:]))
    assert lr[(2 + 374) // 2] == pytest.approx((1e-5 + 1e-6) / 2)  # half-way down the cosine


@pytest.mark.parametrize("total", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("ratio", [0.0, 0.005, 0.07, 0.5, 0.99])
def test_every_schedule_stays_in_range_and_ends_at_the_minimum(total, ratio):
    lr = [learning_rate(s, total, 1.0, 0.1, ratio) for s in range(total)]
    assert lr[-1] == 0.1 and all(0 <= x <= 1.0 for x in lr)
    if total > 1:
        assert lr[0] == (0.0 if ratio else 1.0)
    if total > 2 and ratio < 0.5:
        assert max(lr) == 1.0


def test_warm_up_starts_at_the_start_and_floating_noise_adds_no_step():
    assert learning_rate(0, 100, 1.0, start=0.3, warmup_ratio=0.07) == 0.3
    assert learning_rate(7, 100, 1.0, warmup_ratio=0.07) == 1.0  # 0.07 * 100 is 7.000000000000001


def test_clipping_scales_to_the_norm_and_returns_the_norm_before():
    a, b, untouched = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    a.grad, b.grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
    assert clip_gradients([a, b, untouched], math.inf) == 5.0 and a.grad[0] == 3.0
    assert clip_gradients([a, b, untouched], 10.0) == 5.0 and a.grad[0] == 3.0
    assert clip_gradients([a, b, untouched], 1.0) == 5.0
    assert a.grad[0].item() == pytest.approx(0.6) and global_norm([a, b]) == pytest.approx(1.0)


def test_the_norm_of_bf16_gradients_is_summed_in_fp32():
    p = nn.Parameter(torch.zeros(100_000, dtype=torch.bfloat16))
    p.grad = torch.full_like(p, 2.0**-4)
    assert global_norm([p]) == pytest.approx(100_000**0.5 / 16, rel=1e-5)
    assert global_norm([nn.Parameter(torch.zeros(2))]) == 0.0
