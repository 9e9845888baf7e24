"""The distillation loss: equals its float64 definition on the joint top-k support; only the student learns."""

import math

import pytest
import torch

from oprd.kernels import sparse_rows, tiles
from oprd.kernels.joint_support import first_k, join, scan
from oprd.kernels.tiles import GROUP
from oprd.kernels.topk_kl import DIRECTIONS, SUPPORTS, teacher_topk, topk_kl, topk_kl_definition
from test_cross_entropy import Largest

torch.set_num_threads(1)


def made(N, V, Ds=6, Dt=9, dtype=torch.float64, scale=1.0, seed=0):
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)
    student = (draw(N, Ds) * scale).to(dtype).requires_grad_(), draw(V, Ds).to(dtype).requires_grad_()
    teacher = (draw(N, Dt) * scale).to(dtype).requires_grad_(), draw(V, Dt).to(dtype).requires_grad_()
    return student, teacher, draw(N)


@pytest.fixture
def tile(monkeypatch):
    """Sets how many tokens and entries are held at once."""
    def set_to(tokens, entries):
        monkeypatch.setitem(tiles.TILE, "cpu", (tokens, entries))
        monkeypatch.setitem(sparse_rows.BLOCK_ELEMENTS, "cpu", 64)
    return set_to


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
@pytest.mark.parametrize("temperature", [0.5, 0.6, 1.0, 1.5])
@pytest.mark.parametrize("k, V", [(1, 1), (1, 7), (2, 131), (100, 131), (131, 131), (100, 257)])
def test_value_gradient_and_stats_equal_the_definition(k, V, temperature, support, direction, tile):
    tile(5, 2 * GROUP)  # 13 tokens: two full tiles and a short one; up to five tiles of the vocabulary
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


@pytest.mark.parametrize("entries", [GROUP, 2 * GROUP, 7 * GROUP, 8192])
@pytest.mark.parametrize("k, V", [(1, 7), (2, 509), (100, 509), (509, 509), (128, 1021)])
def test_the_support_is_the_definitions_for_every_tile_and_temperature_also_with_ties(k, V, entries, tile):
    tile(7, entries)
    g = torch.Generator().manual_seed(V + k)
    # eighths of small numbers: their products are exact in float32, so ties are ties; few values, so ties are many
    h, ht = (torch.randint(-8, 9, (11, 3), generator=g) / 8 for _ in range(2))
    W, Wt = (torch.randint(-8, 9, (V, 3), generator=g) / 8 for _ in range(2))
    for temperature in (0.5, 0.6, 1.0, 1.5):
        for dtype in (torch.float32, torch.bfloat16):
            x = [t.to(dtype) for t in (h, W, ht, Wt)]
            found = scan(*x, k, temperature, torch.float32)
            S = join(found.best, found.best_t, found.norm - found.norm_t, k)
            log_p, log_q = (torch.log_softmax(a.double() @ b.double().T / temperature, -1) for a, b in (x[:2], x[2:]))
            score = torch.maximum(log_p, log_q)
            # rounding of the normalisers may exchange entries whose scores differ by less than it
            order = torch.round(score * 1e5).sort(dim=-1, descending=True, stable=True)
            theirs = order.indices[:, :k]
            same_rows = [set(a) == set(b) for a, b in zip(S.ids.tolist(), theirs.tolist())]
            assert all(same_rows), (temperature, dtype, sum(same_rows))
            assert torch.equal(S.z.float(), (x[0].float() @ x[1].float().T).gather(1, S.ids))


