"""What one rank of a layout holds, computes and sends in an optimizer step, without a GPU: `--stage plan`.

The layers run once, forward and backward, on torch's meta device over a mesh on paper, so their saved tensors, products
and collectives are those of the code that trains. Three things stand in for kernels that need numbers: attention that
saves what a flash kernel saves, the delta rule with its products counted, and experts with even routing. The heads,
which go in chunks, are formulas.

T tokens of a micro-batch, c of them on a rank, D hidden, V vocabulary, L layers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from oprd.core.architecture import ModelConfig
from oprd.core.hf import blank
from oprd.core.mixers import Attention, GatedDeltaNet, Layout
from oprd.core.model import Block, Model
from oprd.core.moe import MoE
from oprd.core.optim import AdamW
from oprd.core.settings import Parallel
from oprd.kernels.cross_entropy import WEIGHTED_ELEMENTS
from oprd.kernels.delta_rule import CHUNK
from oprd.parallel.mesh import Mesh, Sizes
from oprd.parallel.reducer import IN_FLIGHT, Reducer

GIB = 2**30


@dataclass(frozen=True)
class Work:
    """One optimizer step: `rows` of `length` tokens each, `tokens` in a forward (student's and teacher's together),
    with or without a teacher that reads as much."""

    rows: int
    length: int
    tokens: int
    teacher: bool = False


@dataclass(frozen=True)
class Costs:
    """Of one rank. memory: bytes by component; flops: of an optimizer step, with causal attention at half its square;
    counted: the same as torch's counter has it (the full square); sent: bytes of a step by axis; rounds: micro-batches
    of a rank in a step."""

    memory: dict[str, int]
    flops: float
    counted: float
    sent: dict[str, int]
    rounds: int

    @property
    def total(self) -> int:
        return sum(self.memory.values())


@dataclass(frozen=True)
class _Layer:
    """One layer, one micro-batch: bytes it saves for its backward pass, products forward and backward, attention's
    forward products (full square), and what is sent forward and backward."""

    saved: int
    forward: float
    backward: float
    attention: float
    sent_forward: Counter
    sent_backward: Counter


def costs(config: ModelConfig, parallel: Parallel, world: int, work: Work) -> Costs:
    """ValueError where the model does not divide by the layout."""
    mesh = Mesh.planned(Sizes(parallel.dp, parallel.cp, parallel.tp, parallel.ep), world)
    dtype = torch.bfloat16 if parallel.weights == "bf16" else torch.float32
    model = blank(config, dtype, mesh)
    per_forward = work.tokens // (2 if work.teacher else 1)
    sequences = max(1, min(per_forward // work.length, -(-work.rows // mesh.dp.size)))
    tokens = sequences * work.length
    rounds = -(-work.rows // (sequences * mesh.dp.size))
    share = -(-tokens // mesh.sequence.size)
    kinds = Counter((kind, config.is_sparse(i)) for i, kind in enumerate(config.layer_types))
    layers = {key: _layer(config, mesh_key(parallel, world), dtype, key, sequences, work.length) for key in kinds}

    stream = share * config.hidden_size * dtype.itemsize
    saved = {key: layer.saved for key, layer in layers.items()}
    held = sum(stream * n if parallel.recompute else saved[key] * n for key, n in kinds.items())
    memory = {"weights": _bytes(model), **_state(model, mesh, parallel)}
    if work.teacher:
        memory["teacher"] = _bytes(model)
    memory["activations"] = held + 2 * stream
    memory["one layer anew"] = max(saved.values()) if parallel.recompute else 0
    memory["logits"] = _logits(config, mesh, tokens, work.teacher)
    head = 2.0 * tokens / mesh.cp.size * config.hidden_size * (-(-config.vocab_size // mesh.tp.size))
    step = dict(forward=sum(layer.forward * kinds[k] for k, layer in layers.items()),
                backward=sum(layer.backward * kinds[k] for k, layer in layers.items()),
                attention=sum(layer.attention * kinds[k] for k, layer in layers.items()))
    forwards = 1 + parallel.recompute + work.teacher
    heads = head * (4 if work.teacher else 3)
    counted = rounds * (step["forward"] * forwards + step["backward"] + heads + step["attention"] * (forwards + 2.5))
    sent = _sent(config, model, mesh, parallel, work, layers, kinds, rounds, tokens, forwards)
    return Costs(memory, counted - rounds * step["attention"] * (forwards + 2.5) / 2, counted, sent, rounds)


def mesh_key(parallel: Parallel, world: int) -> tuple[Sizes, int]:
    return Sizes(parallel.dp, parallel.cp, parallel.tp, parallel.ep), world


def _bytes(model: Model) -> int:
    return sum(p.nbytes for p in model.state_dict().values())


def _state(model: Model, mesh: Mesh, parallel: Parallel) -> dict[str, int]:
    """Bytes of masters, moments and gradients, from the objects that will hold them."""
    named = dict(model.named_parameters())
    if mesh.world.size == 1 and not parallel.offload and parallel.weights == "fp32":
        whole = sum(p.nbytes for p in named.values())
        return {"masters": 0, "moments": 2 * whole, "gradients": whole}
    reducer = Reducer(named, {n: model.cuts[n].replicas for n in named}, mesh.world, parallel.zero,
                      parallel.bucket_mib * 2**20)
    masters = sum(rows.nbytes for kind, _, _, rows in AdamW(named.items(), reducer=reducer).parts() if kind == "model")
    sums = sum(b.width * b.dtype.itemsize for b in reducer.buckets)
    travelling = sum(sorted(b.width * b.ranks * b.dtype.itemsize for b in reducer.buckets)[-IN_FLIGHT:])
    whole = sum(p.numel() * torch.promote_types(p.dtype, torch.float32).itemsize for p in named.values())
    # until the last micro-batch (zero 2: within one) a gradient is whole; then its bucket is, and then a shard
    gradients = sums + travelling + (0 if parallel.zero == 2 else max(0, whole - travelling))
    held = 0 if parallel.offload else 1
    return {"masters": masters * held, "moments": 2 * masters * held, "gradients": gradients}


def _logits(config: ModelConfig, mesh: Mesh, tokens: int, teacher: bool) -> int:
    """Bytes of the logits of one chunk, as kernels/cross_entropy.py cuts them on a GPU, and of two copies of it."""
    local = -(-config.vocab_size // mesh.tp.size)
    rows = min(-(-tokens // mesh.cp.size), max(1, WEIGHTED_ELEMENTS["cuda"] // local))
    return 4 * rows * local * (4 if teacher else 3) + 4 * local * config.hidden_size  # the head's gradient in fp32


def _sent(config: ModelConfig, model: Model, mesh: Mesh, parallel: Parallel, work: Work, layers: dict, kinds: Counter,
          rounds: int, tokens: int, forwards: int) -> dict[str, int]:
    """Bytes that this rank sends in a step, by axis."""
    total: Counter = Counter()
    for key, layer in layers.items():
        for axis, sent in layer.sent_forward.items():
            total[axis] += sent * kinds[key] * rounds * forwards
        for axis, sent in layer.sent_backward.items():
            total[axis] += sent * kinds[key] * rounds
    mesh.traffic.clear()
    x = model.model.embed_tokens(torch.zeros(-(-tokens // mesh.sequence.size) * mesh.sequence.size, dtype=torch.int64,
                                             device="meta"))
    x.backward(torch.empty_like(x))
    embedding = dict(mesh.traffic)
    for axis, sent in embedding.items():  # the teacher embeds without a backward pass
        total[axis] += sent * rounds + (sent // 2 * rounds if work.teacher else 0)
    mesh.traffic.clear()
    named = dict(model.named_parameters())
    reducer = Reducer(named, {n: model.cuts[n].replicas for n in named}, mesh.world, parallel.zero,
                      parallel.bucket_mib * 2**20)
    for _ in range(rounds if parallel.zero == 2 else 1):
        reducer.begin(last=True)
        reducer.end()
    reducer.publish({})
    total.update(mesh.traffic)
    mesh.traffic.clear()
    scored = -(-tokens // mesh.cp.size)  # every token, at most
    if (n := mesh.tp.size) > 1:
        states = scored * config.hidden_size * (next(model.parameters()).element_size())
        total["tp"] += int(rounds * states * (n - 1) / n * (2 + work.teacher))
        total["tp"] += int(rounds * scored * 12 * 2 * (n - 1) / n)
    return {axis: int(sent) for axis, sent in total.items() if sent}


@lru_cache(maxsize=64)
def _layer(config: ModelConfig, key: tuple[Sizes, int], dtype: torch.dtype, kind: tuple[str, bool], sequences: int,
           length: int) -> _Layer:
    mesh = Mesh.planned(*key)
    layer = next(i for i, name in enumerate(config.layer_types) if (name, config.is_sparse(i)) == kind)
    with torch.device("meta"):
        block = Block(config, layer, mesh).to(dtype)
    squares, products = [0.0], [0.0, 0.0]
    for module in block.modules():
        if isinstance(module, Attention):
            module.attend = lambda q, k, v, *_: _PaperAttention.apply(q, k, v, squares, sequences, length)
        if isinstance(module, GatedDeltaNet):
            module.rule = lambda *inputs: (_PaperDeltaRule.apply(*inputs[:5], products), None)
        if isinstance(module, MoE):
            module.run = _even_experts
    tokens = sequences * length
    padding = -tokens % mesh.sequence.size
    cu = torch.tensor([*range(0, tokens + 1, length), *([tokens + padding] if padding else [])], dtype=torch.int32)
    x = torch.empty((tokens + padding) // mesh.sequence.size, config.hidden_size, dtype=dtype, device="meta",
                    requires_grad=True)
    table = torch.empty(tokens + padding, 1, config.rotary_dim, dtype=dtype, device="meta")
    own = {p.untyped_storage()._cdata for p in block.parameters()} | {table.untyped_storage()._cdata}
    saved: dict[int, int] = {}
    kept: list[Tensor] = []  # so that no storage's place is given to another

    def keep(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage._cdata not in own:
            saved[storage._cdata] = storage.nbytes()
            kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        with FlopCounterMode(display=False) as forward:
            out = block(x, Layout(cu, table, table), None, None)
    sent_forward = Counter(mesh.traffic)
    mesh.traffic.clear()
    with FlopCounterMode(display=False) as backward:
        out.backward(torch.empty_like(out))
    return _Layer(sum(saved.values()), forward.get_total_flops() + products[0],
                  backward.get_total_flops() + products[1], squares[0], sent_forward, Counter(mesh.traffic))


class _PaperAttention(torch.autograd.Function):
    """Attention that computes nothing, saves what a flash kernel saves, and counts both products."""

    @staticmethod
    def forward(ctx, q, k, v, squares, sequences, length):
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
        squares[0] += 4.0 * sequences * length**2 * q.shape[1] * q.shape[2]
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, *_ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None, None, None


class _PaperDeltaRule(torch.autograd.Function):
    """The delta rule (kernels/delta_rule.py) that computes nothing, saves what it saves, and counts its products."""

    @staticmethod
    def forward(ctx, q, k, v, g, beta, products):
        (T, H, V), (G, K), C = v.shape, q.shape[1:], CHUNK
        chunks = -(-T // C)
        shared, wide, state = chunks * G * C * C * K, chunks * H * C * C * V, chunks * H * C * K * V
        products[0] += 4 * shared + 4 * wide + 6 * state
        products[1] += 10 * shared + 10 * wide + 14 * state
        inverse, starts = (v.new_empty(chunks * H, *size, dtype=torch.promote_types(v.dtype, torch.float32))
                           for size in ((C, C), (K, V)))
        ctx.save_for_backward(q, k, v, g, beta, inverse, starts)
        return torch.empty_like(v)

    @staticmethod
    def backward(ctx, grad):
        return *(torch.empty_like(x) for x in ctx.saved_tensors[:5]), None


def _even_experts(x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
    """run_experts where every route goes to the first expert: the same products and saved numbers for any routing."""
    token = torch.empty(chosen.numel(), dtype=torch.int64, device=x.device)
    gate, up = F.linear(x.index_select(0, token), gate_up.unbind()[0]).chunk(2, dim=-1)
    out = F.linear(F.silu(gate) * up * weight.reshape(-1, 1), down.unbind()[0])
    return out.index_select(0, token).unflatten(0, chosen.shape).sum(1)


def changed(parallel: Parallel, **fields) -> Parallel:
    """The same settings with some others, checked as settings are."""
    return Parallel.model_validate({**parallel.model_dump(), **fields})
