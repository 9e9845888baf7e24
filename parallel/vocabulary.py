"""The losses of `kernels/` with the vocabulary cut over an axis: every rank has some logits of every token.

N scored tokens, D hidden, v this rank's entries of the vocabulary V.

Logits never travel: kernels/vocabulary_parallel.py says what does. All ranks end with the same values, counted once by
whoever adds them up; the gradient of `hidden` on a rank is the part that its entries make, summed where the states were
gathered.
"""

from __future__ import annotations

from typing import Sequence

import torch
from torch import Tensor

from oprd.kernels.cross_entropy import token_nll, weighted_nll
from oprd.kernels.topk_kl import SupportStats, topk_kl
from oprd.kernels.vocabulary_parallel import Exchange
from oprd.parallel.collectives import all_reduce, all_to_all
from oprd.parallel.layers import Head



class AxisExchange:
    """The Exchange of kernels/vocabulary_parallel.py over the axis that a head is cut over."""

    def __init__(self, head: Head):
        self.axis, self.size, self.rank, self.vocabulary = head.axis, head.axis.size, head.axis.rank, head.vocabulary

    def swap(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        got = all_to_all(torch.cat(list(parts)), self.axis, [len(part) for part in parts], list(sizes))
        return list(got.split(list(sizes)))

    def sum(self, x: Tensor) -> Tensor:
        return all_reduce(x, self.axis)

    def most(self, x: Tensor) -> Tensor:
        return all_reduce(x, self.axis, "max")


def exchange_of(head: Head) -> Exchange | None:
    """How the ranks of a head tell each other of it; None where it is whole."""
    return None if head.axis.size == 1 else AxisExchange(head)


def split_token_nll(hidden: Tensor, head: Head, targets: Tensor) -> Tensor:
    """token_nll with a cut head: [N, D], head [v, D], int64 [N] -> [N], the same on all ranks of head.axis."""
    return token_nll(hidden, head.weight, targets, exchange=exchange_of(head))


def split_weighted_nll(hidden: Tensor, head: Head, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """weighted_nll with a cut head: the weighted sum, and the values [N]; the same on all ranks of head.axis."""
    return weighted_nll(hidden, head.weight, targets, weights, exchange=exchange_of(head))


def split_topk_kl(student_hidden: Tensor, student: Head, teacher_hidden: Tensor, teacher: Head, k: int,
                  temperature: float, direction: str = "reverse",
                  support: str = "topk") -> tuple[Tensor, SupportStats]:
    """topk_kl with cut heads (of both models, alike); values and statistics [N] are the same on all ranks."""
    return topk_kl(student_hidden, student.weight, teacher_hidden, teacher.weight, k, temperature, direction, support,
                   exchange=exchange_of(student))
