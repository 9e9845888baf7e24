"""The losses of `kernels/` with the vocabulary cut over an axis: every rank has some logits of every token.

N scored tokens, D hidden, v this rank's entries of the vocabulary V, k support, c rows of one chunk, n ranks.

Logits never travel. The cross-entropy sends three numbers a token (a maximum, a sum, the target's logit); the joint
top-k KL, to the rank that decides a token, each rank's k best entries of both models (the support lies in their union),
and back the k chosen ids with their gradients. All ranks end with the same values, counted once by whoever adds them up;
the gradient of `hidden` on a rank is the part that its entries make, summed where the states were gathered.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from oprd.kernels.cross_entropy import chunks, compute_dtype, token_nll
from oprd.kernels.topk_kl import DIRECTIONS, SUPPORTS, SupportStats, conditional_kl, first_k, topk_kl
from oprd.parallel.collectives import all_gather, all_reduce, all_to_all
from oprd.parallel.layers import Head
from oprd.parallel.mesh import Axis


def split_token_nll(hidden: Tensor, head: Head, targets: Tensor) -> Tensor:
    """token_nll with a cut head: [N, D], head [v, D], int64 [N] -> [N], the same on all ranks of head.axis."""
    if head.axis.size == 1:
        return token_nll(hidden, head.weight, targets)
    if targets.numel():
        low, high = targets.min().item(), targets.max().item()
        if low < 0 or high >= head.vocabulary:
            raise ValueError(f"target id {low if low < 0 else high} is outside the vocabulary of {head.vocabulary} "
                             "entries; use the tokenizer the model was made for")
    return _SplitNLL.apply(hidden, head.weight, targets, head)


def split_topk_kl(student_hidden: Tensor, student: Head, teacher_hidden: Tensor, teacher: Head, k: int,
                  temperature: float, direction: str = "reverse",
                  support: str = "topk") -> tuple[Tensor, SupportStats]:
    """topk_kl with cut heads (of both models, alike); values and statistics [N] are the same on all ranks."""
    if student.axis.size == 1:
        return topk_kl(student_hidden, student.weight, teacher_hidden, teacher.weight, k, temperature, direction, support)
    V = student.vocabulary
    k = min(k, V) if support == "full" else k
    if teacher.vocabulary != V:
        raise ValueError(f"student vocabulary = {V} must equal teacher vocabulary = {teacher.vocabulary}")
    if not 1 <= k <= V:
        raise ValueError(f"k = {k} must be between 1 and the vocabulary size = {V}; lower distillation k")
    if not temperature > 0:
        raise ValueError(f"temperature = {temperature} must be above 0")
    assert direction in DIRECTIONS and support in SUPPORTS and V < 2**24, (direction, support, V)
    loss, *stats = _SplitTopkKL.apply(student_hidden, student.weight, teacher_hidden, teacher.weight, student, k,
                                      float(temperature), direction, support)
    return loss, SupportStats(*stats)


def split_logsumexp(logits: Tensor, axis: Axis) -> Tensor:
    """logsumexp over the whole vocabulary, from each rank's logits [c, v]: [c]."""
    most = all_reduce(_most(logits), axis, "max")
    return most + all_reduce((logits - most[:, None]).exp().sum(-1), axis).log()


def _most(logits: Tensor) -> Tensor:
    return logits.amax(-1) if logits.shape[1] else logits.new_full(logits.shape[:1], -math.inf)


