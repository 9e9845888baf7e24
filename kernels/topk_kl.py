"""Distillation loss of two linear heads on the joint top-k support, per token, without ever keeping [N, V].

Shapes: N scored tokens, D hidden (may differ between the two models), V vocabulary, k support, T temperature.

    p = softmax(z_student / T), q = softmax(z_teacher / T)           over the whole vocabulary
    s(v) = max(log p_v, log q_v);  S = the k largest of s, ties to the lowest index
    p~, q~ = p, q renormalised on S
    reverse: T^2 KL(p~ || q~)      forward: T^2 KL(q~ || p~)          KL(a || b) = sum_S a (log a - log b)

With S held fixed (a choice has no gradient) the gradient for the student's logits is exactly

    reverse: T p~_i (log p~_i - log q~_i - KL)      forward: T (p~_i - q~_i)      on S, and zero elsewhere;

renormalising cancels the whole-vocabulary normalisers, so they decide S and nothing else. The teacher never gets a
gradient. `support="full"` takes S = the whole vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from oprd.kernels.cross_entropy import chunks, compute_dtype

DIRECTIONS = ("reverse", "forward")
SUPPORTS = ("topk", "full")


class SupportStats(NamedTuple):
    """Per token, detached: the probability each model puts on S, and |student's own top-k & teacher's own| / k."""

    student_mass: Tensor
    teacher_mass: Tensor
    overlap: Tensor


def topk_kl_definition(student_hidden, student_head, teacher_hidden, teacher_head, k, temperature,
                       direction="reverse", support="topk") -> tuple[Tensor, SupportStats]:
    """The definition, in float64 with all logits at once and differentiated by autograd; same arguments."""
    log_p = torch.log_softmax(student_hidden.double() @ student_head.double().T / temperature, -1)
    log_q = torch.log_softmax(teacher_hidden.double() @ teacher_head.double().T / temperature, -1).detach()
    score = torch.maximum(log_p, log_q).detach()
    size = k if support == "topk" else score.shape[1]
    first = lambda x, n: x.sort(dim=-1, descending=True, stable=True).indices[:, :n]  # noqa: E731
    S = first(score, size)
    on_p, on_q = log_p.gather(1, S), log_q.gather(1, S)
    a, b = torch.log_softmax(on_p, -1), torch.log_softmax(on_q, -1)
    if direction == "forward":
        a, b = b, a
    loss = temperature**2 * (a.exp() * (a - b)).sum(-1)
    own = (first(log_p, k)[:, :, None] == first(log_q, k)[:, None, :]).sum((1, 2)) / k
    return loss, SupportStats(on_p.detach().exp().sum(-1), on_q.exp().sum(-1), own)


def topk_kl(student_hidden: Tensor, student_head: Tensor, teacher_hidden: Tensor, teacher_head: Tensor, k: int,
            temperature: float, direction: str = "reverse", support: str = "topk") -> tuple[Tensor, SupportStats]:
    """The loss of every token: [N, Ds], [V, Ds], [N, Dt], [V, Dt] -> fp32 [N] (float64 for float64 input), stats.

    Gradients flow to the student's hidden states and head alone. Peak memory is a few chunks of logits. A k outside
    1..V, a temperature <= 0, an unknown direction or support, or two vocabularies is a ValueError. With the full
    support k counts for the statistic `overlap` alone, and one above V is V.
    """
    V = len(student_head)
    k = min(k, V) if support == "full" else k
    if len(teacher_head) != V:
        raise ValueError(f"student vocabulary = {V} must equal teacher vocabulary = {len(teacher_head)}")
    if not 1 <= k <= V:
        raise ValueError(f"k = {k} must be between 1 and the vocabulary size = {V}; lower distillation k")
    if not temperature > 0:
        raise ValueError(f"temperature = {temperature} must be above 0")
    if direction not in DIRECTIONS or support not in SUPPORTS:
        raise ValueError(f"direction = {direction!r} must be one of {DIRECTIONS}, support = {support!r} of {SUPPORTS}")
    assert len(student_hidden) == len(teacher_hidden), (student_hidden.shape, teacher_hidden.shape)
    student, teacher = (student_hidden, student_head), (teacher_hidden, teacher_head)
    loss, *stats = _TopkKL.apply(*student, *teacher, k, float(temperature), direction, support)
    return loss, SupportStats(*stats)


class _TopkKL(torch.autograd.Function):
    """Chunked over tokens. For the top-k support the exact gradient of the logits, k numbers a token, is made in
    forward and saved; for the full support both models' logits are recomputed in backward."""

    @staticmethod
    def forward(ctx, hidden, head, teacher_hidden, teacher_head, k, temperature, direction, support):
        dtype = compute_dtype(hidden)
        N, V = len(hidden), len(head)
        loss, mass_p, mass_q, overlap = (hidden.new_empty(N, dtype=dtype) for _ in range(4))
        size = k if support == "topk" else 0
        ids = torch.empty(N, size, dtype=torch.int32, device=hidden.device)
        grads = hidden.new_empty(N, size, dtype=dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            W, Wt = head.to(dtype), teacher_head.to(dtype)
            for part in chunks(N, V, hidden.device):
                z = _scaled_logits(hidden[part], W, temperature)
                zt = _scaled_logits(teacher_hidden[part], Wt, temperature)
                lse, lse_t = z.logsumexp(-1), zt.logsumexp(-1)
                chosen, overlap[part] = joint_support(z, zt, lse - lse_t, k)
                if support == "full":
                    loss[part], _ = conditional_kl(z, zt, temperature, direction)
                    mass_p[part] = mass_q[part] = 1.0
                    continue
                on, on_t = z.gather(1, chosen), zt.gather(1, chosen)
                loss[part], grads[part] = conditional_kl(on, on_t, temperature, direction)
                ids[part] = chosen.int()
                mass_p[part] = (on.logsumexp(-1) - lse).exp()
                mass_q[part] = (on_t.logsumexp(-1) - lse_t).exp()
        ctx.save_for_backward(hidden, head, teacher_hidden, teacher_head, ids, grads)
        ctx.settings = temperature, direction, support
        ctx.mark_non_differentiable(mass_p, mass_q, overlap)
        return loss, mass_p, mass_q, overlap

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream, *_):
        hidden, head, teacher_hidden, teacher_head, ids, grads = ctx.saved_tensors
        temperature, direction, support = ctx.settings
        W = head.to(grads.dtype)
        Wt = teacher_head.to(grads.dtype) if support == "full" else None
        d_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        d_head = torch.zeros_like(W) if ctx.needs_input_grad[1] else None
        for part in chunks(len(hidden), len(W), hidden.device):
            h = hidden[part].to(W.dtype)
            if support == "full":
                z, zt = _scaled_logits(h, W, temperature), _scaled_logits(teacher_hidden[part], Wt, temperature)
                d_logits = conditional_kl(z, zt, temperature, direction)[1]
            else:
                d_logits = W.new_zeros(len(h), len(W)).scatter_(1, ids[part].long(), grads[part])
            d_logits.mul_(upstream[part, None])
            if d_hidden is not None:
                d_hidden[part] = (d_logits @ W).to(hidden.dtype)
            if d_head is not None:
                d_head.addmm_(d_logits.T, h)
        return d_hidden, None if d_head is None else d_head.to(head.dtype), *[None] * 6  # none for the teacher


