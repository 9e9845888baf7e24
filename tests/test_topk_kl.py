"""The distillation loss: equals its float64 definition on the joint top-k support; only the student learns."""

import math

import pytest
import torch

from oprd.kernels import cross_entropy
from oprd.kernels.topk_kl import DIRECTIONS, SUPPORTS, first_k, joint_support, topk_kl, topk_kl_definition
from test_cross_entropy import Largest

torch.set_num_threads(1)


def made(N, V, Ds=6, Dt=9, dtype=torch.float64, scale=1.0, seed=0):
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)
    student = (draw(N, Ds) * scale).to(dtype).requires_grad_(), draw(V, Ds).to(dtype).requires_grad_()
    teacher = (draw(N, Dt) * scale).to(dtype).requires_grad_(), draw(V, Dt).to(dtype).requires_grad_()
    return student, teacher, draw(N)


def from_logits(*rows):
    """Hidden states and head (the unit matrix) with these logits."""
    z = torch.tensor(rows, dtype=torch.float64)
    return z, torch.eye(z.shape[1], dtype=torch.float64)


def same(ours, plain, upstream, inputs, tolerance=1e-10):
    (loss, stats), (expected, expected_stats) = ours, plain
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance)
    for name, a, b in zip(stats._fields, stats, expected_stats):
        torch.testing.assert_close(a, b.to(a), rtol=1e-6, atol=1e-7, msg=name)
    for a, b in zip(torch.autograd.grad(loss, inputs, upstream), torch.autograd.grad(expected, inputs, upstream)):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("k, V", [(1, 1), (1, 7), (2, 131), (100, 131), (131, 131), (100, 257)])
def test_value_gradient_and_stats_equal_the_definition(k, V, temperature, support, direction, monkeypatch):
    monkeypatch.setitem(cross_entropy.CHUNK_ELEMENTS, "cpu", 5 * V)  # 13 tokens: two full chunks and a short one
    student, teacher, upstream = made(13, V)
    arguments = (*student, *teacher, k, temperature, direction, support)
    same(topk_kl(*arguments), topk_kl_definition(*arguments), upstream, student)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("support", SUPPORTS)
def test_gradcheck(support, direction):
    student, teacher, _ = made(4, 9, Ds=3, Dt=2)
    score = lambda h, w: topk_kl(h, w, *teacher, 4, 1.5, direction, support)[0]
    assert torch.autograd.gradcheck(score, student)


def test_the_full_support_does_not_ask_for_a_k():
    student, teacher, _ = made(3, 7)
    (loss, stats), (same_loss, same_stats) = (topk_kl(*student, *teacher, k, 1.0, support="full") for k in (100, 7))
    assert torch.equal(loss, same_loss) and torch.equal(stats.overlap, same_stats.overlap)
    with pytest.raises(ValueError, match="k = 100 must be between 1 and the vocabulary size = 7"):
        topk_kl(*student, *teacher, 100, 1.0)


def test_three_entries_by_hand():
    student = from_logits([math.log(0.5), math.log(0.3), math.log(0.2)])
    teacher = from_logits([math.log(0.1), math.log(0.3), math.log(0.6)])
    loss, stats = topk_kl(*student, *teacher, k=2, temperature=1.0)  # max: 0.5, 0.3, 0.6 -> support {0, 2}
    p, q = (5 / 7, 2 / 7), (1 / 7, 6 / 7)
    assert loss.item() == pytest.approx(p[0] * math.log(p[0] / q[0]) + p[1] * math.log(p[1] / q[1]))
    assert stats.student_mass.item() == pytest.approx(0.7) and stats.teacher_mass.item() == pytest.approx(0.7)
    assert stats.overlap.item() == pytest.approx(0.5)  # {0, 1} and {2, 1}
    forward, _ = topk_kl(*student, *teacher, k=2, temperature=1.0, direction="forward")
    assert forward.item() == pytest.approx(q[0] * math.log(q[0] / p[0]) + q[1] * math.log(q[1] / p[1]))


def test_the_loss_is_scaled_by_the_square_of_the_temperature():
    student, teacher = from_logits([2.0, 0.0, -2.0]), from_logits([0.0, 4.0, 2.0])
    halved = [(h / 2, w) for h, w in (student, teacher)]
    at_two, at_one = topk_kl(*student, *teacher, 2, 2.0)[0], topk_kl(*halved[0], *halved[1], 2, 1.0)[0]
    assert at_one.item() > 0.1
    torch.testing.assert_close(at_two, 4 * at_one)


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_teacher_equal_to_the_student_gives_exactly_zero_loss_and_gradient(dtype, direction, support):
    student, _, upstream = made(7, 53, dtype=dtype)
    loss, stats = topk_kl(*student, *student, 10, 0.7, direction, support)
    assert (loss == 0).all() and (stats.overlap == 1).all()
    for g in torch.autograd.grad(loss, student, upstream.to(loss.dtype)):
        assert g.abs().max() < 1e-6


def test_the_teacher_never_gets_a_gradient():
    student, teacher, _ = made(5, 31)
    topk_kl(*student, *teacher, 8, 1.0)[0].sum().backward()
    assert all(x.grad is None for x in teacher) and all(x.grad.abs().sum() > 0 for x in student)


