"""One micro-batch's tokens over the ranks that read it together, and Ulysses: tokens for heads, and back.

T tokens of the micro-batch, padded to a multiple of the ranks by a sequence of its own; t of them on each rank of cp;
c on each rank of cp x tp, neighbours on neighbouring ranks. n heads of size K.

    to_heads    [t, n, K] -> [T, n / cp, K]    every token, some heads: what attention and the delta rule need
    to_tokens   [T, n / cp, K] -> [t, n, K]    back
"""

from __future__ import annotations

from typing import Sequence

import torch
from torch import Tensor

from oprd.parallel.collectives import all_to_all, exchange, gather_uneven
from oprd.parallel.mesh import Axis, Mesh


def spread(heads: int, cp: Axis, what: str) -> int:
    """How often each of a rank's heads must stand for Ulysses to deal them to cp ranks: 1, or cp / heads where there
    are fewer heads than ranks. ValueError where neither divides."""
    if heads % cp.size and cp.size % heads:
        raise ValueError(f"parallel.cp = {cp.size} must divide, or be a multiple of, the {heads} {what} of a rank")
    return max(1, cp.size // heads)


def to_heads(tensors: Sequence[Tensor], cp: Axis) -> Sequence[Tensor]:
    """Each [t, n, K] -> [T, n / cp, K], in one exchange; a tensor with fewer heads than ranks sends a head to several."""
    if cp.size == 1:
        return tensors
    t = len(tensors[0])
    tensors = [x.repeat_interleave(spread(x.shape[1], cp, "heads"), dim=1) for x in tensors]
    blocks = [x.reshape(t, cp.size, -1) for x in tensors]
    joined = torch.cat(blocks, dim=-1).transpose(0, 1).flatten(0, 1)
    got = exchange(joined, cp).split([b.shape[-1] for b in blocks], dim=-1)
    return [g.unflatten(-1, (x.shape[1] // cp.size, -1)) for g, x in zip(got, tensors)]


def to_tokens(x: Tensor, cp: Axis) -> Tensor:
    """[T, n / cp, K] -> [t, n, K]."""
    if cp.size == 1:
        return x
    got = exchange(x.flatten(1), cp).unflatten(0, (cp.size, -1))
    return got.unflatten(-1, x.shape[1:]).transpose(0, 1).flatten(1, 2)


def own_heads(x: Tensor, cp: Axis, dim: int = 0) -> Tensor:
    """Of something by heads along a dim (a convolution's channels, say), what belongs to the heads that to_heads gives
    this rank."""
    if cp.size == 1:
        return x
    x = x.repeat_interleave(spread(x.shape[dim], cp, "heads"), dim=dim)
    return x.chunk(cp.size, dim=dim)[cp.rank]


def own_tokens(x: Tensor, tokens: int, mesh: Mesh) -> Tensor:
    """Of something by tokens [T', ...], T' >= the padded T, this rank's `tokens` rows."""
    return x.narrow(0, mesh.sequence.rank * tokens, tokens) if mesh.sequence.size > 1 else x


def scored_rows(hidden: Tensor, index: Tensor, mesh: Mesh) -> tuple[Tensor, Tensor | slice]:
    """The states at packed positions index [N], as far as this cp rank's ranks hold them: ([m, D], which of the N).
    hidden: [c, D], this rank's tokens. All tp ranks get the same rows, each will know a part of the vocabulary."""
    if mesh.sequence.size == 1:
        return hidden.index_select(0, index), slice(None)
    c, tp = len(hidden), mesh.tp
    owner = index // c
    found = [(owner == mesh.cp.rank * tp.size + r).nonzero().squeeze(1) for r in range(tp.size)]
    own = hidden.index_select(0, index[found[tp.rank]] - mesh.sequence.rank * c)
    return gather_uneven(own, tp, [len(f) for f in found]), torch.cat(found)


def move_rows(rows: Tensor, index: Tensor, to: Tensor, c: int, mesh: Mesh) -> Tensor:
    """Rows of one layout of tokens where another layout's tokens are scored, without gradient.

    rows: [c', D], this rank's tokens of the first; index [N]: positions in it, paired with `to` [N] of the second, in
    which every rank has c. Returns [m, D], for the tokens and in the order of scored_rows(.., to, ..).
    """
    if mesh.sequence.size == 1:
        return rows.index_select(0, index)
    axis = mesh.sequence
    source, target = index // len(rows), to // c
    # both ends walk the pairs in the same order: by the rank they go to, then by the rank they come from
    send = [((source == axis.rank) & (target == r)).nonzero().squeeze(1) for r in range(axis.size)]
    receive = [((source == r) & (target == axis.rank)).nonzero().squeeze(1) for r in range(axis.size)]
    got = all_to_all(rows.index_select(0, index[torch.cat(send)] - axis.rank * len(rows)), axis,
                     [len(s) for s in send], [len(r) for r in receive])
    mine = torch.cat(receive)
    got = got.index_select(0, mine.argsort())  # in the order of the pairs
    counts = [int((target == mesh.cp.rank * mesh.tp.size + r).sum()) for r in range(mesh.tp.size)]
    return gather_uneven(got, mesh.tp, counts)


def joined_index(index: Tensor, lengths: Sequence[int], axis: Axis) -> Tensor:
    """Positions in several runs of tokens end to end, as positions in what the ranks hold of them end to end: each run
    is dealt (padded) to the ranks of axis, and a rank has its part of the first run, then of the second, and so on."""
    if axis.size == 1:
        return index
    share = torch.tensor([-(-n // axis.size) for n in lengths], device=index.device)
    ends = torch.tensor(lengths, device=index.device).cumsum(0)
    run = torch.searchsorted(ends, index, right=True)
    inside = index - (ends - torch.tensor(lengths, device=index.device))[run]
    return inside // share[run] * share.sum() + (share.cumsum(0) - share)[run] + inside % share[run]
