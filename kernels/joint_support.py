"""One pass over the vocabulary for two linear heads: their normalisers, and the candidates for their joint support.

Shapes: c tokens, D hidden, V vocabulary, w entries of one tile of it, k support, T temperature.

Both models' logits of a tile live in a workspace and are gone with the next one. What stays of them is each model's
own k best entries, with the other model's logit beside each, and the normaliser L = T logsumexp(z / T). That is enough:

    the k entries of largest max(log p, log q) are among A, the student's own k best, and B, the teacher's.

(An entry v outside both has k entries of A before it if log p_v is its score, k of B if log q_v is: they have at
least its value, and where it is equal, a lower id.) Their order is that of max(z, zt + L - L_t), in which the
student's key is its logit itself, so that rounding makes no new ties among them. Equal values go to the lower id.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from oprd.kernels.backend import use_triton
from oprd.kernels.tiles import GROUP, Product, tiles


class Best(NamedTuple):
    """Of c tokens the k best entries of one model, in no order: ids int64 [c, k], its own logits, the other model's."""

    ids: Tensor
    own: Tensor
    other: Tensor


class Found(NamedTuple):
    """What one pass knows: normalisers, float64 [c], of the student and the teacher, the k best of both, and with
    moments, float64 [c], sum p (z - zt) and sum q (z - zt) over the vocabulary."""

    norm: Tensor
    norm_t: Tensor
    best: Best
    best_t: Best
    moment: Tensor | None = None
    moment_t: Tensor | None = None


class Support(NamedTuple):
    """The chosen entries, in no order: ids int64 [c, k], logits of both models in float64; overlap [c]: how many
    entries the two models' own k best share, over k."""

    ids: Tensor
    z: Tensor
    zt: Tensor
    overlap: Tensor


class Running:
    """What a scan remembers of one model for c tokens: its k best entries, a maximum and a sum of exponentials."""

    def __init__(self, like: Tensor, count: int, k: int, temperature: float):
        self.k, self.temperature = k, temperature
        self.best = Best(*(like.new_empty(count, 0, dtype=t) for t in (torch.int64, like.dtype, like.dtype)))
        self.most = like.new_full((count,), float("-inf"))
        self.total = like.new_zeros(count, dtype=torch.float64)
        self.moment = torch.zeros_like(self.total)

    @property
    def norm(self) -> Tensor:
        """T logsumexp(z / T) of what was read, float64 [c]."""
        return self.most.double() + self.temperature * self.total.log()

    def add(self, z: Tensor, other: Tensor, start: int, scratch: Tensor, gap: Tensor | None = None) -> None:
        """Read a tile: z, other [c, w], of entries start, start + 1, ...; scratch is written to. gap: z - zt, of which
        the mean under this model is kept too."""
        groups = z.unflatten(1, (-1, GROUP)).amax(-1)
        self._sum(z, groups, scratch, gap)
        self._choose(z, other, groups, start)

    def _sum(self, z: Tensor, groups: Tensor, scratch: Tensor, gap: Tensor | None) -> None:
        most = torch.maximum(self.most, groups.amax(-1))
        origin = most.masked_fill(most == float("-inf"), 0.0)  # -inf minus -inf is no number
        fade = ((self.most - origin).double() / self.temperature).exp_()
        e = torch.sub(z, origin[:, None], out=scratch)
        if self.temperature != 1.0:
            e.div_(self.temperature)
        e.exp_()
        self.total = self.total * fade + e.sum(-1).double()
        if gap is not None:
            terms = e.mul_(gap).nan_to_num_(nan=0.0, posinf=float("inf"), neginf=-float("inf"))  # 0 times infinity
            self.moment = self.moment * fade + terms.sum(-1).double()
        self.most = most

    def _choose(self, z: Tensor, other: Tensor, groups: Tensor, start: int) -> None:
        """The k best of what was and the tile. An entry among them is in a group whose maximum is above the k-th value
        so far (equal is too little: the older id is lower), and in one of the k groups of largest maximum."""
        if self.k == 0:
            return
        ids, own, partner = self.best
        count = min(self.k, groups.shape[1])
        if own.shape[1] == self.k and len(z):
            above = groups > own.amin(-1, keepdim=True)
            count = min(count, int(above.sum(-1).max()))
        if count == 0:
            return
        before, column = own.shape[1], None
        if count < groups.shape[1]:
            at = first_k(groups, count) * GROUP
            column = (at[:, :, None] + torch.arange(GROUP, device=z.device)).flatten(1)
            values, ids_here = z.gather(1, column), column + start
        else:
            values, ids_here = z, torch.arange(start, start + z.shape[1], device=z.device).expand(z.shape)
        if before:
            values, ids_here = torch.cat([own, values], 1), torch.cat([ids, ids_here], 1)
        keep = first_k(values, min(self.k, values.shape[1]), ids_here)
        # the partners of new entries are looked up where they are, those of the old ones where they were
        fresh = (keep - before).clamp_(min=0) if before else keep
        found = other.gather(1, fresh if column is None else column.gather(1, fresh))
        if before:
            found = torch.where(keep < before, partner.gather(1, keep.clamp(max=before - 1)), found)
        self.best = Best(ids_here.gather(1, keep), values.gather(1, keep), found)


