"""From Examples to packed micro-batches: which tokens share a forward, and which of them are scored.

Shapes: T packed tokens of a micro-batch, S rows in it, N scored tokens of one loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from oprd.core.types import Example, Row, View


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
    before the target); targets: int64 [N], the token ids; weights: float64 [N], final and never zero; sampled: float64
    [N], log-probabilities when the tokens were sampled (NaN where nobody recorded them)."""

    index: Tensor
    targets: Tensor
    weights: Tensor
    sampled: Tensor

    def only(self, which: Tensor | slice) -> "Scored":
        """Some of them."""
        return Scored(self.index[which], self.targets[which], self.weights[which], self.sampled[which])

    def to(self, device) -> "Scored":
        return Scored(*(x.to(device) for x in (self.index, self.targets, self.weights, self.sampled)))


@dataclass(frozen=True, eq=False)
class Forest:
    """Rows that share beginnings, each beginning once: level by level, the packed pieces that are read in one forward.

    after[l]: for every piece of level l, the number of the piece it goes on from (counted over all levels), -1: none.

    Rows [1 2 3 4] and [1 2 9] are the levels ([1 2]), after (-1,), and ([3 4], [9]), after (0, 0).
    """

    levels: tuple[Packed, ...]
    after: tuple[tuple[int, ...], ...]

    def to(self, device) -> "Forest":
        return Forest(tuple(level.to(device) for level in self.levels), self.after)


@dataclass(frozen=True, eq=False)
class Batch:
    """One micro-batch. scored: loss name -> its tokens (losses without a token are absent).

    teacher: the teacher's rows; teacher_index: int64 [N of kl], where in the tokens of all its levels, end to end, the
    n-th kl token of the student is predicted. Both None when nothing is distilled.
    """

    student: Packed
    scored: Mapping[str, Scored]
    teacher: Forest | None = None
    teacher_index: Tensor | None = None

    def to(self, device) -> "Batch":
        scored = {name: s.to(device) for name, s in self.scored.items()}
        if self.teacher is None:
            return Batch(self.student.to(device), scored)
        return Batch(self.student.to(device), scored, self.teacher.to(device), self.teacher_index.to(device))


IDLE = Batch(Packed(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64),
                    torch.tensor([0, 1], dtype=torch.int32)), {})  # of a rank that has nothing to read in a round


def teacher_levels(examples: Sequence[Example]) -> int:
    """How many forwards the teacher makes for these examples: the depth of its forest."""
    return max((piece.depth + 1 for e in examples if _distils(e) for piece in e.teacher.pieces), default=0)


def trainable_tokens(example: Example) -> int:
    """How many tokens of the example have a weight that is not zero, under any loss."""
    weighted = np.zeros(len(example.row.targets), dtype=bool)
    for w in example.weights.values():
        weighted |= np.asarray(w) != 0
    return int(weighted.sum())


def counted_tokens(example: Example) -> int:
    """How many tokens of the example stand in a denominator: the trainable ones, and of a policy-gradient row all its
    targets, since an advantage of zero is a measurement and not a mask."""
    return len(example.row.targets) if "pg" in example.weights else trainable_tokens(example)


def tokens_read(example: Example) -> tuple[int, int]:
    """Tokens the student and the teacher read for this example (the teacher: only if something is distilled)."""
    return len(example.row.ids), example.teacher.tokens() if _distils(example) else 0


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
    parts: dict[str, list[tuple[np.ndarray, ...]]] = {}
    for example, start in zip(examples, starts):
        row = example.row
        for name, weights in example.weights.items():
            weights = np.asarray(weights, dtype=np.float64)
            keep = weights != 0
            if keep.any():
                at, old = row.targets[keep], example.old_logprobs
                sampled = np.full(len(at), np.nan) if old is None else np.asarray(old, dtype=np.float64)[keep]
                parts.setdefault(name, []).append((at - 1 + start, row.ids[at], weights[keep], sampled))
    scored = {name: Scored(*(torch.from_numpy(np.concatenate(x)) for x in zip(*p))) for name, p in parts.items()}
    distilled = [e for e in examples if _distils(e)]
    if not distilled:
        return Batch(student, scored)
    return Batch(student, scored, *plant(distilled))


def plant(examples: Sequence[Example]) -> tuple[Forest, Tensor]:
    """The teacher views of the examples as one Forest, and where in it each kl token is predicted (int64 [N])."""
    trees = [e.teacher.pieces for e in examples]
    depth = max(piece.depth for tree in trees for piece in tree) + 1
    levels: list[list[tuple[int, int]]] = [[(t, p) for t, tree in enumerate(trees) for p, piece in enumerate(tree)
                                            if piece.depth == level] for level in range(depth)]
    everything = [place for level in levels for place in level]
    number = {place: i for i, place in enumerate(everything)}
    size = [trees[t][p].end - trees[t][p].start for t, p in everything]
    begins = np.cumsum([0, *size])
    packed, after = [], []
    for level in levels:
        cut = [(examples[t].teacher.rows[trees[t][p].row], trees[t][p]) for t, p in level]
        packed.append(_packed([row.ids[piece.start : piece.end] for row, piece in cut],
                              [piece.start for _, piece in cut]))
        after.append(tuple(number.get((t, trees[t][p].after), -1) for t, p in level))
    index = []
    for t, (example, tree) in enumerate(zip(examples, trees)):
        # where every token of every row lies in the forest
        where = [np.empty(len(row.ids), dtype=np.int64) for row in example.teacher.rows]
        for p, piece in enumerate(tree):
            begin = begins[number[t, p]]
            for r in piece.rows:
                where[r][piece.start : piece.end] = np.arange(begin, begin + piece.end - piece.start)
        _check_targets(example)
        at = np.concatenate([w[row.targets - 1] for w, row in zip(where, example.teacher.rows)])
        index.append(at[example.teacher.order][np.asarray(example.weights["kl"]) != 0])
    return Forest(tuple(packed), tuple(after)), torch.from_numpy(np.concatenate(index))


def pack_rows(rows: Iterable[Row]) -> tuple[Packed, np.ndarray]:
    """Rows end to end, and where each starts."""
    ids = [row.ids for row in rows]
    return _packed(ids, [0] * len(ids)), np.cumsum([0, *(len(i) for i in ids)])[:-1]


def _packed(ids: Sequence[np.ndarray], starts: Sequence[int]) -> Packed:
    """Token runs end to end, the positions of each counted from its start."""
    lengths = [len(i) for i in ids]
    positions = np.concatenate([np.arange(start, start + n) for start, n in zip(starts, lengths)])
    return Packed(torch.from_numpy(np.concatenate(ids).astype(np.int64)), torch.from_numpy(positions),
                  torch.from_numpy(np.cumsum([0, *lengths]).astype(np.int32)))


def _distils(example: Example) -> bool:
    return "kl" in example.weights and bool(np.any(np.asarray(example.weights["kl"]) != 0))


def _check_targets(example: Example) -> None:
    view: View = example.teacher
    scored = np.concatenate([row.ids[row.targets] for row in view.rows])[view.order]
    same = np.array_equal(scored, example.row.ids[example.row.targets])
    assert same, f"{example.source}: the teacher's targets are not the student's"
