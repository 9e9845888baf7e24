"""Everything that needs a GPU, checked and timed in one run of under eight minutes; prints one line a check or timing.

    python bench/gpu.py [--out FILE.json] [--only SECTION ...]    # on a machine with a GPU
    python bench/gpu.py --device cpu                              # the same script in small, to keep it in order

Sections: `kernels` (each against its float64 definition, values and gradients), `families` (logits against the CPU),
`triton` (the fused versions against the torch ones), `kl` and `ce` (the heads: time as a multiple of their matrix
products, peak memory, against naive torch and Liger), `attention`, `experts`, `step` (a training step in bf16 against
the time its products alone would take at the rate of one large product here), `long` (131,072 tokens, KL head).
A section that fails is reported and the next one runs; none starts after BUDGET seconds. Results so far are written
after every section. Exit code 1 when a check or a section failed. Without a GPU it says so and does nothing. Several
GPUs' figures cannot be had from one: bytes are counted in the tests instead.
"""

import argparse
import json
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "bench")]

from heads import liger_jsd, naive_kl  # noqa: E402
from families_help import FAMILIES, randomised  # noqa: E402

from oprd.core.architecture import ModelConfig  # noqa: E402
from oprd.core.model import Model  # noqa: E402
from oprd.kernels import rms_norm, sparse_rows  # noqa: E402
from oprd.kernels.attention import attend, attend_definition  # noqa: E402
from oprd.kernels.backend import use_fla, use_flash_attention, use_triton  # noqa: E402
from oprd.kernels.cross_entropy import token_nll, token_nll_definition, weighted_nll  # noqa: E402
from oprd.kernels.delta_rule import gated_delta_rule, gated_delta_rule_definition  # noqa: E402
from oprd.kernels.experts import run_experts, run_experts_definition  # noqa: E402
from oprd.kernels.short_conv import short_conv, short_conv_definition  # noqa: E402
from oprd.kernels.topk_kl import topk_kl, topk_kl_definition  # noqa: E402

BUDGET = 420.0  # seconds after which no section starts
found: dict[str, object] = {}

LENGTHS = [1, 63, 64, 65, 130]
failed: list[str] = []


def note(what: str, value, text: str = "") -> None:
    found[what] = value
    print(f"{what}: {value}{text}", flush=True)


def check(what: str, error: float, limit: float) -> None:
    found[what] = error
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
    compare("top-k KL", lambda *leaves: topk_kl(*leaves, 7, 0.6), lambda *leaves: topk_kl_definition(*leaves, 7, 0.6),
            [x(T, 6), x(50, 6)], x(T, 5), x(50, 5))


