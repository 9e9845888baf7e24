"""Causal attention over packed sequences: one signature, its float64 definition, and the version that is used.

T packed query tokens, S packed key tokens, H query heads, G key/value heads (H a multiple of G; query head h reads
key/value head h // (H / G)), K head size, B sequences.

Sequence b owns queries cu_seqlens[b]:cu_seqlens[b+1] and keys cu_keys[b]:cu_keys[b+1]. Without a cache the two are the
same. With one, a sequence has more keys than queries, and its queries are the last ones of it: query i of n sees
keys 0 .. L - n + i of its own L keys, and of no other sequence.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from oprd.kernels.backend import use_flash_attention


def attend_definition(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, cu_keys: Tensor | None = None) -> Tensor:
    """What attend() means, one query and one head at a time. Slow on purpose; float64 in, float64 out."""
    cu_keys = cu_seqlens if cu_keys is None else cu_keys
    group = q.shape[1] // k.shape[1]
    out = []
    for b in range(len(cu_seqlens) - 1):
        queries = q[cu_seqlens[b] : cu_seqlens[b + 1]]
        keys, values = k[cu_keys[b] : cu_keys[b + 1]], v[cu_keys[b] : cu_keys[b + 1]]
        before = len(keys) - len(queries)
        for i in range(len(queries)):
            for h in range(q.shape[1]):
                seen = keys[: before + i + 1, h // group]
                weights = torch.softmax(seen @ queries[i, h] * q.shape[-1] ** -0.5, dim=0)
                out.append(weights @ values[: before + i + 1, h // group])
    return torch.stack(out).view_as(q) if out else torch.zeros_like(q)


def attend(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, cu_keys: Tensor | None = None) -> Tensor:
    """Attention output [T, H, K] for q [T, H, K], k and v [S, G, K]; result in q's dtype.

    Work grows with the sum of squared lengths. Where flash-attn is installed its varlen kernel takes all sequences in
    one launch; else it is one fused call per sequence. On a CPU half-precision inputs are
    computed in float32: for 20 sequences of 350 tokens forward and backward took 60 ms in float32, 93 ms in bfloat16,
    and padding them into one batch 86 ms and 121 ms.
    """
    if use_flash_attention(q):
        return _flash(q, k, v, cu_seqlens, cu_seqlens if cu_keys is None else cu_keys)
    lengths = cu_seqlens.diff().tolist()
    key_lengths = lengths if cu_keys is None else cu_keys.diff().tolist()
    assert sum(lengths) == len(q) and sum(key_lengths) == len(k) == len(v), "cu_seqlens must cover every token"
    dtype = torch.float32 if q.device.type == "cpu" and q.dtype.itemsize < 4 else q.dtype
    with torch.autocast(q.device.type, enabled=False):
        parts = zip(
            q.to(dtype).split(lengths), k.to(dtype).split(key_lengths), v.to(dtype).split(key_lengths), strict=True
        )
        out = [_one(queries, keys, values) for queries, keys, values in parts]
    return torch.cat(out).to(q.dtype) if out else torch.zeros_like(q)


def _one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One sequence: q [n, H, K], k and v [L, G, K] with L >= n."""
    n, length = len(q), len(k)
    # is_causal aligns the first query with the first key, so queries behind a cached prefix need their mask spelled out
    mask = None if n == length else torch.ones(n, length, dtype=torch.bool, device=q.device).tril(length - n)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)


def _flash(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, cu_keys: Tensor) -> Tensor:
    """All sequences at once by flash-attn (2.1 or later: its causal mask aligns the last query with the last key)."""
    from flash_attn import flash_attn_varlen_func

    longest = lambda cu: int(cu.diff().max()) if len(cu) > 1 else 0  # noqa: E731
    return flash_attn_varlen_func(q, k.to(q.dtype), v.to(q.dtype), cu_seqlens.to(q.device, torch.int32),
                                  cu_keys.to(q.device, torch.int32), longest(cu_seqlens), longest(cu_keys), causal=True)
