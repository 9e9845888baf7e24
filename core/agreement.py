"""Whether the engine's log-probabilities are the trainer's, and what to do with tokens of older weights.

One forward of the current student, without gradient, over some of a step's rows (all of them, when rollouts may be
stale). For a token with p_trainer under the current weights and p_engine when it was sampled, d = log p_trainer -
log p_engine and r = exp(d):

    tokens of the current version    d should be rounding: mean |d|, max |d| and k3 = r - 1 - d, a low-variance estimate
                                     of KL(engine || trainer) (Schulman, "Approximating KL divergence"), are measured
    tokens of older versions         their nll and kl weights are multiplied by min(r, clip): truncated importance
                                     sampling; a pg weight is left alone, its loss has a ratio of its own
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Sequence

import numpy as np

from oprd.core.metrics import Max, Mean, Metric
from oprd.core.score import target_logprobs
from oprd.core.settings import Rollout
from oprd.core.types import Example

log = logging.getLogger("oprd.trainer")


@dataclass
class Agreement:
    """temperature: of the rollouts (0: greedy, whose log-probabilities are those of temperature 1). rows: how many of
    a step's rows are compared where none is stale. alarm: largest mean |d| of current tokens; 0: none. clip: above."""

    temperature: float
    rows: int
    alarm: float
    clip: float
    token_budget: int
    checked: bool = False  # the first step has been

    @staticmethod
    def of(rollout: Rollout, token_budget: int) -> "Agreement":
        return Agreement(rollout.temperature, rollout.check_attempts, rollout.difference_alarm, rollout.importance_clip,
                         token_budget)

    def __call__(self, model, examples: Sequence[Example], step: int) -> tuple[list[Example], dict[str, Metric]]:
        """The examples with the weights of stale tokens corrected, and the metrics. ValueError: the first step that is
        looked at is beyond the alarm; later ones are warned of."""
        examples, ages = list(examples), [_ages(e, step) for e in examples]
        stale = [i for i, age in enumerate(ages) if age is not None and age.any()]
        compared = [i for i, age in enumerate(ages) if age is not None and len(age)]
        compared = sorted({*stale, *compared[: self.rows]})
        metrics = _staleness([age for age in ages if age is not None])
        if not compared:
            return examples, metrics
        fresh, ratios = [], []
        rows = [examples[i].row for i in compared]
        for i, now in zip(compared, target_logprobs(model, rows, self.token_budget, self.temperature or 1.0)):
            difference = now - examples[i].old_logprobs
            fresh.append(difference[ages[i] == 0])
            if ages[i].any():
                ratio = np.where(ages[i] > 0, np.minimum(np.exp(difference), self.clip), 1.0)
                ratios.append(ratio[ages[i] > 0])
                weights = {name: w if name == "pg" else w * ratio for name, w in examples[i].weights.items()}
                examples[i] = replace(examples[i], weights=weights)
        metrics |= self._judge(np.concatenate(fresh), step)
        if ratios:
            ratio = np.concatenate(ratios)
            metrics["rollout/importance_ratio"] = Mean(float(ratio.sum()), len(ratio))
            metrics["rollout/importance_clipped"] = Mean(float((ratio >= self.clip).sum()), len(ratio))
        return examples, metrics

    def _judge(self, d: np.ndarray, step: int) -> dict[str, Metric]:
        if not len(d):
            return {}
        mean, most, k3 = float(np.abs(d).mean()), float(np.abs(d).max()), np.exp(d) - 1 - d
        said = (f"step {step}: log-probabilities of {len(d)} sampled tokens, engine against trainer: mean difference "
                f"{mean:.2g}, largest {most:.2g}, k3 {k3.mean():.2g}")
        beyond = bool(self.alarm) and not mean <= self.alarm
        if beyond and not self.checked:
            raise ValueError(f"{said}; the mean must be at most rollout.difference_alarm = {self.alarm:g}: the engine "
                             "does not serve the trainer's model (dtype, temperature, template or weights differ)")
        if beyond or not self.checked:
            log.warning("%s%s", said, f": more than rollout.difference_alarm = {self.alarm:g}" if beyond else "")
        self.checked = True
        return {"rollout/difference_mean": Mean(float(np.abs(d).sum()), len(d)), "rollout/difference_max": Max(most),
                "rollout/difference_k3": Mean(float(k3.sum()), len(d)), "rollout/difference_alarms": Max(float(beyond))}


def _ages(example: Example, step: int) -> np.ndarray | None:
    """How many versions old each scored token is; None for a row that no engine sampled."""
    if example.old_logprobs is None or example.versions is None:
        return None
    return step - example.versions


def _staleness(ages: Sequence[np.ndarray]) -> dict[str, Metric]:
    whole = np.concatenate([*ages, np.empty(0)])
    if not len(whole):
        return {}
    return {"rollout/staleness": Mean(float(whole.sum()), len(whole)), "rollout/staleness_max": Max(float(whole.max()))}
