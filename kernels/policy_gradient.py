"""The policy gradient of sampled tokens, per token. Shapes: N tokens.

    value_n = -rho_n        weight_n * value_n is the loss, with weight_n an advantage and its share of the step

rho is the importance ratio of the policy in training to the one that sampled, so that its gradient at a ratio of one is
that of -log p. How it is held (PPO's pessimistic bound with an upper side of its own, "clip-higher"; and a cap):

    behaviour   rho = p / p_sampled; for a positive weight at most 1 + high, for a negative one at least 1 - low and at
                most cap. Beyond a bound the gradient is zero. One ratio for everything that lies between the two: lag,
                and a rollout engine that computes other floats than the trainer.
    trainer     the trainer's own probabilities before this step stand for the old policy. A step's rollouts are trained
                on once, so p / p_old is one, with the gradient of log p; what is left, p_old / p_sampled, corrects the
                engine's mismatch as a constant factor of at most cap (truncated importance sampling).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

RATIOS = ("behaviour", "trainer")


class RatioStats(NamedTuple):
    """Per token [N], without gradient. ratio: p / p_sampled, unbounded; clipped: 1 where a bound holds; kl: the
    estimate ratio - 1 - log ratio of KL(sampled || p), never negative."""

    ratio: Tensor
    clipped: Tensor
    kl: Tensor


def policy_gradient_definition(logprobs: Tensor, sampled: Tensor, weights: Tensor, low: float, high: float, cap: float,
                               ratio: str = "behaviour") -> Tensor:
    """The definition, in float64, token by token: [N], [N], [N] -> [N]."""
    values = []
    for logp, old, weight in zip(logprobs.double(), sampled.double(), weights.tolist()):
        if ratio == "trainer":
            factor = min(math.exp(logp.item() - old.item()), cap)
            values.append(-factor * (1 + logp - logp.item()))
            continue
        rho = torch.exp(logp - old)
        if weight >= 0:
            values.append(-rho if rho <= 1 + high else -torch.tensor(1 + high, dtype=torch.float64) + 0 * logp)
        elif rho < 1 - low or rho > cap:
            values.append(-torch.tensor(1 - low if rho < 1 - low else cap, dtype=torch.float64) + 0 * logp)
        else:
            values.append(-rho)
    return torch.stack(values)


def policy_gradient(logprobs: Tensor, sampled: Tensor, weights: Tensor, low: float, high: float, cap: float,
                    ratio: str = "behaviour") -> tuple[Tensor, RatioStats]:
    """logprobs: the trainer's, of the sampled tokens, with a graph [N]; sampled: those recorded when they were sampled,
    under the same temperature; weights: only their signs matter. Returns (values [N], statistics).

    Bounds are applied to the logarithm: a ratio that would overflow has a finite value and a zero gradient.
    """
    assert ratio in RATIOS and logprobs.shape == sampled.shape == weights.shape
    apart = logprobs - sampled.to(logprobs.dtype)
    with torch.no_grad():
        stats = _stats(apart.detach(), weights, low, high, cap, ratio)
    if ratio == "trainer":
        factor = apart.detach().clamp(max=math.log(cap)).exp()
        return -factor * (1 + logprobs - logprobs.detach()), stats
    up = apart.clamp(max=math.log1p(high)).exp()
    down = apart.clamp(min=math.log1p(-low) if low < 1 else -math.inf, max=math.log(cap)).exp()
    return -torch.where(weights >= 0, up, down), stats


def _stats(apart: Tensor, weights: Tensor, low: float, high: float, cap: float, ratio: str) -> RatioStats:
    rho = apart.clamp(max=80.0).exp()
    if ratio == "trainer":
        clipped = rho > cap
    else:
        clipped = torch.where(weights >= 0, rho > 1 + high, (rho < 1 - low) | (rho > cap))
    return RatioStats(rho, clipped.to(rho.dtype), rho - 1 - apart)
