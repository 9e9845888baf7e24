"""Next-token loss of a linear head, per token, without ever keeping [N, V].

Shapes: N scored tokens, D hidden, V vocabulary, c rows of one chunk, w entries of one tile of the vocabulary.

    token_nll(h, W, y)_n = logsumexp_v(h_n . W_v) - h_n . W_{y_n}

Values are unweighted and unreduced: weights and denominators belong to whoever calls. Two forms:

    token_nll       values for any use of them. Nothing of the vocabulary is kept: the backward pass makes the logits
                    again (four products of a head instead of three), unless all of them fit into one small chunk
    weighted_nll    the values' weighted sum. Its gradient is known at once, so each logit is made once, for a chunk of
                    tokens against the whole vocabulary: three products
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from oprd.kernels.backend import use_triton
from oprd.kernels.joint_support import Running
from oprd.kernels.tiles import Product, compute_dtype, rows_of, tiles
from oprd.kernels.vocabulary_parallel import Exchange, share_of

CHUNK_ELEMENTS = {"cpu": 2**23, "cuda": 2**28}  # logits kept by token_nll: 32 MiB on a CPU, 1 GiB on a GPU, in fp32
WEIGHTED_ELEMENTS = {"cpu": 2**25, "cuda": 2**28}  # logits held at once by weighted_nll


def chunks(rows: int, vocabulary: int, device: torch.device, elements: dict[str, int] | None = None) -> list[slice]:
    """Slices of 0..rows so short that one chunk's logits stay within CHUNK_ELEMENTS, or what is given instead."""
    elements = elements or CHUNK_ELEMENTS
    step = max(1, elements.get(device.type, elements["cpu"]) // vocabulary)
    return [slice(i, min(i + step, rows)) for i in range(0, rows, step)]


def token_nll_definition(hidden: Tensor, head_weight: Tensor, targets: Tensor) -> Tensor:
    """The definition, in float64 with all logits at once: [N, D], [V, D], [N] -> [N]."""
    logits = hidden.double() @ head_weight.double().T
    return -torch.log_softmax(logits, dim=-1).gather(1, targets[:, None]).squeeze(1)


def entropy_definition(hidden: Tensor, head_weight: Tensor) -> Tensor:
    """-sum_v p_v log p_v in float64 with all logits at once: [N]."""
    logits = hidden.double() @ head_weight.double().T
    return torch.distributions.Categorical(logits=logits).entropy()


def token_nll(hidden: Tensor, head_weight: Tensor, targets: Tensor, *, exchange: Exchange | None = None,
              rounded: bool = False) -> Tensor:
    """-log p(target) of every token: [N, D], [V, D], int64 [N] -> fp32 [N] (float64 for float64 input).

    Gradients flow to `hidden` and `head_weight`, right for any upstream gradient. Peak memory is one tile of logits.
    There is no ignore index: a target outside 0..V-1 is a ValueError. exchange, rounded: see topk_kl.
    """
    return token_nll_and_entropy(hidden, head_weight, targets, entropy=False, exchange=exchange, rounded=rounded)[0]


def token_nll_and_entropy(hidden: Tensor, head_weight: Tensor, targets: Tensor, *, entropy: bool = True,
                          exchange: Exchange | None = None, rounded: bool = False) -> tuple[Tensor, Tensor]:
    """token_nll, and the entropy of every token's distribution in nats (without gradient; empty if not asked for)."""
    _check(hidden, head_weight, targets, exchange)
    return _TokenNLL.apply(hidden, head_weight, targets, entropy, exchange, rounded)


def weighted_nll(hidden: Tensor, head_weight: Tensor, targets: Tensor, weights: Tensor, *,
                 exchange: Exchange | None = None, rounded: bool = False) -> tuple[Tensor, Tensor]:
    """(sum_n weights_n token_nll_n, a scalar with a gradient for `hidden` and `head_weight`; token_nll [N], without).

    weights: [N], constants. Peak memory is WEIGHTED_ELEMENTS logits and the gradients themselves.
    """
    _check(hidden, head_weight, targets, exchange)
    assert weights.shape == targets.shape, (weights.shape, targets.shape)
    wanted = tuple(torch.is_grad_enabled() and x.requires_grad for x in (hidden, head_weight))
    return _WeightedNLL.apply(hidden, head_weight, targets, weights, wanted, exchange, rounded)


def _check(hidden: Tensor, head_weight: Tensor, targets: Tensor, exchange: Exchange | None) -> None:
    assert hidden.ndim == 2 and targets.shape == hidden.shape[:1], (hidden.shape, targets.shape)
    vocabulary = len(head_weight) if exchange is None else exchange.vocabulary
    if targets.numel():
        low, high = targets.min().item(), targets.max().item()
        if low < 0 or high >= vocabulary:
            wrong = low if low < 0 else high
            raise ValueError(f"target id {wrong} is outside the vocabulary of {vocabulary} entries; "
                             "use the tokenizer the model was made for")


class _Targets:
    """Which of c targets lie in this rank's entries, and where."""

    def __init__(self, targets: Tensor, size: int, exchange: Exchange | None):
        self.exchange = exchange
        local = targets if exchange is None else targets - exchange.rank * share_of(exchange)
        self.mine = (local >= 0) & (local < size)
        self.local = local.clamp(0, max(0, size - 1))

    def logits(self, z: Tensor, start: int, out: Tensor) -> Tensor:
        """out [c] where the target is in the tile z [c, w] that starts at `start`: its logit."""
        here = self.mine & (self.local >= start) & (self.local < start + z.shape[1])
        if not z.shape[1]:
            return out
        at = (self.local - start).clamp(0, z.shape[1] - 1)
        return torch.where(here, z.gather(1, at[:, None]).squeeze(1), out)

    def gradient(self, z: Tensor, lse: Tensor, scale: Tensor, start: int) -> Tensor:
        """Logits z [c, w] of a tile become their gradient, scale (softmax - one-hot), in place."""
        if use_triton(z):
            from oprd.kernels import cross_entropy_triton

            return cross_entropy_triton.softmax_gradient(z, lse, torch.where(self.mine, self.local, -1), scale, start)
        p = z.sub_(lse[:, None].to(z.dtype)).exp_()
        here = self.mine & (self.local >= start) & (self.local < start + p.shape[1])
        at = (self.local - start).clamp(0, p.shape[1] - 1)
        p.scatter_add_(1, at[:, None], -here.to(p.dtype)[:, None])
        return p.mul_(scale[:, None])

    def whole(self, lse: Tensor, wanted: Tensor, moment: Tensor | None = None) -> tuple[Tensor, ...]:
        """logsumexp, target logit and sum p z over all ranks' entries, from this rank's: float64 [c]."""
        numbers = (lse, wanted) if moment is None else (lse, wanted, moment)
        if self.exchange is None:
            return numbers
        most = self.exchange.most(lse)
        total = (lse - most).exp()
        rest = [] if moment is None else [total * moment.nan_to_num()]  # a rank without entries has no mean
        total, wanted, *rest = self.exchange.sum(torch.stack([total, wanted, *rest])).unbind()
        return (most + total.log(), wanted, *(x / total for x in rest))


class _TokenNLL(torch.autograd.Function):
    """Tile by tile over tokens and vocabulary. A batch whose logits are one small chunk keeps them."""

    @staticmethod
    def forward(ctx, hidden, head_weight, targets, entropy, exchange, rounded):
        dtype, V = compute_dtype(hidden), len(head_weight)
        nll = hidden.new_empty(len(hidden), dtype=dtype)
        lse = hidden.new_empty(len(hidden), dtype=torch.float64)
        entropies = hidden.new_empty(len(hidden) if entropy else 0, dtype=dtype)
        keep = any(ctx.needs_input_grad) and len(chunks(len(hidden), max(1, V), hidden.device)) == 1
        kept = nll.new_empty(len(hidden), V) if keep else nll.new_empty(0)
        with torch.autocast(hidden.device.type, enabled=False):
            for part in rows_of(len(hidden), hidden.device):
                goal = _Targets(targets[part], V, exchange)
                lse[part], target, *moment = goal.whole(*_read(hidden[part], head_weight, goal, entropy, rounded,
                                                               kept[part] if keep else None))
                nll[part] = lse[part] - target
                if entropy:
                    entropies[part] = lse[part] - moment[0]
        ctx.save_for_backward(hidden, head_weight, targets, lse, kept)
        ctx.settings = keep, exchange, rounded
        ctx.mark_non_differentiable(entropies)
        return nll, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream, _):
        hidden, head_weight, targets, lse, kept = ctx.saved_tensors
        keep, exchange, rounded = ctx.settings
        dtype = compute_dtype(hidden)
        d_hidden = torch.zeros_like(hidden, dtype=dtype) if ctx.needs_input_grad[0] else None
        d_weight = torch.zeros_like(head_weight, dtype=dtype) if ctx.needs_input_grad[1] else None
        with torch.autocast(hidden.device.type, enabled=False):
            for part in rows_of(len(hidden), hidden.device):
                goal = _Targets(targets[part], len(head_weight), exchange)
                product = None if keep else Product(hidden[part], head_weight, dtype, rounded)
                for tile in tiles(head_weight, dtype):
                    z = kept[part, tile].clone() if keep else product(tile)[:, : tile.stop - tile.start]
                    p = goal.gradient(z, lse[part], upstream[part], tile.start)
                    _add_products(p, hidden[part], head_weight[tile], rounded,
                                  None if d_hidden is None else d_hidden[part],
                                  None if d_weight is None else d_weight[tile])
        return *_finished(d_hidden, d_weight, hidden, head_weight), None, None, None, None