def test_the_gradient_of_the_logits_is_zero_off_the_support_and_sums_to_zero():
    student, teacher = from_logits([3.0, 2.0, 0.0, -1.0, -2.0]), from_logits([3.0, 1.0, 2.0, -4.0, -5.0])
    z = student[0].requires_grad_()
    topk_kl(z, student[1], *teacher, 3, 1.0)[0].sum().backward()
    assert z.grad[0, 3:].tolist() == [0.0, 0.0]
    assert z.grad[0, :3].abs().min() > 0.01 and z.grad.sum().abs() < 1e-12


def test_a_descent_step_lowers_the_loss():
    for direction in DIRECTIONS:
        student, teacher, _ = made(5, 31)
        before = topk_kl(*student, *teacher, 8, 1.0, direction)[0].sum()
        g = torch.autograd.grad(before, student[0])[0]
        after = topk_kl(student[0] - 1e-3 * g, student[1], *teacher, 8, 1.0, direction)[0].sum()
        assert after < before


def test_ties_go_to_the_lowest_index():
    z = torch.tensor([[1.0, 5.0, 1.0, 1.0, 1.0], [2.0, 2.0, 2.0, 2.0, 2.0], [0.0, 1.0, 2.0, 3.0, 4.0]])
    assert [sorted(ids) for ids in first_k(z, 3).tolist()] == [[0, 1, 2], [0, 1, 2], [2, 3, 4]]


@pytest.mark.parametrize("k", [1, 2, 5, 29])
def test_planted_ties_choose_the_definitions_support(k):
    g = torch.Generator().manual_seed(k)
    z = torch.randint(3, (11, 29), generator=g).double()  # three values over 29 entries: ties everywhere
    zt = torch.randint(3, (11, 29), generator=g).double() * 1.3
    eye = torch.eye(29, dtype=torch.float64)
    z.requires_grad_()
    upstream = torch.randn(11, generator=g, dtype=torch.float64)
    same(topk_kl(z, eye, zt, eye, k, 1.0), topk_kl_definition(z, eye, zt, eye, k, 1.0), upstream, [z])
    chosen, _ = joint_support(z.detach(), z.detach(), torch.zeros(11, dtype=z.dtype), k)
    expected = z.detach().sort(dim=-1, descending=True, stable=True).indices[:, :k]
    assert torch.equal(chosen.sort(-1).values, expected.sort(-1).values)


def test_fp32_inputs_are_close_to_the_definition():
    student, teacher, upstream = made(64, 401, dtype=torch.float32)
    loss, _ = topk_kl(*student, *teacher, 100, 1.0)
    assert loss.dtype == torch.float32
    expected, _ = topk_kl_definition(*student, *teacher, 100, 1.0)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-4, atol=1e-5)


def test_autocast_does_not_round_the_logits():
    student, teacher, _ = made(16, 101, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = topk_kl(*student, *teacher, 10, 1.0)[0]
    assert torch.equal(inside, topk_kl(*student, *teacher, 10, 1.0)[0])


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("support", SUPPORTS)
def test_huge_logits_stay_finite(support, direction):
    student, teacher, upstream = made(9, 61, dtype=torch.float32, scale=1e5)
    loss, stats = topk_kl(*student, *teacher, 5, 1.0, direction, support)
    found = [loss, *stats, *torch.autograd.grad(loss, student, upstream.float())]
    assert all(x.isfinite().all() for x in found) and (loss >= 0).all()


@pytest.mark.parametrize("support", SUPPORTS)
def test_the_largest_tensor_is_a_chunk_of_logits_not_all_of_them(support, monkeypatch):
    monkeypatch.setitem(cross_entropy.CHUNK_ELEMENTS, "cpu", 8 * 512)
    student, teacher, _ = made(256, 512, Ds=4, Dt=4, dtype=torch.float32)
    with Largest() as largest:
        topk_kl(*student, *teacher, 16, 1.0, support=support)[0].sum().backward()
    assert 4 * 512 <= largest.elements <= 8 * 512


def test_no_token_is_an_empty_loss():
    student, teacher, _ = made(0, 11)
    loss, stats = topk_kl(*student, *teacher, 3, 1.0)
    loss.sum().backward()
    assert loss.shape == stats.overlap.shape == (0,) and student[1].grad.abs().sum() == 0


def test_bad_settings_are_errors_that_name_both_sides():
    student, teacher, _ = made(3, 11)
    for k in (0, 12):
        with pytest.raises(ValueError, match=f"k = {k} .*11"):
            topk_kl(*student, *teacher, k, 1.0)
    with pytest.raises(ValueError, match="temperature = 0"):
        topk_kl(*student, *teacher, 2, 0.0)
    with pytest.raises(ValueError, match="'sideways'.*reverse"):
        topk_kl(*student, *teacher, 2, 1.0, "sideways")
    with pytest.raises(ValueError, match="11 .*10"):
        topk_kl(*student, teacher[0], teacher[1][:10], 2, 1.0)