class _SplitNLL(torch.autograd.Function):
    """Chunked over tokens; the softmax is made anew in backward."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, head):
        dtype = compute_dtype(hidden)
        nll = hidden.new_empty(len(hidden), dtype=dtype)
        lse = torch.empty_like(nll)
        local = targets - head.start
        mine = (local >= 0) & (local < len(weight))
        with torch.autocast(hidden.device.type, enabled=False):
            W = weight.to(dtype)
            for part in chunks(len(hidden), -(-head.vocabulary // head.axis.size), hidden.device):
                logits = hidden[part].to(dtype) @ W.T
                most = all_reduce(_most(logits), head.axis, "max")
                total = (logits - most[:, None]).exp().sum(-1)
                wanted = torch.zeros_like(total)
                at = mine[part].nonzero().squeeze(1)
                wanted[at] = logits[at, local[part][at]]
                total, wanted = all_reduce(torch.stack([total, wanted]), head.axis)
                lse[part] = most + total.log()
                nll[part] = lse[part] - wanted
        ctx.save_for_backward(hidden, weight, local, mine, lse)
        ctx.head = head
        return nll

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        hidden, weight, local, mine, lse = ctx.saved_tensors
        W = weight.to(lse.dtype)
        d_hidden, d_weight = torch.empty_like(hidden), torch.zeros_like(W)
        for part in chunks(len(hidden), -(-ctx.head.vocabulary // ctx.head.axis.size), hidden.device):
            h = hidden[part].to(lse.dtype)
            p = (h @ W.T).sub_(lse[part, None]).exp_()
            at = mine[part].nonzero().squeeze(1)
            p[at, local[part][at]] -= 1
            p.mul_(upstream[part, None])
            d_hidden[part] = (p @ W).to(hidden.dtype)
            d_weight.addmm_(p.T, h)
        return d_hidden, d_weight.to(weight.dtype), None, None


class _SplitTopkKL(torch.autograd.Function):
    """Chunked over tokens. Of a chunk every rank decides its n-th part, from all ranks' candidates."""

    @staticmethod
    def forward(ctx, hidden, weight, teacher_hidden, teacher_weight, head, k, temperature, direction, support):
        dtype = compute_dtype(hidden)
        N = len(hidden)
        found = hidden.new_empty(4, N, dtype=dtype)  # loss, both masses, overlap
        size = k if support == "topk" else 0
        ids = torch.empty(N, size, dtype=torch.int64, device=hidden.device)
        grads = hidden.new_empty(N, size, dtype=dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            W, Wt = weight.to(dtype), teacher_weight.to(dtype)
            for part in chunks(N, -(-head.vocabulary // head.axis.size), hidden.device):
                z = (hidden[part].to(dtype) @ W.T).div_(temperature)
                zt = (teacher_hidden[part].to(dtype) @ Wt.T).div_(temperature)
                lse, lse_t = split_logsumexp(z, head.axis), split_logsumexp(zt, head.axis)
                decided = _decide(z, zt, lse, lse_t, head, k, temperature, direction)
                found[:, part] = decided[:, :4].T
                if support == "topk":
                    ids[part], grads[part] = decided[:, 4 : 4 + k].long(), decided[:, 4 + k :]
                else:
                    loss, _ = _full_kl(z, zt, lse, lse_t, head.axis, temperature, direction)
                    found[0, part] = loss
                    found[1:3, part] = 1.0
        ctx.save_for_backward(hidden, weight, teacher_hidden, teacher_weight, ids, grads)
        ctx.head, ctx.settings = head, (temperature, direction, support)
        loss, mass_p, mass_q, overlap = found.unbind()
        ctx.mark_non_differentiable(mass_p, mass_q, overlap)
        return loss, mass_p, mass_q, overlap

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream, *_):
        hidden, weight, teacher_hidden, teacher_weight, ids, grads = ctx.saved_tensors
        head, (temperature, direction, support) = ctx.head, ctx.settings
        W = weight.to(grads.dtype)
        d_hidden, d_weight = torch.empty_like(hidden), torch.zeros_like(W)
        for part in chunks(len(hidden), -(-head.vocabulary // head.axis.size), hidden.device):
            h = hidden[part].to(W.dtype)
            if support == "full":
                z = (h @ W.T).div_(temperature)
                zt = (teacher_hidden[part].to(W.dtype) @ teacher_weight.to(W.dtype).T).div_(temperature)
                lse, lse_t = split_logsumexp(z, head.axis), split_logsumexp(zt, head.axis)
                d_logits = _full_kl(z, zt, lse, lse_t, head.axis, temperature, direction)[1]
            else:
                local = ids[part] - head.start
                mine = (local >= 0) & (local < len(W))
                d_logits = W.new_zeros(len(h), len(W) + 1)  # one column for the others' entries
                d_logits = d_logits.scatter_(1, local.where(mine, len(W)), grads[part])[:, : len(W)]
            d_logits = d_logits * upstream[part, None]
            d_hidden[part] = (d_logits @ W).to(hidden.dtype)
            d_weight.addmm_(d_logits.T, h)
        return d_hidden, d_weight.to(weight.dtype), *[None] * 7


def _decide(z: Tensor, zt: Tensor, lse: Tensor, lse_t: Tensor, head: Head, k: int, temperature: float,
            direction: str) -> Tensor:
    """Of every token, decided on one rank and known to all: [c, 4 + 2 k], loss, student's and teacher's mass on the
    support, overlap, and the support's ids and gradients. z, zt: this rank's scaled logits [c, v]."""
    axis, c = head.axis, len(z)
    share = -(-c // axis.size)
    mine = torch.stack([_candidates(z, zt, z, head, k), _candidates(z, zt, zt, head, k)], 1)  # [c, 2, k, 3]
    padded = torch.cat([mine, mine.new_zeros(share * axis.size - c, *mine.shape[1:])])
    got = all_to_all(padded, axis).unflatten(0, (axis.size, share))  # [n, share, 2, k, 3]
    own = slice(axis.rank * share, min(c, (axis.rank + 1) * share))
    rows = got.permute(1, 2, 0, 3, 4).flatten(2, 3)[: max(0, own.stop - own.start)]  # [s, 2, n k, 3]
    best = _largest(rows[:, 0], rows[:, 0, :, 0], k), _largest(rows[:, 1], rows[:, 1, :, 1], k)
    shared = (best[0][:, :, None, 2] == best[1][:, None, :, 2])
    # an entry that both models name is there twice: the teacher's copy is taken out
    both = torch.cat([best[0], best[1]], dim=1)
    key = torch.maximum(both[:, :, 0], both[:, :, 1] + (lse - lse_t)[own, None])
    key[:, k:].masked_fill_(shared.any(1), -math.inf)
    chosen = _largest(both, key, k)
    on, on_t = chosen[:, :, 0], chosen[:, :, 1]
    loss, grads = conditional_kl(on, on_t, temperature, direction)
    masses = (on.logsumexp(-1) - lse[own]).exp(), (on_t.logsumexp(-1) - lse_t[own]).exp()
    overlap = shared.sum((1, 2)).to(z.dtype) / k
    decided = torch.cat([torch.stack([loss, *masses, overlap], 1), chosen[:, :, 2], grads], dim=1)
    decided = torch.cat([decided, decided.new_zeros(share - len(decided), decided.shape[1])])
    return all_gather(decided, axis)[:c]


def _candidates(z: Tensor, zt: Tensor, by: Tensor, head: Head, k: int) -> Tensor:
    """(student's logit, teacher's, id) of this rank's k largest entries `by` one of them: [c, k, 3]; where it has fewer
    than k, -inf and an id that does not exist."""
    n = min(k, z.shape[1])
    ids = first_k(by, n) if n else torch.empty(len(z), 0, dtype=torch.int64, device=z.device)
    found = torch.stack([z.gather(1, ids), zt.gather(1, ids), (ids + head.start).to(z.dtype)], dim=-1)
    none = z.new_tensor([-math.inf, -math.inf, head.vocabulary]).expand(len(z), k - n, 3)
    return torch.cat([found, none], dim=1)


def _largest(rows: Tensor, key: Tensor, k: int) -> Tensor:
    """The k rows [s, m, 3] of largest key [s, m], ties to the lowest id."""
    by_id = rows[:, :, 2].argsort(dim=1, stable=True)
    order = key.gather(1, by_id).sort(dim=1, descending=True, stable=True).indices[:, :k]
    return rows.gather(1, by_id.gather(1, order)[:, :, None].expand(-1, -1, 3))


def _full_kl(z: Tensor, zt: Tensor, lse: Tensor, lse_t: Tensor, axis: Axis, temperature: float,
             direction: str) -> tuple[Tensor, Tensor]:
    """conditional_kl over the whole vocabulary: loss [c], and the gradient of this rank's logits [c, v]."""
    log_p, log_q = z - lse[:, None], zt - lse_t[:, None]
    gap, p = log_p - log_q, log_p.exp()
    if direction == "forward":
        q = log_q.exp()
        return -(temperature**2) * all_reduce((q * gap).sum(-1), axis), temperature * (p - q)
    kl = all_reduce((p * gap).sum(-1), axis)
    return temperature**2 * kl, temperature * p * (gap - kl[:, None])
