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
from torch.autograd.function import once_differentiable

from oprd.kernels.backend import use_fla

# As in transformers, so that float32 rounds alike. For K <= 64, 32 was 1.1 to 1.4 times as fast and, where decays are
# strong, twice as near to float64, but several times further from transformers.
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

    Computed in float32 (float64 for float64), in chunks of C = `chunk` tokens, or of the longest sequence if that is
    shorter; sequences share no chunk. Gradients for all inputs, once differentiable; besides the inputs C + K V / C
    numbers per token and value head are kept for them.
    """
    if use_fla(v) and chunk == CHUNK:
        from oprd.kernels import delta_rule_fla

        return delta_rule_fla.gated_delta_rule(q, k, v, g, beta, cu_seqlens, states)
    assert v.shape[1] % q.shape[1] == 0, "the number of value heads must be a multiple of the number of key heads"
    assert cu_seqlens[-1] == len(v), "cu_seqlens must cover every token"
    wide = torch.promote_types(v.dtype, torch.float32)
    layout = _Layout(cu_seqlens, chunk, v.device)
    if states is None:
        states = v.new_zeros(len(cu_seqlens) - 1, v.shape[1], q.shape[2], v.shape[2], dtype=wide)
    return _Chunked.apply(q, k, v, g, beta, states.to(wide), layout)


class _Chunked(torch.autograd.Function):
    """The chunked form and its gradient. All chunks of all heads are one batch of N = M H; dx is the gradient of x."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor,
                layout: _Layout) -> tuple[Tensor, Tensor]:
        with torch.autocast(v.device.type, enabled=False):
            x = _Chunks(layout, q, k, v, g, beta, states.dtype)
            eye = torch.eye(x.v.shape[1], dtype=x.v.dtype, device=v.device).expand_as(x.between)
            # what is on the diagonal is not read
            inverse = torch.linalg.solve_triangular(x.kk * x.beta, eye, upper=False, unitriangular=True)
            d = torch.empty_like(x.v)
            S = states.index_select(0, layout.sorted)
            starts = S.new_empty(len(d), *S.shape[2:])
            for here, count in layout.steps(v.shape[1]):
                now = S[:count].flatten(0, 1)
                starts[here] = now
                wanted = torch.baddbmm(x.v[here], x.fallen_k[here], now, alpha=-1)
                torch.bmm(inverse[here], wanted.mul_(x.beta[here]), out=d[here])
                now.mul_(x.whole[here]).baddbmm_(x.left_k[here].mT, d[here])
            out = torch.bmm(x.fallen_q, starts).baddbmm_(x.qk, d)
            ctx.save_for_backward(q, k, v, g, beta, inverse, starts)
            ctx.layout = layout
            return layout.gather(out, v.shape[1]).to(v.dtype), S.index_select(0, layout.order)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out: Tensor, d_after: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, inverse, starts = ctx.saved_tensors
        layout, heads = ctx.layout, d_out.shape[1]
        with torch.autocast(d_out.device.type, enabled=False):
            x = _Chunks(layout, *inputs, starts.dtype)
            do = layout.spread(d_out, starts.dtype)
            wanted = torch.baddbmm(x.v, x.fallen_k, starts, alpha=-1)
            d = inverse @ (wanted * x.beta)
            # from the last chunk to the first; dr is the gradient of the system's right side
            dd, dr, dv, d_ends = x.qk.mT @ do, torch.empty_like(d), torch.empty_like(d), torch.empty_like(starts)
            d_starts = x.fallen_q.mT @ do
            dS = d_after.to(starts.dtype).index_select(0, layout.sorted)
            for here, count in reversed(layout.steps(heads)):
                now = dS[:count].flatten(0, 1)
                d_ends[here] = now
                torch.bmm(inverse[here].mT, dd[here].baddbmm_(x.left_k[here], now), out=dr[here])
                torch.mul(dr[here], x.beta[here], out=dv[here])
                now.mul_(x.whole[here]).add_(d_starts[here]).baddbmm_(x.fallen_k[here].mT, dv[here], alpha=-1)
            d_beta = wanted.mul_(dr).sum(-1, keepdim=True)
            d_whole = (d_ends * starts).sum((1, 2)).mul_(x.whole[:, 0, 0])
            dq, dk, dg, d_beta_too = x.backward(
                dqk=do @ d.mT, dA=(dr @ d.mT).neg_(), d_fallen_q=do @ starts.mT, d_fallen_k=(dv @ starts.mT).neg_(),
                d_left_k=d @ d_ends.mT, d_whole=d_whole)
            q, k, v, g, beta = inputs
            return (_unit_backward(q, layout.gather(dq, q.shape[1]) * q.shape[2] ** -0.5),
                    _unit_backward(k, layout.gather(dk, k.shape[1])),
                    layout.gather(dv, heads).to(v.dtype), layout.gather(dg, heads).squeeze(2).to(g.dtype),
                    layout.gather(d_beta.add_(d_beta_too), heads).squeeze(2).to(beta.dtype),
                    dS.index_select(0, layout.order), None)