def conditional_kl(z: Tensor, zt: Tensor, temperature: float, direction: str) -> tuple[Tensor, Tensor]:
    """T^2 KL of the two softmaxes of scaled logits [c, S], and its gradient for the student's UNscaled logits."""
    log_p, log_q = torch.log_softmax(z, -1), torch.log_softmax(zt, -1)
    gap = log_p - log_q
    p = log_p.exp()
    if direction == "forward":
        q = log_q.exp()
        return -(temperature**2) * (q * gap).sum(-1), temperature * (p - q)
    kl = (p * gap).sum(-1)
    return temperature**2 * kl, temperature * p * (gap - kl[:, None])


def joint_support(z: Tensor, zt: Tensor, shift: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k ids of largest max(log p, log q), ties to the lowest id, and the overlap of the two own top-k over k.

    z, zt: scaled logits [c, V]; shift [c] = logsumexp(z) - logsumexp(zt). The order of s is the order of
    max(z, zt + shift): the student's key stays an exact image of its logit, so rounding makes no new ties among them.
    """
    chosen = first_k(torch.maximum(z, zt + shift[:, None]), k)
    own = torch.zeros_like(z, dtype=torch.bool).scatter_(1, first_k(z, k), True)
    return chosen, own.gather(1, first_k(zt, k)).sum(-1, dtype=z.dtype) / k


def first_k(z: Tensor, k: int) -> Tensor:
    """Ids of the k largest of every row [c, V] -> [c, k], in no order, ties at the k-th value to the lowest ids."""
    values, ids = z.topk(k, dim=-1, sorted=False)
    if k == z.shape[1]:
        return ids
    tied = ((z >= values.amin(-1, keepdim=True)).sum(-1) > k).nonzero().squeeze(1)
    if len(tied):  # torch.topk breaks ties as it likes
        ids[tied] = z[tied].sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return ids


def _scaled_logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    return (hidden.to(weight.dtype) @ weight.T).div_(temperature)