class _WeightedNLL(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, head_weight, targets, weights, wanted, exchange, rounded):
        dtype, V = compute_dtype(hidden), len(head_weight)
        nll = hidden.new_empty(len(hidden), dtype=dtype)
        d_hidden = torch.zeros_like(hidden, dtype=dtype) if wanted[0] else None
        d_weight = torch.zeros_like(head_weight, dtype=dtype) if wanted[1] else None
        weights = weights.to(dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            share = V if exchange is None else share_of(exchange)  # ranks exchange alike, also one with fewer entries
            parts = chunks(len(hidden), max(1, share), hidden.device, WEIGHTED_ELEMENTS)
            space = nll.new_empty(parts[0].stop if parts else 0, V)
            for part in parts:
                goal, h = _Targets(targets[part], V, exchange), hidden[part]
                z = space[: len(h)]
                for tile in tiles(head_weight, dtype):
                    _product_into(z[:, tile], h, head_weight[tile], rounded)
                lse = torch.logsumexp(z, -1) if V else z.new_full((len(h),), float("-inf"))
                lse, target = goal.whole(lse.double(),
                                         goal.logits(z, 0, nll.new_zeros(len(h))).double())
                nll[part] = lse - target
                if not any(wanted):
                    continue
                p = goal.gradient(z, lse, weights[part], 0) if V else z
                for tile in tiles(head_weight, dtype):
                    _add_products(p[:, tile], h, head_weight[tile], rounded,
                                  None if d_hidden is None else d_hidden[part],
                                  None if d_weight is None else d_weight[tile])
        d_hidden, d_weight = _finished(d_hidden, d_weight, hidden, head_weight)
        ctx.gradients = d_hidden, d_weight
        ctx.mark_non_differentiable(nll)
        return (nll * weights).sum(), nll

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream, _):
        scale = 1.0 if upstream == 1 else upstream  # one is what a sum of losses gives: no copy of the gradients
        return *(None if g is None else g if scale == 1.0 else g * scale for g in ctx.gradients), *[None] * 5


