"""The two heads against their matrix products alone, naive torch, TRL's and Liger's losses: time and memory in one run.

    python bench/heads.py                       # 512 x 1024 x 151,936, fp32
    python bench/heads.py 512 2560 248320 bf16  # tokens, hidden, vocabulary, dtype
    python bench/heads.py memory                # how the KL head's memory grows with tokens, 248,320 entries

One thread; the time is the process's CPU time, sides take turns, the fastest of ROUNDS counts, as a multiple of
the floor in the same run: gemm2, the two forward products (KL head); gemm3, the three products of a cross-entropy.
Memory is the peak (VmHWM, reset before) above what was resident. Our KL head's gradient for its weight is added to a
matrix that is there (`into`); the others make theirs. A run in which the floor itself varies by more than 15% is marked
inconclusive. Liger's and TRL's losses are other objectives of the same kind, JSD over the full vocabulary. Liger needs
liger-kernel, TRL's loss trl with datasets and accelerate; a side that is not installed is left out.
"""

import gc
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**20))  # memory goes back when it is freed
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from oprd.kernels.cross_entropy import token_nll, weighted_nll  # noqa: E402
from oprd.kernels.topk_kl import topk_kl  # noqa: E402

ROUNDS = int(os.environ.get("ROUNDS", 3))
K = 100


def status(field: str) -> int:
    """KiB of a field of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1])
    raise LookupError(field)


def measure(run) -> tuple[float, float]:
    """CPU seconds, and MiB at the peak above what was resident."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    resident, start = status("VmRSS"), time.process_time()
    run()
    return time.process_time() - start, (status("VmHWM") - resident) / 1024


def naive_kl(h, W, ht, Wt):
    """The paper's text, word by word, through autograd."""
    with torch.no_grad():
        log_q = torch.log_softmax((ht @ Wt.T).float(), -1)
    log_p = torch.log_softmax((h @ W.T).float(), -1)
    S = torch.maximum(log_p.detach(), log_q).topk(K, -1).indices
    a, b = log_p.gather(1, S).log_softmax(-1), log_q.gather(1, S).log_softmax(-1)
    (a.exp() * (a - b)).sum(-1).mean().backward()


def liger_jsd(h, W, ht, Wt, chunk=128):
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    loss = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=1.0, compiled=False,
                                   chunk_size=chunk)
    out = loss(h, W, ht, Wt, torch.zeros(len(h), dtype=torch.int64, device=h.device))
    (out[0] if isinstance(out, tuple) else out).backward()


def trl_gkd(h, W, ht, Wt):
    from trl.experimental.gkd.gkd_trainer import GKDTrainer

    with torch.no_grad():
        teacher = (ht @ Wt.T)[None]
    GKDTrainer.generalized_jsd_loss((h @ W.T)[None], teacher, beta=1.0).backward()


def own_kl(into, rounded):
    def run(h, W, ht, Wt):
        topk_kl(h, W, ht, Wt, K, 1.0, into=into, rounded=rounded)[0].mean().backward()
    return run


def torch_ce(h, W, targets):
    F.cross_entropy((h @ W.T).float(), targets).backward()


def own_ce(rounded):
    return lambda h, W, y: weighted_nll(h, W, y, torch.full((len(h),), 1 / len(h)), rounded=rounded)[0].backward()


def own_ce_low(rounded):
    return lambda h, W, y: token_nll(h, W, y, rounded=rounded).mean().backward()


def compare(sides: dict, floor: str, clear) -> None:
    """Print one line a side: CPU seconds, multiple of the floor, MiB."""
    times, memory, broken = {name: [] for name in sides}, {}, set()
    for _ in range(ROUNDS):
        for name, run in sides.items():
            if name in broken:
                continue
            try:
                seconds, mib = measure(run)
            except (ImportError, AttributeError, TypeError, RuntimeError) as problem:
                print(f"  {name:<44} left out: {type(problem).__name__}: {str(problem)[:100]}")
                broken.add(name)
                continue
            times[name].append(seconds)
            memory[name] = min(mib, memory.get(name, mib))
            clear()
    base = min(times[floor])
    spread = max(times[floor]) / base - 1
    for name in sides:
        if name not in broken:
            print(f"  {name:<44} {min(times[name]):7.2f} s  {min(times[name]) / base:5.2f} x {floor}  "
                  f"{memory[name]:7.0f} MiB", flush=True)
    print(f"  floor varies by {spread:.0%}{'  INCONCLUSIVE' if spread > 0.15 else ''}; "
          f"load {os.getloadavg()[0]:.1f}", flush=True)


def heads(N: int, D: int, V: int, dtype: torch.dtype) -> None:
    print(f"N {N}  D {D}  V {V}  {str(dtype).removeprefix('torch.')}  k {K}", flush=True)
    torch.manual_seed(0)
    half = dtype != torch.float32
    h, ht = (torch.randn(N, D).to(dtype) for _ in range(2))
    W, Wt = ((torch.randn(V, D) * D**-0.5 * 2).to(dtype) for _ in range(2))
    h.requires_grad_(), W.requires_grad_()
    into, targets = torch.zeros(V, D), torch.randint(V, (N,))
    step = 8192
    space = torch.empty(N, step, dtype=dtype)

    def product(a, b):
        with torch.no_grad():
            for i in range(0, V, step):
                part = b[i : i + step]
                torch.mm(a, part.T, out=space[:, : len(part)].contiguous() if len(part) < step else space)

    def outer():
        with torch.no_grad():
            for i in range(0, V, step):
                space.T @ h if i + step <= V else space[:, : V - i].T @ h

    def hidden():
        with torch.no_grad():
            for i in range(0, V, step):
                part = W[i : i + step]
                space[:, : len(part)] @ part

    def clear():
        h.grad = W.grad = None

    kl = {"gemm2": lambda: (product(h, W), product(ht, Wt)), "naive torch": lambda: naive_kl(h, W, ht, Wt),
          "Liger chunked JSD": lambda: liger_jsd(h, W, ht, Wt),
          "TRL GKD, full vocabulary": lambda: trl_gkd(h, W, ht, Wt),
          "ours": lambda: own_kl(into, half)(h, W, ht, Wt)}
    compare(kl, "gemm2", clear)
    ce = {"gemm3": lambda: (product(h, W), hidden(), outer()), "F.cross_entropy": lambda: torch_ce(h, W, targets),
          "ours, gradient in forward": lambda: own_ce(half)(h, W, targets),
          "ours, low memory": lambda: own_ce_low(half)(h, W, targets)}
    compare(ce, "gemm3", clear)


def memory() -> None:
    """Peak of the KL head for more and more tokens; the head's gradient goes into a matrix that is there."""
    D, V = 256, 248_320
    torch.manual_seed(0)
    W, Wt = (torch.randn(V, D, dtype=torch.bfloat16) for _ in range(2))
    into = torch.zeros(V, D)
    for N in (256, 1024, 4096):
        h, ht = (torch.randn(N, D, dtype=torch.bfloat16) for _ in range(2))
        h.requires_grad_()
        _, mib = measure(lambda: own_kl(into, True)(h, W.requires_grad_(), ht, Wt))
        print(f"{N} tokens: {mib:.0f} MiB", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[1:] == ["memory"]:
        return memory()
    shape = [int(x) for x in sys.argv[1:4]] or [512, 1024, 151_936]
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[sys.argv[4] if len(sys.argv) > 4 else "fp32"]
    heads(*shape, dtype)


if __name__ == "__main__":
    main()
