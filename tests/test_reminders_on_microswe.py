"""Reminders on really executed MicroSWE attempts: mistakes are noticed, a clean solution is left alone."""

import random

import pytest

from oprd.core.types import Ending, Trajectory, Turn
from oprd.rollout.audit import each_boundary
from oprd.rollout.events import error_events
from oprd.rollout.expert import mistake, perform, solution
from oprd.rollout.global_reminder import global_reminder
from oprd.rollout.rubric import MICRO, load_rubric
from oprd.rollout.scripted import ScriptedJudge
from oprd.rollout.select import remind
from oprd.sandbox.box import Limits
from oprd.sandbox.microswe import KINDS, generate
from oprd.sandbox.opener import opener
from oprd.sandbox.repo import extract_patch
from oprd.sandbox.verify import verify

RUBRIC = load_rubric(MICRO)
JUDGE = ScriptedJudge(RUBRIC)


@pytest.fixture(scope="module")
def open_box():
    return opener("local", Limits(), "test-reminders")


def events(task, steps):
    turns = [Turn((1,), (2,), call=s.call, observation=s.observation if s.call.name != "submit" else None)
             for s in steps]
    told = Trajectory("a", task.instance_id, tuple(turns), (9,), Ending.SUBMITTED)
    return error_events(task.problem_statement, told, RUBRIC, each_boundary(JUDGE))


@pytest.mark.parametrize("kind", KINDS)
def test_a_clean_solution_shows_no_error_and_is_warned_of_nothing_but_unread_tests(open_box, kind):
    task = generate(5, 0, kind=kind)
    with open_box(task) as box:
        steps = perform(task, box, solution(task), remind(RUBRIC, JUDGE))
    assert events(task, steps) == ()
    assert {s.reminder.category for s in steps if s.reminder} <= {"read_failing_test_first"}


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_of_the_scripted_mistakes_fires_a_reminder_from_what_is_visible(open_box, kind):
    for index in range(3):
        task = generate(6, index, kind=kind)
        wrong, _ = mistake(task, random.Random(index))
        with open_box(task) as box:
            steps = perform(task, box, wrong, remind(RUBRIC, JUDGE))
        assert steps[-1].reminder and "{" not in steps[-1].reminder.text
        assert f'return "{task.meta["right"]}"' not in steps[-1].reminder.text


def test_a_really_graded_wrong_patch_gives_a_global_reminder_that_names_the_failing_test(open_box):
    task = generate(7, 0, kind="validate")
    wrong = next(calls for seed in range(50) for calls, _ in [mistake(task, random.Random(seed))]
                 if calls[-2].name == "edit" and calls[-1].name == "bash")
    with open_box(task) as box:
        perform(task, box, wrong)
        patch = extract_patch(box)
    text = global_reminder(task, verify(task, patch, open_box)).text
    assert task.fail_to_pass[0].split(" ")[0] in text and f"Changed {task.meta['path']}." in text
    assert " != " in text and "return" not in text
    assert global_reminder(task, verify(task, task.patch.encode(), open_box)) is None
