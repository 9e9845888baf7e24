"""gated_delta_rule by flash-linear-attention's chunk kernels, for a GPU on which that package is installed.

Its kernels rather than ours: they keep a chunk's state and triangular solve on the chip, and forward and backward are
what its authors tune GPU by GPU (a third of FlashAttention-2's time at 8,192 tokens on a GB200, by their table), and a
first version of our own would reach a part of that. Shapes as in delta_rule.py; only the layout differs, theirs
being one batch [1, T, ...] with cu_seqlens, and q and k repeated for the value heads that share them.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor,
                     states: Tensor | None = None) -> tuple[Tensor, Tensor]:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    repeat = v.shape[1] // q.shape[1]
    if repeat > 1:
        q, k = (x.repeat_interleave(repeat, dim=1) for x in (q, k))
    out, after = chunk_gated_delta_rule(
        q.to(v.dtype)[None], k.to(v.dtype)[None], v[None], g.float()[None], beta.to(v.dtype)[None],
        scale=q.shape[2] ** -0.5, initial_state=None if states is None else states.float(), output_final_state=True,
        use_qk_l2norm_in_kernel=True, cu_seqlens=cu_seqlens.long())
    return out[0], after
