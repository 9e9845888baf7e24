"""Which implementation runs, and the adapters to packages that need a GPU: against stand-ins with their documented
signatures that compute by our definitions."""

import sys
import types

import torch

from oprd.kernels import attention, backend, delta_rule_fla
from oprd.kernels.attention import attend_definition
from oprd.kernels.delta_rule import gated_delta_rule_definition


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_on_a_cpu_the_torch_versions_run_whatever_is_installed():
    x = torch.zeros(2, 3, 4, dtype=torch.bfloat16)
    assert not (backend.use_triton(x) or backend.use_flash_attention(x) or backend.use_fla(x))


def test_flash_attention_is_asked_for_queries_that_are_the_last_of_their_keys(monkeypatch):
    asked = {}

    def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
                               softmax_scale=None, causal=False):
        asked.update(longest=(max_seqlen_q, max_seqlen_k), types=(cu_seqlens_q.dtype, cu_seqlens_k.dtype))
        assert causal and softmax_scale is None and dropout_p == 0.0
        return attend_definition(q, k, v, cu_seqlens_q, cu_seqlens_k)

    monkeypatch.setitem(sys.modules, "flash_attn", types.SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func))
    cu, cu_keys = torch.tensor([0, 2, 5]), torch.tensor([0, 4, 7])
    q, k, v = draw(5, 4, 6), draw(7, 2, 6, seed=1), draw(7, 2, 6, seed=2)
    torch.testing.assert_close(attention._flash(q, k, v, cu, cu_keys), attention.attend(q, k, v, cu, cu_keys))
    assert asked == {"longest": (3, 4), "types": (torch.int32, torch.int32)}


def test_the_fla_adapter_gives_every_value_head_its_key_head(monkeypatch):
    def chunk_gated_delta_rule(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
                               use_qk_l2norm_in_kernel=False, cu_seqlens=None):
        assert q.shape == k.shape and q.shape[:3] == v.shape[:3] and use_qk_l2norm_in_kernel and output_final_state
        assert scale == q.shape[-1] ** -0.5 and cu_seqlens.dtype == torch.int64 and g.dtype == torch.float32
        out, after = gated_delta_rule_definition(q[0], k[0], v[0], g[0], beta[0], cu_seqlens, initial_state)
        return out[None], after

    stand_in = types.SimpleNamespace(chunk_gated_delta_rule=chunk_gated_delta_rule)
    monkeypatch.setitem(sys.modules, "fla", types.SimpleNamespace())
    monkeypatch.setitem(sys.modules, "fla.ops", types.SimpleNamespace())
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", stand_in)
    cu = torch.tensor([0, 3, 8], dtype=torch.int32)
    x = (draw(8, 2, 4), draw(8, 2, 4, seed=1), draw(8, 6, 5, seed=2), -draw(8, 6, seed=3).abs(),
         draw(8, 6, seed=4).sigmoid())
    states = draw(2, 6, 4, 5, seed=5)
    ours, wanted = delta_rule_fla.gated_delta_rule(*x, cu, states), gated_delta_rule_definition(*x, cu, states)
    for a, b in zip(ours, wanted):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)  # decays and states go over in float32
