"""kernels/rms_norm.py against its definition."""

import pytest
import torch
import torch.nn.functional as F

from oprd.kernels.rms_norm import rms_norm, rms_norm_definition

torch.set_num_threads(1)


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def test_a_row_of_threes_and_fours_is_divided_by_its_root_mean_square():
    y = rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]), 0.0)
    assert torch.allclose(y, torch.tensor([[3 / 12.5**0.5, 8 / 12.5**0.5]]))


@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (3, 4, 64), (2, 1, 3, 33), (0, 8)])
@pytest.mark.parametrize("eps", [1e-6, 0.3])
def test_values_and_both_gradients_are_the_definitions(shape, eps):
    x, scale, weights = random(*shape), random(shape[-1], seed=1), random(*shape, seed=2)
    results = []
    for norm in (rms_norm, rms_norm_definition):
        a, b = x.clone().requires_grad_(), scale.clone().requires_grad_()
        y = norm(a, b, eps)
        (y * weights).sum().backward()
        results.append((y.detach(), a.grad, b.grad))
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)


def test_gradients_are_those_of_finite_differences_for_uneven_weights():
    x, scale = random(3, 5).requires_grad_(), random(5, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, s: rms_norm(x, s, 1e-3) * random(3, 5, seed=3), (x, scale))


def test_rows_of_zeros_give_zeros_and_finite_gradients():
    x, scale = torch.zeros(2, 6, requires_grad=True), torch.ones(6, requires_grad=True)
    y = rms_norm(x, scale, 1e-6)
    y.sum().backward()
    assert (y == 0).all() and x.grad.isfinite().all() and (scale.grad == 0).all()


def test_bf16_rows_are_normed_in_float32_as_torch_does():
    x, scale = random(9, 48, dtype=torch.bfloat16), random(48, seed=1, dtype=torch.float32)
    ours, theirs = rms_norm(x, scale, 1e-6), F.rms_norm(x.float(), (48,), scale, 1e-6).bfloat16()
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours, theirs, atol=0, rtol=2**-7)


def test_inputs_may_be_views_and_are_left_as_they_were():
    whole = random(4, 3, 10, dtype=torch.float32)
    view, before = whole.transpose(0, 1)[..., :6], whole.clone()
    y = rms_norm(view, torch.ones(6), 1e-6)
    torch.testing.assert_close(y, rms_norm(view.contiguous(), torch.ones(6), 1e-6))
    assert torch.equal(whole, before)
