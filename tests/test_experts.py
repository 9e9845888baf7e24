"""kernels/experts.py: every token through its experts, against the definition in values and gradients."""

import pytest
import torch

from oprd.kernels.experts import run_experts, run_experts_definition

torch.set_num_threads(1)


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs(T, D, E, F, k, dtype=torch.float64):
    """Leaves x, gate_up, down, weight, and the choice of distinct experts."""
    leaves = [draw(T, D, dtype=dtype), draw(E, 2 * F, D, seed=2, dtype=dtype), draw(E, D, F, seed=3, dtype=dtype),
              draw(T, k, seed=1).softmax(-1).to(dtype)]
    return [leaf.requires_grad_() for leaf in leaves], draw(T, E, seed=5).topk(k, -1).indices


def outputs(run, leaves, chosen):
    """y and the gradients of x, gate_up, down, weight."""
    *tensors, weight = leaves
    y = run(*tensors, chosen, weight)
    return [y, *torch.autograd.grad(y, leaves, draw(*y.shape, seed=4).to(y.dtype))]


def compare(leaves, chosen):
    for got, wanted in zip(outputs(run_experts, leaves, chosen), outputs(run_experts_definition, leaves, chosen)):
        torch.testing.assert_close(got, wanted, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("T, D, E, F, k", [
    (9, 5, 4, 3, 2),
    (1, 4, 6, 2, 3),  # one token
    (7, 3, 3, 4, 3),  # k = E: every expert sees every token
    (20, 6, 1, 5, 1),  # one expert
    (3, 1, 17, 1, 2),  # many idle experts, width 1
])
def test_experts_equal_the_definition_in_values_and_all_gradients(T, D, E, F, k):
    compare(*inputs(T, D, E, F, k))


def test_a_token_sent_twice_to_one_expert_counts_twice():
    leaves, chosen = inputs(5, 4, 3, 2, 2)
    chosen[1:4] = 1
    compare(leaves, chosen)


def test_one_token_by_hand():
    # expert 1 of width 1: gate = 2, up = 3, silu(2) = 1.7616; down [10, 0]; weight 0.5
    gate_up = torch.tensor([[[9.0, 9.0], [9.0, 9.0]], [[2.0, 0.0], [3.0, 0.0]]])
    down = torch.tensor([[[9.0], [9.0]], [[10.0], [0.0]]])
    got = run_experts(torch.tensor([[1.0, 7.0]]), gate_up, down, torch.tensor([[1]]), torch.tensor([[0.5]]))
    torch.testing.assert_close(got, torch.tensor([[0.5 * 10 * 3 * 1.7615942, 0.0]]))


@pytest.mark.parametrize("T", [3, 0])
def test_idle_experts_have_zero_gradients_not_missing_ones_even_without_a_token(T):
    gate_up, down = draw(4, 6, 5).requires_grad_(), draw(4, 5, 3).requires_grad_()
    out = run_experts(draw(T, 5), gate_up, down, torch.full((T, 1), 2), torch.ones(T, 1, dtype=torch.float64))
    out.sum().backward()
    assert out.shape == (T, 5)
    for grad in (gate_up.grad, down.grad):
        assert grad[[0, 1, 3]].abs().max() == 0 and (grad[2].abs().max() > 0) == (T > 0)


def test_strides_do_not_matter():
    (x, gate_up, down, weight), chosen = inputs(6, 5, 4, 3, 2)
    strided = [torch.stack([t, t], -1)[..., 0] for t in (x, gate_up, down, chosen, weight)]
    assert not any(t.is_contiguous() for t in strided)
    torch.testing.assert_close(run_experts(*strided), run_experts(x, gate_up, down, chosen, weight), atol=1e-12, rtol=0)


@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_stays_near_float64(autocast):
    leaves, chosen = inputs(40, 24, 6, 16, 3, torch.float32 if autocast else torch.bfloat16)
    leaves[3] = leaves[3].detach().float().requires_grad_()  # as a router computes it
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        got = outputs(run_experts, leaves, chosen)
    for a, b, leaf in zip(got, outputs(run_experts_definition, leaves, chosen), [leaves[0], *leaves]):
        assert a.dtype == leaf.dtype
        assert (a.double() - b.double()).norm() < 0.02 * b.double().norm()


def test_the_backward_pass_keeps_what_the_docstring_says():
    T, D, E, F, k = 64, 48, 4, 8, 2
    leaves, chosen = inputs(T, D, E, F, k, torch.float32)
    mine, kept = {t.untyped_storage().data_ptr() for t in leaves}, {}

    def pack(t):
        storage = t.untyped_storage()
        if t.is_floating_point() and storage.data_ptr() not in mine:
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = run_experts(*leaves[:3], chosen, leaves[3])
    assert y.requires_grad
    assert sum(kept.values()) == T * k * (D + 5 * F + 1) * 4  # and the weight itself, in the order of the experts
