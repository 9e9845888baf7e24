"""The policy-gradient loss against its definition and its own algebra: values, gradients, bounds, masks."""

import math

import numpy as np
import pytest
import torch
from test_step import V, model, run

from oprd.core.batch import collate
from oprd.core.metrics import values
from oprd.core.objective import Distillation, Objective, PolicyGradient, batch_loss, normalise
from oprd.core.types import Example, Row, View
from oprd.kernels.policy_gradient import policy_gradient, policy_gradient_definition

torch.set_num_threads(1)
BOUNDS = dict(low=0.2, high=0.28, cap=5.0)


def drawn(seed, n=64, spread=1.0):
    rng = np.random.default_rng(seed)
    logp = torch.tensor(-rng.exponential(1.0, n), requires_grad=True)
    sampled = torch.tensor(logp.detach().numpy() + rng.normal(0, spread, n))
    return logp, sampled, torch.tensor(rng.normal(0, 1, n))


@pytest.mark.parametrize("ratio", ["behaviour", "trainer"])
@pytest.mark.parametrize("seed", range(5))
def test_values_and_gradients_are_those_of_the_definition(ratio, seed):
    logp, sampled, weights = drawn(seed)
    expected = policy_gradient_definition(logp, sampled, weights, **BOUNDS, ratio=ratio)
    (wanted,) = torch.autograd.grad((expected * weights).sum(), logp)
    found, _ = policy_gradient(logp, sampled, weights, **BOUNDS, ratio=ratio)
    (got,) = torch.autograd.grad((found * weights).sum(), logp)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_at_a_ratio_of_one_the_gradient_is_that_of_reinforce():
    logp, _, weights = drawn(0)
    for ratio in ("behaviour", "trainer"):
        found, stats = policy_gradient(logp, logp.detach(), weights, **BOUNDS, ratio=ratio)
        (got,) = torch.autograd.grad((found * weights).sum(), logp)
        torch.testing.assert_close(got, -weights)
        assert stats.clipped.sum() == 0 and stats.kl.abs().max() == 0


@pytest.mark.parametrize("apart,weight,value,flows", [
    (math.log(1.27), 1.0, 1.27, True), (math.log(1.29), 1.0, 1.28, False), (math.log(0.1), 1.0, 0.1, True),
    (math.log(0.81), -1.0, 0.81, True), (math.log(0.79), -1.0, 0.8, False), (math.log(4.9), -1.0, 4.9, True),
    (math.log(5.1), -1.0, 5.0, False), (500.0, -1.0, 5.0, False), (500.0, 1.0, 1.28, False), (-500.0, 1.0, 0.0, True)])
def test_bounds_by_hand(apart, weight, value, flows):
    logp = torch.tensor([apart], dtype=torch.float64, requires_grad=True)
    found, _ = policy_gradient(logp, torch.zeros(1), torch.tensor([weight]), **BOUNDS)
    (gradient,) = torch.autograd.grad(found.sum(), logp)
    assert found.item() == pytest.approx(-value, abs=1e-12)
    assert gradient.item() == pytest.approx(-value if flows else 0.0, abs=1e-12)


def test_the_engines_mismatch_is_a_constant_factor_that_is_capped():
    logp = torch.tensor([math.log(2.0), math.log(9.0)], dtype=torch.float64, requires_grad=True)
    found, stats = policy_gradient(logp, torch.zeros(2), torch.ones(2), **BOUNDS, ratio="trainer")
    (gradient,) = torch.autograd.grad(found.sum(), logp)
    np.testing.assert_allclose(gradient, [-2.0, -5.0])
    assert stats.clipped.tolist() == [0, 1]


