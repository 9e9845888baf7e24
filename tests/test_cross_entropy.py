"""The next-token loss: equals its float64 definition, in value and gradient, and never holds [N, V]."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from oprd.kernels import cross_entropy
from oprd.kernels.cross_entropy import token_nll, token_nll_definition

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


@pytest.fixture(params=[1, 7, 2**23], ids="chunk_of_{}_elements".format)
def chunk(request, monkeypatch):
    monkeypatch.setitem(cross_entropy.CHUNK_ELEMENTS, "cpu", request.param)


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


def test_the_largest_tensor_is_a_chunk_of_logits_not_all_of_them(monkeypatch):
    monkeypatch.setitem(cross_entropy.CHUNK_ELEMENTS, "cpu", 8 * 512)
    hidden, head, targets, _ = made(256, 4, 512, torch.float32)
    with Largest() as largest:
        token_nll(hidden, head, targets).sum().backward()
    assert 4 * 512 <= largest.elements <= 8 * 512
    with Largest() as largest:
        token_nll_definition(hidden, head, targets).sum().backward()
    assert largest.elements == 256 * 512