def scan(h: Tensor, W: Tensor, ht: Tensor, Wt: Tensor, k: int, temperature: float, dtype: torch.dtype,
         rounded: bool = False, moments: bool = False) -> Found:
    """Read both models' whole vocabularies for c tokens: h [c, D], W [V, D], ht [c, Dt], Wt [V, Dt]. Needs k <= V."""
    if use_triton(h) and len(W):
        from oprd.kernels import joint_support_triton

        return joint_support_triton.scan(h, W, ht, Wt, k, temperature, dtype, rounded, moments)
    student, teacher = Product(h, W, dtype, rounded), Product(ht, Wt, dtype, rounded)
    a, b = (Running(student.space, len(h), k, temperature) for _ in range(2))
    scratch = None
    for tile in tiles(W if W.shape[1] >= Wt.shape[1] else Wt, dtype):
        z, zt = student(tile), teacher(tile)
        if scratch is None or scratch.shape != z.shape:
            scratch = torch.empty_like(z)
        gap = difference(z, zt) if moments else None
        a.add(z, zt, tile.start, scratch, gap)
        b.add(zt, z, tile.start, scratch, gap)
    more = (a.moment / a.total, b.moment / b.total) if moments else ()
    return Found(a.norm, b.norm, a.best, b.best, *more)


def scan_one(h: Tensor, W: Tensor, k: int, temperature: float, dtype: torch.dtype, rounded: bool = False,
             watched: Tensor | None = None) -> tuple[Tensor, Best, Tensor | None]:
    """One model alone: its normaliser, its k best (whose `other` is its own logit), its logits of the ids `watched`."""
    product = Product(h, W, dtype, rounded)
    a, scratch = Running(product.space, len(h), k, temperature), None
    seen = None if watched is None else h.new_empty(watched.shape, dtype=dtype)
    for tile in tiles(W, dtype):
        z = product(tile)
        if scratch is None or scratch.shape != z.shape:
            scratch = torch.empty_like(z)
        a.add(z, z, tile.start, scratch)
        if seen is not None:
            here = (watched >= tile.start) & (watched < tile.stop)
            seen = torch.where(here, z.gather(1, (watched - tile.start).clamp(0, z.shape[1] - 1)), seen)
    return a.norm, a.best, seen


def difference(z: Tensor, zt: Tensor) -> Tensor:
    """z - zt; 0 where both are -inf (neither model has the entry)."""
    return (z - zt).masked_fill_((z == float("-inf")) & (zt == float("-inf")), 0.0)


def join(best: Best, best_t: Best, shift: Tensor, k: int) -> Support:
    """The joint support from the candidates of both; shift: float64 [c], L - L_t. Candidates may be more than k a
    model (of several parts of the vocabulary), but each of a model's only once."""
    ids = torch.cat([best.ids, best_t.ids], 1)
    z, zt = (torch.cat(pair, 1).double() for pair in ((best.own, best_t.other), (best.other, best_t.own)))
    known = best.ids.sort(dim=1).values
    at = torch.searchsorted(known, best_t.ids.contiguous()).clamp_(max=known.shape[1] - 1)
    again = known.gather(1, at) == best_t.ids  # the student has it too, and its copy counts
    key = torch.maximum(z, zt + shift[:, None]).clamp_(min=torch.finfo(z.dtype).min)
    key[:, known.shape[1] :].masked_fill_(again, float("-inf"))
    chosen = first_k(key, k, ids)
    return Support(ids.gather(1, chosen), z.gather(1, chosen), zt.gather(1, chosen), again.sum(1) / k)


def first_k(z: Tensor, k: int, ids: Tensor | None = None) -> Tensor:
    """Where the k largest of every row [c, m] are, int64 [c, k], in no order; ties at the k-th value go to the lowest
    of `ids` [c, m] (default: the places). ids must be below 2^24."""
    values, at = z.topk(k, dim=-1, sorted=False)
    if k == z.shape[1]:
        return at
    last = values.amin(-1, keepdim=True)
    tied = ((z >= last).sum(-1) > k).nonzero().squeeze(1)
    if len(tied):  # torch.topk breaks ties as it likes
        z, last = z[tied], last[tied]
        order = (torch.arange(z.shape[1], device=z.device).expand_as(z) if ids is None else ids[tied]).to(torch.float32)
        among = torch.where(z == last, -order, float("-inf")).masked_fill_(z > last, float("inf"))
        at[tied] = among.topk(k, dim=-1, sorted=False).indices
    return at
