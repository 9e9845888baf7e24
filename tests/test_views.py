"""The rows student and teacher read: same sampled tokens, a local reminder in one turn, the global one in all."""

import random

import pytest

from oprd.core.types import Ending, Reminder, Trajectory, Turn
from oprd.rollout.views import rows_of, student_example, student_row, teacher_view, teacher_view_slow

GENERATION = (90, 91)
MARK = 1000  # reminder ids are >= MARK, nothing else is


def encode(text):
    return [MARK + ord(c) for c in text]


def local(k, text="r"):
    return Reminder("c", "R1", text, turn=k)


GLOBAL = Reminder("test_outcome_feedback", "G", "g")


def trajectory(seed, turns=5, reminders=()):
    rng = random.Random(seed)
    ids = iter(range(1, 90))
    take = lambda low: tuple(next(ids) for _ in range(rng.randint(low, 3)))
    made = [Turn(take(1), take(1), reminder_ids=tuple(encode("z")) if k in reminders else ()) for k in range(turns)]
    return Trajectory("a", "t", tuple(made), GENERATION, Ending.SUBMITTED)


def contexts(view):
    """What stands before each scored token, in the student's order: a list of tuples ending in that token."""
    flat = [tuple(row.ids[: t + 1]) for row in view.rows for t in row.targets]
    return [flat[i] for i in view.order]


def test_a_hand_worked_conversation_gives_this_row_trunk_and_branch():
    told = Trajectory("a", "t", (Turn((1, 2), (3,)), Turn((4,), (5, 6))), (9,), Ending.SUBMITTED)
    row = student_row(told)
    assert row.ids.tolist() == [1, 2, 9, 3, 4, 9, 5, 6] and row.targets.tolist() == [3, 6, 7]
    view = teacher_view(told, encode, GLOBAL, {0: local(0)})
    g, r = encode("g")[0], encode("r")[0]
    trunk, branch = view.rows
    assert trunk.ids.tolist() == [1, 2, g, 9, 3, 4, 9, 5, 6] and trunk.targets.tolist() == [4]
    assert branch.ids.tolist() == [1, 2, g, 9, 3, 4, r, 9, 5, 6] and branch.targets.tolist() == [8, 9]
    assert view.order.tolist() == [0, 1, 2]


@pytest.mark.parametrize("seed", range(30))
def test_trunk_and_branches_show_every_token_the_context_of_the_one_row_per_turn_definition(seed):
    rng = random.Random(seed)
    told = trajectory(seed, turns=rng.randint(1, 6))
    hints = {k: local(k, "r" * rng.randint(1, 3)) for k in range(len(told.turns)) if rng.random() < 0.5}
    shown = GLOBAL if rng.random() < 0.5 else None
    fast, slow = teacher_view(told, encode, shown, hints), teacher_view_slow(told, encode, shown, hints)
    assert contexts(fast) == contexts(slow)
    row = student_row(told)
    assert [c[-1] for c in contexts(fast)] == row.ids[row.targets].tolist()
    assert len(fast.rows) == 1 + sum(k + 1 < len(told.turns) for k in hints)


def test_a_local_reminder_is_seen_by_one_turn_after_the_observation_and_before_the_generation_prompt():
    told = trajectory(1)
    seen = contexts(teacher_view(told, encode, None, {1: local(1), 2: local(2, "s")}))
    plain = contexts(teacher_view(told, encode, None, {}))
    turn_of = [k for k, turn in enumerate(told.turns) for _ in turn.sampled_ids]
    for k, with_, without in zip(turn_of, seen, plain):
        marks = [i for i in with_ if i >= MARK]
        assert marks == {2: encode("r"), 3: encode("s")}.get(k, [])
        if marks:
            at = with_.index(marks[0])
            assert with_[at - len(told.turns[k].context_ids):at] == told.turns[k].context_ids
            assert with_[at + 1:at + 1 + len(GENERATION)] == GENERATION
            assert with_[:at] + with_[at + 1:] == without


def test_the_global_reminder_stands_once_before_the_first_generation_prompt_of_every_turn():
    told = trajectory(2)
    for context in contexts(teacher_view(told, encode, GLOBAL, {0: local(0)})):
        at = len(told.turns[0].context_ids)
        assert context[at] == encode("g")[0] and context[at + 1] in (GENERATION[0], *encode("r"))
        assert context.count(encode("g")[0]) == 1


@pytest.mark.parametrize("k", range(4))
def test_student_and_teacher_contexts_end_in_the_same_generation_prefix_and_sampled_tokens(k):
    told = trajectory(3)
    student = contexts(teacher_view(told, encode, None, {}))
    teacher = contexts(teacher_view(told, encode, GLOBAL, {k: local(k)}))
    turn_of = [(turn, j) for turn in told.turns for j in range(len(turn.sampled_ids))]
    for (turn, j), s, t in zip(turn_of, student, teacher):
        tail = GENERATION + turn.sampled_ids[: j + 1]
        assert s[-len(tail):] == t[-len(tail):] == tail


def test_the_students_tokens_hold_no_reminder_and_no_reminder_makes_the_teacher_read_the_students_row():
    told = trajectory(4)
    row = student_row(told)
    assert (row.ids < MARK).all()
    view = teacher_view(told, encode, None, {})
    assert len(view.rows) == 1 and (view.rows[0].ids == row.ids).all() and (view.rows[0].targets == row.targets).all()


def test_a_trajectory_sampled_under_reminders_is_trained_in_the_contexts_it_was_sampled_in():
    told = trajectory(5, reminders={2, 4})
    trunk, *branches = rows_of(told)
    assert (trunk.ids < MARK).all() and len(branches) == 2
    for branch, k in zip(branches, (2, 4)):
        assert (branch.ids >= MARK).sum() == 1
        assert tuple(branch.ids[branch.targets]) == told.turns[k].sampled_ids
    scored = sorted(int(i) for row in (trunk, *branches) for i in row.ids[row.targets])
    assert scored == sorted(i for turn in told.turns for i in turn.sampled_ids)
    with pytest.raises(ValueError, match="turn 2 was sampled with a reminder"):
        student_row(told)


def test_a_reminder_fired_by_the_last_observation_has_no_turn_to_be_shown_to():
    told = trajectory(6, turns=2)
    assert len(teacher_view(told, encode, None, {1: local(1)}).rows) == 1


def test_an_example_gives_each_scored_token_the_loss_weight_and_keeps_its_logprobs():
    turns = (Turn((1,), (2, 3), logprobs=(-0.5, -1.0)), Turn((4,), (5,), logprobs=(-2.0,)))
    told = Trajectory("a", "t", turns, (9,), Ending.SUBMITTED)
    view = teacher_view(told, encode, GLOBAL, {})
    made = student_example(told, {"kl": 0.5}, "failure", view)
    assert made.weights["kl"].tolist() == [0.5, 0.5, 0.5] and made.old_logprobs.tolist() == [-0.5, -1.0, -2.0]
    assert (made.branch, made.unit, made.teacher) == ("failure", "a", view)
    assert student_example(trajectory(7), {"nll": 1.0}, "success").old_logprobs is None
