"""Next-token loss of a linear head, per token, without ever keeping [N, V].

Shapes: N scored tokens, D hidden, V vocabulary, c rows of one chunk.

    token_nll(h, W, y)_n = logsumexp_v(h_n . W_v) - h_n . W_{y_n}

Values are unweighted and unreduced: weights and denominators belong to whoever calls.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_ELEMENTS = {"cpu": 2**23, "cuda": 2**28}  # logits held at once: 32 MiB on a CPU, 1 GiB on a GPU, in fp32


def chunks(rows: int, vocabulary: int, device: torch.device) -> list[slice]:
    """Slices of 0..rows so short that one chunk's logits stay within CHUNK_ELEMENTS."""
    step = max(1, CHUNK_ELEMENTS.get(device.type, CHUNK_ELEMENTS["cpu"]) // vocabulary)
    return [slice(i, min(i + step, rows)) for i in range(0, rows, step)]


def compute_dtype(hidden: Tensor) -> torch.dtype:
    """Logits are fp32 whatever the model computes in (bf16 logits tie and round); float64 stays float64."""
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def token_nll_definition(hidden: Tensor, head_weight: Tensor, targets: Tensor) -> Tensor:
    """The definition, in float64 with all logits at once: [N, D], [V, D], [N] -> [N]."""
    logits = hidden.double() @ head_weight.double().T
    return -torch.log_softmax(logits, dim=-1).gather(1, targets[:, None]).squeeze(1)


def token_nll(hidden: Tensor, head_weight: Tensor, targets: Tensor) -> Tensor:
    """-log p(target) of every token: [N, D], [V, D], int64 [N] -> fp32 [N] (float64 for float64 input).

    Gradients flow to `hidden` and `head_weight`, right for any upstream gradient. Peak memory is one chunk of
    logits. There is no ignore index: a target outside 0..V-1 is a ValueError.
    """
    assert hidden.ndim == 2 and targets.shape == hidden.shape[:1], (hidden.shape, targets.shape)
    if targets.numel():
        low, high = targets.min().item(), targets.max().item()
        if low < 0 or high >= len(head_weight):
            wrong = low if low < 0 else high
            raise ValueError(f"target id {wrong} is outside the vocabulary of {len(head_weight)} entries; "
                             "use the tokenizer the model was made for")
    return _TokenNLL.apply(hidden, head_weight, targets)


class _TokenNLL(torch.autograd.Function):
    """Chunked over tokens. The last chunk's softmax is kept for backward (bounded by one chunk, and a small batch
    is one chunk); the others are recomputed there."""

    @staticmethod
    def forward(ctx, hidden, head_weight, targets):
        dtype = compute_dtype(hidden)
        nll = hidden.new_empty(len(hidden), dtype=dtype)
        lse = torch.empty_like(nll)
        kept = nll.new_empty(0)
        with torch.autocast(hidden.device.type, enabled=False):
            W = head_weight.to(dtype)
            for part in chunks(len(hidden), len(W), hidden.device):
                logits = hidden[part].to(dtype) @ W.T
                lse[part] = torch.logsumexp(logits, dim=-1)
                nll[part] = lse[part] - logits.gather(1, targets[part, None]).squeeze(1)
                if part.stop == len(hidden) and any(ctx.needs_input_grad):
                    kept = logits.sub_(lse[part, None]).exp_()
        ctx.save_for_backward(hidden, head_weight, targets, lse, kept)
        return nll

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        hidden, head_weight, targets, lse, kept = ctx.saved_tensors
        W = head_weight.to(lse.dtype)
        d_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        d_weight = torch.zeros_like(W) if ctx.needs_input_grad[1] else None
        for part in chunks(len(hidden), len(W), hidden.device):
            h = hidden[part].to(lse.dtype)
            last = part.stop == len(hidden)
            p = kept.clone() if last else (h @ W.T).sub_(lse[part, None]).exp_()
            p.scatter_add_(1, targets[part, None], -torch.ones_like(lse[part, None]))
            p.mul_(upstream[part, None])
            if d_hidden is not None:
                d_hidden[part] = (p @ W).to(hidden.dtype)
            if d_weight is not None:
                d_weight.addmm_(p.T, h)
        return d_hidden, None if d_weight is None else d_weight.to(head_weight.dtype), None