def _read(h: Tensor, W: Tensor, goal: _Targets, entropy: bool, rounded: bool, kept: Tensor | None) -> list[Tensor]:
    """logsumexp, target logit and, for the entropy, sum p z of this rank's entries: float64 [c]. kept: the logits"""
    dtype = compute_dtype(h)
    if use_triton(h) and not entropy and kept is None and len(W):
        from oprd.kernels import cross_entropy_triton

        lse, wanted = cross_entropy_triton.lse_and_target(h, W, torch.where(goal.mine, goal.local, -1))
        return [lse, wanted.double()]
    product = Product(h, W, dtype, rounded)
    running, scratch = Running(product.space, len(h), 0, 1.0), None
    wanted = h.new_zeros(len(h), dtype=dtype)
    for tile in tiles(W, dtype):
        z = product(tile)
        real = z[:, : tile.stop - tile.start]
        wanted = goal.logits(real, tile.start, wanted)
        if kept is not None:
            kept[:, tile] = real
        if scratch is None or scratch.shape != z.shape:
            scratch = torch.empty_like(z)
        running.add(z, z, tile.start, scratch, z if entropy else None)
    return [running.norm, wanted.double(), *([running.moment / running.total] if entropy else [])]


def _product_into(out: Tensor, h: Tensor, W: Tensor, rounded: bool) -> None:
    """out [c, w] = h [c, D] @ W [w, D].T in out's dtype; half-precision inputs as in Product."""
    if h.dtype == W.dtype == out.dtype:
        torch.mm(h, W.T, out=out)
    elif W.is_cuda:
        out.copy_(torch.mm(h.to(W.dtype), W.T, out_dtype=out.dtype))
    elif rounded:
        out.copy_(h.to(W.dtype) @ W.T)
    else:
        torch.mm(h.to(out.dtype), W.to(out.dtype).T, out=out)


def _add_products(d: Tensor, h: Tensor, W: Tensor, rounded: bool, d_hidden: Tensor | None,
                  d_weight: Tensor | None) -> None:
    """d_hidden += d @ W, d_weight += d.T @ h for the gradient d [c, w] of the logits of a tile W [w, D]."""
    half = W.dtype != d.dtype and (rounded or W.is_cuda)
    if half:
        d = d.to(W.dtype)
        if d_hidden is not None:
            d_hidden += d @ W
        if d_weight is not None:
            d_weight += d.T @ h.to(W.dtype)
        return
    if d_hidden is not None:
        d_hidden.addmm_(d, W.to(d.dtype))
    if d_weight is not None:
        d_weight.addmm_(d.T, h.to(d.dtype))


def _finished(d_hidden: Tensor | None, d_weight: Tensor | None, hidden: Tensor,
              head_weight: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The gradients in their inputs' dtypes."""
    return (None if d_hidden is None else d_hidden.to(hidden.dtype),
            None if d_weight is None else d_weight.to(head_weight.dtype))
