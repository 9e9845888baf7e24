"""The gated delta rule over packed sequences: its token-by-token definition, the chunked form, and the decoding step.

T packed tokens, B sequences, G key heads of size K, H value heads of size V (H a multiple of G; value head h reads key
head h // (H / G)), M chunks of C tokens, N rows being decoded.

Per value head a state S [K, V], with the log decay g <= 0 and the step beta of each token, and q, k of unit length:

    S <- exp(g) S;    S <- S + k (beta (v - S^T k))^T;    o = S^T q / sqrt(K)

(Gated DeltaNet, arXiv 2412.06464.) Inside a chunk that starts from S0, with the cumulated decays G_i = g_1 + .. + g_i
and d_i = beta_i (v_i - S^T k_i) what token i adds,

    (I + A) d = beta (v - exp(G) k S0)     A_ij = beta_i exp(G_i - G_j) k_i.k_j  for j < i
    o_i = exp(G_i) q_i S0 + sum_{j <= i} exp(G_i - G_j) q_i.k_j d_j
    S_C = exp(G_C) S0 + sum_j exp(G_C - G_j) k_j d_j^T

so only d and S go from chunk to chunk; everything else is one batched product over all chunks of all sequences.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

CHUNK = 64


def gated_delta_rule_definition(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor,
                                states: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """What gated_delta_rule() means, token by token, in float64. Slow on purpose."""
    heads, repeat = v.shape[1], v.shape[1] // q.shape[1]
    q, k = (_unit(x.double()).repeat_interleave(repeat, dim=1) for x in (q, k))
    v, g, beta = v.double(), g.double(), beta.double()
    out, after = [], []
    for b, (start, end) in enumerate(zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:])):
        S = v.new_zeros(heads, k.shape[2], v.shape[2]) if states is None else states[b].double()
        for t in range(start, end):
            S = S * g[t].exp()[:, None, None]
            d = beta[t, :, None] * (v[t] - torch.einsum("hkv,hk->hv", S, k[t]))
            S = S + torch.einsum("hk,hv->hkv", k[t], d)
            out.append(torch.einsum("hkv,hk->hv", S, q[t]) * k.shape[2] ** -0.5)
        after.append(S)
    return torch.stack(out) if out else torch.zeros_like(v), torch.stack(after)


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor,
                     states: Tensor | None = None, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """o [T, H, V] in v's dtype, and the states [B, H, K, V] after each sequence, for q, k [T, G, K] of any length (they
    are made unit vectors here), v [T, H, V], g and beta [T, H], and the states before (default: zeros).

    Computed in float32 (float64 for float64). Sequences share no chunk. Kept for the backward pass, per token and value
    head: about 5 C + 4 K + 4 V numbers, and per chunk a state.
    """
    dtype, wide = v.dtype, torch.promote_types(v.dtype, torch.float32)
    with torch.autocast(v.device.type, enabled=False):
        layout = _Layout(cu_seqlens, chunk, v.device)
        repeat = v.shape[1] // q.shape[1]
        # q, k: [M, G, 1, C, K]; v: [M, G, R, C, V]; g, beta: [M, G, R, C, 1]
        q, k = (layout.spread(_unit(x.to(wide))).transpose(1, 2).unsqueeze(2) for x in (q, k))
        v, g, beta = (layout.spread(x.to(wide)).unflatten(2, (-1, repeat)) for x in (v, g[..., None], beta[..., None]))
        v, g, beta = (x.permute(0, 2, 3, 1, 4) for x in (v, g, beta))
        total = g.cumsum(3)  # G_i
        decay = _lower(total - total.transpose(3, 4)).exp()  # exp(G_i - G_j) for j <= i, else 0
        scaled_k = k * (beta * total.exp())
        kk = k @ k.transpose(3, 4)
        rhs = torch.cat([v * beta, scaled_k.expand(*v.shape[:4], -1)], dim=-1)
        # of I + A only what is below the diagonal is read
        solved = torch.linalg.solve_triangular(kk * decay * beta, rhs, upper=False, unitriangular=True)
        u, w = solved.split([v.shape[-1], k.shape[-1]], dim=-1)  # d = u - w S0
        last = total[:, :, :, -1:]
        left = k * (last - total).exp()  # exp(G_C - G_j) k_j
        added, starts, after = layout.scan(*(x.flatten(1, 2) for x in (u, w, left, last.exp())), states)
        seen = torch.matmul(q * total.exp(), starts.unflatten(1, (-1, repeat)))
        out = torch.baddbmm(_batch(seen), _batch(q @ k.transpose(3, 4) * decay), added.flatten(0, 1))
        out = out.view(seen.shape) * k.shape[-1] ** -0.5
        return layout.gather(out.permute(0, 3, 1, 2, 4).flatten(2, 3)).to(dtype), after


class _Layout:
    """Chunks of all sequences in the order in which the scan needs them: first the first chunk of every sequence,
    longest sequences first, then every second chunk, and so on; so chunk number c of all who have one is one slice."""

    def __init__(self, cu_seqlens: Tensor, chunk: int, device: torch.device):
        cu = cu_seqlens.cpu().numpy().astype(np.int64)
        lengths = np.diff(cu)
        order = np.argsort(-lengths, kind="stable")
        chunks = -(-lengths[order] // chunk)
        self.widths = [int((chunks > c).sum()) for c in range(chunks.max(initial=0))]
        starts = np.concatenate([cu[:-1][order[:n]] + c * chunk for c, n in enumerate(self.widths)] or [cu[:0]])
        ends = np.concatenate([cu[1:][order[:n]] for n in self.widths] or [cu[:0]])
        token = starts[:, None] + np.arange(chunk)
        inside = token < ends[:, None]
        place = np.empty(cu[-1], dtype=np.int64)
        place[token[inside]] = np.flatnonzero(inside)
        self.chunk = chunk
        self.token, self.place, self.order, self.sorted = (
            torch.from_numpy(x).to(device)
            for x in (np.where(inside, token, cu[-1]).ravel(), place, np.argsort(order), order))

    def spread(self, x: Tensor) -> Tensor:
        """[T, ...] -> [M, C, ...]; zeros where a sequence ends inside a chunk."""
        padded = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
        return padded.index_select(0, self.token).unflatten(0, (-1, self.chunk))

    def gather(self, x: Tensor) -> Tensor:
        """[M, C, ...] -> [T, ...]"""
        return x.flatten(0, 1).index_select(0, self.place)

    def scan(self, u: Tensor, w: Tensor, left: Tensor, decay: Tensor, states: Tensor | None
             ) -> tuple[Tensor, Tensor, Tensor]:
        """From chunk to chunk: d = u - w S; S <- decay S + left^T d. All [M, H, ...].

        Returns d and the S each chunk started from, [M, H, C, V] and [M, H, K, V], and the last S of every sequence,
        [B, H, K, V] in the order of the sequences.
        """
        shape = (len(self.order), u.shape[1], w.shape[3], u.shape[3])
        S = u.new_zeros(shape) if states is None else states.to(u.dtype).index_select(0, self.sorted)
        added, starts, finished = [], [], []
        for n, *parts in zip(self.widths, *(x.split(self.widths) for x in (u, w, left, decay))):
            finished.append(S[n:])
            starts.append(S := S[:n])
            u_c, w_c, left_c, decay_c = parts
            added.append(u_c - w_c @ S)
            S = decay_c * S + left_c.transpose(2, 3) @ added[-1]
        after = torch.cat([S, *reversed(finished)]).index_select(0, self.order)
        empty = u.new_zeros(0, *shape[1:])
        return torch.cat(added or [u]), torch.cat(starts or [empty]), after


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _lower(x: Tensor) -> Tensor:
    """-inf above the diagonal, before exp(): the differences there are positive and could overflow."""
    above = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
    return x.masked_fill(above, float("-inf"))


def _batch(x: Tensor) -> Tensor:
    """All but the last two dims as one."""
    return x.flatten(0, -3)


def gated_delta_rule_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor) -> Tensor:
    """One token for each of N rows: q, k [N, G, K], v [N, H, V], g and beta [N, H] -> o [N, H, V] in v's dtype.

    states [N, H, K, V] are updated in place.
    """
    wide, repeat = states.dtype, v.shape[1] // q.shape[1]
    q, k = (_unit(x.to(wide)).repeat_interleave(repeat, dim=1) for x in (q, k))
    states.mul_(g.to(wide).exp()[..., None, None])
    d = (v.to(wide) - torch.matmul(k.unsqueeze(2), states).squeeze(2)) * beta.to(wide)[..., None]
    states.addcmul_(k[..., None], d.unsqueeze(2))
    return (torch.matmul(q.unsqueeze(2), states).squeeze(2) * k.shape[-1] ** -0.5).to(v.dtype)
