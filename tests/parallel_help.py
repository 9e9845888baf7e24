"""One optimizer step's examples, and training on them on any mesh with everything gathered whole afterwards."""

import functools

import numpy as np
import torch
import torch.distributed as dist
from families_help import config_of, randomised

from oprd.core.metrics import values
from oprd.core.model import Model
from oprd.core.objective import Distillation, Objective
from oprd.core.optim import AdamW
from oprd.core.step import train_step
from oprd.core.types import Example, Row, View
from oprd.parallel.collectives import all_reduce
from oprd.parallel.mesh import Mesh, Sizes
from oprd.parallel.reducer import Reducer

HEADS = dict(num_attention_heads=8, num_key_value_heads=2, linear_num_key_heads=4, linear_num_value_heads=8)
MODELS = {  # a vocabulary of 37 divides by neither 2 nor 4
    "hybrid": ("qwen3_5_text", HEADS), "hybrid moe": ("qwen3_5_moe_text", {**HEADS, "num_experts": 8,
                                                                          "shared_expert_intermediate_size": 12}),
    "qwen3": ("qwen3", dict(num_attention_heads=8, num_key_value_heads=2)),
    "qwen3 untied": ("qwen3", dict(num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=False)),
}
V = 37


def examples(count=7, seed=0):
    """Imitated, distilled and reinforced rows of uneven lengths (T divides by nothing); a distilled one's teacher reads a
    reminder, some in two branches of a common beginning; the last row trains on nothing."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(count):
        ids = rng.integers(0, V, rng.integers(6, 20))
        targets = np.sort(rng.choice(np.arange(2, len(ids)), size=len(ids) // 2, replace=False))
        row, weights = Row(ids, targets), rng.random(len(targets)) + 0.1
        if i % 2:
            first, rest = (targets[:2], targets[2:]) if i % 4 == 1 else (targets, targets[:0])
            rows = [Row(np.concatenate([ids[:1], [1, 2], ids[1:]]), first + 2)]
            if len(rest):
                rows.append(Row(np.concatenate([ids[:1], [1, 5, 2], ids[1:]]), rest + 3))
            made.append(Example(row, {"kl": weights}, "failure", View(tuple(rows), np.arange(len(targets)))))
        elif i == 4:
            advantages = weights - weights.mean()
            made.append(Example(row, {"pg": advantages}, "policy", old_logprobs=-3.5 * rng.random(len(targets))))
        else:
            made.append(Example(row, {"nll": weights}, "success"))
    made.append(Example(Row(rng.integers(0, V, 9), np.array([3, 4])), {"nll": np.zeros(2)}, "success"))
    return made


@functools.cache
def mesh_of(sizes: Sizes) -> Mesh:
    """The mesh of this process's pool, made once."""
    return Mesh.of(sizes) if dist.is_initialized() else Mesh()


def part_of(whole: Model, mesh: Mesh, **more) -> Model:
    """The same model on a mesh: this rank's part of it."""
    model = Model(whole.config, mesh, **more).to(whole.head_weight.dtype)
    with torch.no_grad():
        for name, p in whole.state_dict().items():
            model.state_dict()[name].copy_(model.cuts[name].take(p))
    return model


class Recorder(AdamW):
    """Keeps the gradients that the first step used, whole."""

    first = None

    def step(self, lr):
        if self.first is None:
            self.first = {}
            for name, p in self.parameters.items():
                holder, rows = (p, (0, len(p))) if self.reducer is None else (
                    self._masters.get(name), self.reducer.rows(name))
                whole = torch.zeros_like(p)
                if holder is not None and holder.grad is not None:
                    whole[slice(*rows)] = holder.grad
                self.first[name] = whole
        super().step(lr)


def train(kind: str, sizes: Sizes, stage: int, budget: int = 75, steps: int = 3, rows=None, **settings) -> dict:
    """Losses, the first step's gradients and the weights after the last, all whole."""
    family, change = MODELS[kind]
    mesh = mesh_of(sizes)
    recompute = settings.pop("recompute", False)
    model = part_of(randomised(family, 0, **change).double(), mesh, recompute=recompute)
    teacher = part_of(randomised(family, 1, **change).double(), mesh).requires_grad_(False)
    named = dict(model.named_parameters())
    reducer = None
    if mesh.world.size > 1:
        reducer = Reducer(named, {n: model.cuts[n].replicas for n in named}, mesh.world, stage, bucket_bytes=20_000)
    optimizer = Recorder(named.items(), weight_decay=0.1, reducer=reducer)
    shown = [values(train_step(model, teacher, examples() if rows is None else rows, optimizer, lr=1e-2,
                               token_budget=budget, objective=Objective(1.0, 0.7), distillation=Distillation(k=7),
                               router_balance=0.3, max_norm=0.5, mesh=mesh, **settings)) for _ in range(steps)]
    gradients = {}
    for name, g in optimizer.first.items():
        cut = model.cuts[name]
        sharded = reducer is not None and stage
        gradients[name] = cut.join(all_reduce(g, cut.replicas) if sharded else g)
    weights = {name: model.cuts[name].join(p.detach()) for name, p in model.named_parameters()}
    return {"shown": shown, "gradients": gradients, "weights": weights}
