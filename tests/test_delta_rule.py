"""kernels/delta_rule.py: the chunked form and the decoding step are the token-by-token rule, values and gradients."""

import pytest
import torch

from oprd.kernels.delta_rule import gated_delta_rule, gated_delta_rule_definition, gated_delta_rule_step

torch.set_num_threads(1)
LENGTHS = [1, 0, 63, 64, 65, 130, 7]


def bounds(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])


def inputs(lengths, G=2, H=6, K=5, V=7, states=False, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype)

    T = sum(lengths)
    made = [draw(T, G, K), draw(T, G, K), draw(T, H, V), -draw(T, H).abs(), draw(T, H).sigmoid()]
    return [x.requires_grad_() for x in [*made, *([draw(len(lengths), H, K, V)] if states else [])]]


def run(rule, x, cu, **more):
    return rule(*x[:5], cu, *x[5:], **more)


def same(a, b, limit=1e-10):
    torch.testing.assert_close(a, b, atol=limit, rtol=limit)


@pytest.mark.parametrize("heads", [dict(G=2, H=6), dict(G=3, H=3), dict(G=1, H=2, K=9, V=2)])
@pytest.mark.parametrize("states", [False, True])
def test_chunks_equal_the_definition_in_values_and_all_gradients(heads, states):
    x, y = (inputs(LENGTHS, states=states, **heads) for _ in range(2))
    got, wanted = run(gated_delta_rule, x, bounds(LENGTHS)), run(gated_delta_rule_definition, y, bounds(LENGTHS))
    weights = [torch.randn(t.shape, dtype=t.dtype, generator=torch.Generator().manual_seed(1)) for t in got]
    for values, leaves in ((got, x), (wanted, y)):
        torch.autograd.backward(values, weights)
    for a, b in zip((*got, *(t.grad for t in x)), (*wanted, *(t.grad for t in y)), strict=True):
        same(a, b)


def test_two_tokens_by_hand():
    # K = V = 1, so unit vectors are signs: S1 = 0.5 * 4 = 2; S2 = 2 * 0.5 = 1, then 1 + (1 * (3 - 1)) = 3
    x = [torch.tensor([[[2.0]], [[-5.0]]]), torch.tensor([[[3.0]], [[1.0]]]), torch.tensor([[[4.0]], [[3.0]]]),
         torch.tensor([[1.0], [0.5]]).log(), torch.tensor([[0.5], [1.0]])]
    out, after = run(gated_delta_rule, x, torch.tensor([0, 2]))
    same(out.flatten(), torch.tensor([2.0, -3.0]), 1e-5)
    same(after.flatten(), torch.tensor([3.0]), 1e-5)


@pytest.mark.parametrize("pieces", [[40, 90], [1] * 5 + [64, 61], [130], [0, 129, 1]])
def test_pieces_that_hand_on_their_state_equal_one_piece(pieces):
    whole = inputs([130], states=True)
    out, after = run(gated_delta_rule, whole, bounds([130]))
    got, state = [], whole[5]
    for part in zip(*(x.split(pieces) for x in whole[:5])):
        piece, state = gated_delta_rule(*part, bounds([len(part[0])]), state)
        got.append(piece)
    same(torch.cat(got), out)
    same(state, after)


@pytest.mark.parametrize("chunk", [1, 16, 64, 1000])
def test_packed_sequences_equal_each_alone_whatever_the_chunk(chunk):
    x = inputs(LENGTHS)
    out, after = run(gated_delta_rule, x, bounds(LENGTHS), chunk=chunk)
    for part, own, state in zip(zip(*(t.split(LENGTHS) for t in x)), out.split(LENGTHS), after):
        alone, last = gated_delta_rule(*part, bounds([len(own)]))
        same(own, alone)
        same(state, last[0])


