"""Decoded tokens per second: NativeEngine against transformers' generate, same small model, same batch, same sampling.

    python bench/decode.py [threads]

Both sample BATCH conversations of PROMPT tokens for NEW tokens each (temperature 1, top-p 0.95, no stop ids). Rounds
alternate and the fastest of each side counts, since other work on the machine only ever slows one down. `decoding` is
what is left after the time for the first token alone, which is mostly prefill. Needs transformers (the `test` extra).
About 30 s on one core.
"""

import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from oprd.core import hf  # noqa: E402
from oprd.core.model import Model, ModelConfig  # noqa: E402
from oprd.rollout.engine import Sampling  # noqa: E402
from oprd.rollout.native import NativeEngine  # noqa: E402

BATCH, PROMPT, NEW, ROUNDS = 16, 300, 96, 4
CONFIG = ModelConfig(vocab_size=512, hidden_size=160, intermediate_size=448, num_hidden_layers=5, num_attention_heads=5,
                     num_key_value_heads=1, head_dim=32, tie_word_embeddings=True)


def native_seconds(engine: NativeEngine, prompts: torch.Tensor, new: int) -> float:
    """Wall time for one batch through the engine, from cold caches."""
    sampling = Sampling(temperature=1.0, top_p=0.95, max_new_tokens=new, stop_ids=())
    with ThreadPoolExecutor(BATCH) as pool, ExitStack() as stack:
        for _ in range(BATCH):
            stack.enter_context(engine.worker())
        start = time.perf_counter()
        done = pool.map(lambda i: engine.generate(f"s{i}", prompts[i].tolist(), sampling, seed=i), range(BATCH))
        assert all(len(d.ids) == new for d in done)
        seconds = time.perf_counter() - start
    for i in range(BATCH):
        engine.forget(f"s{i}")
    return seconds


def transformers_seconds(model, prompts: torch.Tensor, new: int) -> float:
    """Wall time for the same batch through generate()."""
    start = time.perf_counter()
    out = model.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=True, temperature=1.0, top_p=0.95,
                         top_k=0, min_new_tokens=new, max_new_tokens=new, pad_token_id=0)
    assert out.shape == (BATCH, PROMPT + new)
    return time.perf_counter() - start


def main() -> None:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(int(sys.argv[1]) if len(sys.argv) > 1 else torch.get_num_threads())
    model = Model(CONFIG).init(0)
    with tempfile.TemporaryDirectory() as folder:
        hf.save(model, Path(folder) / "m")
        theirs = AutoModelForCausalLM.from_pretrained(Path(folder) / "m", dtype=torch.float32)
    engine = NativeEngine(model)
    prompts = torch.randint(CONFIG.vocab_size, (BATCH, PROMPT), generator=torch.Generator().manual_seed(0))
    sides = {"native": (native_seconds, engine), "transformers": (transformers_seconds, theirs)}
    best = {(name, new): float("inf") for name in sides for new in (1, NEW)}
    for _ in range(ROUNDS):
        for name, new in best:
            run, what = sides[name]
            best[name, new] = min(best[name, new], run(what, prompts, new))
    engine.close()
    size = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"{size:.2f}M parameters, batch {BATCH}, {PROMPT} + {NEW} tokens, {torch.get_num_threads()} threads")
    whole = {name: BATCH * NEW / best[name, NEW] for name in sides}
    decoding = {name: BATCH * (NEW - 1) / (best[name, NEW] - best[name, 1]) for name in sides}
    for what, speed in (("with prefill", whole), ("decoding", decoding)):
        print(f"{what:>12}: native {speed['native']:.0f} tokens/s, transformers {speed['transformers']:.0f} tokens/s, "
              f"ratio {speed['native'] / speed['transformers']:.2f}")


if __name__ == "__main__":
    main()
