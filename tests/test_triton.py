"""Every Triton kernel against the torch version beside it, here in Triton's interpreter. What they write to is filled
with NaN before, so that an element they leave out is seen."""

import pytest
import torch

pytest.importorskip("triton")

from oprd.kernels import (cross_entropy_triton, experts_triton, joint_support_triton, rms_norm_triton,  # noqa: E402
                          sparse_rows_triton)
from oprd.kernels.experts import run_experts_definition  # noqa: E402
from oprd.kernels.joint_support import join, scan  # noqa: E402
from oprd.kernels.rms_norm import gated_rms_norm_definition, rms_norm_definition  # noqa: E402
from oprd.kernels.sparse_rows import add_outer, weigh_rows  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = {"BM": 16, "BN": 32, "BK": 16}


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """new_empty, empty and empty_like give NaN (integers: a number that is no place in anything)."""
    def poisoned(make):
        def made(*args, **kwargs):
            x = make(*args, **kwargs)
            return x.fill_(float("nan")) if x.is_floating_point() else x.fill_(2**30)
        return made
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def close(a, b, tolerance=1e-5):
    torch.testing.assert_close(a.double(), b.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the interpreter multiplies the bits of bfloat16
@pytest.mark.parametrize("N, D, V, k, candidates, T", [(5, 24, 203, 7, 32, 0.6), (17, 40, 131, 131, 131, 1.0),
                                                      (1, 8, 7, 1, 8, 1.5)])
def test_the_scan_finds_what_the_torch_version_finds(N, D, V, k, candidates, T, dtype):
    x = [draw(N, D, seed=1, dtype=dtype), draw(V, D, seed=2, dtype=dtype), draw(N, 9, seed=3, dtype=dtype),
         draw(V, 9, seed=4, dtype=dtype)]
    ours = joint_support_triton.scan(*x, k, T, torch.float32, moments=True, blocks=SMALL, candidates=candidates)
    plain = scan(*(t.cpu() for t in x), k, T, torch.float32, moments=True)
    for a, b in ((ours.norm, plain.norm), (ours.norm_t, plain.norm_t), (ours.moment, plain.moment),
                 (ours.moment_t, plain.moment_t)):
        close(a.cpu(), b)
    supports = [join(f.best, f.best_t, f.norm - f.norm_t, k) for f in (ours, plain)]
    order = [S.ids.sort(1).indices for S in supports]
    assert torch.equal(supports[0].ids.gather(1, order[0]).cpu(), supports[1].ids.gather(1, order[1]))
    close(supports[0].z.gather(1, order[0]).cpu(), supports[1].z.gather(1, order[1]))
    close(supports[0].zt.gather(1, order[0]).cpu(), supports[1].zt.gather(1, order[1]))
    assert torch.equal(supports[0].overlap.cpu(), supports[1].overlap)


def test_ties_and_rising_logits_lose_no_candidate():
    """Logits that rise with the id put every entry forward: more than there is room for, so launches are halved."""
    V, k = 150, 5
    h, W = torch.ones(2, 1, device=DEVICE), torch.arange(V, device=DEVICE)[:, None].float() // 3
    ours = joint_support_triton.scan(h, W, -h, W, k, 1.0, torch.float32, blocks=SMALL, candidates=8)
    plain = scan(h.cpu(), W.cpu(), -h.cpu(), W.cpu(), k, 1.0, torch.float32)
    for a, b in ((ours.best, plain.best), (ours.best_t, plain.best_t)):
        assert torch.equal(a.ids.sort(1).values.cpu(), b.ids.sort(1).values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sparse_products(dtype):
    ids = torch.randint(11, (6, 5), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    numbers, W, h = draw(6, 5, seed=1), draw(11, 21, seed=2, dtype=dtype), draw(6, 21, seed=3, dtype=dtype)
    close(sparse_rows_triton.weigh_rows(ids.to(DEVICE), numbers, W, block=16).cpu(),
          weigh_rows(ids, numbers.cpu(), W.cpu().float()))
    ours, plain = torch.ones(11, 21, device=DEVICE), torch.ones(11, 21)
    sparse_rows_triton.add_outer(ours, ids.to(DEVICE), numbers, h, block=16)
    add_outer(plain, ids, numbers.cpu(), h.cpu())
    close(ours.cpu(), plain)


@pytest.mark.parametrize("N, D, V", [(5, 24, 71), (17, 8, 7)])
def test_the_softmax_over_a_share_of_the_vocabulary(N, D, V):
    h, W, scale = draw(N, D, seed=1), draw(V, D, seed=2), draw(N, seed=3)
    local = torch.arange(N, device=DEVICE) * 5 - 4  # some are before this share, some behind
    lse, wanted = cross_entropy_triton.lse_and_target(h, W, local, blocks=SMALL)
    z = h.double() @ W.double().T
    close(lse, z.logsumexp(1))
    inside = (local >= 0) & (local < V)
    close(wanted, torch.where(inside, z.gather(1, local.clamp(0, V - 1)[:, None])[:, 0], 0.0))
    start = 3
    d = cross_entropy_triton.softmax_gradient(z[:, start:].float().contiguous(), lse, local, scale, start, block=16)
    p = z.softmax(1)
    p[inside.nonzero().squeeze(1), local[inside]] -= 1
    close(d, (p * scale[:, None])[:, start:])


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_rms_norms(gated, dtype, tolerance):
    x, z = (draw(67, 2, 12, seed=i, dtype=dtype) for i in range(2))
    scale, dy = draw(12, seed=2), draw(67, 2, 12, seed=3)
    sides = []
    for run in ((rms_norm_triton.gated_rms_norm, gated_rms_norm_definition) if gated else
                (rms_norm_triton.rms_norm, rms_norm_definition)):
        leaves = [t.clone().requires_grad_() for t in ((x, z, scale) if gated else (x, scale))]
        y = run(*leaves, 1e-6)
        sides.append([y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))])
    assert sides[0][0].dtype == dtype
    for a, b in zip(*sides):
        close(a, b, tolerance * (10 if a.shape == scale.shape else 1))


@pytest.mark.parametrize("chosen", [[[0, 3], [3, 1], [1, 1], [3, 0], [3, 3]], [[2, 2]] * 19, []],
                         ids=["an idle expert and a route twice", "all to one", "no token"])
def test_experts_forward_and_backward(chosen):
    chosen = torch.tensor(chosen, dtype=torch.int64, device=DEVICE).view(-1, 2)
    T = len(chosen)
    leaves = [draw(T, 20, seed=1), draw(4, 2 * 13, 20, seed=2), draw(4, 20, 13, seed=3), draw(T, 2, seed=4).sigmoid()]
    dy = draw(T, 20, seed=5)
    sides = []
    for run in (lambda x, a, b, w: experts_triton.run_experts(x, a, b, chosen, w, SMALL),
                lambda x, a, b, w: run_experts_definition(x, a, b, chosen, w)):
        own = [t.clone().requires_grad_() for t in leaves]
        y = run(*own)
        if not T:
            assert y.shape == (0, 20)
            return
        sides.append([y.detach(), *torch.autograd.grad(y, own, dy.to(y.dtype))])
    for a, b in zip(*sides):
        close(a, b, 1e-4)
