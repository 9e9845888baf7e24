"""The divergence of two distributions on a support they share, and its gradient for the student's logits.

Shapes: c tokens, k entries of the support S, V vocabulary, T temperature. p = softmax(z / T), q = softmax(zt / T) over
the whole vocabulary, L = T logsumexp(z / T) (L_t for the teacher's), so log p_i = (z_i - L) / T.

    support       reverse, T^2 times                           forward: p and q exchanged
    topk          sum_S p~ log(p~/q~)                          p~, q~: p, q renormalised on S
    tail          sum_S p log(p/q) + p' log(p'/q')             p', q': what lies outside S, at least TAIL
    generalised   sum_S p log(p/q) - p + q                     outside S nothing is asked for
    full          sum_V p log(p/q)                             `Found.moment`, not here

With S held fixed, let e_i = dF/dp_i for a value F of probabilities on S and of what lies outside (e'). Then

    dF/dz_v = (p_v / T) (e_v - E) on S, (p_v / T) (e' - E) outside,       E = sum_S p e + p' e'

that is a sparse part, p_i (e_i - e') / T on S, and (e' - E) / T times the whole softmax, which is zero for `topk`:
renormalised on S its E takes S alone. 0 log(0 / x) is 0: an entry that no model has costs nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

TAIL = 1e-7  # probability outside S below which float32 normalisers know nothing about it


class Divergence(NamedTuple):
    """value [c]; sparse [c, k]: gradient of the logits on S; dense [c] or None: the factor of the whole softmax; the
    probability [c] that p and q have on S."""

    value: Tensor
    sparse: Tensor
    dense: Tensor | None
    mass: Tensor
    mass_t: Tensor


def on_support(z: Tensor, zt: Tensor, norm: Tensor, norm_t: Tensor, temperature: float, direction: str,
               support: str) -> Divergence:
    """From logits on S, float64 [c, k], and the normalisers L, L_t, float64 [c]; the gradient is of T^2 F."""
    T = temperature
    if support == "topk":
        z, zt = z / T, zt / T
        log_p, log_q = z.log_softmax(-1), zt.log_softmax(-1)
        p, q = log_p.exp(), log_q.exp() if direction == "forward" else None
        value, pe = _pieces(log_p, log_q, p, q)
        # the largest logit minus the largest log-probability is the normaliser over S
        masses = ((x.amax(-1) - y.amax(-1) - n / T).exp() for x, y, n in ((z, log_p, norm), (zt, log_q, norm_t)))
        return Divergence(T**2 * value, p.mul_(pe.sum(-1, keepdim=True)).neg_().add_(pe).mul_(T), None, *masses)
    log_p, log_q = (z - norm[:, None]) / T, (zt - norm_t[:, None]) / T
    p, q = log_p.exp(), log_q.exp()
    value, pe = _pieces(log_p, log_q, p, q if direction == "forward" else None)
    masses = p.sum(-1), q.sum(-1)
    if support == "generalised":
        value = value + (q - p).sum(-1) if direction == "reverse" else value + (p - q).sum(-1)
        pe = pe - p if direction == "reverse" else pe + p
        return Divergence(T**2 * value, T * pe, -T * pe.sum(-1), *masses)
    rest, rest_t = (1 - mass for mass in masses)
    out, out_t = rest.clamp(min=TAIL), rest_t.clamp(min=TAIL)
    alive = (rest > TAIL).to(p.dtype)
    if direction == "reverse":
        value, e = value + out * (out / out_t).log(), alive * ((out / out_t).log() + 1)
    else:
        value, e = value + out_t * (out_t / out).log(), -alive * out_t / out
    E = pe.sum(-1) + rest * e
    return Divergence(T**2 * value, T * (pe - p * e[:, None]), T * (e - E), *masses)


def _pieces(log_p: Tensor, log_q: Tensor, p: Tensor, q: Tensor | None) -> tuple[Tensor, Tensor]:
    """sum p log(p/q), or with q sum q log(q/p), [c]; and p_i times its derivative for p_i [c, k]."""
    gap = log_p - log_q
    if q is None:
        terms = torch.where(p > 0, p * gap, 0.0)
        return terms.sum(-1), terms + p
    return -torch.where(q > 0, q * gap, 0.0).sum(-1), -q


def on_support_definition(log_p: Tensor, log_q: Tensor, S: Tensor, temperature: float, direction: str,
                          support: str) -> Tensor:
    """T^2 F from whole log-probabilities, float64 [c, V], and the ids [c, k] of S; differentiable. Slow on purpose."""
    inside = torch.zeros_like(log_p, dtype=torch.bool).scatter_(1, S, True)
    kl = lambda a, b: torch.where(a > -torch.inf, a.exp() * (a - b), 0.0).sum(-1)  # noqa: E731
    on_p, on_q = log_p.gather(1, S), log_q.gather(1, S)
    if support == "topk":
        a, b = on_p.log_softmax(-1), on_q.log_softmax(-1)
    elif support == "tail":
        rest = [x.exp().masked_fill(inside, 0.0).sum(-1, keepdim=True).clamp(min=TAIL).log() for x in (log_p, log_q)]
        a, b = torch.cat([on_p, rest[0]], 1), torch.cat([on_q, rest[1]], 1)
    elif support == "generalised":
        a, b = on_p, on_q
    else:
        a, b = log_p, log_q
    if direction == "forward":
        a, b = b, a
    extra = (b.exp() - a.exp()).sum(-1) if support == "generalised" else 0.0
    return temperature**2 * (kl(a, b) + extra)
