"""Packing loses nothing, fits the budget, and keeps every token beside its prediction and its teacher's."""

import random

import numpy as np
import pytest
import torch

from oprd.core.architecture import ModelConfig
from oprd.core.batch import collate, pack, tokens_read, trainable_tokens
from oprd.core.model import Model
from oprd.core.objective import read_forest
from oprd.core.types import Example, Row, View, pieces


def row(*ids, targets):
    return Row(np.array(ids, dtype=np.int64), np.array(targets, dtype=np.int64))


def sized(n, source="s", teacher=0):
    student = row(*range(n), targets=[n - 1])
    if not teacher:
        return Example(student, {"nll": np.ones(1)}, source=source)
    seen = row(*[0] * (teacher - 1), n - 1, targets=[teacher - 1])
    return Example(student, {"kl": np.ones(1)}, "failure", View((seen,), np.array([0])), source=source)


def test_every_example_is_packed_once_within_the_budget_whatever_the_sizes():
    for count in range(1, 60):
        rng = random.Random(count)
        examples = [sized(rng.randint(2, 40), str(i), rng.choice([0, rng.randint(2, 20)])) for i in range(count)]
        bins = pack(examples, 64)
        assert sorted(int(e.source) for b in bins for e in b) == list(range(count))
        fill = [sum(sum(tokens_read(e)) for e in b) for b in bins]
        assert max(fill) <= 64
        assert all(a + b > 64 for i, a in enumerate(fill) for b in fill[:i])  # first fit: no two bins could be one
        assert [[e.source for e in b] for b in bins] == [[e.source for e in b] for b in pack(examples, 64)]


def test_first_fit_decreasing_by_hand():
    examples = [sized(3, "a"), sized(6, "b"), sized(4, "c"), sized(7, "d")]
    assert [[e.source for e in b] for b in pack(examples, 10)] == [["a", "d"], ["b", "c"]]


def test_teacher_tokens_count_only_where_something_is_distilled():
    assert tokens_read(sized(5, teacher=9)) == (5, 9)
    distilled = sized(5, teacher=9)
    assert tokens_read(Example(distilled.row, {"kl": np.zeros(1)}, "failure", distilled.teacher)) == (5, 0)


def test_an_example_over_the_budget_is_an_error_that_names_it_and_both_numbers():
    with pytest.raises(ValueError, match=r"rows.jsonl:7: 6 student \+ 5 teacher tokens = 11 .*token_budget = 10"):
        pack([sized(3), sized(6, "rows.jsonl:7", teacher=5)], 10)


def test_two_rows_by_hand():
    first = Example(row(5, 6, 7, 8, targets=[2, 3]), {"nll": np.array([0.5, 0.25])})
    second = Example(row(9, 10, 11, targets=[1, 2]), {"nll": np.array([0.0, 2.0])})
    batch = collate([first, second])
    assert batch.student.ids.tolist() == [5, 6, 7, 8, 9, 10, 11]
    assert batch.student.positions.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert batch.student.cu_seqlens.tolist() == [0, 4, 7]
    scored = batch.scored["nll"]
    assert scored.index.tolist() == [1, 2, 5]  # the token of weight zero never reaches the head
    assert scored.targets.tolist() == [7, 8, 11] and scored.weights.tolist() == [0.5, 0.25, 2.0]
    assert batch.teacher is None and batch.teacher_index is None and set(batch.scored) == {"nll"}


def test_a_teacher_view_of_trunk_and_branch_by_hand():
    student = row(1, 50, 2, 60, 3, 70, targets=[1, 3, 5])
    trunk = row(99, 1, 50, 2, 60, 3, 70, targets=[2, 6])  # the global reminder 99, the second turn scored elsewhere
    branch = row(99, 1, 50, 2, 88, 60, targets=[5])  # the local reminder 88 before the second turn
    example = Example(student, {"kl": np.array([1.0, 2.0, 3.0])}, "failure", View((trunk, branch), np.array([0, 2, 1])))
    other = sized(4, teacher=3)
    batch = collate([other, sized(2), example])
    # level 0: the other's row and what trunk and branch begin with; level 1: what they go on with
    first, then = batch.teacher.levels
    assert first.ids.tolist() == [0, 0, 3, 99, 1, 50, 2] and first.cu_seqlens.tolist() == [0, 3, 7]
    assert then.ids.tolist() == [60, 3, 70, 88, 60] and then.cu_seqlens.tolist() == [0, 3, 5]
    assert then.positions.tolist() == [4, 5, 6, 4, 5] and batch.teacher.after == ((-1, -1), (1, 1))
    assert batch.teacher_index.tolist() == [1, 3 + 1, 7 + 3, 7 + 1]
    assert batch.scored["kl"].targets.tolist() == [3, 50, 60, 70]
    skipped = Example(student, {"kl": np.array([1.0, 0.0, 3.0])}, "failure", example.teacher)
    assert collate([skipped]).teacher_index.tolist() == [1, 4 + 1]
    assert tokens_read(example) == (6, 4 + 3 + 2)


