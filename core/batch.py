"""From Examples to packed micro-batches: which tokens share a forward, and which of them are scored.

Shapes: T packed tokens of a micro-batch, S rows in it, N scored tokens of one loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from oprd.core.types import Example, Row


@dataclass(frozen=True, eq=False)
class Packed:
    """Rows laid end to end. ids, positions: int64 [T]; cu_seqlens: int32 [S + 1], where each row starts and ends.

    Rows [5, 6, 7] and [8, 9] are ids = [5, 6, 7, 8, 9], positions = [0, 1, 2, 0, 1], cu_seqlens = [0, 3, 5].
    """

    ids: Tensor
    positions: Tensor
    cu_seqlens: Tensor

    def to(self, device) -> "Packed":
        return Packed(self.ids.to(device), self.positions.to(device), self.cu_seqlens.to(device))


@dataclass(frozen=True, eq=False)
class Scored:
    """The tokens one loss is computed on. index: int64 [N], packed position of the hidden state that predicts (one
    before the target); targets: int64 [N], the token ids; weights: float64 [N], final and never zero."""

    index: Tensor
    targets: Tensor
    weights: Tensor

    def to(self, device) -> "Scored":
        return Scored(self.index.to(device), self.targets.to(device), self.weights.to(device))


@dataclass(frozen=True, eq=False)
class Batch:
    """One micro-batch. scored: loss name -> its tokens (losses without a token are absent).

    teacher: the teacher's rows, packed likewise; teacher_index: int64 [N of kl], where in the teacher's packed
    tokens the n-th kl token of the student is predicted. Both None when nothing is distilled.
    """

    student: Packed
    scored: Mapping[str, Scored]
    teacher: Packed | None = None
    teacher_index: Tensor | None = None

    def to(self, device) -> "Batch":
        scored = {name: s.to(device) for name, s in self.scored.items()}
        if self.teacher is None:
            return Batch(self.student.to(device), scored)
        return Batch(self.student.to(device), scored, self.teacher.to(device), self.teacher_index.to(device))


def trainable_tokens(example: Example) -> int:
    """How many tokens of the example have a weight that is not zero, under any loss."""
    weighted = np.zeros(len(example.row.targets), dtype=bool)
    for w in example.weights.values():
        weighted |= np.asarray(w) != 0
    return int(weighted.sum())


def tokens_read(example: Example) -> tuple[int, int]:
    """Tokens the student and the teacher read for this example (the teacher: only if something is distilled)."""
    teacher = sum(len(r.ids) for r in example.teacher.rows) if _distils(example) else 0
    return len(example.row.ids), teacher


def pack(examples: Sequence[Example], token_budget: int) -> list[list[Example]]:
    """Micro-batches of at most `token_budget` tokens, student's and teacher's together: first-fit decreasing.

    Deterministic; inside a micro-batch examples keep their order. An example over the budget is a ValueError.
    """
    sizes = [sum(tokens_read(e)) for e in examples]
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(examples)), key=lambda i: (-sizes[i], i)):
        if sizes[i] > token_budget:
            student, teacher = tokens_read(examples[i])
            raise ValueError(f"{examples[i].source or 'example'}: {student} student + {teacher} teacher tokens = "
                             f"{sizes[i]} must fit token_budget = {token_budget}; raise it or shorten the example")
        slot = next((b for b, left in enumerate(room) if left >= sizes[i]), None)
        if slot is None:
            slot = len(bins)
            bins.append([])
            room.append(token_budget)
        bins[slot].append(i)
        room[slot] -= sizes[i]
    return [[examples[i] for i in sorted(b)] for b in bins]


def collate(examples: Sequence[Example]) -> Batch:
    """Pack the examples' rows (and their teacher views) into one Batch; weights must be final already."""
    student, starts = pack_rows(e.row for e in examples)
    parts: dict[str, list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = {}
    teacher_rows: list[Row] = []
    teacher_parts: list[np.ndarray] = []
    teacher_start = 0
    for example, start in zip(examples, starts):
        row = example.row
        for name, weights in example.weights.items():
            weights = np.asarray(weights, dtype=np.float64)
            keep = weights != 0
            if keep.any():
                at = row.targets[keep]
                parts.setdefault(name, []).append((at - 1 + start, row.ids[at], weights[keep]))
        if _distils(example):
            keep = np.asarray(example.weights["kl"]) != 0
            teacher_parts.append(teacher_start + _teacher_positions(example)[keep])
            teacher_rows.extend(example.teacher.rows)
            teacher_start += sum(len(r.ids) for r in example.teacher.rows)
    scored = {name: Scored(*(torch.from_numpy(np.concatenate(x)) for x in zip(*p))) for name, p in parts.items()}
    if not teacher_rows:
        return Batch(student, scored)
    index = torch.from_numpy(np.concatenate(teacher_parts))
    return Batch(student, scored, pack_rows(teacher_rows)[0], index)


def pack_rows(rows: Iterable[Row]) -> tuple[Packed, np.ndarray]:
    """Rows end to end, and where each starts."""
    rows = list(rows)
    lengths = [len(r.ids) for r in rows]
    ends = np.cumsum([0, *lengths])
    ids = np.concatenate([r.ids for r in rows]).astype(np.int64)
    positions = np.concatenate([np.arange(n) for n in lengths])
    packed = Packed(torch.from_numpy(ids), torch.from_numpy(positions), torch.from_numpy(ends.astype(np.int32)))
    return packed, ends[:-1]


def _distils(example: Example) -> bool:
    return "kl" in example.weights and bool(np.any(np.asarray(example.weights["kl"]) != 0))


def _teacher_positions(example: Example) -> np.ndarray:
    """Where, in the example's teacher rows end to end, the student's n-th scored token is predicted: int64 [N]."""
    view = example.teacher
    starts = np.cumsum([0, *[len(r.ids) for r in view.rows]])
    at = np.concatenate([r.targets + s for r, s in zip(view.rows, starts)])[view.order]
    ids = np.concatenate([r.ids for r in view.rows])
    same = np.array_equal(ids[at], example.row.ids[example.row.targets])
    assert same, f"{example.source}: the teacher's targets are not the student's"
    return at - 1
