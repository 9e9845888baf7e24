"""The experts of a mixture: every token through the few it was routed to.

T tokens, D hidden, E experts of width F, k experts a token, P = T k routes.

    y_t = sum_j weight_tj down_e (silu(gate_e x_t) * up_e x_t)      e = chosen_tj
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def run_experts_definition(x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
    """What run_experts() means, route by route, in float64. Slow on purpose."""
    x, gate_up, down, weight = x.double(), gate_up.double(), down.double(), weight.double()
    out = []
    for t in range(len(x)):
        total = torch.zeros_like(x[t]) + 0.0 * (gate_up.sum() + down.sum())  # every expert has a gradient, maybe zero
        for e, w in zip(chosen[t].tolist(), weight[t]):
            gate, up = (gate_up[e] @ x[t]).chunk(2)
            total = total + w * (down[e] @ (gate * torch.sigmoid(gate) * up))
        out.append(total)
    return torch.stack(out) if out else x


def run_experts(x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
    """y [T, D] for x [T, D], gate_up [E, 2F, D] (gate rows first), down [E, D, F], chosen int64 and weight [T, k].

    Routes are sorted by expert once; each expert is then two products on a slice. Kept for the backward pass, a route:
    its input, gate and up values, their product, and its output (2 D + 4 F numbers). An expert without a token gets a
    zero gradient.
    """
    order = chosen.flatten().argsort(stable=True)
    token = order // chosen.shape[1]
    counts = chosen.flatten().bincount(minlength=len(gate_up)).tolist()
    out = [F.linear(_swiglu(F.linear(part, wide)), narrow) for part, wide, narrow in
           zip(x.index_select(0, token).split(counts), gate_up, down, strict=True)]
    routed = torch.cat(out)
    routed = routed * weight.flatten().index_select(0, order).unsqueeze(1).to(routed.dtype)
    # back in the order of the routes, token t's k routes are neighbours: a sum without atomics, the same every time
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return routed.index_select(0, place).unflatten(0, chosen.shape).sum(1).to(x.dtype)


def _swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
