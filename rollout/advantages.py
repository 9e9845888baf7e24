"""Advantages within a group of attempts at one task: how much better each went than the others.

Let r be the rewards of the n valid members; every other member (a machine's failure, a masked ending, a reward that is
no finite number) has no advantage and stands in no mean, no deviation, no test for a signal and no denominator.

    estimator      baseline of i          with std, divided by
    grpo           mean of all n          deviation of all n, plus EPSILON
    rloo           mean of the others     deviation of all n, plus EPSILON
    leave_one_out  mean of the others     deviation of the others, plus EPSILON: nothing of i is in its own scale. Where
                                          the others do not differ: that of all n

Deviations are the sample's (n - 1). rloo without std is n / (n - 1) times grpo without std. A group whose valid members
all have the same reward, or that has fewer than two of them, has no signal: there all advantages are exactly zero,
whatever a rounded mean would say.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Sequence

ESTIMATORS = ("grpo", "rloo", "leave_one_out")
EPSILON = 1e-6


@dataclass(frozen=True)
class Advantages:
    """values: one a member, None where it is not valid. signal: whether the valid members differ."""

    values: tuple[float | None, ...]
    signal: bool

    @property
    def valid(self) -> int:
        return sum(v is not None for v in self.values)

    @property
    def energy(self) -> float:
        """Sum of squares: for binary rewards, rloo, n members and k passes it is n k (n - k) / (n - 1)^2."""
        return math.fsum(v * v for v in self.values if v is not None)


def advantages(rewards: Sequence[float | None], estimator: str = "rloo", std: bool = False) -> Advantages:
    """rewards: one a member, None for a member that is masked. ValueError for an unknown estimator.

    Worked example: [1, 0, 0, None] has, by rloo, [1, -1/2, -1/2, None]; by grpo [2/3, -1/3, -1/3, None].
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"estimator = {estimator!r} must be one of {', '.join(ESTIMATORS)}")
    valid = [float(r) for r in rewards if _counts(r)]
    signal = len(valid) > 1 and max(valid) != min(valid)
    if not signal:
        return Advantages(tuple(0.0 if _counts(r) else None for r in rewards), False)
    whole = _deviation(valid) if std else 0.0
    found = iter([_advantage(valid, i, estimator, std, whole) for i in range(len(valid))])
    return Advantages(tuple(next(found) if _counts(r) else None for r in rewards), True)


def _advantage(rewards: list[float], i: int, estimator: str, std: bool, whole: float) -> float:
    others = rewards[:i] + rewards[i + 1 :]
    apart = rewards[i] - _mean(rewards if estimator == "grpo" else others)
    if not std:
        return apart
    alone = _deviation(others) if estimator == "leave_one_out" else 0.0
    return apart / ((alone or whole) + EPSILON)


def _counts(reward: float | None) -> bool:
    return reward is not None and math.isfinite(reward)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _deviation(values: Sequence[float]) -> float:
    """Of a sample; exactly 0 where all are equal or there is one."""
    if len(values) < 2 or max(values) == min(values):
        return 0.0
    mean = _mean(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))