def families(device) -> None:
    cu = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()])
    ids = torch.randint(37, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    for family in FAMILIES:
        model = randomised(family)
        with torch.no_grad():
            wanted = model.logits(ids, cu)
            got = model.to(device).logits(ids.to(device), cu.to(device)).cpu()
        check(f"logits of {family} against the CPU", distance(got, wanted), 1e-4)


def fused(device, small: bool) -> None:
    """What runs on this device in float32 against the definitions (on a CPU: the torch versions)."""
    draw = torch.Generator(device).manual_seed(0)
    x = lambda *shape: torch.randn(*shape, generator=draw, device=device)  # noqa: E731
    note("triton runs here", use_triton(x(2)))
    N, V = (64, 997) if small else (256, 151_936)
    for temperature in (0.6, 1.0, 1.5):
        leaves, rest = [x(N, 256), x(V, 256) / 16], [x(N, 128), x(V, 128) / 11]
        sides = []
        for run in (topk_kl, topk_kl_definition):
            own = [t.clone().requires_grad_() for t in leaves]
            loss = run(*own, *rest, 100, temperature)[0]
            sides.append([loss.detach(), *torch.autograd.grad(loss.sum(), own)])
        check(f"top-k KL in float32, T = {temperature}", max(distance(a, b) for a, b in zip(*sides)), 5e-6)
    T, D, width, E = (64, 32, 24, 4) if small else (512, 256, 128, 16)
    weight, chosen = x(T, E).softmax(-1).topk(2, -1)
    leaves, sides = [x(T, D), x(E, 2 * width, D) / 16, x(E, D, width) / 16, weight], []
    for run in (run_experts, run_experts_definition):
        own = [t.clone().requires_grad_() for t in leaves]
        y = run(*own[:3], chosen, own[3])
        sides.append([y.detach(), *torch.autograd.grad(y.sum(), own)])
    check("experts in float32", max(distance(a, b) for a, b in zip(*sides)), 1e-4)
    rows, gate, scale = x(100, 96), x(100, 96), x(96)
    check("gated norm", distance(rms_norm.gated_rms_norm(rows, gate, scale, 1e-6),
                                 rms_norm.gated_rms_norm_definition(rows, gate, scale, 1e-6)), 1e-6)
    ids = torch.randint(97, (50, 9), generator=draw, device=device, dtype=torch.int32)
    numbers, W = x(50, 9), x(97, 80)
    check("sparse rows", distance(sparse_rows.weigh_rows(ids, numbers, W), (numbers[..., None] * W[ids.long()]).sum(1)),
          1e-6)


def seconds(run, device, rounds: int = 10) -> float:
    """The median of some rounds after one that warms up; on a GPU by its own clock."""
    took = []
    for i in range(rounds + 1):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            took.append(begin.elapsed_time(end) / 1e3)
        else:
            start = time.perf_counter()
            run()
            took.append(time.perf_counter() - start)
    return sorted(took[1:])[rounds // 2]


def peak(run, device) -> float:
    """MiB at the peak above what was there before (NaN on a CPU)."""
    if device.type != "cuda":
        return float("nan")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def head_inputs(device, small: bool, N: int):
    D, V = (64, 4099) if small else (2560, 248_320)
    draw = torch.Generator(device).manual_seed(0)
    dtype = torch.float32 if small else torch.bfloat16
    x = lambda *shape: torch.randn(*shape, generator=draw, device=device, dtype=dtype)  # noqa: E731
    return x(N, D).requires_grad_(), (x(V, D) * 0.04).requires_grad_(), x(N, D), x(V, D) * 0.04


def timed(name: str, run, floor: float, device, leaves, rounds: int = 10) -> None:
    """One line: milliseconds, multiple of the floor, peak MiB; a run that fails (no memory, no package) says why."""
    def once():
        for leaf in leaves:
            leaf.grad = None
        run()
    try:
        took, mib = seconds(once, device, rounds), peak(once, device)
        note(name, [took * 1e3, took / floor, mib], " (ms, x floor, MiB)")
    except (ImportError, RuntimeError) as problem:
        note(name, f"{type(problem).__name__}: {str(problem)[:80]}")


def kl_head(device, small: bool) -> None:
    for N in (64,) if small else (1024, 8192, 32768):
        h, W, ht, Wt = head_inputs(device, small, N)
        into = torch.zeros_like(W, dtype=torch.float32)

        @torch.no_grad()
        def products():
            for i in range(0, N, 2048):
                h[i : i + 2048] @ W.T, ht[i : i + 2048] @ Wt.T

        floor = seconds(products, device)
        note(f"kl N {N} gemm2", floor * 1e3, " ms")
        ours = lambda: topk_kl(h, W, ht, Wt, 100, 1.0, into=into)[0].sum().backward()  # noqa: E731
        timed(f"kl N {N} ours", ours, floor, device, [h, W])
        if N <= 8192:
            timed(f"kl N {N} naive torch", lambda: naive_kl(h, W, ht, Wt), floor, device, [h, W], rounds=3)
            timed(f"kl N {N} Liger JSD", lambda: liger_jsd(h, W, ht, Wt, 1024), floor, device, [h, W], rounds=3)


def ce_head(device, small: bool) -> None:
    N = 64 if small else 8192
    h, W, _, _ = head_inputs(device, small, N)
    y = torch.arange(N, device=device) % len(W)
    weights = torch.full((N,), 1 / N, device=device)

    @torch.no_grad()
    def products():
        for i in range(0, N, 2048):
            z = h[i : i + 2048] @ W.T
            z @ W, z.T @ h[i : i + 2048]

    def liger():
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        LigerFusedLinearCrossEntropyLoss()(W, h, y).backward()

    floor = seconds(products, device)
    note("ce gemm3", floor * 1e3, " ms")
    timed("ce ours, gradient in forward", lambda: weighted_nll(h, W, y, weights)[0].backward(), floor, device, [h, W])
    timed("ce ours, low memory", lambda: token_nll(h, W, y).mean().backward(), floor, device, [h, W])
    timed("ce F.cross_entropy", lambda: F.cross_entropy((h @ W.T).float(), y).backward(), floor, device, [h, W])
    timed("ce Liger", liger, floor, device, [h, W])


def attention(device, small: bool) -> None:
    lengths = [64, 17] if small else [16384, 8192, 4096, 4096]
    H, G, K = (4, 2, 16) if small else (16, 4, 256)
    dtype = torch.float32 if small else torch.bfloat16
    x = lambda heads: torch.randn(sum(lengths), heads, K, device=device, dtype=dtype, requires_grad=True)  # noqa: E731
    q, k, v = x(H), x(G), x(G)
    cu = torch.tensor([0, *lengths], device=device, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    note("flash-attn runs here", use_flash_attention(q))
    took = seconds(lambda: attend(q, k, v, cu).sum().backward(), device, 3)
    rate = 14 * H * K * sum(n * n / 2 for n in lengths) / took  # forward 4, backward 10 a pair
    note("attention, packed, forward and backward", [took * 1e3, rate / 1e12], " (ms, causal TFLOP/s)")
    T, Hv = sum(lengths), 4 if small else 32
    y = lambda heads, size: torch.randn(T, heads, size, device=device, dtype=dtype, requires_grad=True)  # noqa: E731
    q, k, v = y(Hv // 2, K // 2), y(Hv // 2, K // 2), y(Hv, K // 2)
    g, beta = -torch.rand(T, Hv, device=device), torch.rand(T, Hv, device=device, dtype=dtype)
    note("flash-linear-attention runs here", use_fla(v))
    took = seconds(lambda: gated_delta_rule(q, k, v, g, beta, cu)[0].sum().backward(), device, 3)
    note("gated delta rule, packed, forward and backward", took * 1e3, " ms")


def mixture(device, small: bool) -> None:
    T, D, width, E, k = (64, 32, 16, 4, 2) if small else (8192, 2048, 768, 128, 8)
    dtype = torch.float32 if small else torch.bfloat16
    x = lambda *shape: torch.randn(*shape, device=device, dtype=dtype)  # noqa: E731
    rows, gate_up, down = x(T, D).requires_grad_(), (x(E, 2 * width, D) / 50).requires_grad_(), x(E, D, width) / 50
    weight, chosen = x(T, E).softmax(-1).topk(k, -1)
    a, b, c = x(T * k, D), x(D, 2 * width), x(width, D)
    floor = 3 * seconds(lambda: (a @ b)[:, :width] @ c, device)
    note("experts: one expert of all routes, forward x 3", floor * 1e3, " ms")
    timed("experts ours", lambda: run_experts(rows, gate_up, down, chosen, weight).sum().backward(), floor, device,
          [rows, gate_up])


def step(device, small: bool) -> None:
    side = 512 if small else 8192
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    rate = 2 * side**3 / seconds(lambda: a @ b, device)
    note(f"one bf16 product of side {side}", rate / 1e12, " TFLOP/s")
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

    def update():
        with torch.autocast(device.type, torch.bfloat16):
            states = model.hidden(ids, cu)
        token_nll(states[:-1], model.head_weight, ids[1:]).mean().backward()
        model.zero_grad(set_to_none=True)

    took = seconds(update, device, rounds=3)
    floor = 6 * tokens * sum(p.numel() for p in model.parameters()) / rate
    size = sum(p.numel() for p in model.parameters())
    note(f"training step, {tokens} tokens, {size / 1e6:.0f}M parameters", [took * 1e3, took / floor],
         " (ms, x the time of its products)")
    note("training step, peak", peak(update, device), " MiB")


def long(device, small: bool) -> None:
    """The KL head of a whole 131,072-token trajectory on one GPU."""
    h, W, ht, Wt = head_inputs(device, small, 256 if small else 131_072)
    into = torch.zeros_like(W, dtype=torch.float32)
    start = time.perf_counter()
    mib = peak(lambda: topk_kl(h, W, ht, Wt, 100, 1.0, into=into)[0].sum().backward(), device)
    note(f"kl head, {len(h)} tokens", [mib, time.perf_counter() - start], " (MiB, s)")


SECTIONS = {"kernels": lambda device, small: kernels(device), "families": lambda device, small: families(device),
            "triton": fused, "kl": kl_head, "ce": ce_head, "attention": attention, "experts": mixture, "step": step,
            "long": long}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda, or cpu for the same in small")
    parser.add_argument("--out", type=Path, help="file for the results as JSON, written after every section")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="sections to run")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("skipped: no GPU here; --device cpu runs the same script in small")
        return 0
    device, began = torch.device(options.device), time.monotonic()
    note("machine", torch.cuda.get_device_name() if device.type == "cuda" else "CPU", f", torch {torch.__version__}")
    for name in options.only:
        if time.monotonic() - began > BUDGET:
            note(f"section {name}", "left out: no time")
            continue
        start = time.monotonic()
        try:
            SECTIONS[name](device, device.type == "cpu")
        except Exception:  # the next section may still say something
            traceback.print_exc()
            failed.append(f"section {name}")
        note(f"section {name}", round(time.monotonic() - start, 1), " s")
        if options.out:
            options.out.write_text(json.dumps({"found": found, "failed": failed}, indent=1))
    print("all checks passed" if not failed else f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
