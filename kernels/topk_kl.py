"""Distillation loss of two linear heads on the joint top-k support, per token, without ever keeping [N, V].

Shapes: N scored tokens, D hidden (may differ between the two models), V vocabulary, k support, T temperature.

    p = softmax(z_student / T), q = softmax(z_teacher / T)           over the whole vocabulary
    s(v) = max(log p_v, log q_v);  S = the k largest of s, ties to the lowest index
    p~, q~ = p, q renormalised on S
    reverse: T^2 KL(p~ || q~)      forward: T^2 KL(q~ || p~)          KL(a || b) = sum_S a (log a - log b)

With S held fixed (a choice has no gradient) the gradient for the student's logits is exactly

    reverse: T p~_i (log p~_i - log q~_i - KL)      forward: T (p~_i - q~_i)      on S, and zero elsewhere;

renormalising cancels the whole-vocabulary normalisers, so they decide S and nothing else. The teacher never gets a
gradient. So the forward pass reads both vocabularies once, tile by tile (`joint_support.py`), and keeps k ids and k
numbers a token; the backward pass is two products with a sparse matrix (`sparse_rows.py`), the same bits every time.

Other supports (`divergence.py` has their formulas): `tail` adds one outcome for all that lies outside S, `generalised`
compares p and q on S without renormalising, `full` takes the whole vocabulary. Their gradients have a dense part too,
for which the backward pass reads the vocabulary again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from oprd.kernels.divergence import on_support, on_support_definition
from oprd.kernels.joint_support import Best, Found, difference, join, scan, scan_one
from oprd.kernels.sparse_rows import add_outer, weigh_rows
from oprd.kernels.tiles import Product, compute_dtype, rows_of, tiles
from oprd.kernels.vocabulary_parallel import Exchange, return_sparse, send_to_owners

DIRECTIONS = ("reverse", "forward")
SUPPORTS = ("topk", "tail", "generalised", "full")


class SupportStats(NamedTuple):
    """Per token, detached: the probability each model puts on S, and |student's own top-k & teacher's own| / k."""

    student_mass: Tensor
    teacher_mass: Tensor
    overlap: Tensor


class TeacherTopk(NamedTuple):
    """What the student's pass needs of a teacher that ran before: its final hidden states [N, Dt], its k best entries
    (ids int32 and logits [N, k]) and its normaliser T logsumexp(z / T), float64 [N]."""

    hidden: Tensor
    ids: Tensor
    logits: Tensor
    norm: Tensor


def topk_kl_definition(student_hidden, student_head, teacher_hidden, teacher_head, k, temperature,
                       direction="reverse", support="topk") -> tuple[Tensor, SupportStats]:
    """The definition, in float64 with all logits at once and differentiated by autograd; same arguments."""
    log_p = torch.log_softmax(student_hidden.double() @ student_head.double().T / temperature, -1)
    log_q = torch.log_softmax(teacher_hidden.double() @ teacher_head.double().T / temperature, -1).detach()
    first = lambda x, n: x.sort(dim=-1, descending=True, stable=True).indices[:, :n]  # noqa: E731
    S = first(torch.maximum(log_p, log_q).detach(), k if support != "full" else log_p.shape[1])
    loss = on_support_definition(log_p, log_q, S, temperature, direction, support)
    own = (first(log_p, k)[:, :, None] == first(log_q, k)[:, None, :]).sum((1, 2)) / k
    return loss, SupportStats(log_p.gather(1, S).detach().exp().sum(-1), log_q.gather(1, S).exp().sum(-1), own)


def topk_kl(student_hidden: Tensor, student_head: Tensor, teacher_hidden: Tensor | None, teacher_head: Tensor, k: int,
            temperature: float, direction: str = "reverse", support: str = "topk", *,
            stored: TeacherTopk | None = None, exchange: Exchange | None = None, into: Tensor | None = None,
            rounded: bool = False) -> tuple[Tensor, SupportStats]:
    """The loss of every token: [N, Ds], [V, Ds], [N, Dt], [V, Dt] -> fp32 [N] (float64 for float64 input), stats.

    Gradients flow to the student's hidden states and head alone. Peak memory is two tiles of logits and 8 k bytes a
    token. A k outside 1..V, a temperature <= 0, an unknown direction or support, or two vocabularies is a ValueError.
    With the full support k counts for the statistic `overlap` alone, and one above V is V.

    stored: what teacher_topk() kept of the same tokens; teacher_hidden is not read then, and the teacher's head only
        where the student's candidates are not the teacher's own.
    exchange: the heads are this rank's share of a vocabulary, the hidden states the same on all ranks. Loss and stats
        are too; the gradient of the hidden states is the part that this rank's entries make.
    into: [V, Ds], where the head's gradient is added in the backward pass, instead of a gradient for the head itself.
    rounded: half-precision heads on a CPU: products rounded to half precision, four times as fast. The support is then
        that of the rounded logits.
    """
    V = len(student_head) if exchange is None else exchange.vocabulary
    k = min(k, V) if support == "full" else k
    if len(teacher_head) != len(student_head):
        raise ValueError(f"student vocabulary = {len(student_head)} must equal teacher vocabulary = "
                         f"{len(teacher_head)}")
    if not 1 <= k <= V:
        raise ValueError(f"k = {k} must be between 1 and the vocabulary size = {V}; lower distillation k")
    if not temperature > 0:
        raise ValueError(f"temperature = {temperature} must be above 0")
    if direction not in DIRECTIONS or support not in SUPPORTS:
        raise ValueError(f"direction = {direction!r} must be one of {DIRECTIONS}, support = {support!r} of {SUPPORTS}")
    assert exchange is None or stored is None, "a stored teacher is whole"
    teacher_hidden = teacher_hidden if stored is None else stored.hidden
    assert len(student_hidden) == len(teacher_hidden), (student_hidden.shape, teacher_hidden.shape)
    task = _Task(k, float(temperature), direction, support, stored, exchange, into, rounded)
    loss, *stats = _TopkKL.apply(student_hidden, student_head, teacher_hidden.detach(), teacher_head.detach(), task)
    return loss, SupportStats(*stats)


@torch.no_grad()
def teacher_topk(hidden: Tensor, head: Tensor, k: int, temperature: float, rounded: bool = False) -> TeacherTopk:
    """What topk_kl needs of the teacher, so that it can run before the student and leave the device: 8 k + 8 bytes a
    token and its hidden state."""
    dtype = compute_dtype(hidden)
    norm = hidden.new_empty(len(hidden), dtype=torch.float64)
    ids = torch.empty(len(hidden), min(k, len(head)), dtype=torch.int32, device=hidden.device)
    logits = hidden.new_empty(ids.shape, dtype=dtype)
    with torch.autocast(hidden.device.type, enabled=False):
        for part in rows_of(len(hidden), hidden.device):
            norm[part], best, _ = scan_one(hidden[part], head, ids.shape[1], temperature, dtype, rounded)
            ids[part], logits[part] = best.ids.int(), best.own
    return TeacherTopk(hidden, ids, logits, norm)


class _Task(NamedTuple):
    k: int
    temperature: float
    direction: str
    support: str
    stored: TeacherTopk | None
    exchange: Exchange | None
    into: Tensor | None
    rounded: bool


class _TopkKL(torch.autograd.Function):
    """The exact gradient of the logits is made in forward: ids and numbers on S, and a factor of the whole softmax."""

    @staticmethod
    def forward(ctx, hidden, head, teacher_hidden, teacher_head, task: _Task):
        dtype = compute_dtype(hidden)
        found, sparse = [], []
        with torch.autocast(hidden.device.type, enabled=False):
            for part in rows_of(len(hidden), hidden.device):
                numbers, ids, grads = _decide(hidden[part], head, teacher_hidden[part], teacher_head, part, dtype, task)
                found.append(numbers)
                sparse.append((ids, grads))
        width = max((ids.shape[1] for ids, _ in sparse), default=0)
        ids = torch.zeros(len(hidden), width, dtype=torch.int32, device=hidden.device)
        grads = hidden.new_zeros(len(hidden), width, dtype=dtype)
        for part, (some, numbers) in zip(rows_of(len(hidden), hidden.device), sparse):
            ids[part, : some.shape[1]], grads[part, : some.shape[1]] = some, numbers
        found = torch.cat(found) if found else hidden.new_empty(0, 8, dtype=torch.float64)
        ctx.save_for_backward(hidden, head, teacher_hidden, teacher_head, ids, grads, found[:, 4:].contiguous())
        ctx.task = task
        loss, mass, mass_t, overlap = found[:, :4].to(dtype).unbind(1)
        ctx.mark_non_differentiable(mass, mass_t, overlap)
        return loss, mass, mass_t, overlap

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream, *_):
        hidden, head, teacher_hidden, teacher_head, ids, grads, scalars = ctx.saved_tensors
        task: _Task = ctx.task
        grads = grads * upstream[:, None]
        with torch.autocast(hidden.device.type, enabled=False):
            d_hidden = weigh_rows(ids, grads, head) if ctx.needs_input_grad[0] else None
            d_head = task.into
            if d_head is None and ctx.needs_input_grad[1]:
                d_head = torch.zeros_like(head) if task.support == "topk" else torch.zeros_like(head, dtype=grads.dtype)
            if d_head is not None:
                add_outer(d_head, ids, grads, hidden)
            if task.support != "topk":
                _dense_part(hidden, head, teacher_hidden, teacher_head, scalars, upstream, task, d_hidden, d_head)
        d_hidden = None if d_hidden is None else d_hidden.to(hidden.dtype)
        return d_hidden, None if task.into is not None or d_head is None else d_head.to(head.dtype), None, None, None


def _decide(h: Tensor, W: Tensor, ht: Tensor, Wt: Tensor, part: slice, dtype: torch.dtype,
            task: _Task) -> tuple[Tensor, Tensor, Tensor]:
    """For c tokens: float64 [c, 8] of loss, masses, overlap, factor of the softmax, both normalisers, moment; and the
    ids int32 and gradients [c, m] of logits of this rank's vocabulary."""
    here = min(task.k, len(W))
    if task.stored is None:
        seen = scan(h, W, ht, Wt, here, task.temperature, dtype, task.rounded, task.support == "full")
    else:
        seen = _scan_stored(h, W, ht, Wt, TeacherTopk(*(x[part] for x in task.stored)), dtype, task)
    if task.exchange is not None:
        seen = send_to_owners(seen, task.k, task.temperature, task.exchange)
    S = join(seen.best, seen.best_t, seen.norm - seen.norm_t, task.k)
    T, shift = task.temperature, (seen.norm - seen.norm_t) / task.temperature
    if task.support == "full":
        kl = seen.moment / T - shift if task.direction == "reverse" else shift - seen.moment_t / T
        factor, ids, grads = kl, S.ids[:, :0], S.z[:, :0]
        loss, mass, mass_t = T**2 * kl, torch.ones_like(kl), torch.ones_like(kl)
    else:
        loss, grads, factor, mass, mass_t = on_support(S.z, S.zt, seen.norm, seen.norm_t, T, task.direction, task.support)
        factor, ids = torch.zeros_like(loss) if factor is None else factor, S.ids
        # an entry without a gradient reads and writes the best one's row: its own may hold -inf
        ids = torch.where(grads == 0, ids.gather(1, S.z.argmax(1, keepdim=True)), ids)
    numbers = torch.stack([loss, mass, mass_t, S.overlap.to(loss), factor, seen.norm, seen.norm_t,
                           torch.zeros_like(loss)], 1)
    ids, grads = ids.int(), grads.to(dtype)
    if task.exchange is None:
        return numbers, ids, grads
    numbers = numbers[:, :4] if task.support == "topk" else numbers
    return return_sparse(numbers, ids, grads, len(h), dtype, task.exchange)


