"""Logits of a linear head, a tile at a time: so many tokens by so many entries of the vocabulary, in one workspace.

Shapes: c tokens, D hidden, V vocabulary, w entries of one tile.
"""

from __future__ import annotations

from typing import Iterator

import torch
from torch import Tensor

TILE = {"cpu": (512, 8192), "cuda": (2048, 8192)}  # tokens x entries whose logits are held at once, per model
GROUP = 32  # entries whose maximum stands for them while candidates are sought
WEIGHT_ELEMENTS = 2**23  # of a head that is copied to float32 tile by tile: 32 MiB


def compute_dtype(hidden: Tensor) -> torch.dtype:
    """Logits are fp32 whatever the model computes in (bf16 logits tie and round); float64 stays float64."""
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def rows_of(tokens: int, device: torch.device) -> list[slice]:
    """Slices of 0..tokens, each one tile high."""
    step = TILE.get(device.type, TILE["cpu"])[0]
    return [slice(i, min(i + step, tokens)) for i in range(0, tokens, step)]


def tiles(W: Tensor, dtype: torch.dtype) -> Iterator[slice]:
    """Slices of the vocabulary, each one tile wide; narrower where the weights have to be copied to `dtype`."""
    width = TILE.get(W.device.type, TILE["cpu"])[1]
    if W.dtype != dtype:
        width = min(width, max(GROUP, WEIGHT_ELEMENTS // max(1, W.shape[1]) // GROUP * GROUP))
    return (slice(i, min(i + width, len(W))) for i in range(0, len(W), width))


class Product:
    """h @ W[tile].T for one tile after the other, in one workspace [c, w]; w is a multiple of GROUP, filled up by -inf.

    The logits are fp32 (fp64 for fp64): of half-precision weights by a product that accumulates and returns fp32, on a
    CPU by copying the tile of weights. With `rounded`, the CPU's product in the weights' own dtype, four times as fast
    and rounded to it.
    """

    def __init__(self, h: Tensor, W: Tensor, dtype: torch.dtype, rounded: bool = False):
        self.W, self.dtype = W, dtype
        self.wide = W.dtype != dtype and W.is_cuda
        self.own = W.dtype if self.wide or rounded else dtype
        self.h = h.to(self.own)
        self.space = h.new_empty(0, dtype=dtype)

    def __call__(self, tile: slice) -> Tensor:
        count, width = len(self.h), -(-(tile.stop - tile.start) // GROUP) * GROUP
        if self.space.numel() < count * width:
            self.space = self.h.new_empty(count * width, dtype=self.dtype)
        z = self.space[: count * width].view(count, width)
        out = z[:, : tile.stop - tile.start]
        W = self.W[tile]
        if self.wide:
            out.copy_(torch.mm(self.h, W.T, out_dtype=self.dtype))
        elif self.own != self.dtype:
            out.copy_(self.h @ W.T)
        else:
            torch.mm(self.h, W.to(self.own).T, out=out)
        z[:, tile.stop - tile.start :] = float("-inf")
        return z