class _Chunks:
    """The inputs in chunks and what both directions make of them. q, k [M G, C, K] (unit vectors; q scaled),
    v [N, C, V], beta [N, C, 1]; and per value head, with the cumulated decays G_i:

    fallen_q, fallen_k [N, C, K]   exp(G_i) q_i, exp(G_i) k_i          left_k [N, C, K]  exp(G_C - G_j) k_j
    qk, kk             [N, C, C]   exp(G_i - G_j) times q_i.k_j, k_i.k_j for j <= i, else 0    whole [N, 1, 1]  exp(G_C)
    """

    def __init__(self, layout: _Layout, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, wide: torch.dtype):
        self.repeat = v.shape[1] // q.shape[1]
        self.q = layout.spread(_unit(q.to(wide)) * q.shape[2] ** -0.5, wide)
        self.k = layout.spread(_unit(k.to(wide)), wide)
        self.v, self.beta = layout.spread(v, wide), layout.spread(beta[..., None], wide)
        total = layout.spread(g[..., None], wide).cumsum(1)
        last = total[:, -1:]
        self.fall, self.rest, self.whole = total.exp(), (last - total).exp(), last.exp()
        # masked before exp(), which would overflow above the diagonal, where differences are positive
        above = torch.ones(total.shape[1], total.shape[1], dtype=torch.bool, device=total.device).triu(1)
        self.between = (total - total.mT).masked_fill_(above, float("-inf")).exp_()
        self.fallen_q, self.fallen_k, self.left_k = (
            self.each(a, b) for a, b in ((self.q, self.fall), (self.k, self.fall), (self.k, self.rest)))
        self.qk, self.kk = (self.each(a @ self.k.mT, self.between) for a in (self.q, self.k))

    def each(self, x: Tensor, factor: Tensor) -> Tensor:
        """x [M G, ...] of a key head times factor [N, ...] of each of its value heads: [N, ...]."""
        return (x.unsqueeze(1) * factor.unflatten(0, (-1, self.repeat))).flatten(0, 1)

    def shared(self, x: Tensor) -> Tensor:
        """[N, ...] summed over the value heads of a key head: [M G, ...]."""
        return x.unflatten(0, (-1, self.repeat)).sum(1) if self.repeat > 1 else x

    def backward(self, dqk: Tensor, dA: Tensor, d_fallen_q: Tensor, d_fallen_k: Tensor, d_left_k: Tensor,
                 d_whole: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """dq, dk [M G, C, K], dg, d_beta [N, C, 1] from the gradients of the products above; A is beta kk below the
        diagonal."""
        dA.tril_(-1)
        through = dA * self.kk
        d_beta = through.sum(-1, keepdim=True)
        through.mul_(self.beta).addcmul_(dqk, self.qk)  # the gradient of the exponents G_i - G_j
        left = (d_left_k * self.left_k).sum(-1, keepdim=True)
        d_total = through.sum(-1, keepdim=True) - through.sum(-2).unsqueeze(2) - left
        d_total += (d_fallen_q * self.fallen_q).addcmul_(d_fallen_k, self.fallen_k).sum(-1, keepdim=True)
        d_total[:, -1, 0] += left.sum((1, 2)) + d_whole
        dg = d_total.flip(1).cumsum(1).flip(1)
        dqk, dkk = self.shared(dqk.mul_(self.between)), self.shared(dA.mul_(self.between).mul_(self.beta))
        dq = self.shared(d_fallen_q.mul_(self.fall)).baddbmm_(dqk, self.k)
        dk = self.shared(d_fallen_k.mul_(self.fall).addcmul_(d_left_k, self.rest))
        dk.baddbmm_(dqk.mT, self.q).baddbmm_(dkk + dkk.mT, self.k)
        return dq, dk, dg, d_beta


class _Layout:
    """Chunks of all sequences in the order in which the scan needs them: first the first chunk of every sequence,
    longest sequences first, then every second chunk, and so on; so chunk number c of all who have one is one slice."""

    def __init__(self, cu_seqlens: Tensor, chunk: int, device: torch.device):
        cu = cu_seqlens.cpu().numpy().astype(np.int64)
        lengths = np.diff(cu)
        chunk = max(1, min(chunk, lengths.max(initial=0)))
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
        self.token, self.padding, self.place, self.order, self.sorted = (
            torch.from_numpy(x).to(device)
            for x in (np.where(inside, token, 0).ravel(), np.flatnonzero(~inside), place, np.argsort(order), order))

    def spread(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """[T, H, ...] -> [M H, C, ...]; zeros where a sequence ends inside a chunk."""
        rows = x.index_select(0, self.token).to(dtype).index_fill_(0, self.padding, 0)
        return rows.unflatten(0, (-1, self.chunk)).transpose(1, 2).flatten(0, 1).contiguous()

    def gather(self, x: Tensor, heads: int) -> Tensor:
        """[M H, C, ...] -> [T, H, ...]"""
        return x.unflatten(0, (-1, heads)).transpose(1, 2).flatten(0, 1).index_select(0, self.place)

    def steps(self, heads: int) -> list[tuple[slice, int]]:
        """For chunk number 0, 1, ...: where it lies in [M H, ...], and how many sequences have one."""
        ends = np.cumsum([0, *self.widths]) * heads
        return [(slice(a, b), n) for a, b, n in zip(ends.tolist(), ends[1:].tolist(), self.widths)]


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _unit_backward(x: Tensor, d_unit: Tensor) -> Tensor:
    """The gradient of x, in its dtype, from that of _unit(x): r d - u (u.d) r, where u = r x."""
    wide = x.to(d_unit.dtype)
    r = torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)
    unit = wide * r
    return torch.addcmul(d_unit, unit, (unit * d_unit).sum(-1, keepdim=True), value=-1).mul_(r).to(x.dtype)


def gated_delta_rule_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor) -> Tensor:
    """One token for each of N rows: q, k [N, G, K], v [N, H, V], g and beta [N, H] -> o [N, H, V] in v's dtype.

    states [N, H, K, V] are updated in place. They are what costs: q and k read them together, before d is added, so
    o = S^T q + (q.k) d.
    """
    wide, repeat = states.dtype, v.shape[1] // q.shape[1]
    qk = _unit(torch.stack([q, k], dim=2).to(wide))
    if repeat > 1:
        qk = qk.repeat_interleave(repeat, dim=1)
    q, k = qk.unbind(2)
    states.mul_(g.to(wide).exp()[..., None, None])
    read, known = torch.matmul(qk, states).unbind(2)
    d = (v.to(wide) - known).mul_(beta.to(wide)[..., None])
    states.addcmul_(k[..., None], d.unsqueeze(2))
    return torch.addcmul(read, (q * k).sum(-1, keepdim=True), d).mul_(qk.shape[-1] ** -0.5).to(v.dtype)
