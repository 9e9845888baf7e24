"""One optimizer step on the real model: the split into micro-batches changes neither loss nor any gradient."""

import logging

import numpy as np
import pytest
import torch
from families_help import randomised

from oprd.core.metrics import values
from oprd.core.model import Model, ModelConfig
from oprd.core.moe import balance_loss
from oprd.core.objective import Distillation, Objective
from oprd.core.optim import AdamW
from oprd.core.step import train_step
from oprd.core.types import Example, Row, View

torch.set_num_threads(1)
V = 37


def model(seed, dtype=torch.float64):
    sizes = dict(hidden_size=16, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2, head_dim=4)
    config = ModelConfig(V, num_hidden_layers=2, tie_word_embeddings=True, initializer_range=0.3, **sizes)
    return Model(config).init(seed).to(dtype)


def examples(count=8, seed=0):
    """Successes and failures of uneven lengths; a failure's teacher reads a reminder of two tokens first."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(count):
        ids = rng.integers(0, V, rng.integers(6, 20))
        targets = np.sort(rng.choice(np.arange(1, len(ids)), size=len(ids) // 2, replace=False))
        row = Row(ids, targets)
        weights = rng.integers(0, 2, len(targets)) + np.eye(len(targets))[0]
        if i % 2:
            reminded = Row(np.concatenate([[1, 2], ids]), targets + 2)
            view = View((reminded,), np.arange(len(targets)))
            made.append(Example(row, {"kl": weights}, "failure", view, unit=f"u{i}", source=f"row {i}"))
        else:
            made.append(Example(row, {"nll": weights}, "success", unit=f"u{i // 4}", source=f"row {i}"))
    return made


class Recorder(AdamW):
    """Keeps the gradients of the last step."""

    def step(self, lr):
        self.gradients = {n: None if p.grad is None else p.grad.clone() for n, p in self.parameters.items()}
        super().step(lr)


def run(student, rows, budget, lr=0.0, **settings):
    optimizer = Recorder(student.named_parameters())
    settings = {"distillation": Distillation(k=5), **settings}
    metrics = train_step(student, model(1, torch.float64), rows, optimizer, lr=lr, token_budget=budget, **settings)
    return values(metrics), getattr(optimizer, "gradients", None)


@pytest.mark.parametrize("aggregate", ["token", "trajectory"])
@pytest.mark.parametrize("denominator", ["separate", "joint"])
def test_eight_micro_batches_of_one_equal_one_of_eight(aggregate, denominator):
    objective = Objective(1.0, 0.5, aggregate, denominator)
    found = {budget: run(model(0), examples(), budget, objective=objective) for budget in (40, 80, 10_000)}
    whole, gradients = found[10_000]
    assert whole["train/micro_batches"] == 1 and found[40][0]["train/micro_batches"] >= 5
    layout = {"train/micro_batches"}
    for shown, others in found.values():
        for name in whole.keys() - layout:
            assert shown[name] == pytest.approx(whole[name], rel=1e-10, abs=1e-12), name
        for name, g in gradients.items():
            torch.testing.assert_close(others[name], g, rtol=1e-10, atol=1e-12, msg=name)
    assert all(g.abs().max() > 0 for g in gradients.values())


def test_each_example_alone_in_its_micro_batch_adds_up_too():
    same_size = [Example(Row(np.arange(i, i + 9), np.arange(1, 9)), {"nll": np.ones(8)}) for i in range(8)]
    (one, a), (eight, b) = run(model(0), same_size, 9), run(model(0), same_size, 72)
    assert (one["train/micro_batches"], eight["train/micro_batches"]) == (8, 1)
    assert one["train/loss"] == pytest.approx(eight["train/loss"], rel=1e-12)
    assert all(torch.allclose(a[n], b[n], rtol=1e-10, atol=1e-13) for n in a)


def test_a_teacher_that_is_the_student_without_a_reminder_gives_zero_loss_and_gradient():
    rows = []
    for e in examples()[1::2]:
        rows.append(Example(e.row, e.weights, "failure", View((e.row,), np.arange(len(e.row.targets)))))
    student = model(0)
    optimizer = Recorder(student.named_parameters())
    metrics = train_step(student, student, rows, optimizer, lr=0.1, token_budget=100, distillation=Distillation(k=5))
    assert metrics["train/loss"].value() == 0.0
    assert max(g.abs().max().item() for g in optimizer.gradients.values()) < 1e-14


def test_training_lowers_both_losses():
    student = model(0)
    optimizer = AdamW(student.named_parameters())
    seen = [values(train_step(student, model(1), examples(), optimizer, lr=3e-3, token_budget=200,
                              distillation=Distillation(k=5), max_norm=10.0)) for _ in range(15)]
    for name in ("train/nll", "distillation/kl", "train/loss"):
        assert seen[-1][name] < 0.8 * seen[0][name], name
    assert all(p.grad is None for p in student.parameters())  # freed before the next rollout
    assert seen[0]["train/learning_rate"] == 3e-3 and seen[0]["train/gradient_norm"] > 0


def test_a_step_without_a_trainable_token_is_skipped_loudly(caplog):
    student = model(0)
    before = [p.clone() for p in student.parameters()]
    masked = [Example(Row(np.arange(5), np.array([2, 3])), {"nll": np.zeros(2)})] * 3
    with caplog.at_level(logging.WARNING):
        shown, gradients = run(student, masked, 100, lr=0.1)
    assert "none of its 3 examples" in caplog.text and gradients is None
    assert shown["train/skipped_steps"] == 1 and shown["train/trained_tokens"] == 0 and "train/loss" not in shown
    assert all(torch.equal(a, b) for a, b in zip(before, student.parameters()))


def test_an_example_without_trainable_tokens_is_counted_and_changes_nothing():
    masked = Example(Row(np.arange(5), np.array([2, 3])), {"nll": np.zeros(2)}, "success")
    (alone, a), (both, b) = run(model(0), examples(), 100), run(model(0), [masked, *examples()], 100)
    assert alone["train/examples_without_tokens"] == 0 and both["train/examples_without_tokens"] == 1
    assert both["train/loss"] == alone["train/loss"] and all(torch.equal(a[n], b[n]) for n in a)


def test_a_gradient_that_is_not_finite_is_an_error_and_the_weights_stay():
    student = model(0)
    with torch.no_grad():
        student.model.embed_tokens.weight[3] = torch.inf
    before = [p.clone() for p in student.parameters()]
    rows = [Example(Row(np.array([3, 4, 5]), np.array([1, 2])), {"nll": np.ones(2)})]
    with pytest.raises(FloatingPointError, match="embed_tokens.weight.*not finite.*loss = nan"):
        run(student, rows, 100, lr=0.1)
    assert all(torch.equal(a, b) for a, b in zip(before, student.parameters()))
    assert all(p.grad is None for p in student.parameters())


def test_bf16_autocast_stays_close_and_leaves_fp32_weights():
    def gradient(**settings):
        student = model(0, torch.float32)
        optimizer = Recorder(student.named_parameters())
        train_step(student, model(1, torch.float32), examples(), optimizer, lr=1e-3, token_budget=100,
                   distillation=Distillation(k=5), **settings)
        assert all(p.dtype == torch.float32 for p in student.parameters())
        return torch.cat([g.flatten() for g in optimizer.gradients.values()])

    exact, rounded = gradient(), gradient(bf16=True)
    assert not torch.equal(exact, rounded)
    assert torch.cosine_similarity(exact, rounded, dim=0) > 0.99


def test_the_same_step_twice_is_bit_identical():
    (a, g), (b, h) = run(model(0), examples(), 100), run(model(0), examples(), 100)
    assert a == b and all(torch.equal(g[n], h[n]) for n in g)


def test_the_routers_balance_is_a_mean_over_rows_whatever_the_micro_batches():
    student = randomised("qwen3_5_moe_text").double()
    rows = [Row(np.arange(n) % V, np.array([n - 1])) for n in (9, 30, 17, 25)]
    made = [Example(row, {"nll": np.ones(1)}) for row in rows]
    plain, without = run(student, made, 10_000)
    whole, gradients = run(student, made, 10_000, router_balance=0.5)
    split, same = run(student, made, 30, router_balance=0.5)
    alone = []
    for row in rows:
        routers = []
        student.hidden(torch.from_numpy(row.ids), torch.tensor([0, len(row.ids)]), routers=routers)
        alone.append(balance_loss(routers, torch.tensor([0, len(row.ids)]), 2)[0].item())
    assert whole["train/router_balance"] == pytest.approx(np.mean(alone), rel=1e-9)
    assert split["train/micro_batches"] == 3 and "train/router_balance" not in plain
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, same[name], atol=1e-10, rtol=1e-10)
    router = "model.layers.0.mlp.gate.weight"
    assert (gradients[router] - without[router]).abs().max() > 1e-4
