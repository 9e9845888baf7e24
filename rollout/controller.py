"""Holds the pass rate of replayed tasks near one half by turning one knob: a ratio of which larger is harder.

Every step with news, an exponential mean takes in the pass rate; outside the dead zone around the target, and not more
often than every `cooldown` steps, the ratio goes one `move` towards the target, within its bounds.

What was measured under one ratio says little about the next, and a mean that remembers it (half-life 13.5 steps at
alpha = 0.05) makes the loop swing far beyond one move. So a move begins the mean anew (`restart`, ours). The mean is
corrected for its beginning: after n pass rates their weights are alpha (1 - alpha)^i, scaled to add up to one.
restart = false is the plain mean, beginning at the target.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class ControlSettings:
    """alpha: weight of the newest pass rate. zone: half the width of the dead zone. cooldown: steps with news between
    moves. least, most: bounds of the ratio."""

    alpha: float = 0.05
    target: float = 0.5
    zone: float = 0.03
    move: float = 0.05
    cooldown: int = 5
    least: float = 0.05
    most: float = 0.95
    restart: bool = True

    def __post_init__(self):
        if not (0 < self.alpha <= 1 and 0 < self.target < 1):
            raise ValueError(f"alpha = {self.alpha} and target = {self.target} must lie between 0 and 1")
        if self.zone < 0 or self.move <= 0 or self.cooldown < 1:
            raise ValueError(f"zone = {self.zone} must be 0 or above, move = {self.move} above 0 and cooldown = "
                             f"{self.cooldown} at least 1")
        if not 0 <= self.least <= self.most <= 1:
            raise ValueError(f"least = {self.least} and most = {self.most} must be bounds between 0 and 1")


@dataclass(frozen=True)
class Controller:
    """One bucket's state. mean: of pass rates since the last move, None before the first. weight: how much of a full
    exponential mean it stands for. since: steps with news since the last move."""

    ratio: float
    mean: float | None = None
    weight: float = 0.0
    since: int = 0

    def seen(self, pass_rate: float, s: ControlSettings) -> "Controller":
        """The controller after one step's pass rate."""
        if s.restart:
            weight = self.weight + s.alpha * (1 - self.weight)
            old = 0.0 if self.mean is None else self.mean * self.weight * (1 - s.alpha)
            mean = (old + s.alpha * pass_rate) / weight
        else:
            weight = 1.0
            mean = (s.target if self.mean is None else self.mean) * (1 - s.alpha) + s.alpha * pass_rate
        after = replace(self, mean=mean, weight=weight, since=self.since + 1)
        if after.since < s.cooldown or abs(mean - s.target) <= s.zone + 1e-9:
            return after
        ratio = min(s.most, max(s.least, self.ratio + (s.move if mean > s.target else -s.move)))
        if s.restart:
            return Controller(round(ratio, 9))
        return replace(after, ratio=round(ratio, 9), since=0)
