"""The next-token loss: equals its float64 definition, in value and gradient, and never holds [N, V]."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from oprd.kernels import cross_entropy, tiles
from oprd.kernels.cross_entropy import (entropy_definition, token_nll, token_nll_and_entropy, token_nll_definition,
                                        weighted_nll)

torch.set_num_threads(1)


def made(N, D, V, dtype=torch.float64, scale=1.0, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden = (torch.randn(N, D, generator=g, dtype=torch.float64) * scale).to(dtype).requires_grad_()
    head = torch.randn(V, D, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, head, torch.randint(V, (N,), generator=g), torch.randn(N, generator=g, dtype=torch.float64)


def gradients(loss, upstream, *inputs):
    return torch.autograd.grad(loss, inputs, upstream.to(loss.dtype))


class Largest(TorchDispatchMode):
    """Remembers the largest tensor any operation made."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return out


@pytest.fixture(params=[1, 70, 2**23], ids="chunk_of_{}_elements".format)
def chunk(request, monkeypatch):
    for table in (cross_entropy.CHUNK_ELEMENTS, cross_entropy.WEIGHTED_ELEMENTS):
        monkeypatch.setitem(table, "cpu", request.param)
    monkeypatch.setitem(tiles.TILE, "cpu", (7, tiles.GROUP))


@pytest.mark.parametrize("N, D, V", [(1, 1, 1), (5, 3, 2), (17, 8, 23), (64, 5, 131)])
def test_value_and_gradients_equal_the_definition_for_uneven_upstream_gradients(N, D, V, chunk):
    hidden, head, targets, upstream = made(N, D, V)
    ours, plain = token_nll(hidden, head, targets), token_nll_definition(hidden, head, targets)
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    for a, b in zip(gradients(ours, upstream, hidden, head), gradients(plain, upstream, hidden, head)):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_gradcheck(chunk):
    hidden, head, targets, _ = made(6, 3, 5)
    assert torch.autograd.gradcheck(lambda h, w: token_nll(h, w, targets), (hidden, head))


def test_backward_can_run_twice():
    hidden, head, targets, upstream = made(4, 3, 5)
    loss = token_nll(hidden, head, targets)
    first = torch.autograd.grad(loss, hidden, upstream, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(loss, hidden, upstream)[0])


def test_two_entries_with_logits_one_apart_by_hand():
    hidden, head = torch.tensor([[1.0]]), torch.tensor([[0.0], [1.0]])
    loss = token_nll(hidden, head, torch.tensor([0]))
    assert loss.item() == pytest.approx(math.log(1 + math.e))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 1e-5)])
def test_low_precision_inputs_are_scored_in_fp32(dtype, tolerance):
    hidden, head, targets, _ = made(33, 16, 101, dtype)
    loss = token_nll(hidden, head, targets)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), token_nll_definition(hidden, head, targets), rtol=tolerance, atol=1e-5)
    loss.sum().backward()
    assert hidden.grad.dtype == dtype and head.grad.dtype == dtype


def test_autocast_does_not_round_the_logits():
    hidden, head, targets, _ = made(33, 16, 101, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = token_nll(hidden, head, targets)
    assert torch.equal(inside, token_nll(hidden, head, targets))


def test_huge_logits_stay_finite():
    hidden, head, targets, upstream = made(9, 4, 11, torch.float32, scale=1e5)
    loss = token_nll(hidden, head, targets)
    assert loss.isfinite().all() and all(g.isfinite().all() for g in gradients(loss, upstream, hidden, head))


def test_non_contiguous_inputs():
    hidden, head, targets, upstream = made(12, 8, 10)
    a, b = hidden[::2, 1:5], head.T[1:5].T
    torch.testing.assert_close(token_nll(a, b, targets[::2]), token_nll_definition(a, b, targets[::2]))


def test_no_token_is_an_empty_loss_with_a_zero_gradient():
    hidden, head, targets, _ = made(0, 4, 11)
    loss = token_nll(hidden, head, targets)
    assert loss.shape == (0,)
    loss.sum().backward()
    assert head.grad.abs().sum() == 0


@pytest.mark.parametrize("wrong", [-100, -1, 11, 10**6])
def test_a_target_outside_the_vocabulary_is_an_error_that_names_it(wrong):
    hidden, head, targets, _ = made(3, 4, 11)
    targets[1] = wrong
    with pytest.raises(ValueError, match=f"{wrong} .*11"):
        token_nll(hidden, head, targets)


@pytest.mark.parametrize("N, D, V", [(1, 1, 1), (5, 3, 2), (17, 8, 23), (64, 5, 131)])
def test_the_weighted_sum_has_the_definitions_gradient_at_once(N, D, V, chunk):
    hidden, head, targets, weights = made(N, D, V)
    total, values = weighted_nll(hidden, head, targets, weights)
    plain = token_nll_definition(hidden, head, targets)
    torch.testing.assert_close(values, plain.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(total, (plain * weights).sum(), rtol=1e-12, atol=1e-12)
    assert not values.requires_grad
    theirs = torch.autograd.grad((plain * weights).sum(), (hidden, head))
    for scale in (1.0, -2.5):
        for a, b in zip(torch.autograd.grad(total * scale, (hidden, head), retain_graph=True), theirs):
            torch.testing.assert_close(a, b * scale, rtol=1e-11, atol=1e-12)


def test_gradcheck_of_the_weighted_sum(chunk):
    hidden, head, targets, weights = made(6, 3, 5)
    assert torch.autograd.gradcheck(lambda h, w: weighted_nll(h, w, targets, weights)[0], (hidden, head))


def test_without_a_gradient_the_weighted_sum_makes_none():
    hidden, head, targets, weights = made(6, 3, 5)
    with torch.no_grad():
        total, values = weighted_nll(hidden, head, targets, weights)
    assert not total.requires_grad
    torch.testing.assert_close(values, token_nll_definition(hidden, head, targets))


def test_the_entropy_of_every_token(chunk):
    hidden, head, targets, _ = made(17, 4, 71)
    nll, entropy = token_nll_and_entropy(hidden, head, targets)
    torch.testing.assert_close(entropy, entropy_definition(hidden, head).detach(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(nll, token_nll_definition(hidden, head, targets))
    assert not entropy.requires_grad and token_nll_and_entropy(hidden, head, targets, entropy=False)[1].numel() == 0


def test_no_tensor_of_a_quarter_of_all_logits_is_made_forward_or_backward(monkeypatch):
    for table in (cross_entropy.CHUNK_ELEMENTS, cross_entropy.WEIGHTED_ELEMENTS):
        monkeypatch.setitem(table, "cpu", 32 * 2048)
    monkeypatch.setitem(tiles.TILE, "cpu", (64, 512))
    hidden, head, targets, weights = made(512, 4, 2048, torch.float32)
    with Largest() as largest:
        token_nll(hidden, head, targets).sum().backward()
    assert 64 * 512 <= largest.elements < 512 * 2048 // 4
    with Largest() as largest:
        weighted_nll(hidden, head, targets, weights)[0].backward()
    assert 32 * 2048 <= largest.elements < 512 * 2048 // 4
    with Largest() as largest:
        token_nll_definition(hidden, head, targets).sum().backward()
    assert largest.elements == 512 * 2048


def test_rounded_products_are_near():
    hidden, head, targets, weights = made(33, 16, 101, torch.bfloat16)
    exact = token_nll_definition(hidden, head, targets)
    for values in (token_nll(hidden, head, targets, rounded=True),
                   weighted_nll(hidden, head, targets, weights, rounded=True)[1]):
        assert 1e-4 < (values.double() - exact).abs().max() < 0.1