def rows(seed=0, count=6):
    rng = np.random.default_rng(seed)
    made = []
    for i in range(count):
        ids = rng.integers(0, V, rng.integers(6, 18))
        targets = np.sort(rng.choice(np.arange(1, len(ids)), size=len(ids) // 2, replace=False))
        advantage = float(rng.normal())
        made.append(Example(Row(ids, targets), {"pg": np.full(len(targets), advantage)}, "policy", unit=f"u{i}",
                            source=f"row {i}", old_logprobs=-rng.exponential(3.0, len(targets))))
    return made


def logprobs_of(student, example):
    hidden = student.hidden(torch.from_numpy(example.row.ids), torch.tensor([0, len(example.row.ids)], dtype=torch.int32),
                            torch.arange(len(example.row.ids)))
    logits = hidden[example.row.targets - 1] @ student.head_weight.T
    return torch.log_softmax(logits, -1).gather(1, torch.from_numpy(example.row.ids[example.row.targets])[:, None])[:, 0]


def test_the_step_is_the_objective_written_out_and_no_split_changes_it():
    student, made = model(0), rows()
    total = sum(len(e.row.targets) for e in made)
    loss = sum((policy_gradient_definition(lp := logprobs_of(student, e), torch.from_numpy(e.old_logprobs),
                                           w := torch.from_numpy(e.weights["pg"]), **BOUNDS) * w).sum()
               for e in made) / total
    wanted = dict(zip(dict(student.named_parameters()), torch.autograd.grad(loss, list(student.parameters()))))
    for budget in (20, 1000):
        found, got = run(student, made, budget)
        assert found["train/loss"] == pytest.approx(loss.item(), rel=1e-12)
        for name, gradient in wanted.items():
            torch.testing.assert_close(got[name], gradient, rtol=1e-9, atol=1e-12)


def test_temperature_divides_the_trainers_logits_as_it_divided_the_engines():
    student, (row, *_) = model(0), rows()
    hidden = student.hidden(torch.from_numpy(row.row.ids), torch.tensor([0, len(row.row.ids)], dtype=torch.int32),
                            torch.arange(len(row.row.ids)))
    logits = hidden[row.row.targets - 1] @ student.head_weight.T / 0.7
    lp = torch.log_softmax(logits, -1).gather(1, torch.from_numpy(row.row.ids[row.row.targets])[:, None])[:, 0]
    at = Example(row.row, {"pg": np.ones(len(row.row.targets))}, "policy", old_logprobs=lp.detach().numpy())
    _, found = batch_loss(student, None, collate(normalise([at])), Distillation(), policy=PolicyGradient(temperature=0.7))
    assert values(found)["policy/ratio"] == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("aggregate", ["token", "trajectory", "constant"])
def test_what_is_no_target_has_exactly_no_part_in_loss_gradient_and_denominator(aggregate):
    """The log-probabilities of masked tokens do not even enter the row; weights of zero stay in the denominator."""
    rng = np.random.default_rng(3)
    ids = rng.integers(0, V, 12)
    old = -rng.exponential(1.0, 12)
    tail = np.arange(6, 12)
    objective = Objective(aggregate=aggregate, length=10.0)
    masked = Example(Row(ids, tail), {"pg": np.ones(6)}, "policy", old_logprobs=old[tail])
    found, gradients = run(model(0), [masked], 1000, objective=objective)
    zeroed = Example(Row(ids, np.arange(1, 12)), {"pg": np.where(np.arange(1, 12) < 6, 0.0, 1.0)}, "policy",
                     old_logprobs=old[1:])
    again, same = run(model(0), [zeroed], 1000, objective=objective)
    share = 1.0 if aggregate == "constant" else 6 / 11
    assert again["train/loss"] == pytest.approx(found["train/loss"] * share, rel=1e-12)
    for name in gradients:
        torch.testing.assert_close(same[name], gradients[name] * share, rtol=1e-9, atol=1e-13)


def test_denominators_of_a_policy_branch_by_hand():
    made = [Example(Row(np.arange(n + 1), np.arange(1, n + 1)), {"pg": np.full(n, w)}, "policy", unit=str(n),
                    old_logprobs=np.zeros(n)) for n, w in ((3, 2.0), (1, -1.0), (4, 0.0))]
    weights = lambda **o: [e.weights["pg"].tolist() for e in normalise(made, Objective(**o))]  # noqa: E731
    assert weights() == [[2 / 8] * 3, [-1 / 8], [0.0] * 4]
    assert weights(aggregate="trajectory") == [[2 / 9] * 3, [-1 / 3], [0.0] * 4]
    assert weights(aggregate="constant", length=10.0) == [[2 / 30] * 3, [-1 / 30], [0.0] * 4]


def test_a_kl_to_a_reference_is_a_second_weight_on_the_same_row():
    made = [Example(e.row, {"pg": e.weights["pg"], "kl": np.full(len(e.row.targets), 0.1)}, "policy",
                    View((e.row,), np.arange(len(e.row.targets))), e.unit, e.source, e.old_logprobs) for e in rows()]
    found, _ = run(model(0), made, 1000)
    assert found["train/loss_kl"] > 0 and found["train/loss"] == pytest.approx(found["train/loss_kl"] + found["train/loss_pg"])
    alone, _ = run(model(0), rows(), 1000)
    assert found["train/loss_pg"] == pytest.approx(alone["train/loss_pg"], rel=1e-12)


def test_mistakes_are_named():
    row = Row(np.arange(4), np.arange(1, 4))
    with pytest.raises(ValueError, match="needs the 3 log-probabilities"):
        Example(row, {"pg": np.ones(3)}, "policy", source="r")
    bad = Example(row, {"pg": np.ones(3)}, "policy", source="r", old_logprobs=np.array([0.0, np.nan, 0.0]))
    with pytest.raises(ValueError, match="r: a sampled token's log-probability is not finite"):
        normalise([bad])
    for settings, name in (({"ratio": "odd"}, "ratio"), ({"clip_low": 2.0}, "clip_low"), ({"cap": 1.0}, "cap = 1.0")):
        with pytest.raises(ValueError, match=name):
            PolicyGradient(**settings)
