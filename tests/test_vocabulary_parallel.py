"""Heads whose vocabulary is cut over ranks: the losses and gradients are those of one rank, and few bytes travel."""

import pytest
import torch

from oprd.kernels.cross_entropy import token_nll_and_entropy, weighted_nll
from oprd.kernels.topk_kl import DIRECTIONS, SUPPORTS, topk_kl
from oprd.parallel.collectives import all_reduce
from oprd.parallel.layers import Head, vocabulary_cut
from oprd.parallel.mesh import Sizes
from oprd.parallel.vocabulary import exchange_of
from parallel_help import mesh_of
from ranks_help import ranks
from test_topk_kl import made

VOCABULARIES = [5, 37, 211]  # over 4 ranks: one rank has nothing; the last has less; fewer entries a rank than k


def heads_of(student, teacher, size):
    """This rank's parts of two whole heads, which want a gradient, and how the ranks exchange."""
    mesh = mesh_of(Sizes(tp=size))
    cut = vocabulary_cut(len(student), mesh)
    own = [cut.take(W.detach()).requires_grad_() for W in (student, teacher)]
    heads = [Head.of(W, cut) for W in own]
    return mesh.tp, own[0], heads, exchange_of(heads[0]), cut


def whole_gradients(loss, upstream, hidden, own, cut, axis):
    """Gradients as one rank has them: the hidden states' summed over ranks, the head's put together."""
    d_hidden, d_own = torch.autograd.grad(loss, (hidden, own), upstream)
    full = d_own.new_zeros(cut.whole_shape(d_own.shape))
    for start, place, length in cut.runs():
        full[start : start + length] = d_own[place : place + length]
    return [all_reduce(d_hidden, axis), all_reduce(full, axis)]


def distil(size, V, k, dtype):
    (h, W), (ht, Wt), upstream = made(11, V, dtype=dtype)
    found = {}
    for direction in DIRECTIONS:
        for support in SUPPORTS:
            axis, own, (student, teacher), exchange, cut = heads_of(W, Wt, size)
            loss, stats = topk_kl(h, student.weight, ht, teacher.weight, k, 0.6, direction, support, exchange=exchange)
            grads = whole_gradients(loss, upstream.to(dtype), h, own, cut, axis)
            found[direction, support] = [x.detach() for x in (loss, *stats, *grads)]
    return found


def imitate(size, V):
    (h, W), _, upstream = made(11, V)
    targets = torch.randint(V, (11,), generator=torch.Generator().manual_seed(3))
    axis, own, (head, _), exchange, cut = heads_of(W, W, size)
    nll, entropy = token_nll_and_entropy(h, head.weight, targets, exchange=exchange)
    total, values = weighted_nll(h, head.weight, targets, upstream, exchange=exchange)
    return [x.detach() for x in (nll, entropy, *whole_gradients(nll, upstream, h, own, cut, axis),
                                 total, values, *whole_gradients(total, None, h, own, cut, axis))]


def bytes_a_token(size, V, k, N):
    (h, W), (ht, Wt), _ = made(N, V, Ds=4, Dt=4, dtype=torch.float32)
    axis, own, (student, teacher), exchange, _ = heads_of(W, Wt, size)
    before = axis.traffic["tp"]
    topk_kl(h, student.weight, ht, teacher.weight, k, 1.0, exchange=exchange)[0].sum().backward()
    return (axis.traffic["tp"] - before) / N


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("V", VOCABULARIES)
def test_distillation_over_ranks_is_that_of_one(size, V):
    k = min(20, V)
    wanted = distil(1, V, k, torch.float64)
    for rank in ranks(size).run(distil, size, V, k, torch.float64):
        for case, numbers in rank.items():
            for a, b in zip(numbers, wanted[case]):
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11, msg=lambda m: f"{case}: {m}")


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("V", VOCABULARIES)
def test_imitation_over_ranks_is_that_of_one(size, V):
    wanted = imitate(1, V)
    for rank in ranks(size).run(imitate, size, V):
        for a, b in zip(rank, wanted):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("size", [2, 4])
def test_in_float32_two_and_four_ranks_are_within_a_millionth_of_one(size):
    wanted = distil(1, 211, 20, torch.float32)["reverse", "topk"]
    for rank in ranks(size).run(distil, size, 211, 20, torch.float32):
        for a, b in zip(rank["reverse", "topk"], wanted):
            assert (a - b).norm() <= 1e-6 * b.norm()


@pytest.mark.parametrize("size", [2, 4])
def test_candidates_travel_and_not_logits(size):
    k, N = 100, 64
    sent = ranks(size).run(bytes_a_token, size, 1000, k, N)
    limit = (32 * k + 8) * (size - 1) / size
    # owners get different shares of what is sent back, so a rank's count is not the mean's
    assert sum(sent) / size <= limit, (sent, limit)
    assert max(sent) <= 1.05 * limit
