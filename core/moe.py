"""Feed-forwards: the dense SwiGLU, and the mixture of experts with its router and load-balancing loss.

T tokens, D hidden, E experts, k experts a token, L layers that are mixtures, B packed sequences.

Over a mesh a dense feed-forward is cut over tp (its width). A mixture's experts are dealt whole to ep: a token's routes
travel to the ranks of their experts and back, so every rank routes its own tokens.
"""

from __future__ import annotations

from typing import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oprd.core.architecture import ModelConfig
from oprd.kernels.experts import run_experts
from oprd.parallel.collectives import gather_rows, sum_over
from oprd.parallel.experts import split_experts
from oprd.parallel.layers import ColumnLinear, Cut, RowLinear, head_cut
from oprd.parallel.mesh import Axis, Mesh


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)), [T, D] -> [T, D]. `routers` is there for the signature it shares with MoE."""

    def __init__(self, hidden: int, intermediate: int, mesh: Mesh = Mesh()):
        super().__init__()
        self.tp = mesh.tp
        self.gate_proj = ColumnLinear(hidden, head_cut(mesh, "intermediate_size", (intermediate, 1)))
        self.up_proj = ColumnLinear(hidden, head_cut(mesh, "intermediate_size", (intermediate, 1)))
        self.down_proj = RowLinear(head_cut(mesh, "intermediate_size", (intermediate, 1), dim=1), hidden)

    def forward(self, x: Tensor, routers: list[Tensor] | None = None) -> Tensor:
        x = gather_rows(x, self.tp)
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    """The weights of all experts of this rank: gate_up_proj [E, 2F, D] (gate rows first) and down_proj [E, D, F]."""

    def __init__(self, config: ModelConfig, mesh: Mesh = Mesh()):
        super().__init__()
        d, f = config.hidden_size, config.moe_intermediate_size
        e = mesh.ep.share(config.num_experts, "num_experts")
        cut = Cut(mesh.ep, mesh.expert_replicas, (config.num_experts,))
        self.cuts = {"gate_up_proj": cut, "down_proj": cut}
        self.gate_up_proj = nn.Parameter(torch.empty(e, 2 * f, d))
        self.down_proj = nn.Parameter(torch.empty(e, d, f))


class MoE(nn.Module):
    """A mixture: each token goes to the k experts its router likes best, and to the shared expert if there is one."""

    run = staticmethod(run_experts)

    def __init__(self, config: ModelConfig, mesh: Mesh = Mesh()):
        super().__init__()
        self.top_k, self.renormalise, self.ep = config.num_experts_per_tok, config.norm_topk_prob, mesh.ep
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = Experts(config, mesh)
        self.shared_expert = None
        if config.shared_expert_intermediate_size:
            self.shared_expert = MLP(config.hidden_size, config.shared_expert_intermediate_size, mesh)
            self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False)

    def forward(self, x: Tensor, routers: list[Tensor] | None = None) -> Tensor:
        """x [T, D] -> [T, D]; appends the router logits [T, E] to `routers`."""
        logits = self.gate(x)
        if routers is not None:
            routers.append(logits)
        weight, chosen = _probabilities(logits).topk(self.top_k, dim=-1)
        if self.renormalise:
            weight = weight / weight.sum(-1, keepdim=True)
        weights = self.experts.gate_up_proj, self.experts.down_proj
        out = split_experts(self.run, x, *weights, chosen, weight.to(x.dtype), self.ep)
        if self.shared_expert is not None:
            out = out + torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        return out


def balance_loss(router_logits: Sequence[Tensor], cu_seqlens: Tensor, top_k: int,
                 sequence: Axis = Axis("sequence")) -> Tensor:
    """The load-balancing loss of every sequence by itself, [B]: E sum_e f_e p_e over its tokens in all layers
    (router_logits: L of [T, E]), f_e how many of its k choices a token gives to e on average, p_e its mean probability.

    Even routing gives k. For one sequence it is transformers' load_balancing_loss_func (Switch, arXiv 2101.03961), with
    the softmax in float32 at least; taken sequence by sequence it does not depend on what shares a batch.
    A sequence without tokens gives 0. sequence: the ranks that have the tokens, each an equal part of them (padded).
    """
    (tokens, experts), device = router_logits[0].shape, router_logits[0].device
    lengths = cu_seqlens.diff().to(device)
    owner = torch.arange(len(lengths), device=device).repeat_interleave(lengths)
    owner = owner[sequence.rank * tokens : (sequence.rank + 1) * tokens]  # without the padding behind the last token
    router_logits = [logits[: len(owner)] for logits in router_logits]
    f_sum = p_sum = 0.0
    for logits in router_logits:  # a layer at a time: only its p [T, E] is kept for the backward pass
        p = _probabilities(logits)
        chosen = torch.zeros_like(p).scatter_(1, p.topk(top_k, dim=1).indices, 1.0)
        f_layer, p_layer = (p.new_zeros(len(lengths), experts).index_add_(0, owner, rows) for rows in (chosen, p))
        f_sum, p_sum = f_sum + f_layer, p_sum + p_layer
    f_sum, p_sum = sum_over(f_sum, sequence), sum_over(p_sum, sequence)
    rows = (len(router_logits) * lengths).clamp(min=1).unsqueeze(1)
    return experts * (f_sum / rows * (p_sum / rows)).sum(1)


def balance_loss_definition(router_logits: Sequence[Tensor], cu_seqlens: Tensor, top_k: int) -> Tensor:
    """What balance_loss() means, in float64, one sequence and expert at a time. Slow on purpose."""
    losses = []
    for start, end in zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:]):
        rows = [torch.softmax(logits[t].double(), -1) for logits in router_logits for t in range(start, end)]
        total = torch.zeros((), dtype=torch.float64)
        for e in range(router_logits[0].shape[1]):
            share = sum(e in row.topk(top_k).indices.tolist() for row in rows) / max(1, len(rows))
            total = total + share * sum(row[e] for row in rows) / max(1, len(rows))
        losses.append(router_logits[0].shape[1] * total)
    return torch.stack(losses)


def _probabilities(logits: Tensor) -> Tensor:
    """Softmax over the experts, in float32 or wider."""
    return torch.softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))
