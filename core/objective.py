"""The objective: from raw per-token weights to the step's loss.

The step's loss is the plain sum, over every scored token n of the optimizer step, of

    weight_n * loss_n        loss_n = nll_n (imitation), kl_n (distillation) or pg_n (policy gradient), unreduced

`normalise` makes those final weights once, over the whole optimizer step, before any split into micro-batches; so
the split changes neither loss nor gradient. With w_n the raw weight (pg: the advantage), b its branch (`success`,
`failure`, `policy`, `sft`), lambda_policy = lambda_sft = 1, and counting only tokens whose raw weight is not zero (in a
pg row every target counts):

    aggregate   denominator   weight_n
    token       separate      lambda_b w_n / N_b            N_b: tokens of branch b
    token       joint         lambda_b w_n / N              N: tokens of all branches
    trajectory  separate      lambda_b w_n / (U_b n_u)      U_b: trajectories of branch b; n_u: tokens of n's own
    trajectory  joint         lambda_b w_n / (U n_u)        U: trajectories of all branches
    constant    separate      lambda_b w_n / (U_b length)   no mean over a trajectory's own tokens: a longer one is not
    constant    joint         lambda_b w_n / (U length)     pushed less per token; length: a constant of the run

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

from oprd.core.batch import IDLE, Batch, Forest, Scored, counted_tokens
from oprd.core.metrics import Max, Mean, Metric, Min, Sum
from oprd.core.moe import balance_loss
from oprd.core.types import Example
from oprd.kernels.cross_entropy import compute_dtype
from oprd.kernels.policy_gradient import RATIOS, RatioStats, policy_gradient
from oprd.kernels.topk_kl import SupportStats
from oprd.parallel.layers import Head
from oprd.parallel.mesh import Mesh
from oprd.parallel.sequence import joined_index, move_rows, scored_rows
from oprd.parallel.vocabulary import split_token_nll, split_topk_kl, split_weighted_nll

AGGREGATES = ("token", "trajectory", "constant")
DENOMINATORS = ("separate", "joint")


@dataclass(frozen=True)
class Objective:
    """How the branches are weighed; see the table above."""

    lambda_success: float = 1.0
    lambda_failure: float = 1.0
    aggregate: str = "token"
    denominator: str = "separate"
    length: float = 1.0  # aggregate = constant: tokens

    def __post_init__(self):
        if not 0 < self.length < float("inf"):
            raise ValueError(f"length = {self.length} must be above 0")
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


@dataclass(frozen=True)
class PolicyGradient:
    """The policy-gradient loss: see `kernels/policy_gradient.py`. temperature: that of the rollouts, by which the
    trainer's logits are divided too."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    cap: float = 5.0
    ratio: str = "behaviour"
    temperature: float = 1.0

    def __post_init__(self):
        if self.ratio not in RATIOS:
            raise ValueError(f"ratio = {self.ratio!r} must be one of {RATIOS}")
        if not (0 <= self.clip_low <= 1 and self.clip_high >= 0 and self.temperature > 0):
            raise ValueError(f"clip_low = {self.clip_low} must be from 0 to 1, clip_high = {self.clip_high} 0 or above "
                             f"and temperature = {self.temperature} above 0")
        if self.cap < 1 + self.clip_high:
            raise ValueError(f"cap = {self.cap} must be at least 1 + clip_high = {1 + self.clip_high}")


def normalise(examples: Sequence[Example], objective: Objective = Objective()) -> list[Example]:
    """The same examples with final weights. `examples` is the WHOLE optimizer step."""
    factor = {"sft": 1.0, "success": objective.lambda_success, "failure": objective.lambda_failure,
              "policy": 1.0}
    counts = [counted_tokens(e) for e in examples]
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
        if objective.aggregate != "token":
            below *= per_unit[unit] if objective.aggregate == "trajectory" else objective.length
        scale = factor[example.branch] / below
        weights = {name: np.asarray(w, dtype=np.float64) * scale for name, w in example.weights.items()}
        final.append(replace(example, weights=weights))
    return final


