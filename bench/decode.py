"""Decoded tokens per second: NativeEngine against transformers' generate, same small model, same batch, same sampling.

    python bench/decode.py [threads]

Both sample BATCH conversations of PROMPT tokens for NEW tokens each (temperature 1, top-p 0.95, no stop ids), prefill
included; rounds alternate and the median of each side counts. Needs transformers (the `test` extra). About 20 s.
"""

import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from oprd.core import hf  # noqa: E402
from oprd.core.model import Model, ModelConfig  # noqa: E402
from oprd.rollout.engine import Sampling  # noqa: E402
from oprd.rollout.native import NativeEngine  # noqa: E402

BATCH, PROMPT, NEW, ROUNDS = 16, 300, 96, 3
CONFIG = ModelConfig(vocab_size=512, hidden_size=160, intermediate_size=448, num_hidden_layers=5, num_attention_heads=5,
                     num_key_value_heads=1, head_dim=32, tie_word_embeddings=True)


def native_seconds(engine: NativeEngine, prompts: torch.Tensor) -> float:
    """Wall time for one batch through the engine, from cold caches."""
    sampling = Sampling(temperature=1.0, top_p=0.95, max_new_tokens=NEW, stop_ids=())
    with ThreadPoolExecutor(BATCH) as pool, ExitStack() as stack:
        for _ in range(BATCH):
            stack.enter_context(engine.worker())
        start = time.perf_counter()
        done = pool.map(lambda i: engine.generate(f"s{i}", prompts[i].tolist(), sampling, seed=i), range(BATCH))
        assert all(len(d.ids) == NEW for d in done)
        seconds = time.perf_counter() - start
    for i in range(BATCH):
        engine.forget(f"s{i}")
    return seconds


def transformers_seconds(model, prompts: torch.Tensor) -> float:
    """Wall time for the same batch through generate()."""
    start = time.perf_counter()
    out = model.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=True, temperature=1.0, top_p=0.95,
                         top_k=0, min_new_tokens=NEW, max_new_tokens=NEW, pad_token_id=0)
    assert out.shape == (BATCH, PROMPT + NEW)
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
    seconds: dict[str, list[float]] = {"native": [], "transformers": []}
    for _ in range(ROUNDS + 1):  # the first of each warms up
        seconds["native"].append(native_seconds(engine, prompts))
        seconds["transformers"].append(transformers_seconds(theirs, prompts))
    engine.close()
    speed = {name: BATCH * NEW / median(times[1:]) for name, times in seconds.items()}
    size = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"{size:.2f}M parameters, batch {BATCH}, {PROMPT} + {NEW} tokens, {torch.get_num_threads()} threads")
    for name, tokens in speed.items():
        print(f"{name:>12}: {tokens:7.0f} tokens/s")
    print(f"       ratio: {speed['native'] / speed['transformers']:.2f}")


if __name__ == "__main__":
    main()
