"""The gated delta rule against transformers' torch_chunk_gated_delta_rule, forward and backward, as ratios in one run.

    python bench/delta_rule.py [rounds]

2,048 tokens as one sequence, as eight of 256, and as eight of unequal lengths, which transformers reads as a padded
batch (building it is not counted); with one and two threads. Both sides alternate and the fastest of each counts, since
other work on the machine only ever slows one down. Their forward results are compared before the clock starts. Needs
transformers (the `test` extra). About a minute with the default of six rounds.
"""

import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from oprd.kernels.delta_rule import gated_delta_rule  # noqa: E402

SHAPES = {"G 2 H 4 K V 32": (2, 4, 32), "G 4 H 8 K V 64": (4, 8, 64)}
PACKINGS = {"1 x 2048": [2048], "8 x 256": [256] * 8, "8 unequal": [50, 100, 150, 200, 250, 350, 448, 500]}


def inputs(T: int, G: int, H: int, size: int) -> list[torch.Tensor]:
    """q, k, v, g, beta as the mixer makes them, leaves that want a gradient."""
    draw = torch.Generator().manual_seed(0)
    made = [torch.randn(T, heads, size, generator=draw) for heads in (G, G, H)]
    made += [-torch.rand(T, H, generator=draw), torch.rand(T, H, generator=draw)]
    return [x.requires_grad_() for x in made]


def padded(x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """[T, ...] -> a leaf [B, longest, ...], zeros behind each sequence."""
    rows = torch.nn.utils.rnn.pad_sequence(x.detach().split(lengths), batch_first=True)
    return rows.requires_grad_()


def fastest(sides: dict, rounds: int) -> dict[str, float]:
    """Seconds of the fastest round, by side; the sides take turns."""
    best = dict.fromkeys(sides, float("inf"))
    for _ in range(rounds):
        for name, run in sides.items():
            start = time.perf_counter()
            run().sum().backward()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def main() -> None:
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 6
    print("forward and backward of 2,048 tokens, ms\n")
    print(f"| {'shape':<14} | {'packing':<9} | threads | ours | transformers | ratio |\n|---|---|---|---|---|---|")
    for shape, (G, H, size) in SHAPES.items():
        for packing, lengths in PACKINGS.items():
            cu = torch.tensor([0, *lengths]).cumsum(0)
            x = inputs(sum(lengths), G, H, size)
            rows = [padded(t, lengths) for t in x]
            sides = {"ours": lambda: gated_delta_rule(*x, cu)[0],
                     "theirs": lambda: torch_chunk_gated_delta_rule(*rows, use_qk_l2norm_in_kernel=True)[0]}
            got, wanted = (run().detach() for run in sides.values())
            wanted = torch.cat([row[:n] for row, n in zip(wanted, lengths)])
            torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
            for threads in (1, 2):
                torch.set_num_threads(threads)
                best = fastest(sides, rounds)
                mine, their = best["ours"], best["theirs"]
                print(f"| {shape:<14} | {packing:<9} | {threads} | {mine * 1e3:.1f} | {their * 1e3:.1f} "
                      f"| {their / mine:.2f} |", flush=True)


if __name__ == "__main__":
    main()
