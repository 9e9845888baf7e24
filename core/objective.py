"""The objective: from raw per-token weights to the step's loss.

The step's loss is the plain sum, over every scored token n of the optimizer step, of

    weight_n * loss_n        loss_n = nll_n (imitation) or kl_n (distillation), unreduced

`normalise` makes those final weights once, over the whole optimizer step, before any split into micro-batches; so
the split changes neither loss nor gradient. With w_n the raw weight, b its branch (`success`, `failure`, `sft`),
lambda_sft = 1, and counting only tokens whose raw weight is not zero:

    aggregate   denominator   weight_n
    token       separate      lambda_b w_n / N_b            N_b: tokens of branch b
    token       joint         lambda_b w_n / N              N: tokens of all branches
    trajectory  separate      lambda_b w_n / (U_b n_u)      U_b: trajectories of branch b; n_u: tokens of n's own
    trajectory  joint         lambda_b w_n / (U n_u)        U: trajectories of all branches

`separate` with `token` is the paper's L = lambda+ L+ + lambda- L-, each the mean over its branch's valid tokens. With
`joint`, 1:1 weighs a branch by how many tokens (or trajectories) it has. A branch without tokens contributes zero.
A token with weights under two losses is counted once.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Sequence

import numpy as np
import torch
from torch import Tensor

from oprd.core.batch import Batch, Forest, trainable_tokens
from oprd.core.metrics import Max, Mean, Metric, Min, Sum
from oprd.core.moe import balance_loss
from oprd.core.types import Example
from oprd.kernels.cross_entropy import token_nll
from oprd.kernels.topk_kl import SupportStats, topk_kl

AGGREGATES = ("token", "trajectory")
DENOMINATORS = ("separate", "joint")


@dataclass(frozen=True)
class Objective:
    """How the branches are weighed; see the table above."""

    lambda_success: float = 1.0
    lambda_failure: float = 1.0
    aggregate: str = "token"
    denominator: str = "separate"

    def __post_init__(self):
        if self.aggregate not in AGGREGATES:
            raise ValueError(f"aggregate = {self.aggregate!r} must be one of {AGGREGATES}")
        if self.denominator not in DENOMINATORS:
            raise ValueError(f"denominator = {self.denominator!r} must be one of {DENOMINATORS}")
        for name in ("lambda_success", "lambda_failure"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} = {getattr(self, name)} must be 0 or above")


@dataclass(frozen=True)
class Distillation:
    """The distillation loss: see `kernels/topk_kl.py`, which checks the values."""

    k: int = 100
    temperature: float = 1.0
    direction: str = "reverse"
    support: str = "topk"


def normalise(examples: Sequence[Example], objective: Objective = Objective()) -> list[Example]:
    """The same examples with final weights. `examples` is the WHOLE optimizer step."""
    factor = {"sft": 1.0, "success": objective.lambda_success, "failure": objective.lambda_failure}
    counts = [trainable_tokens(e) for e in examples]
    for example in examples:
        _check(example, factor)
    units = [(e.branch, e.unit or i) for i, e in enumerate(examples)]
    per_unit, per_branch = Counter(), Counter()
    for unit, n in zip(units, counts):
        per_unit[unit] += n
    for (branch, _), n in per_unit.items():
        per_branch[branch] += n if objective.aggregate == "token" else int(n > 0)
    everything = sum(per_branch.values())
    final = []
    for example, unit, n in zip(examples, units, counts):
        if n == 0:
            final.append(example)
            continue
        below = per_branch[example.branch] if objective.denominator == "separate" else everything
        if objective.aggregate == "trajectory":
            below *= per_unit[unit]
        scale = factor[example.branch] / below
        weights = {name: np.asarray(w, dtype=np.float64) * scale for name, w in example.weights.items()}
        final.append(replace(example, weights=weights))
    return final


def batch_loss(model, teacher, batch: Batch, distillation: Distillation,
               balance: float = 0.0) -> tuple[Tensor, dict[str, Metric]]:
    """One micro-batch's part of the step's loss (a scalar with a graph), and its metrics.

    model, teacher: `hidden(ids [T], cu_seqlens, positions, caches, routers) -> [T, D]`, `head_weight` [V, D],
    `new_cache()`. The teacher is only read where something is distilled, without gradient; it may be the model itself. Heads run on the
    scored tokens alone. balance: weight of one student row's load-balancing loss (core/moe.py), where there are
    mixtures: it is computed row by row, so that it does not depend on which rows share a micro-batch.
    """
    assert batch.scored, "a micro-batch without a scored token must not reach the model"
    student = batch.student
    routers: list[Tensor] | None = [] if balance else None
    hidden = model.hidden(student.ids, student.cu_seqlens, student.positions, routers=routers)
    total = hidden.new_zeros((), dtype=torch.float64 if hidden.dtype == torch.float64 else torch.float32)
    metrics: dict[str, Metric] = {}
    for name, scored in batch.scored.items():
        states = hidden.index_select(0, scored.index)
        if name == "nll":
            values = token_nll(states, model.head_weight, scored.targets)
            metrics["train/nll"] = Mean(*_total(values))
        else:
            values, stats = _distil(states, model, teacher, batch, distillation)
            metrics |= _distillation_metrics(values, stats)
        assert values.shape == scored.weights.shape
        part = (values * scored.weights.to(values.dtype)).sum()
        metrics[f"train/loss_{name}"] = Sum(part.item())
        total = total + part
    if routers:
        rows = balance_loss(routers, student.cu_seqlens, model.config.num_experts_per_tok)
        metrics["train/router_balance"] = Mean(*_total(rows))
        total = total + balance * rows.sum()
    metrics["train/loss"] = Sum(sum(metrics[f"train/loss_{name}"].total for name in batch.scored))
    return total, metrics


def _distil(states, model, teacher, batch, settings: Distillation) -> tuple[Tensor, SupportStats]:
    if teacher is None:
        raise ValueError("a row asks for distillation (weights named kl) but there is no teacher")
    with torch.no_grad():
        seen = read_forest(teacher, batch.teacher).index_select(0, batch.teacher_index)
    return topk_kl(states, model.head_weight, seen, teacher.head_weight, settings.k, settings.temperature,
                   settings.direction, settings.support)


def read_forest(model, forest: Forest) -> Tensor:
    """Hidden states [T, D] of all pieces, level after level: each goes on from a fork of the cache of the piece before
    it, so the trunk of a view is read once however many turns have a reminder of their own."""
    if len(forest.levels) == 1:
        level = forest.levels[0]
        return model.hidden(level.ids, level.cu_seqlens, level.positions)
    caches, hidden = [], []
    for level, after in zip(forest.levels, forest.after):
        own = [model.new_cache() if before < 0 else caches[before].fork() for before in after]
        hidden.append(model.hidden(level.ids, level.cu_seqlens, level.positions, own))
        caches += own
    return torch.cat(hidden)


def _distillation_metrics(values: Tensor, stats: SupportStats) -> dict[str, Metric]:
    found: dict[str, Metric] = {"distillation/kl": Mean(*_total(values))}
    found["distillation/kl_max"] = Max(values.max().item())
    for name, x in stats._asdict().items():
        found[f"distillation/{name}"] = Mean(*_total(x))
        found[f"distillation/{name}_min"] = Min(x.min().item())
        found[f"distillation/{name}_max"] = Max(x.max().item())
    return found


def _total(x: Tensor) -> tuple[float, int]:
    return x.detach().sum(dtype=torch.float64).item(), x.numel()


def _check(example: Example, branches) -> None:
    source = example.source or "example"
    if example.branch not in branches:
        raise ValueError(f"{source}: branch = {example.branch!r} must be one of {tuple(branches)}")
    for name, w in example.weights.items():
        if name not in ("nll", "kl"):
            raise ValueError(f"{source}: loss = {name!r} must be one of ('nll', 'kl') in this version")
        if not np.isfinite(w).all():
            raise ValueError(f"{source}: a {name} weight is not finite")