def _scan_stored(h: Tensor, W: Tensor, ht: Tensor, Wt: Tensor, teacher: TeacherTopk, dtype: torch.dtype,
                 task: _Task) -> Found:
    if task.support == "full":  # the teacher's whole vocabulary is needed, so it is read
        return scan(h, W, ht, Wt, min(task.k, len(W)), task.temperature, dtype, task.rounded, moments=True)
    assert teacher.ids.shape[1] == task.k, "teacher_topk was asked for another k"
    theirs = teacher.ids.long()
    norm, best, z = scan_one(h, W, task.k, task.temperature, dtype, task.rounded, theirs)
    zt = torch.empty_like(best.own)
    step = max(1, 2**21 // max(1, task.k * Wt.shape[1]))
    for i in range(0, len(h), step):
        rows = Wt[best.ids[i : i + step]].to(dtype)
        torch.bmm(rows, ht[i : i + step, :, None].to(dtype), out=zt[i : i + step, :, None])
    return Found(norm, teacher.norm, best._replace(other=zt), Best(theirs, teacher.logits, z))


def _dense_part(hidden: Tensor, W: Tensor, teacher_hidden: Tensor, Wt: Tensor, scalars: Tensor, upstream: Tensor,
                task: _Task, d_hidden: Tensor | None, d_head: Tensor | None) -> None:
    """Add what a gradient [c, w] of every tile of logits adds: factor p for `tail` and `generalised`, for `full`
    T p (log p - log q - KL) or T (p - q)."""
    T, dtype = task.temperature, compute_dtype(hidden)
    for part in rows_of(len(hidden), hidden.device):
        factor, norm, norm_t, _ = (x[:, None].to(dtype) for x in scalars[part].unbind(1))
        scale, h = upstream[part, None].to(dtype), hidden[part].to(dtype)
        student = Product(hidden[part], W, dtype, task.rounded)
        teacher = Product(teacher_hidden[part], Wt, dtype, task.rounded) if task.support == "full" else None
        for tile in tiles(W, dtype):
            width = tile.stop - tile.start
            z = student(tile)[:, :width]
            p = ((z - norm) / T).exp_()
            if teacher is None:
                d = p.mul_(factor)
            elif task.direction == "forward":
                d = p.sub_(((teacher(tile)[:, :width] - norm_t) / T).exp_()).mul_(T)
            else:
                zt = teacher(tile)[:, :width]
                d = torch.where(p > 0, p * (difference(z, zt) - (norm - norm_t) - factor * T), 0.0)
            d = d.mul_(scale)
            if d_hidden is not None:
                d_hidden[part].addmm_(d, W[tile].to(dtype))
            if d_head is not None:
                d_head[tile] += d.T @ h
