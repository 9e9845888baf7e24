"""Layers whose weights are cut over an axis, and how a cut weight lies in the whole one.

t tokens of this rank, T tokens of the ranks that share its weights (T = n t over tp), D hidden, I inputs, O outputs,
V vocabulary.

    column   y_TO = x_TD W.T        W's O rows cut; x gathered over tp before (`gather_rows`), once for all its readers
    row      y_tD = scatter(x_TI W.T)   W's I columns cut; the partial sums are added up and dealt out by tokens
    embedding   x_tD = scatter(W[ids])   W's V rows cut, an id that is another rank's gives zero

Between a row's output and the next gather every rank has its own tokens (Megatron's sequence parallelism), so what is
not cut (norms, routers) sees a part of them and its gradient is a part too: everything's gradient is summed over the
ranks that hold the same numbers (`Cut.replicas`), and that is the whole rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oprd.parallel.collectives import all_gather, scatter_rows
from oprd.parallel.mesh import Axis, Mesh


@dataclass(frozen=True)
class Cut:
    """How a whole parameter is dealt to the ranks of `axis`: along `dim` it is `sections` end to end (q, k and v rows,
    say), each in even parts; `copies` neighbouring ranks hold the same part. The last part of a section that does not
    divide (a vocabulary) is filled up with zeros that are no part of the whole.

    replicas: the ranks that hold the same part as this one.
    """

    axis: Axis
    replicas: Axis
    sections: tuple[int, ...]
    dim: int = 0
    copies: int = 1

    @property
    def parts(self) -> int:
        return self.axis.size // self.copies

    def runs(self, rank: int | None = None) -> Iterator[tuple[int, int, int]]:
        """(place in the whole, place in the part, length) of every stretch that a rank (default: this one) holds."""
        part = (self.axis.rank if rank is None else rank) // self.copies
        whole = local = 0
        for size in self.sections:
            share = -(-size // self.parts)
            length = max(0, min(share, size - part * share))
            if length:
                yield whole + part * share, local, length
            whole, local = whole + size, local + share

    def whole_shape(self, part: Sequence[int]) -> tuple[int, ...]:
        """The shape of the whole parameter of which this is a part."""
        return (*part[: self.dim], sum(self.sections), *part[self.dim + 1 :])

    def part_shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """The shape of a part of a whole parameter."""
        share = sum(-(-size // self.parts) for size in self.sections)
        return (*whole[: self.dim], share, *whole[self.dim + 1 :])

    def take(self, whole: Tensor) -> Tensor:
        """This rank's part (the whole itself where nothing is cut)."""
        if self.parts == 1:
            return whole
        part = whole.new_zeros(self.part_shape(whole.shape))
        for start, place, length in self.runs():
            part.narrow(self.dim, place, length).copy_(whole.narrow(self.dim, start, length))
        return part

    @torch.no_grad()
    def join(self, part: Tensor) -> Tensor:
        """The whole from all ranks' parts, on each of them; every rank of the axis must call it."""
        if self.parts == 1:
            return part
        parts = all_gather(part[None], self.axis)
        whole = part.new_empty(self.whole_shape(part.shape))
        for rank in range(self.axis.size):
            for start, place, length in self.runs(rank):
                whole.narrow(self.dim, start, length).copy_(parts[rank].narrow(self.dim, place, length))
        return whole


def cuts(model: nn.Module, mesh: Mesh) -> dict[str, Cut]:
    """The cut of every parameter, by name. A module that cuts some says so in `cuts`, by their own names."""
    found = {}
    for prefix, module in model.named_modules():
        own = getattr(module, "cuts", {})
        for name, p in module.named_parameters(recurse=False):
            whole = Cut(Axis("none"), mesh.world, (p.shape[0],))
            found[f"{prefix}.{name}" if prefix else name] = own.get(name, whole)
    return found


def head_cut(mesh: Mesh, what: str, *sections: tuple[int, int], dim: int = 0, shared: bool = False) -> Cut:
    """The cut over tp of something made of heads, each section `count` heads of `size`. shared: with fewer heads than
    ranks neighbouring ranks hold the same one. ValueError where heads do not divide."""
    tp, copies = mesh.tp, 1
    if shared and sections[0][0] < tp.size:
        if tp.size % sections[0][0]:
            raise ValueError(f"parallel.tp = {tp.size} must be a multiple of {what} = {sections[0][0]}, or divide it")
        copies = tp.size // sections[0][0]
    else:
        for count, _ in sections:
            tp.share(count, what)
    return Cut(tp, mesh.copies(copies), tuple(count * size for count, size in sections), dim, copies)


class ColumnLinear(nn.Linear):
    """y_TO = x_TD W.T + b with W's O rows (and b) cut. x is gathered over tp already."""

    def __init__(self, inputs: int, cut: Cut, bias: bool = False):
        super().__init__(inputs, *cut.part_shape((sum(cut.sections),)), bias=bias)
        self.cuts = {"weight": cut, "bias": cut}


class RowLinear(nn.Linear):
    """y_tD = scatter(x_TI W.T) with W's I columns cut: partial sums added over tp, each rank keeping its tokens."""

    def __init__(self, cut: Cut, outputs: int):
        super().__init__(*cut.part_shape((outputs, sum(cut.sections)))[1:], outputs, bias=False)
        self.cuts, self.axis = {"weight": cut}, cut.axis

    def forward(self, x: Tensor) -> Tensor:
        return scatter_rows(super().forward(x), self.axis)


def vocabulary_cut(vocabulary: int, mesh: Mesh) -> Cut:
    return Cut(mesh.tp, mesh.shard_replicas, (vocabulary,))


class VocabularyEmbedding(nn.Embedding):
    """x_tD = scatter(W[ids]) with W's V rows cut over tp, any V. ids [T']: of all tokens of the ranks that read one
    micro-batch, a multiple of them; each gets the rows of its own tokens."""

    def __init__(self, vocabulary: int, hidden: int, mesh: Mesh):
        cut = vocabulary_cut(vocabulary, mesh)
        super().__init__(*cut.part_shape((vocabulary, hidden)))
        self.cuts, self.cp, self.tp = {"weight": cut}, mesh.cp, mesh.tp

    def forward(self, ids: Tensor) -> Tensor:
        ids = ids.tensor_split(self.cp.size)[self.cp.rank] if self.cp.size > 1 else ids
        if self.tp.size == 1:
            return super().forward(ids)
        local = ids - self.tp.rank * len(self.weight)
        inside = (local >= 0) & (local < len(self.weight))
        rows = F.embedding(local.where(inside, 0), self.weight)
        return scatter_rows(rows.where(inside[:, None], 0), self.tp)


@dataclass(frozen=True, eq=False)
class Head:
    """The output matrix, or this rank's part of it: weight [v, D] are the rows of ids start .. start + v of a
    vocabulary; over all ranks of `axis` they are all of it, padding left out."""

    weight: Tensor
    vocabulary: int
    start: int = 0
    axis: Axis = Axis("tp")

    @staticmethod
    def of(weight: Tensor, cut: Cut) -> "Head":
        """The head that a (padded) part of a matrix is."""
        runs = list(cut.runs())
        start, _, length = runs[0] if runs else (sum(cut.sections), 0, 0)
        part = weight if length == len(weight) else weight[:length]
        return Head(part, sum(cut.sections), start, cut.axis)