@pytest.mark.parametrize("decay", [0.0, -50.0, -1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extreme_decays_stay_finite_in_values_and_gradients(decay, dtype):
    x = inputs([70, 3], dtype=dtype)
    with torch.no_grad():
        x[3].fill_(decay)
    out, after = run(gated_delta_rule, x, bounds([70, 3]))
    (out.float().sum() + after.sum()).backward()
    assert out.dtype == dtype and after.dtype == torch.float32
    assert all(t.isfinite().all() for t in (out, after, *(t.grad for t in x)))
    if decay < -40:  # nothing of the past is left: every token reads what it wrote itself
        q, k, v, _, beta = (t.float() for t in x)
        cos = torch.cosine_similarity(q, k, dim=-1).repeat_interleave(3, dim=1)
        alone = v * (beta * cos * 5**-0.5)[..., None]
        torch.testing.assert_close(out.float(), alone, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("heads", [dict(G=2, H=6), dict(G=3, H=3)])
def test_a_step_for_many_rows_equals_the_definition_and_writes_the_states_in_place(heads):
    x = [t.detach() for t in inputs([1] * 9, states=True, **heads)]
    out, after = run(gated_delta_rule_definition, x, bounds([1] * 9))
    states = x[5].clone()
    same(gated_delta_rule_step(*x[:5], states), out)
    same(states, after)


def test_a_step_in_bfloat16_keeps_float32_states_and_gives_the_values_dtype():
    x = [t.detach() for t in inputs([1] * 4, states=True, dtype=torch.float32)]
    low = [t.bfloat16() for t in x[:5]]
    out, after = run(gated_delta_rule_definition, [*low, x[5]], bounds([1] * 4))
    states = x[5].clone()
    step = gated_delta_rule_step(*low, states)
    assert step.dtype == torch.bfloat16 and states.dtype == torch.float32
    same(step.double(), out, 0.02)
    same(states.double(), after, 1e-5)


def test_keys_that_are_nearly_the_same_leave_it_exact():
    # beta = 1 and no decay: the powers of the triangular system grow past 1e11, its inverse stays small
    x = [t.detach() for t in inputs([128], dtype=torch.float32)]
    x[1] = x[1][:1] + 0.1 * x[1]
    x[3], x[4] = torch.zeros_like(x[3]), torch.ones_like(x[4])
    for got, wanted in zip(run(gated_delta_rule, x, bounds([128])), run(gated_delta_rule_definition, x, bounds([128]))):
        assert (got.double() - wanted).norm() < 1e-5 * wanted.norm()


def test_autocast_around_either_pass_changes_nothing():
    results = []
    for on in (False, True):
        x = inputs([70, 3], states=True, dtype=torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
            out, after = run(gated_delta_rule, x, bounds([70, 3]))
            (out.square().sum() + after.square().sum()).backward()
        results.append([out, after, *(t.grad for t in x)])
    for plain, cast in zip(*results, strict=True):
        assert torch.equal(plain, cast)


def test_only_one_result_or_one_input_may_take_part_in_the_gradient():
    cu = bounds(LENGTHS)
    for used in (0, 1):
        x, y = (inputs(LENGTHS, states=True) for _ in range(2))
        for rule, leaves in ((gated_delta_rule, x), (gated_delta_rule_definition, y)):
            for t in leaves[:2]:
                t.requires_grad_(False)
            run(rule, leaves, cu)[used].square().sum().backward()
        assert x[0].grad is None and x[1].grad is None
        for a, b in zip(x[2:], y[2:]):
            # the definition never reads some inputs; the kernel then says zero
            same(a.grad, torch.zeros_like(a) if b.grad is None else b.grad)


def test_heads_may_be_views_into_one_row_of_channels():
    G, H, K, V = 2, 4, 5, 3
    row = torch.randn(66, 2 * G * K + H * V, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    q, k, v = row.split([G * K, G * K, H * V], dim=1)
    views = q.unflatten(1, (G, K)), k.unflatten(1, (G, K)), v.unflatten(1, (H, V))
    g, beta = -torch.rand(66, H, dtype=torch.float64), torch.rand(66, H, dtype=torch.float64)
    for got, wanted in zip(gated_delta_rule(*views, g, beta, bounds([66])),
                           gated_delta_rule_definition(*views, g, beta, bounds([66]))):
        same(got, wanted)


@pytest.mark.parametrize("lengths", [[0], [0, 0, 0]])
def test_without_tokens_the_states_stay_and_their_gradient_passes(lengths):
    x = inputs(lengths, states=True)
    out, after = run(gated_delta_rule, x, bounds(lengths))
    assert out.shape == (0, 6, 7) and torch.equal(after, x[5])
    (3 * after).sum().backward()
    assert torch.equal(x[5].grad, torch.full_like(x[5], 3))
    assert all(t.grad.shape == t.shape for t in x)


def test_it_leaves_its_inputs_and_the_states_before_as_they_were():
    x = inputs(LENGTHS, states=True)
    before = [t.detach().clone() for t in x]
    out, after = run(gated_delta_rule, x, bounds(LENGTHS))
    (out.sum() + after.sum()).backward()
    assert all(torch.equal(a, b) for a, b in zip(x, before))


def test_what_is_kept_for_the_backward_pass_is_what_the_docstring_says():
    G, H, K, V, T = 2, 4, 8, 16, 256
    x, kept = inputs([T], G, H, K, V, dtype=torch.float32), {}

    def keep(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes() // 4
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        gated_delta_rule(*x, bounds([T]))
    assert sum(kept.values()) == sum(t.numel() for t in x) + T * H * (64 + K * V // 64)


@pytest.mark.parametrize("T", [1, 64, 150])
def test_it_is_the_rule_of_transformers(T):
    from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs

    x = [t.detach() for t in inputs([T], states=True, dtype=torch.float32)]
    q, k = (t.repeat_interleave(3, dim=1)[None] for t in x[:2])
    for rule in (theirs.torch_chunk_gated_delta_rule, theirs.torch_recurrent_gated_delta_rule):
        out, state = rule(q, k, *(t[None] for t in x[2:5]), initial_state=x[5], output_final_state=True,
                          use_qk_l2norm_in_kernel=True)
        got, after = run(gated_delta_rule, x, bounds([T]))
        same(got, out[0], 2e-5)
        same(after, state, 2e-5)
