"""Losses of heads whose vocabulary is cut over ranks: candidates travel to the tokens' owners.

Shapes: c tokens (known to all ranks), n of them owned by a rank, k support, r ranks, m numbers a token in a share.

Logits never travel. Each rank sends the k best entries of both models of its share, with the partner's logit, to the
rank that owns the token: 12 bytes a candidate, and 16 for the normalisers. The owner decides, and sends back to every
rank the ids and gradients that lie in its share. Per token and rank (24 k + 8 k / r + 36)(r - 1) / r bytes.
"""

from __future__ import annotations

from typing import Protocol, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from oprd.kernels.joint_support import Best, Found, first_k


class Exchange(Protocol):
    """What the losses ask of the ranks that share a vocabulary: rank r has the entries r share .. (r + 1) share of it,
    share = ceil(vocabulary / size), the last ranks what is left."""

    size: int
    rank: int
    vocabulary: int

    def swap(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """parts[r] goes to rank r; what came from rank r has sizes[r] rows. Rows are alike on all ranks."""

    def sum(self, x: Tensor) -> Tensor:
        """The sum over ranks; x is left alone."""

    def most(self, x: Tensor) -> Tensor:
        """The elementwise maximum over ranks; x is left alone."""


def share_of(exchange: Exchange) -> int:
    return -(-exchange.vocabulary // exchange.size)


def owned(count: int, exchange: Exchange) -> list[int]:
    """How many of `count` tokens each rank owns, in the order of the ranks."""
    ends = [count * r // exchange.size for r in range(exchange.size + 1)]
    return [b - a for a, b in zip(ends, ends[1:])]


def send_to_owners(seen: Found, k: int, temperature: float, exchange: Exchange) -> Found:
    """From what this rank found in its share of the vocabulary (at most k candidates a model) for c tokens, what is
    known of the whole for the n tokens this rank owns."""
    sizes = owned(len(seen.norm), exchange)
    scalars = torch.stack([x for x in (seen.norm, seen.norm_t, seen.moment, seen.moment_t) if x is not None], 1)
    word = torch.int64 if seen.best.own.dtype == torch.float64 else torch.int32
    share = share_of(exchange)
    packed = torch.stack([t for best in (seen.best, seen.best_t)
                          for t in _filled(best, min(k, share), exchange.rank * share, exchange.vocabulary, word)], 1)
    mine = sizes[exchange.rank]
    got = exchange.swap(packed.split(sizes), [mine] * exchange.size)
    ids, own, other, ids_t, own_t, other_t = torch.cat(got, dim=2).unbind(1)
    real = lambda x: x.contiguous().view(seen.best.own.dtype)  # noqa: E731
    best, best_t = (_cut(Best(i.long(), real(a), real(b)), k)
                    for i, a, b in ((ids, own, other), (ids_t, own_t, other_t)))
    numbers = torch.stack(exchange.swap(scalars.split(sizes), [mine] * exchange.size))  # [r, n, 2 or 4]
    norms = [temperature * (numbers[:, :, i] / temperature).logsumexp(0) for i in range(2)]
    weights = [((numbers[:, :, i] - norm) / temperature).exp() for i, norm in enumerate(norms)]
    moments = []
    if numbers.shape[2] == 4:
        moments = [(w * x.nan_to_num()).sum(0) for w, x in zip(weights, numbers[:, :, 2:].unbind(2))]
    return Found(*norms, best, best_t, *moments)


def _filled(best: Best, width: int, start: int, vocabulary: int, word: torch.dtype) -> list[Tensor]:
    """Whole ids and both logits as words [c, width]; where a rank has fewer entries, -inf and an id there is not."""
    more = width - best.ids.shape[1]
    ids = F.pad((best.ids + start).to(word), (0, more), value=vocabulary)
    return [ids, *(F.pad(z, (0, more), value=float("-inf")).view(word) for z in (best.own, best.other))]


def _cut(best: Best, k: int) -> Best:
    if best.ids.shape[1] <= k:
        return best
    keep = first_k(best.own, k, best.ids)
    return Best(*(x.gather(1, keep) for x in best))


def return_sparse(numbers: Tensor, ids: Tensor, grads: Tensor, count: int, dtype: torch.dtype,
                  exchange: Exchange) -> tuple[Tensor, Tensor, Tensor]:
    """From the owners to all: numbers [n, j] of every token as float64 [count, 8], and of ids and grads [n, k] those in
    this rank's share, as local ids int32 and gradients [count, m], filled up by zeros."""
    sizes = owned(count, exchange)
    sent = numbers if numbers.shape[1] > 4 else numbers.to(dtype)
    everything = torch.cat(exchange.swap([sent] * exchange.size, sizes)).double()
    full = everything.new_zeros(count, 8)
    full[:, : everything.shape[1]] = everything
    share = share_of(exchange)
    owner = ids // share
    counts = [(owner == r).sum(1, dtype=torch.int32) for r in range(exchange.size)]
    counts_got = exchange.swap(counts, sizes)
    totals = [int(c.sum()) for c in counts_got]
    word = torch.int64 if dtype == torch.float64 else torch.int32
    parts = []
    for r in range(exchange.size):
        at = owner == r
        parts.append(torch.stack([ids[at].to(word) - r * share, grads[at].view(word)], 1))
    got = torch.cat(exchange.swap(parts, totals))
    count_got = torch.cat(counts_got).long()
    width = int(count_got.max()) if count else 0
    there = torch.arange(width, device=ids.device) < count_got[:, None]
    local = torch.zeros(count, width, dtype=torch.int32, device=ids.device)
    values = grads.new_zeros(count, width, dtype=dtype)
    local[there] = got[:, 0].int()
    values[there] = got[:, 1].contiguous().view(dtype)
    return full, local, values