def test_what_several_rows_begin_with_is_one_piece():
    rows = [row(1, 2, 3, 4, targets=[]), row(1, 2, 9, targets=[]), row(1, 2, 3, targets=[]), row(7, targets=[]),
            row(1, 2, 3, 4, targets=[])]
    assert [(rows[p.row].ids[p.start : p.end].tolist(), p.after, p.rows, p.depth) for p in pieces(rows)] == [
        ([1, 2], -1, (0, 1, 2, 4), 0), ([3], 0, (0, 2, 4), 1), ([4], 1, (0, 4), 2), ([9], 0, (1,), 1), ([7], -1, (3,), 0)]


def random_view(rng):
    """An example whose teacher reads a trunk and branches off it, no two turns alike."""
    turns = [[rng.randrange(1, 30) for _ in range(rng.randint(2, 6))] for _ in range(rng.randint(1, 5))]
    head, reminded = [31] * rng.randint(0, 2), {k for k in range(len(turns)) if rng.random() < 0.5}
    student, targets, trunk, trunk_targets, branches, place = [0], [], [0, *head], [], [], []
    for k, turn in enumerate(turns):
        targets += range(len(student), len(student) + len(turn))
        student += turn
        if k in reminded:
            before = [*trunk, 32, 33 + k]
            branches.append(row(*before, *turn, targets=range(len(before), len(before) + len(turn))))
            place.append((len(branches), 0, len(turn)))
        else:
            place.append((0, len(trunk_targets), len(turn)))
            trunk_targets += range(len(trunk), len(trunk) + len(turn))
        trunk += turn
    rows = (row(*trunk, targets=trunk_targets), *branches)
    first = np.cumsum([0, *(len(r.targets) for r in rows)])
    order = np.concatenate([np.arange(first[r] + s, first[r] + s + n) for r, s, n in place])
    return Example(row(*student, targets=targets), {"kl": np.ones(len(targets))}, "failure", View(rows, order))


@pytest.mark.parametrize("layer_types", [("full_attention",) * 2, ("linear_attention", "full_attention")])
def test_a_forest_read_piece_by_piece_through_forked_caches_equals_every_row_by_itself(layer_types):
    config = ModelConfig(vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, head_dim=4, model_type="qwen3_5_text", layer_types=layer_types,
                         linear_conv_kernel_dim=4, linear_key_head_dim=4, linear_value_head_dim=6,
                         linear_num_key_heads=2, linear_num_value_heads=4, initializer_range=0.3)
    model, rng = Model(config).init(0).double().requires_grad_(False), random.Random(0)
    for _ in range(12):
        examples = [random_view(rng) for _ in range(rng.randint(1, 3))]
        batch = collate(examples)
        got = read_forest(model, batch.teacher)[batch.teacher_index]
        wanted = []
        for example in examples:
            alone = [model.hidden(torch.from_numpy(r.ids), torch.tensor([0, len(r.ids)]))[r.targets - 1]
                     for r in example.teacher.rows]
            wanted.append(torch.cat(alone)[example.teacher.order])
        torch.testing.assert_close(got, torch.cat(wanted), atol=1e-12, rtol=1e-12)
        total = sum(len(level.ids) for level in batch.teacher.levels)
        assert total == sum(e.teacher.tokens() for e in examples) <= sum(len(r.ids) for e in examples
                                                                         for r in e.teacher.rows)


def test_a_teacher_view_of_other_tokens_is_refused():
    student = row(1, 50, 2, 60, targets=[1, 3])
    view = View((row(1, 50, 2, 60, targets=[1, 3]),), np.array([1, 0]))
    with pytest.raises(AssertionError, match="line 3: the teacher's targets"):
        collate([Example(student, {"kl": np.ones(2)}, "failure", view, source="line 3")])


def test_a_token_under_two_losses_is_one_trainable_token():
    example = Example(row(1, 2, 3, 4, targets=[1, 2, 3]), {"nll": np.array([1, 0, 0]), "kl": np.array([1, 1, 0])},
                      teacher=View((row(1, 2, 3, 4, targets=[1, 2, 3]),), np.arange(3)))
    assert trainable_tokens(example) == 2