def batch_loss(model, teacher, batch: Batch, distillation: Distillation, balance: float = 0.0,
               policy: PolicyGradient = PolicyGradient(), mesh: Mesh = Mesh(),
               levels: int = 0) -> tuple[Tensor, dict[str, Metric]]:
    """One micro-batch's part of the step's loss (a scalar with a graph), and its metrics.

    model, teacher: `hidden(ids [T], cu_seqlens, positions, caches, routers) -> [T, D]`, `head` (parallel/layers.py),
    `new_cache()`. The teacher is only read where something is distilled, without gradient; it may be the model itself.
    Heads run on the scored tokens alone. balance: weight of one student row's load-balancing loss (core/moe.py), where
    there are mixtures: it is computed row by row, so that it does not depend on which rows share a micro-batch.

    On a mesh loss and metrics are this rank's part: tokens are scored by the cp rank that has them, and what its tp
    ranks all know is told by the first. levels: forwards the teacher makes at least, as other ranks have so many.
    """
    student = batch.student
    routers: list[Tensor] | None = [] if balance else None
    hidden = model.hidden(student.ids, student.cu_seqlens, student.positions, routers=routers)
    total = hidden.new_zeros((), dtype=torch.float64 if hidden.dtype == torch.float64 else torch.float32)
    metrics: dict[str, Metric] = {}
    for name, scored in batch.scored.items():
        index = scored.index
        states, here = scored_rows(hidden, index, mesh)
        scored = scored.only(here)  # by this rank
        if name == "nll":
            part, values = split_weighted_nll(states, model.head, scored.targets, scored.weights)
            metrics["train/nll"] = Mean(*_total(values))
        elif name == "pg":
            values, found = _reinforce(states, model.head, scored, policy)
            part = _weigh(values, scored)
            metrics |= _policy_metrics(found)
        else:
            values, stats = _distil(states, len(hidden), index, model, teacher, batch, distillation, mesh)
            part = _weigh(values, scored)
            metrics |= _distillation_metrics(values, stats)
        metrics[f"train/loss_{name}"] = Sum(part.item())
        total = total + part
    _read_along(teacher, levels - (len(batch.teacher.levels) if batch.teacher else 0))
    metrics["train/loss"] = Sum(sum(metrics[f"train/loss_{name}"].total for name in batch.scored))
    if mesh.tp.rank:
        metrics.clear()
    if routers:
        rows = balance_loss(routers, student.cu_seqlens, model.config.num_experts_per_tok, mesh.sequence)
        if mesh.sequence.rank == 0 and batch.scored:
            metrics["train/router_balance"] = Mean(*_total(rows))
        total = total + (balance if batch.scored else 0.0) * rows.sum()
    if not batch.scored:  # no number, but a graph: other ranks' backward passes need this one's
        total = total + hidden[:0].sum()
    return total, metrics


def _weigh(values: Tensor, scored: Scored) -> Tensor:
    assert values.shape == scored.weights.shape
    return (values * scored.weights.to(values.dtype)).sum()


def _distil(states, tokens: int, index: Tensor, model, teacher, batch, settings: Distillation,
            mesh: Mesh) -> tuple[Tensor, SupportStats]:
    """index: where the student's tokens are; tokens: how many of the micro-batch's each rank has."""
    if teacher is None:
        raise ValueError("a row asks for distillation (weights named kl) but there is no teacher")
    with torch.no_grad():
        lengths = [len(level.ids) for level in batch.teacher.levels]
        where = joined_index(batch.teacher_index, lengths, mesh.sequence)
        seen = move_rows(read_forest(teacher, batch.teacher), where, index, tokens, mesh)
    return split_topk_kl(states, model.head, seen, teacher.head, settings.k, settings.temperature,
                         settings.direction, settings.support)


@torch.no_grad()
def _read_along(teacher, forwards: int) -> None:
    """Take part in forwards of the teacher that other ranks need and this one has no token for."""
    idle = IDLE.to(teacher.mesh.device).student if forwards > 0 else None
    for _ in range(forwards):
        teacher.hidden(idle.ids, idle.cu_seqlens, idle.positions)


def _reinforce(states, head: Head, scored: Scored, settings: PolicyGradient) -> tuple[Tensor, RatioStats]:
    if settings.temperature != 1.0:
        states = states.to(compute_dtype(states)) / settings.temperature
    logprobs = -split_token_nll(states, head, scored.targets)
    return policy_gradient(logprobs, scored.sampled, scored.weights, settings.clip_low, settings.clip_high,
                           settings.cap, settings.ratio)


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
    if not len(values):
        return {}
    found: dict[str, Metric] = {"distillation/kl": Mean(*_total(values))}
    found["distillation/kl_max"] = Max(values.max().item())
    for name, x in stats._asdict().items():
        found[f"distillation/{name}"] = Mean(*_total(x))
        found[f"distillation/{name}_min"] = Min(x.min().item())
        found[f"distillation/{name}_max"] = Max(x.max().item())
    return found


def _policy_metrics(stats: RatioStats) -> dict[str, Metric]:
    if not len(stats.ratio):
        return {}
    return {"policy/ratio": Mean(*_total(stats.ratio)), "policy/ratio_max": Max(stats.ratio.max().item()),
            "policy/clipped": Mean(*_total(stats.clipped)), "policy/kl_to_sampled": Mean(*_total(stats.kl))}


def _total(x: Tensor) -> tuple[float, int]:
    return x.detach().sum(dtype=torch.float64).item(), x.numel()


def _check(example: Example, branches) -> None:
    source = example.source or "example"
    if example.branch not in branches:
        raise ValueError(f"{source}: branch = {example.branch!r} must be one of {tuple(branches)}")
    for name, w in example.weights.items():
        if name not in ("nll", "kl", "pg"):
            raise ValueError(f"{source}: loss = {name!r} must be one of ('nll', 'kl', 'pg')")
        if not np.isfinite(w).all():
            raise ValueError(f"{source}: a {name} weight is not finite")
    if "pg" in example.weights and not np.isfinite(example.old_logprobs).all():
        raise ValueError(f"{source}: a sampled token's log-probability is not finite")
