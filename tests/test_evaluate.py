"""Evaluation: rates over what was judged, reminders that were followed, one table."""

from oprd.core.types import Ending, Observation, Reminder, ToolCall, Trajectory, Turn
from oprd.rollout.attempts import Attempt, Outcome
from oprd.rollout.evaluate import CLASSES, Report, attempts_at, evaluate, following_counts, table
from oprd.sandbox.task import Task
from oprd.sandbox.verify import Verdict

TASK = Task("t", "r", "0", "s", "", "", ("a",), (), {})
ASK = Reminder("hard_x", "R4", "Run `python check.py` once.", turn=0)


def turn(command):
    return Turn((1,), (2, 3), call=ToolCall("bash", {"command": command}), observation=Observation("", 0))


def outcome(*commands, resolved=False, given=(), trouble=None):
    if trouble:
        return Outcome(Attempt("x", TASK, 0), trouble=trouble)
    talk = Trajectory("x", "t", tuple(map(turn, commands)), (9,), Ending.SUBMITTED)
    return Outcome(Attempt("x", TASK, 0), talk, given, verdict=Verdict(resolved))


class Pool:
    def __init__(self, *rounds):
        self.rounds, self.asked = list(rounds), []

    def run(self, attempts, remind=None, on_done=None):
        self.asked.append(([a.seed for a in attempts], remind))
        return self.rounds.pop(0)


def test_a_reminder_counts_as_inserted_when_a_turn_read_it_and_as_followed_when_that_turn_obeyed():
    found = [outcome("ls", "python check.py", given=(ASK,)), outcome("ls", "ls", given=(ASK,)), outcome("ls", given=(ASK,))]
    inserted, followed = following_counts(found)
    assert inserted == {"R1": 0, "R2": 0, "R3": 0, "R4": 2} and followed["R4"] == 1


def test_a_machines_failure_is_in_no_rate_and_is_counted():
    pool = Pool([outcome("ls", resolved=True), outcome("ls"), outcome(trouble="infra_sandbox")])
    report = evaluate([Attempt(f"{i}", TASK, i) for i in range(3)], pool, lambda o: {"R1": 1})
    assert (report.attempts, report.judged, report.resolved, report.rate) == (3, 2, 1, 0.5)
    scalars = report.scalars()
    assert scalars["eval/dropped"] == 1 and scalars["eval/error_events_R1"] == 1.0 and scalars["eval/error_events_R2"] == 0
    assert "eval/following_rate" not in scalars and report.tokens == 4  # 1 + 1 + 2


def test_following_is_measured_in_a_second_run_with_the_same_seeds():
    pool = Pool([outcome("ls")], [outcome("ls", "python check.py", given=(ASK,), resolved=True)])
    report = evaluate([Attempt("a", TASK, 5)], pool, lambda o: {}, remind="reminders")
    assert pool.asked == [([5], None), ([5], "reminders")]
    assert (report.rate, report.following, report.resolved_reminded) == (0.0, 1.0, 1.0)


def test_every_attempt_has_its_own_name_and_seed():
    attempts = attempts_at([TASK, Task("u", "r", "0", "s", "", "", ("a",), (), {})], 3, seed=2, tag="eval")
    assert len({a.id for a in attempts}) == len({a.seed for a in attempts}) == 6


def test_the_table_has_one_row_for_each_checkpoint():
    report = Report(4, 4, 3, {c: 0 for c in CLASSES} | {"R2": 7}, {}, 12.4, {"R1": 4}, {"R1": 1})
    head, _, row = table([("+ OPRD", report)]).splitlines()
    assert row.split("  ")[0] == "+ OPRD" and row.split()[2:] == ["3/4", "75.0%", "0", "7", "0", "0", "25.0%", "12"]
    assert len(head) == len(row)
