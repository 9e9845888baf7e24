"""kernels/attention.py: the version that is used against its float64 definition."""

import math

import pytest
import torch

from oprd.kernels.attention import attend, attend_definition

torch.set_num_threads(1)


def cu(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])


def qkv(queries, keys, heads, groups, size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(queries, heads, size), (keys, groups, size), (keys, groups, size)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]


@pytest.mark.parametrize("lengths, past, heads, groups, size", [
    ([5, 3, 9], [0, 0, 0], 6, 2, 10),
    ([1, 7, 1], [0, 0, 0], 3, 3, 2),
    ([4], [0], 5, 1, 7),
    ([4, 0, 2], [0, 0, 0], 2, 1, 3),
    ([1, 3, 2], [6, 0, 5], 4, 2, 5),  # behind cached prefixes
])
def test_output_and_gradients_equal_the_definition(lengths, past, heads, groups, size):
    keys = [a + b for a, b in zip(lengths, past)]
    inputs = qkv(sum(lengths), sum(keys), heads, groups, size)
    cu_keys = cu(keys) if any(past) else None
    outs = [f(*inputs, cu(lengths), cu_keys) for f in (attend, attend_definition)]
    torch.testing.assert_close(outs[0], outs[1], atol=1e-12, rtol=1e-12)
    weight = torch.randn(outs[0].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    grads = [torch.autograd.grad((out * weight).sum(), inputs) for out in outs]
    for got, want in zip(*grads):
        torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-12)


def test_two_tokens_by_hand():
    # scores of the second query: q.k = ln 3 and 0, so weights 3/4 and 1/4 (head size 1: no scaling)
    q = torch.tensor([[[5.0]], [[1.0]]], dtype=torch.float64)
    k = torch.tensor([[[math.log(3)]], [[0.0]]], dtype=torch.float64)
    v = torch.tensor([[[8.0]], [[4.0]]], dtype=torch.float64)
    for f in (attend, attend_definition):
        assert f(q, k, v, cu([2])).flatten().tolist() == pytest.approx([8.0, 7.0])


def test_a_token_sees_neither_the_future_nor_another_sequence():
    q, k, v = (x.detach() for x in qkv(9, 9, 2, 1, 4))
    before = attend(q, k, v, cu([4, 5]))
    k[6:], v[6:] = 100.0, -100.0  # the last three keys of the second sequence
    after = attend(q, k, v, cu([4, 5]))
    assert torch.equal(before[:6], after[:6])
    assert (before[6:] - after[6:]).abs().min() > 0


def test_half_precision_comes_back_in_its_dtype_and_near_the_definition():
    q, k, v = (x.detach().bfloat16() for x in qkv(12, 12, 4, 2, 8))
    with torch.autocast("cpu", torch.bfloat16):
        out = attend(q, k, v, cu([7, 5]))
    assert out.dtype == torch.bfloat16
    want = attend_definition(q.double(), k.double(), v.double(), cu([7, 5]))
    torch.testing.assert_close(out.double(), want, atol=0, rtol=2**-8)  # one rounding to 8 significant bits


def test_boundaries_that_do_not_cover_every_token_are_refused():
    q, k, v = qkv(5, 5, 1, 1, 2)
    with pytest.raises(AssertionError, match="cover every token"):
        attend(q, k, v, cu([4]))
