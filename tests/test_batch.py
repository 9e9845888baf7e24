"""Packing loses nothing, fits the budget, and keeps every token beside its prediction and its teacher's."""

import random

import numpy as np
import pytest

from oprd.core.batch import collate, pack, tokens_read, trainable_tokens
from oprd.core.types import Example, Row, View


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
    assert batch.teacher.cu_seqlens.tolist() == [0, 3, 10, 16]
    assert batch.teacher_index.tolist() == [1, 3 + 1, 3 + 7 + 4, 3 + 5]
    predicted = batch.teacher.ids[batch.teacher_index + 1]
    assert predicted.tolist() == batch.scored["kl"].targets.tolist() == [3, 50, 60, 70]
    skipped = Example(student, {"kl": np.array([1.0, 0.0, 3.0])}, "failure", example.teacher)
    assert collate([skipped]).teacher_index.tolist() == [1, 5]


def test_a_teacher_view_of_other_tokens_is_refused():
    student = row(1, 50, 2, 60, targets=[1, 3])
    view = View((row(1, 50, 2, 60, targets=[1, 3]),), np.array([1, 0]))
    with pytest.raises(AssertionError, match="line 3: the teacher's targets"):
        collate([Example(student, {"kl": np.ones(2)}, "failure", view, source="line 3")])


def test_a_token_under_two_losses_is_one_trainable_token():
    example = Example(row(1, 2, 3, 4, targets=[1, 2, 3]), {"nll": np.array([1, 0, 0]), "kl": np.array([1, 1, 0])},
                      teacher=View((row(1, 2, 3, 4, targets=[1, 2, 3]),), np.arange(3)))
    assert trainable_tokens(example) == 2
