"""Advantages by hand, against numpy's definitions, and for groups nobody likes."""

import math

import numpy as np
import pytest

from oprd.rollout.advantages import EPSILON, ESTIMATORS, advantages

NAN, INF = float("nan"), float("inf")
S = math.sqrt(1 / 3)  # sample deviation of 1 0 0


@pytest.mark.parametrize("estimator,std,rewards,wanted", [
    ("rloo", False, [1, 0, 0], [1, -1 / 2, -1 / 2]),
    ("grpo", False, [1, 0, 0], [2 / 3, -1 / 3, -1 / 3]),
    ("leave_one_out", False, [1, 0, 0], [1, -1 / 2, -1 / 2]),
    ("grpo", True, [1, 0, 0], [2 / 3 / S, -1 / 3 / S, -1 / 3 / S]),
    ("rloo", True, [1, 0, 0], [1 / S, -1 / 2 / S, -1 / 2 / S]),
    # the others of 1 are 0 0 and do not differ: the whole group's deviation; the others of 0 are 1 0
    ("leave_one_out", True, [1, 0, 0], [1 / S, -1 / 2 / math.sqrt(1 / 2), -1 / 2 / math.sqrt(1 / 2)]),
    ("rloo", False, [0.35, 0.35, 0.85], [-0.25, -0.25, 0.5]),
    ("rloo", False, [1, 0], [1, -1]),
    ("grpo", True, [1, 0], [math.sqrt(1 / 2), -math.sqrt(1 / 2)]),
    ("rloo", False, [None, 1, 0, None, 0], [None, 1, -1 / 2, None, -1 / 2]),
    ("grpo", False, [NAN, 1, 0, 0], [None, 2 / 3, -1 / 3, -1 / 3]),
    ("rloo", False, [INF, 1, 0, -INF], [None, 1, -1, None]),
    ("rloo", False, [True, False], [1, -1]),
])
def test_by_hand(estimator, std, rewards, wanted):
    found = advantages(rewards, estimator, std)
    assert found.signal and [v is None for v in found.values] == [w is None for w in wanted]
    for value, want in zip(found.values, wanted):
        assert value is None or value == pytest.approx(want, rel=1e-5, abs=1e-12)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("std", [False, True])
@pytest.mark.parametrize("rewards", [
    [0.35] * 3, [0.1] * 7, [1.0] * 8, [0] * 8, [1], [], [None, 0.7, None], [NAN, NAN], [None, 0.35, NAN, 0.35], [-2.5] * 6,
    [1e300] * 5, [0.1 + 0.2, 0.1 + 0.2]])
def test_a_group_that_agrees_or_is_alone_has_no_signal_and_exact_zeros(rewards, estimator, std):
    found = advantages(rewards, estimator, std)
    assert not found.signal and found.energy == 0.0
    assert all(v in (0.0, None) for v in found.values)
    assert found.valid == sum(r is not None and math.isfinite(r) for r in rewards)


@pytest.mark.parametrize("n", [2, 3, 5, 8, 17, 64])
def test_against_numpy_for_any_size_and_rewards(n):
    rng = np.random.default_rng(n)
    for r in (rng.normal(size=n), rng.uniform(0, 1, n).round(2), (rng.random(n) < 0.4) + np.eye(n)[0]):
        others = np.array([np.delete(r, i).mean() for i in range(n)])
        scale = r.std(ddof=1) + EPSILON
        np.testing.assert_allclose(advantages(r, "grpo").values, r - r.mean(), atol=1e-12)
        np.testing.assert_allclose(advantages(r, "grpo", True).values, (r - r.mean()) / scale, atol=1e-9)
        np.testing.assert_allclose(advantages(r, "rloo").values, r - others, atol=1e-12)
        np.testing.assert_allclose(advantages(r, "rloo").values, n / (n - 1) * (r - r.mean()), atol=1e-12)
        np.testing.assert_allclose(advantages(r, "rloo", True).values, (r - others) / scale, atol=1e-9)
        assert abs(math.fsum(advantages(r, "rloo").values)) < 1e-9 * n


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("std", [False, True])
def test_masked_members_leave_no_trace(estimator, std):
    rng = np.random.default_rng(1)
    for _ in range(50):
        kept = list(rng.choice([0.0, 0.35, 1.0], rng.integers(1, 6)))
        at = sorted(rng.integers(0, len(kept) + 1, 3), reverse=True)
        padded = list(kept)
        for i in at:
            padded.insert(i, rng.choice(np.array([None, NAN, INF], dtype=object)))
        alone, among = advantages(kept, estimator, std), advantages(padded, estimator, std)
        assert [v for v in among.values if v is not None] == list(alone.values)
        assert (among.signal, among.valid) == (alone.signal, alone.valid)


@pytest.mark.parametrize("k,energy", [(1, 1.142857), (2, 1.959184), (3, 2.44898), (4, 2.612245)])
def test_the_energy_of_eight_binary_rewards_is_the_papers(k, energy):
    found = advantages([1] * k + [0] * (8 - k))
    assert found.energy == pytest.approx(energy, abs=1e-5) == pytest.approx(8 * k * (8 - k) / 49)


def test_one_differing_reward_by_a_rounding_step_is_a_signal():
    assert advantages([0.3, 0.1 + 0.2]).signal


def test_an_unknown_estimator_is_named():
    with pytest.raises(ValueError, match="estimator = 'ppo'"):
        advantages([1, 0], "ppo")