@pytest.mark.slow
@pytest.mark.parametrize("V", [151_936, 248_320])
def test_the_support_is_the_definitions_on_large_vocabularies(V):
    g = torch.Generator().manual_seed(0)
    h, ht = torch.randn(3, 24, generator=g), torch.randn(3, 16, generator=g)
    W, Wt = torch.randn(V, 24, generator=g), torch.randn(V, 16, generator=g)
    log_p, log_q = (torch.log_softmax(a.double() @ b.double().T, -1) for a, b in ((h, W), (ht, Wt)))
    found = scan(h, W, ht, Wt, 128, 1.0, torch.float32)
    S = join(found.best, found.best_t, found.norm - found.norm_t, 128)
    theirs = torch.maximum(log_p, log_q).sort(dim=-1, descending=True, stable=True).indices[:, :128]
    assert torch.equal(S.ids.sort(-1).values, theirs.sort(-1).values)


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_entries_that_no_model_has_cost_nothing(direction, support, tile):
    tile(4, GROUP)
    student, teacher, upstream = made(5, 71, Ds=4, Dt=3)
    for h, W in (student, teacher):
        with torch.no_grad():  # the first coordinate is 1, and 20 entries have -inf there
            h[:, 0], W[:, 0] = 1.0, 0.0
            W[30:50, 0] = float("-inf")
    for k in (3, 51, 60):
        loss, stats = topk_kl(*student, *teacher, k, 1.0, direction, support)
        plain, _ = topk_kl_definition(*student, *teacher, k, 1.0, direction, support)
        torch.testing.assert_close(loss, plain, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(stats.student_mass <= 1 + 1e-9, torch.ones(5, dtype=torch.bool))
        if support in ("topk", "full") or k == 3:
            d_hidden, d_head = torch.autograd.grad(loss, student, upstream)
            assert d_head.isfinite().all() and (support != "topk" or d_hidden.isfinite().all())


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_teacher_that_ran_before_gives_the_same(direction, support, tile):
    tile(4, GROUP)
    student, teacher, upstream = made(9, 211)
    stored = teacher_topk(*teacher, 20, 0.6)
    sides = []
    for hidden, kept in ((teacher[0], None), (None, stored)):
        loss, stats = topk_kl(*student, hidden, teacher[1], 20, 0.6, direction, support, stored=kept)
        sides.append([loss.detach(), *stats, *torch.autograd.grad(loss, student, upstream)])
    for a, b in zip(*sides):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("support", SUPPORTS)
def test_the_heads_gradient_can_be_added_to_what_is_there(support):
    student, teacher, upstream = made(9, 61)
    wanted = torch.autograd.grad(topk_kl(*student, *teacher, 7, 1.0, support=support)[0], student[1], upstream)[0]
    into = torch.ones_like(student[1])
    loss, _ = topk_kl(*student, *teacher, 7, 1.0, support=support, into=into)
    loss.backward(upstream)
    assert student[1].grad is None
    torch.testing.assert_close(into - 1, wanted)


def test_the_gradient_is_the_same_bits_every_time():
    student, teacher, upstream = made(40, 301, dtype=torch.float32)
    runs = []
    for _ in range(3):
        loss, _ = topk_kl(*student, *teacher, 50, 1.0)
        runs.append(torch.autograd.grad(loss, student, upstream.float()))
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0]))


def test_half_precision_is_chosen_from_exact_logits_unless_rounding_is_asked_for():
    student, teacher, _ = made(50, 997, Ds=32, Dt=32, dtype=torch.bfloat16)
    x = [t.detach() for t in (*student, *teacher)]
    expected, _ = topk_kl_definition(*x, 100, 1.0)
    exact, rounded = (topk_kl(*x, 100, 1.0, rounded=r)[0].double() for r in (False, True))
    assert (exact - expected).abs().max() < 1e-4 * expected.max()
    assert 1e-4 * expected.max() < (rounded - expected).abs().max() < 0.05 * expected.max()


@pytest.mark.parametrize("k", [1, 2, 5, 29])
def test_planted_ties_choose_the_definitions_support(k):
    g = torch.Generator().manual_seed(k)
    z = torch.randint(3, (11, 29), generator=g).double()  # three values over 29 entries: ties everywhere
    zt = torch.randint(3, (11, 29), generator=g).double() * 1.3
    eye = torch.eye(29, dtype=torch.float64)
    z.requires_grad_()
    upstream = torch.randn(11, generator=g, dtype=torch.float64)
    same(topk_kl(z, eye, zt, eye, k, 1.0), topk_kl_definition(z, eye, zt, eye, k, 1.0), upstream, [z])


def test_fp32_inputs_are_close_to_the_definition():
    student, teacher, upstream = made(64, 401, dtype=torch.float32)
    loss, _ = topk_kl(*student, *teacher, 100, 1.0)
    assert loss.dtype == torch.float32
    expected, _ = topk_kl_definition(*student, *teacher, 100, 1.0)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("support", SUPPORTS)
def test_float32_is_within_a_millionth_of_the_definition_and_its_gradients_within_five(support, direction, tile):
    tile(32, 32 * GROUP)
    student, teacher, upstream = made(64, 4001, Ds=32, Dt=24, dtype=torch.float32, scale=0.5)
    sides = []
    for run in (topk_kl, topk_kl_definition):
        loss = run(*student, *teacher, 100, 0.6, direction, support)[0]
        sides.append([loss.detach(), *torch.autograd.grad(loss, student, upstream.to(loss.dtype))])
    for a, b, limit in zip(*sides, (1e-6, 5e-6, 5e-6)):
        assert (a.double() - b.double()).norm() <= limit * b.double().norm()


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
def test_no_tensor_of_a_quarter_of_all_logits_is_made_forward_or_backward(support, tile):
    tile(64, 128)
    student, teacher, _ = made(512, 2048, Ds=4, Dt=4, dtype=torch.float32)
    with Largest() as largest:
        topk_kl(*student, *teacher, 16, 1.0, support=support)[0].sum().backward()
    assert 64 * 128 <= largest.elements < 512 * 2048 // 4
    with Largest() as largest:
        topk_kl_definition(*student, *teacher, 16, 1.0, support=support)[0].sum().backward()
    assert largest.elements >= 512 * 2048


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
