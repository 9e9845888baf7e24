"""Training and decoding speed against transformers, as ratios in one run: tiny Qwen3 and Qwen3.5 on this CPU.

    python bench/models.py [threads]

Training: forward and backward (next-token loss of every token) of 2,048 tokens, as eight packed sequences of 256 and as
one of 2,048; transformers reads the eight as a batch without padding. Decoding: 16 conversations of 64 tokens, 96 new
ones each, sampled at temperature 1 with top-p 0.95; `decoding` leaves out the time to the first token. Both sides
alternate; the fastest of each counts, since other work on the machine only ever slows one down. Needs transformers (the
`test` extra). About two minutes.
"""

import copy
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "bench")]

import decode  # noqa: E402
from tiny_models import tiny  # noqa: E402

from oprd.core import hf  # noqa: E402
from oprd.kernels.cross_entropy import token_nll  # noqa: E402
from oprd.rollout.native import NativeEngine  # noqa: E402

ROUNDS = 5
decode.PROMPT = 64


def ours(model, ids, count):
    cu = torch.arange(0, len(ids) + 1, len(ids) // count)
    hidden = model.hidden(ids, cu)
    at = torch.ones(len(ids), dtype=torch.bool)
    at[cu[1:] - 1] = False
    at = at.nonzero().squeeze(1)
    token_nll(hidden[at], model.head_weight, ids[at + 1]).mean().backward()


def theirs(model, ids, count):
    rows = ids.view(count, -1)
    model(input_ids=rows, labels=rows).loss.backward()


def fastest(sides):
    """Seconds of the fastest of ROUNDS, by side; the sides take turns."""
    best = dict.fromkeys(sides, float("inf"))
    for _ in range(ROUNDS):
        for name, run in sides.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def main() -> None:
    torch.set_num_threads(int(sys.argv[1]) if len(sys.argv) > 1 else torch.get_num_threads())
    print(f"{torch.get_num_threads()} threads; times in ms, ratio = transformers / ours")
    for name in ("qwen3", "qwen3_5_text"):
        with tempfile.TemporaryDirectory() as folder:
            eager = tiny(name, folder)
            model = hf.load(folder)
        sdpa = copy.deepcopy(eager)
        sdpa.set_attn_implementation("sdpa")
        ids = torch.randint(240, (2048,), generator=torch.Generator().manual_seed(0))
        for count in (8, 1):
            best = fastest({"ours": lambda: ours(model, ids, count), "eager": lambda: theirs(eager, ids, count),
                            "sdpa": lambda: theirs(sdpa, ids, count)})
            report(f"{name}, train {count} x {2048 // count}", best)
        engine = NativeEngine(model)
        prompts = torch.randint(240, (decode.BATCH, decode.PROMPT), generator=torch.Generator().manual_seed(0))
        new, best = decode.NEW, {}
        for tokens in (1, new):
            best[tokens] = fastest({"ours": lambda: decode.native_seconds(engine, prompts, tokens),
                                    "eager": lambda: decode.transformers_seconds(eager, prompts, tokens),
                                    "sdpa": lambda: decode.transformers_seconds(sdpa, prompts, tokens)})
        engine.close()
        report(f"{name}, decode {decode.BATCH} x ({decode.PROMPT} + {new})", best[new])
        report(f"{name}, decoding alone", {side: best[new][side] - best[1][side] for side in best[new]})


def report(what: str, seconds: dict[str, float]) -> None:
    mine = seconds["ours"]
    print(f"{what:<40} ours {mine * 1e3:7.1f}   " + "   ".join(
        f"{side} {s * 1e3:7.1f} ({s / mine:.2f}x)" for side, s in seconds.items() if side != "ours"), flush=True)


if __name__ == "__main__":
    main()
