"""The experts of a mixture: every token through the few it was routed to.

T tokens, D hidden, E experts of width F, k experts a token, P = T k routes.

    y_t = sum_j weight_tj down_e (silu(gate_e x_t) * up_e x_t)      e = chosen_tj
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from oprd.kernels.backend import use_triton


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
    """y [T, D] in x's dtype for x [T, D], gate_up [E, 2F, D] (gate rows first), down [E, D, F], chosen int64 and weight
    [T, k].

    Routes are sorted by expert once; each expert that has any is then two products on a slice, the weight multiplied in
    between them, where a route is F wide. Kept for the backward pass, a route: its input, gate, up, silu(gate), and
    their product before and after the weight (D + 5 F numbers). An expert without a token gets a zero gradient.
    """
    if use_triton(x):
        from oprd.kernels import experts_triton

        return experts_triton.run_experts(x, gate_up, down, chosen, weight)
    order = chosen.flatten().argsort(stable=True)
    token = order // chosen.shape[1]
    counts = chosen.flatten().bincount(minlength=len(gate_up)).tolist()
    # idle experts cost no call; with no token at all one empty product still ties the weights to the gradient
    busy = [e for e, count in enumerate(counts) if count] or [0]
    sizes = [counts[e] for e in busy]
    inputs = x.index_select(0, token).split(sizes)
    scales = weight.flatten().index_select(0, order).unsqueeze(1).split(sizes)
    # unbind's gradient is one stack, zeros for what was not used; gate_up[e] would make one [E, 2F, D] an expert
    gate_up, down = gate_up.unbind(), down.unbind()
    out = []
    for e, rows, scale in zip(busy, inputs, scales, strict=True):
        inner = _swiglu(F.linear(rows, gate_up[e]))
        out.append(F.linear(inner * scale.to(inner.dtype), down[e]))
    # back in the order of the routes, token t's k routes are neighbours: a sum without atomics, the same every time
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return torch.cat(out).index_select(0, place).unflatten(0, chosen.shape).sum(1).to(x.dtype)


def _swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
