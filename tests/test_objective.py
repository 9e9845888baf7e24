"""Final weights make the step's loss a plain sum; they are checked against the loss written out from its formula."""

import numpy as np
import pytest
import torch

from oprd.core.batch import collate
from oprd.core.metrics import values
from oprd.core.objective import Distillation, Objective, batch_loss, normalise
from oprd.core.types import Example, Row, View
from oprd.parallel.layers import Head

torch.set_num_threads(1)


def example(weights, branch="success", unit="", name="nll"):
    n = len(weights)
    row = Row(np.arange(n + 1), np.arange(1, n + 1))
    view = View((row,), np.arange(n)) if name == "kl" else None
    return Example(row, {name: np.array(weights, dtype=float)}, branch, view, unit, source=f"{branch} row")


def final(examples, **settings):
    return [e.weights[next(iter(e.weights))].tolist() for e in normalise(examples, Objective(**settings))]


STEP = [example([1, 1, 1], unit="a"), example([1], unit="a"), example([1, 1], unit="b"),
        example([1, 0, 1], "failure", "c", "kl")]


def test_token_mean_of_each_branch():
    assert final(STEP, lambda_failure=0.5) == [[1 / 6] * 3, [1 / 6], [1 / 6] * 2, [0.25, 0, 0.25]]


def test_token_mean_with_one_denominator():
    assert final(STEP, denominator="joint", lambda_success=2.0) == [[0.25] * 3, [0.25], [0.25] * 2, [1 / 8, 0, 1 / 8]]


def test_mean_over_trajectories_of_token_means():
    by_unit = final(STEP, aggregate="trajectory")  # success: units a (4 tokens over two rows) and b (2)
    assert by_unit == [[1 / 8] * 3, [1 / 8], [1 / 4] * 2, [0.5, 0, 0.5]]
    joint = final(STEP, aggregate="trajectory", denominator="joint")
    np.testing.assert_allclose(np.concatenate(joint), [1 / 12] * 4 + [1 / 6] * 2 + [1 / 6, 0, 1 / 6])


def test_rows_without_a_unit_are_trajectories_of_their_own():
    assert final([example([1, 1]), example([1])], aggregate="trajectory") == [[0.25, 0.25], [0.5]]


def test_a_trajectory_without_tokens_is_not_counted():
    empty = example([0, 0], unit="a")
    assert final([empty, example([1, 1], unit="b")], aggregate="trajectory") == [[0, 0], [0.5, 0.5]]


def test_raw_weights_scale_the_loss_and_not_the_denominator():
    assert final([example([2.0, -1.0])]) == [[1.0, -0.5]]


@pytest.mark.parametrize("settings", [{}, {"denominator": "joint"}, {"aggregate": "trajectory"}])
def test_an_empty_branch_or_row_contributes_zero_and_divides_nothing(settings):
    empty, only = example([0, 0], "failure", name="kl"), example([1, 1])
    assert final([empty, only], **settings) == [[0, 0], [0.5, 0.5]]
    assert final([empty], **settings) == [[0, 0]]
    assert final([], **settings) == []


def test_a_branch_of_lambda_zero_has_no_trainable_token():
    normal = normalise([example([1, 1], "failure", name="kl")], Objective(lambda_failure=0.0))
    assert normal[0].weights["kl"].tolist() == [0, 0]


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="odd row: branch = 'odd'"):
        normalise([example([1], "odd")])
    with pytest.raises(ValueError, match="success row: loss = 'odd'"):
        normalise([example([1], name="odd")])
    with pytest.raises(ValueError, match="success row: a nll weight is not finite"):
        normalise([example([1, np.nan])])
    for bad in ({"aggregate": "rows"}, {"denominator": "both"}, {"lambda_success": -1.0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            Objective(**bad)


class Table:
    """A model whose hidden states are the logits of the next token, one row of a table per id."""

    def __init__(self, V, seed):
        self.table = torch.randn(V, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        self.table.requires_grad_()
        self.head = Head(torch.eye(V, dtype=torch.float64), V)
        self.read, self.with_graph = 0, False

    def hidden(self, ids, cu_seqlens, positions=None, routers=None):
        self.read += len(ids)
        self.with_graph = torch.is_grad_enabled()
        return self.table[ids]


def test_the_loss_is_the_formula_of_the_paper_written_out():
    model, teacher = Table(7, 0), Table(7, 1)
    examples = [example([1, 1, 1]), example([1]), example([1, 1, 0, 1], "failure", name="kl")]
    objective = Objective(lambda_success=0.7, lambda_failure=2.0)
    loss, metrics = batch_loss(model, teacher, collate(normalise(examples, objective)), Distillation(k=7))
    log_p, log_q = torch.log_softmax(model.table, -1), torch.log_softmax(teacher.table, -1)
    nll = -(log_p[0, 1] + log_p[1, 2] + log_p[2, 3] + log_p[0, 1]) / 4
    kl = sum((log_p[i].exp() * (log_p[i] - log_q[i])).sum() for i in (0, 1, 3)) / 3
    torch.testing.assert_close(loss, 0.7 * nll + 2.0 * kl)
    shown = values(metrics)
    assert shown["train/loss"] == pytest.approx(loss.item()) and shown["train/nll"] == pytest.approx(nll.item())
    assert shown["distillation/kl"] == pytest.approx(kl.item())
    assert shown["distillation/student_mass"] == pytest.approx(1.0)
    loss.backward()
    assert teacher.table.grad is None and teacher.read == 5 and not teacher.with_graph and model.with_graph


def test_the_teacher_is_not_read_when_nothing_is_distilled():
    teacher = Table(7, 1)
    batch_loss(Table(7, 0), teacher, collate(normalise([example([1, 1])])), Distillation(k=3))
    assert teacher.read == 0


def test_distillation_without_a_teacher_is_an_error():
    with pytest.raises(ValueError, match="no teacher"):
        batch_loss(Table(7, 0), None, collate(normalise([example([1], "failure", name="kl")])), Distillation(k=3))


def test_another_teacher_or_setting_changes_the_gradient():
    batch = collate(normalise([example([1, 1, 1], "failure", name="kl")]))
    seen = set()
    for seed, settings in [(1, {}), (2, {}), (1, {"k": 4}), (1, {"temperature": 0.5}), (1, {"direction": "forward"}),
                           (1, {"support": "full"}), (1, {"support": "tail"}), (1, {"support": "generalised"})]:
        model = Table(7, 0)
        batch_loss(model, Table(7, seed), batch, Distillation(**{"k": 3, **settings}))[0].backward()
        seen.add(round(model.table.grad.pow(2).sum().item(), 12))
    assert len(seen) == 8
