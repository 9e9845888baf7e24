"""From a judged attempt to its lesson: successes are imitated, failures distilled, each attempt has one fate."""

import numpy as np
import pytest

from oprd.core.types import Ending, Reminder, Trajectory, Turn
from oprd.rollout.attempts import Attempt, Outcome
from oprd.rollout.teach import OutcomeRouting, Reminded, fates, measured
from oprd.sandbox.task import Task
from oprd.sandbox.verify import Verdict

TASK = Task("t", "r", "0", "s", "", "", ("a",), (), {})
TALK = Trajectory("x", "t", (Turn((1, 2, 3), (4, 5), (-1.0, -2.0)), Turn((6,), (7, 8), (-1.0, -1.0))), (9,),
                  Ending.SUBMITTED)  # 3 + 1 + 2 + 1 + 1 + 2 = 10 tokens
LOCAL = Reminded(None, {0: Reminder("c", "R1", "do", turn=0)})
NONE = Reminded(None, {})


def outcome(resolved=False, trouble=None, trajectory=TALK):
    if trouble:
        return Outcome(Attempt("x", TASK, 0), trouble=trouble)
    return Outcome(Attempt("x", TASK, 0), trajectory, verdict=Verdict(resolved))


def routing(found=LOCAL, most=1000, **more):
    teach = OutcomeRouting(lambda text: (20, 21), most, **more)
    return lambda o: teach(o, found if teach.distils(o) else None)


def test_a_success_is_imitated_and_a_failure_distilled_from_the_reminded_teacher():
    won, lost = routing()(outcome(True)), routing()(outcome())
    assert (won.fate, won.example.branch, sorted(won.example.weights)) == ("trained_success", "success", ["nll"])
    assert (lost.fate, lost.example.branch, sorted(lost.example.weights)) == ("trained_failure", "failure", ["kl"])
    # trunk 1 2 3 9 [4 5] 6 9 7 8, branch 1 2 3 9 4 5 6 R 9 [7 8]
    assert [row.ids.tolist() for row in lost.example.teacher.rows] == [[1, 2, 3, 9, 4, 5, 6, 9, 7, 8],
                                                                       [1, 2, 3, 9, 4, 5, 6, 20, 21, 9, 7, 8]]
    assert won.example.teacher is None and np.array_equal(won.example.row.ids, lost.example.row.ids)


def test_without_routing_a_success_is_distilled_too():
    assert routing(routing=False)(outcome(True)).fate == "trained_failure"


def test_a_failure_without_a_reminder_is_dropped_or_kept_as_asked():
    assert routing(NONE)(outcome()).fate == "dropped_no_reminder"
    assert routing(NONE, without_reminder="distil")(outcome()).fate == "trained_failure"


@pytest.mark.parametrize("most,fate", [(25, "trained_failure"), (24, "dropped_too_long")])
def test_what_no_micro_batch_can_hold_is_dropped_instead_of_ending_the_run(most, fate):
    assert routing(most=most)(outcome()).fate == fate  # student 10; trunk 10; branch 12, the first 7 of them the trunk's


@pytest.mark.parametrize("trouble", ["infra_sandbox", "infra_verifier", "invalid_verdict"])
def test_a_machines_failure_never_trains(trouble):
    lesson = routing()(outcome(trouble=trouble))
    assert lesson.fate == f"dropped_{trouble}" and lesson.example is None


def test_fates_add_up_and_means_count_what_was_judged():
    outcomes = [outcome(True), outcome(), outcome(), outcome(trouble="infra_sandbox")]
    lessons = [routing(found)(o) for found, o in zip((LOCAL, LOCAL, NONE, LOCAL), outcomes)]
    assert fates(lessons) == {"trained_success": 1, "trained_failure": 1, "dropped_no_reminder": 1,
                              "dropped_infra_sandbox": 1}
    found = measured(outcomes, lessons)
    assert found["rollout/pass_rate"] == (1, 3) and found["rollout/ending_submitted"] == (3, 3)
    assert found["oprd/local_reminders_per_failure"] == (1, 2)  # the failure without one counts
