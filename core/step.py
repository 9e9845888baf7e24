"""One optimizer step: examples in, one update out."""

from __future__ import annotations

import logging
import math
from contextlib import nullcontext
from typing import Sequence

import torch

from oprd.core.batch import IDLE, collate, pack, teacher_levels, tokens_read, trainable_tokens
from oprd.core.metrics import Last, Metric, Sum, merge
from oprd.core.objective import Distillation, Objective, PolicyGradient, batch_loss, normalise
from oprd.core.optim import AdamW
from oprd.core.types import Example
from oprd.parallel.collectives import all_objects
from oprd.parallel.mesh import Mesh

log = logging.getLogger("oprd.step")


def train_step(model, teacher, examples: Sequence[Example], optimizer: AdamW, *, lr: float, token_budget: int,
               objective: Objective = Objective(), distillation: Distillation = Distillation(),
               policy: PolicyGradient = PolicyGradient(), router_balance: float = 0.0, max_norm: float = math.inf,
               bf16: bool = False, mesh: Mesh = Mesh()) -> dict[str, Metric]:
    """Train once on all `examples` (one optimizer step's worth, the same on every rank) and return its metrics.

    Weights are normalised over the whole step, then the examples are packed into micro-batches of at most
    `token_budget` tokens; the split changes neither loss nor gradient. bf16: run the models under autocast (heads and
    losses stay fp32). router_balance: weight of the routers' load-balancing loss, a mean over rows. Examples without a
    trainable token are left out and counted. When none has one, nothing is updated, a warning is logged and
    `train/skipped_steps` is 1. A gradient that is not finite is a FloatingPointError, raised before the weights are
    touched.
    """
    final = normalise(examples, objective)
    useful = [e for e in final if trainable_tokens(e)]
    metrics: dict[str, Metric] = {
        "train/examples": Sum(len(useful)),
        "train/examples_without_tokens": Sum(len(final) - len(useful)),
        "train/trained_tokens": Sum(sum(trainable_tokens(e) for e in useful)),
        "train/skipped_steps": Sum(0 if useful else 1),
    }
    if not useful:
        log.warning("step skipped: none of its %d examples has a trainable token", len(final))
        return metrics
    read = [tokens_read(e) for e in useful]
    metrics["train/student_tokens"] = Sum(sum(student for student, _ in read))
    metrics["train/teacher_tokens"] = Sum(sum(teacher for _, teacher in read))
    optimizer.zero_grad()
    parts = pack(useful, token_budget)
    seen: dict[str, Metric] = {}
    # every rank packs alike, so all know how many rounds there are and who has no micro-batch in the last one
    rounds = [parts[i : i + mesh.dp.size] for i in range(0, len(parts), mesh.dp.size)]
    for number, here in enumerate(rounds, start=1):
        batch = (collate(here[mesh.dp.rank]) if mesh.dp.rank < len(here) else IDLE).to(mesh.device)
        levels = max(teacher_levels(part) for part in here)
        with torch.autocast(mesh.device.type, dtype=torch.bfloat16) if bf16 else nullcontext():
            loss, found = batch_loss(model, teacher, batch, distillation, router_balance / len(useful), policy, mesh,
                                     levels)
        optimizer.backward(loss, last=number == len(rounds))
        seen = merge(seen, found)
    for found in all_objects(seen, mesh.world):
        metrics = merge(metrics, found)
    norm = optimizer.clip(max_norm)
    if not math.isfinite(norm):
        _refuse(optimizer, metrics["train/loss"].value())
    optimizer.step(lr)
    optimizer.zero_grad()
    return metrics | {
        "train/micro_batches": Sum(len(parts)), "train/gradient_norm": Last(norm), "train/learning_rate": Last(lr),
    }


def _refuse(optimizer: AdamW, loss: float) -> None:
    """Name the parameters whose gradient is not finite; the weights have not been touched."""
    bad = optimizer.not_finite()
    where = f"{bad[0]} and {len(bad) - 1} more" if bad else "the global norm (each gradient here is finite)"
    optimizer.zero_grad()
    raise FloatingPointError(f"gradient of {where} is not finite (loss = {loss}); the step was not taken: lower the "
                             "learning rate or look at this step's examples")
