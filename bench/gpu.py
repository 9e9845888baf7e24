"""Everything that needs a GPU, checked and timed in one run of a few minutes; prints one line a check and one a timing.

    python bench/gpu.py                 # on a machine with a GPU
    python bench/gpu.py --device cpu    # the same script in small, to keep it in order where there is none

Checks: every kernel against its float64 definition, values and gradients; the logits of every family against the CPU.
Timings, each as a ratio in the same run: a training step of a small Qwen3.5-like model in bf16 against the time its
matrix products alone would take at the rate that one large product reaches here; the delta rule and the experts likewise.
Exit code 1 when a check fails.
"""

import argparse
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from families_help import FAMILIES, randomised  # noqa: E402

from oprd.core.architecture import ModelConfig  # noqa: E402
from oprd.core.model import Model  # noqa: E402
from oprd.kernels.attention import attend, attend_definition  # noqa: E402
from oprd.kernels.cross_entropy import token_nll, token_nll_definition  # noqa: E402
from oprd.kernels.delta_rule import gated_delta_rule, gated_delta_rule_definition  # noqa: E402
from oprd.kernels.experts import run_experts, run_experts_definition  # noqa: E402
from oprd.kernels.short_conv import short_conv, short_conv_definition  # noqa: E402

LENGTHS = [1, 63, 64, 65, 130]
failed: list[str] = []


def check(what: str, error: float, limit: float) -> None:
    print(f"{'ok  ' if error < limit else 'FAIL'}  {what:<44} error {error:.1e}  limit {limit:.0e}", flush=True)
    if not error < limit:
        failed.append(what)


def distance(a, b) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30)).item()


def compare(what: str, kernel, definition, leaves, *rest) -> None:
    """Values and all gradients of a kernel against its definition, both in float64 on the device."""
    sides = []
    for run in (kernel, definition):
        own = [t.detach().clone().requires_grad_() for t in leaves]
        out = run(*own, *rest)
        out = out[0] if isinstance(out, tuple) else out
        out.backward(torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view(out.shape))
        sides.append([out.detach(), *(t.grad for t in own)])
    check(what, max(distance(a, b) for a, b in zip(*sides)), 1e-10)


def kernels(device) -> None:
    cu = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], device=device)
    T = sum(LENGTHS)
    draw = torch.Generator(device).manual_seed(0)

    def x(*shape):
        return torch.randn(*shape, generator=draw, device=device, dtype=torch.float64)

    compare("attention", attend, attend_definition, [x(T, 4, 8), x(T, 2, 8), x(T, 2, 8)], cu)
    compare("gated delta rule", gated_delta_rule, gated_delta_rule_definition,
            [x(T, 2, 5), x(T, 2, 5), x(T, 4, 7), -x(T, 4).abs(), x(T, 4).sigmoid()], cu)
    compare("short convolution", short_conv, short_conv_definition, [x(T, 6), x(6, 4)], cu)
    weight, chosen = x(T, 5).topk(2, -1)
    compare("experts", lambda a, b, c, w: run_experts(a, b, c, chosen, w),
            lambda a, b, c, w: run_experts_definition(a, b, c, chosen, w), [x(T, 6), x(5, 8, 6), x(5, 6, 4), weight])
    targets = torch.randint(50, (T,), generator=draw, device=device)
    compare("cross-entropy", lambda h, w: token_nll(h, w, targets), lambda h, w: token_nll_definition(h, w, targets),
            [x(T, 6), x(50, 6)])


def families(device) -> None:
    cu = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()])
    ids = torch.randint(37, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    for family in FAMILIES:
        model = randomised(family)
        with torch.no_grad():
            wanted = model.logits(ids, cu)
            got = model.to(device).logits(ids.to(device), cu.to(device)).cpu()
        check(f"logits of {family} against the CPU", distance(got, wanted), 1e-4)


def seconds(run, device, rounds: int = 5) -> float:
    """The fastest of some rounds, after one that warms up."""
    best = float("inf")
    for i in range(rounds + 1):
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start) if i else best
    return best


def timings(device, small: bool) -> None:
    side = 512 if small else 8192
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    rate = 2 * side**3 / seconds(lambda: a @ b, device)
    print(f"one bf16 product of side {side}: {rate / 1e12:.1f} TFLOP/s", flush=True)
    sizes = (128, 4, 256, 512) if small else (1024, 24, 3584, 8192)  # hidden, layers, intermediate, tokens
    hidden, layers, inner, tokens = sizes
    heads = hidden // 128 or 1
    config = ModelConfig(vocab_size=1024 if small else 32768, hidden_size=hidden, intermediate_size=inner,
                         num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=1 + (heads > 1),
                         head_dim=128, model_type="qwen3_5_text", partial_rotary_factor=0.25,
                         layer_types=("linear_attention",) * 3 * (layers // 4) + ("full_attention",) * (layers // 4),
                         linear_conv_kernel_dim=4, linear_key_head_dim=64, linear_value_head_dim=64,
                         linear_num_key_heads=2 * heads, linear_num_value_heads=4 * heads, tie_word_embeddings=True)
    model = Model(config).init(0).to(device)
    ids = torch.randint(config.vocab_size, (tokens,), device=device)
    cu = torch.arange(0, tokens + 1, tokens // 4, device=device)

    def step():
        with torch.autocast(device.type, torch.bfloat16):
            states = model.hidden(ids, cu)
        token_nll(states[:-1], model.head_weight, ids[1:]).mean().backward()
        model.zero_grad(set_to_none=True)

    took = seconds(step, device, rounds=3)
    floor = 6 * tokens * sum(p.numel() for p in model.parameters()) / rate
    print(f"training step, {tokens} tokens, {sum(p.numel() for p in model.parameters()) / 1e6:.0f}M parameters: "
          f"{took * 1e3:.0f} ms, {took / floor:.1f}x the time of its products", flush=True)
    if device.type == "cuda":
        print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("error: no GPU here; --device cpu runs the same script in small", file=sys.stderr)
        return 2
    device = torch.device(options.device)
    print(torch.cuda.get_device_name() if device.type == "cuda" else "CPU", torch.__version__)
    kernels(device)
    families(device)
    timings(device, small=device.type == "cpu")
    print("all checks passed" if not failed else f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
