"""Packed attention against the sum of its sequences taken one by one, and against one dense mask over all of them.

    python bench/attention.py

Five sequences of 256 to 2,048 tokens, 16 query and 4 key/value heads of 64, float32, forward alone and with backward;
one thread, CPU time, sides take turns, the fastest of five counts. Results are compared first. About half a minute.
"""

import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from oprd.kernels.attention import attend  # noqa: E402

LENGTHS = [512, 1024, 256, 2048, 256]
ROUNDS = 5


def one_by_one(q, k, v, cu):
    """Each sequence by itself through the same fused operation."""
    parts = zip(*(x.transpose(0, 1).split(LENGTHS, dim=1) for x in (q, k, v)))
    out = [F.scaled_dot_product_attention(*(x[None] for x in part), is_causal=True, enable_gqa=True) for part in parts]
    return torch.cat([x[0].transpose(0, 1) for x in out])


def dense(q, k, v, cu):
    """All tokens at once under a mask: work grows with the square of the sum."""
    owner = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    mask = (owner[:, None] == owner[None, :]).tril()
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)


def main() -> None:
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    x = [torch.randn(sum(LENGTHS), heads, 64, generator=draw).requires_grad_() for heads in (16, 4, 4)]
    cu = torch.tensor([0, *LENGTHS]).cumsum(0)
    sides = {"packed (ours)": attend, "one by one": one_by_one, "dense mask": dense}
    for run in sides.values():
        torch.testing.assert_close(run(*x, cu), attend(*x, cu), atol=1e-5, rtol=1e-5)
    for what in ("forward", "forward and backward"):
        best = dict.fromkeys(sides, float("inf"))
        for _ in range(ROUNDS):
            for name, run in sides.items():
                start = time.process_time()
                with torch.set_grad_enabled(what != "forward"):
                    y = run(*x, cu)
                if y.requires_grad:
                    y.sum().backward()
                best[name] = min(best[name], time.process_time() - start)
        print(what, *(f"{name} {s * 1e3:.0f} ms ({s / best['one by one']:.2f}x)" for name, s in best.items()), sep="   ",
              flush=True)


if __name__ == "__main__":
    main()
