"""Experts dealt to the ranks of an axis: a token's routes travel to their experts and back.

T tokens of this rank, k routes each, D hidden, E experts of all n ranks (rank r has the r-th block of E / n), R routes
that arrive here.
"""

from __future__ import annotations

from typing import Callable

import torch
from torch import Tensor

from oprd.parallel.collectives import all_to_all, exchange
from oprd.parallel.mesh import PLANNED, Axis


def split_experts(run: Callable[..., Tensor], x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weight: Tensor,
                  axis: Axis) -> Tensor:
    """run(x, gate_up, down, chosen, weight) (kernels/experts.py) where gate_up and down are this rank's experts alone
    and chosen [T, k] may name any: y [T, D].

    Routes are permuted by expert, exchanged with their weights, run in one grouped call, exchanged back and summed.
    Every rank takes part in the same exchanges however its tokens are routed; an expert without a token gets zero
    gradients, and a router's gradient comes back with the weights.
    """
    if axis.size == 1:
        return run(x, gate_up, down, chosen, weight)
    own = len(gate_up)
    order = chosen.flatten().argsort(stable=True)
    counts = _routes(chosen, own * axis.size, axis)
    arriving = all_to_all(counts, axis).view(axis.size, own)  # by rank they come from, by expert here
    if axis.group == PLANNED:
        arriving = counts.view(axis.size, own)
    send, receive = counts.view(axis.size, own).sum(1).tolist(), arriving.sum(1).tolist()
    rows = exchange(x.index_select(0, order // chosen.shape[1]), axis, send, receive)
    scales = exchange(weight.flatten().index_select(0, order)[:, None], axis, send, receive)
    expert = torch.arange(own, device=arriving.device).repeat(axis.size).repeat_interleave(arriving.flatten())
    out = exchange(run(rows, gate_up, down, expert.to(x.device)[:, None], scales), axis, receive, send)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return out.index_select(0, place).unflatten(0, chosen.shape).sum(1)


def _routes(chosen: Tensor, experts: int, axis: Axis) -> Tensor:
    """How many of this rank's routes go to every expert, int64 [E]; on paper, the same to each rank's first."""
    if axis.group != PLANNED:
        return chosen.flatten().bincount(minlength=experts)
    counts = torch.zeros(experts, dtype=torch.int64)
    counts[:: experts // axis.size] = chosen.numel() // axis.size
    counts[0] += chosen.numel() % axis.size
    return counts
