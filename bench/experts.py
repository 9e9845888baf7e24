"""A mixture-of-experts layer against transformers' block and a loop of masks, as ratios in one run on this CPU.

    python bench/experts.py [threads]

All sides hold the same weights and are checked to agree first. `masks` looks for each expert's tokens in all choices,
as a first version would; `eager` and `grouped_mm` are Qwen3MoeSparseMoeBlock of transformers with either way to run its
experts; `products` are two dense products of as many FLOPs as the routes need, and nothing around them. Training is
forward and backward of the whole layer, decoding forward alone. Sides take turns and the fastest round of each counts,
by the process's CPU time. Needs transformers (the `test` extra). About 20 s on one core.
"""

import copy
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from oprd.core.architecture import ModelConfig  # noqa: E402
from oprd.core.moe import MoE  # noqa: E402

ROUNDS = 12
# what, tokens, hidden, expert width, experts, experts a token
SIZES = [("train", 2048, 256, 128, 32, 4), ("train", 512, 256, 64, 128, 8),
         ("decode", 16, 256, 64, 128, 8), ("decode", 1, 256, 64, 128, 8)]


def masks(layer: MoE, x: Tensor) -> Tensor:
    """The layer without sorting: every expert looks for its tokens among all choices."""
    weight, chosen = layer.gate(x).softmax(-1).topk(layer.top_k, dim=-1)
    weight = weight / weight.sum(-1, keepdim=True)
    out = torch.zeros_like(x)
    for e, (wide, narrow) in enumerate(zip(layer.experts.gate_up_proj, layer.experts.down_proj)):
        token, place = (chosen == e).nonzero(as_tuple=True)
        gate, up = (x[token] @ wide.T).chunk(2, dim=-1)
        y = (torch.nn.functional.silu(gate) * up) @ narrow.T
        out = out.index_add(0, token, y * weight[token, place, None])
    return out


def block_of(layer: MoE, config: ModelConfig, implementation: str):
    """transformers' block with copies of the layer's weights, as a function of x [T, D]."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    theirs = Qwen3MoeConfig(**{name: getattr(config, name) for name in (
        "hidden_size", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")})
    theirs._experts_implementation = implementation
    block = Qwen3MoeSparseMoeBlock(theirs)
    block.load_state_dict(copy.deepcopy(layer.state_dict()))

    def run(x: Tensor) -> Tensor:
        out = block(x.unsqueeze(0))
        return (out[0] if isinstance(out, tuple) else out).view(x.shape)

    return run


def once(side, x: Tensor, training: bool) -> float:
    """Seconds of one round."""
    start = time.process_time()
    with torch.set_grad_enabled(training):
        y = side(x)
    if training:
        y.backward(torch.ones_like(y))
    return time.process_time() - start


def main() -> None:
    torch.set_num_threads(int(sys.argv[1]) if len(sys.argv) > 1 else torch.get_num_threads())
    torch.manual_seed(0)
    print(f"{torch.get_num_threads()} threads; times in ms, ratio = the other side / ours")
    for what, T, D, width, E, k in SIZES:
        config = ModelConfig(vocab_size=1, hidden_size=D, intermediate_size=1, num_hidden_layers=1,
                             num_attention_heads=1, num_key_value_heads=1, head_dim=2, model_type="qwen3_moe",
                             num_experts=E, num_experts_per_tok=k, moe_intermediate_size=width, norm_topk_prob=True)
        layer = MoE(config)
        for p in layer.parameters():
            torch.nn.init.normal_(p, 0.0, 0.1)
        x = torch.randn(T, D, requires_grad=what == "train")
        sides = {"ours": layer, "masks": lambda x: masks(layer, x),
                 **{name: block_of(layer, config, name) for name in ("eager", "grouped_mm")}}
        for name, side in sides.items():
            torch.testing.assert_close(side(x), layer(x), atol=1e-4, rtol=1e-4, msg=lambda m: f"{name}: {m}")
        rows = x.detach().repeat_interleave(k, 0).requires_grad_(what == "train")  # one expert that gets all routes
        up, down = (t[0].detach().clone().requires_grad_() for t in layer.experts.parameters())
        sides["products"] = lambda _: ((rows @ up.T)[:, :width] @ down.T)
        best = dict.fromkeys(sides, float("inf"))
        for _ in range(ROUNDS):
            for name, side in sides.items():
                best[name] = min(best[name], once(side, x, what == "train"))
        mine = best.pop("ours")
        others = "   ".join(f"{name} {s * 1e3:7.2f} ({s / mine:.2f}x)" for name, s in best.items())
        print(f"{what:<6} T {T:<4} D {D} F {width:<3} E {E:<3} k {k}   ours {mine * 1e3:7.2f}   {others}", flush=True)


if __name__ == "__main__":
    main()
