"""From a trajectory to the token rows that student and teacher read.

The student reads the plain conversation: one row, every sampled token scored. The teacher scores the same sampled
tokens in other contexts: the Global Reminder stands after the task in every view, a Turn-local Reminder is seen by
exactly one turn. So the teacher's view is a trunk (the conversation without local reminders) and one branch per
reminded turn (the trunk up to the observation that fired it, the reminder, that turn). A replayed turn is context in
every view, and nobody's target:

    trunk   task G  a0  o0  a1  o1  a2  o2 ...        scores every turn that has no local reminder
    branch  task G  a0  o0  a1  o1  R1  a2            scores a2 alone
"""

from __future__ import annotations

from typing import Callable, Mapping, Sequence

import numpy as np

from oprd.core.types import Example, Reminder, Row, Trajectory, View

Ids = Sequence[int]
Encode = Callable[[str], Ids]  # a reminder's text -> the ids of its whole message


def student_row(trajectory: Trajectory) -> Row:
    """The reminder-free conversation with every sampled token scored, those of replayed turns apart.

    Raises ValueError when a turn was sampled under a one-turn reminder: such a trajectory has no single row (its
    later turns did not see the reminder), see `rows_of`.
    """
    for k, turn in enumerate(trajectory.turns):
        if turn.reminder_ids:
            raise ValueError(f"{trajectory.attempt_id}: turn {k} was sampled with a reminder, so the trajectory is no "
                             f"reminder-free student row; use rows_of")
    return _read(trajectory, (), {}).rows[0]


def rows_of(trajectory: Trajectory) -> tuple[Row, ...]:
    """The rows under which the trajectory was really sampled: the trunk, and one branch per turn that saw a
    one-turn reminder. Every sampled token is scored in exactly one row (of replayed turns: in none)."""
    return _read(trajectory, (), {k: t.reminder_ids for k, t in enumerate(trajectory.turns) if t.reminder_ids}).rows


def student_example(trajectory: Trajectory, losses: Mapping[str, float], branch: str,
                    teacher: View | None = None, source: str = "") -> Example:
    """The student's row with one constant weight per loss name (e.g. {"nll": 1.0}) and the recorded log-probs."""
    row = student_row(trajectory)
    own = [turn for turn in trajectory.turns if not turn.replayed]
    logprobs = np.asarray([x for turn in own for x in turn.logprobs], np.float64)
    known = len(logprobs) == len(row.targets)
    versions = np.asarray([v for turn in own for v in turn.versions], np.int64)
    return Example(row, {name: np.full(len(row.targets), float(weight)) for name, weight in losses.items()}, branch,
                   teacher, trajectory.attempt_id, source or trajectory.attempt_id, logprobs if known else None,
                   versions if known else None)


def teacher_view(trajectory: Trajectory, encode: Encode, global_reminder: Reminder | None,
                 local: Mapping[int, Reminder]) -> View:
    """How the teacher reads a reminder-free student trajectory.

    encode: text -> ids of the reminder's message. local: k -> the reminder fired by observation k, shown to turn
    k + 1 only (one fired by the last observation has no turn to be shown to and is left out).
    Scores the same ids as `student_row(trajectory)`; `order` lines the two up.
    """
    student = student_row(trajectory)
    view = _read(trajectory, *_reminder_ids(trajectory, encode, global_reminder, local))
    _check_same_tokens(student, view)
    return view


def teacher_view_slow(trajectory: Trajectory, encode: Encode, global_reminder: Reminder | None,
                      local: Mapping[int, Reminder]) -> View:
    """The definition `teacher_view` must agree with: one whole row per turn, holding exactly what that turn sees."""
    head, by_turn = _reminder_ids(trajectory, encode, global_reminder, local)
    rows = []
    for k, turn in enumerate(trajectory.turns):
        ids = []
        for i, earlier in enumerate(trajectory.turns[:k]):
            ids += [*earlier.context_ids, *(head if i == 0 else ()), *trajectory.generation_ids, *earlier.sampled_ids]
        ids += [*turn.context_ids, *(head if k == 0 else ()), *by_turn.get(k, ()), *trajectory.generation_ids]
        if not turn.replayed:
            rows.append(_row(ids + list(turn.sampled_ids), range(len(ids), len(ids) + len(turn.sampled_ids))))
    return View(tuple(rows), np.arange(sum(len(r.targets) for r in rows)))


def _reminder_ids(trajectory, encode, global_reminder, local) -> tuple[Ids, dict[int, Ids]]:
    """(ids of the Global Reminder, ids of the local reminder by the turn that sees it)."""
    turns = len(trajectory.turns)
    for k, reminder in local.items():
        assert reminder.turn == k and 0 <= k < turns, f"reminder of turn {reminder.turn} filed under {k} of {turns}"
    head = tuple(encode(global_reminder.text)) if global_reminder else ()
    return head, {k + 1: tuple(encode(reminder.text)) for k, reminder in local.items() if k + 1 < turns}


def _read(trajectory: Trajectory, head: Ids, by_turn: Mapping[int, Ids]) -> View:
    """Trunk first, then the branches in turn order. head stands after turn 0's context; by_turn: turn -> ids that
    this turn alone sees before its generation prompt."""
    trunk: list[int] = []
    trunk_targets: list[int] = []
    branches: list[Row] = []
    place: list[tuple[int, int, int]] = []  # per turn: row, first target inside that row, count
    for k, turn in enumerate(trajectory.turns):
        trunk += [*turn.context_ids, *(head if k == 0 else ())]
        n = 0 if turn.replayed else len(turn.sampled_ids)
        if k in by_turn and n:
            before = [*trunk, *by_turn[k], *trajectory.generation_ids]
            branches.append(_row(before + list(turn.sampled_ids), range(len(before), len(before) + n)))
            place.append((len(branches), 0, n))
        trunk += trajectory.generation_ids
        if k not in by_turn and n:
            place.append((0, len(trunk_targets), n))
            trunk_targets += range(len(trunk), len(trunk) + n)
        trunk += turn.sampled_ids
    rows = (_row(trunk, trunk_targets), *branches)
    first = np.concatenate([[0], np.cumsum([len(row.targets) for row in rows])])
    order = [np.arange(first[row] + start, first[row] + start + n) for row, start, n in place]
    return View(rows, np.concatenate(order) if order else np.zeros(0, np.int64))


def _row(ids: Ids, targets: Sequence[int]) -> Row:
    return Row(np.asarray(ids, np.int64), np.asarray(targets, np.int64))


def _check_same_tokens(student: Row, view: View) -> None:
    scored = np.concatenate([row.ids[row.targets] for row in view.rows])
    assert (scored[view.order] == student.ids[student.targets]).all(), "teacher and student score different tokens"
