"""Evaluation: rates over what was judged, reminders that were followed, one table."""

import json
from dataclasses import replace

import pytest

from oprd.core.types import Ending, Observation, Reminder, ToolCall, Trajectory, Turn
from oprd.rollout.attempts import Attempt, Outcome
from oprd.rollout.evaluate import (CLASSES, Passes, Report, Retry, attempts_at, evaluate, reminders_table, table)
from oprd.rollout.events import Event
from oprd.rollout.following import Following, following
from oprd.rollout.following import table as following_table
from oprd.rollout.select import Dropped
from oprd.rollout.teach import Reminded
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

    def run(self, attempts, reminding=None, on_done=None):
        self.asked.append(([(a.seed, a.start) for a in attempts], reminding))
        return self.rounds.pop(0)


NONE = lambda judged: [()] * len(judged)  # noqa: E731


def test_the_four_counts_have_four_denominators():
    found = [outcome("ls", "python check.py", given=(ASK,), resolved=True), outcome("ls", "ls", given=(ASK,)),
             outcome("ls", given=(ASK,)), outcome("ls", "ls"), outcome(trouble="infra_sandbox"),
             replace(outcome("ls", "python check.py", given=(ASK,)), trouble="infra_verifier", verdict=None)]
    counted = following(found)
    # the third's reminder was fired by the last observation: no turn read it. The last could not be graded
    assert (counted.captured, counted.asked) == (5, 6) and (counted.reminded, counted.captured) == (3, 5)
    assert counted.told() == (2, 3) and (counted.verified, counted.graded) == (1, 4)
    assert counted.told("R4") == (2, 3) and counted.told("R1") == (0, 0)
    scalars = counted.scalars()
    assert scalars["following/rate_followed"] == scalars["following/rate_followed_R4"] == pytest.approx(2 / 3)
    assert scalars["following/rate_captured"] == pytest.approx(5 / 6) and scalars["following/of_verified"] == 4
    assert scalars["following/rate_reminded"] == 0.6 and "following/rate_followed_R1" not in scalars
    row = following_table([("base", counted)]).splitlines()[2].split()
    assert row == ["base", "5/6", "83.3%", "3/5", "60.0%", "2/3", "66.7%", "1/4", "25.0%", "0/0", "0/0", "0/0", "2/3",
                   "66.7%", "0"]


def test_a_reminder_whose_next_action_tells_nothing_is_in_no_rate():
    wide = Reminder("public_contract_before_edit", "R2", "Keep names.", turn=0)
    counted = following([outcome("ls", "ls", given=(wide,)), outcome("ls", "python check.py", given=(ASK,))])
    assert counted.told() == (1, 1) and counted.unclear == {"public_contract_before_edit": 1}
    assert sum(counted.inserted.values()) == 2


def test_probes_discarded_actions_and_dropped_candidates_are_counted():
    one = outcome("ls", "python check.py", given=(ASK,))
    turns = (one.trajectory.turns[0], replace(one.trajectory.turns[1], probe="I would edit"))
    one = replace(one, trajectory=replace(one.trajectory, turns=turns), probes=4,
                  dropped=(Dropped("c", 0, "r", "phase"), Dropped("c", 1, "r", "phase"), Dropped("d", 1, "r", "budget")))
    counted = following([one])
    assert (counted.probes, counted.discarded, counted.dropped) == (4, 1, {"phase": 2, "budget": 1})


def test_a_machines_failure_is_in_no_rate_and_is_counted():
    pool = Pool([outcome("ls", resolved=True), outcome("ls"), outcome(trouble="infra_sandbox")])
    event = Event("c", "R1", 0, "")
    report = evaluate([Attempt(f"{i}", TASK, i) for i in range(3)], pool, lambda judged: [(event,)] * len(judged))
    assert (report.attempts, report.judged, report.resolved, report.rate) == (3, 2, 1, 0.5)
    scalars = report.scalars()
    assert scalars["eval/dropped"] == 1 and scalars["eval/error_events_R1"] == 1.0 and scalars["eval/error_events_R2"] == 0
    assert "following/rate_followed" not in scalars and report.tokens == 4  # 1 + 1 + 2


def test_following_is_measured_in_a_second_run_with_the_same_seeds_and_what_is_shown_may_draw_on_the_first():
    first = [outcome("ls")]
    pool = Pool(first, [outcome("ls", "python check.py", given=(ASK,), resolved=True)])
    drawn = []
    report = evaluate([Attempt("a", TASK, 5)], pool, NONE, Passes(lambda free: drawn.append(free) or "reminders"))
    assert pool.asked == [([(5, None)], None), ([(5, None)], "reminders")] and drawn == [first]
    assert (report.rate, report.following, report.reminded.verified) == (0.0, 1.0, 1)


def test_failed_attempts_are_made_afresh_with_their_global_reminder_and_the_others_are_counted_by_reason():
    whole, other = Reminder("f", "G", "g"), Reminder("f", "G", "another task's")
    empty = (Dropped("f", -1, "the patch is empty", "ineligible"),)
    asked = {}

    def globals_(failed):
        asked["n"] = len(failed)
        return [Reminded(whole, {}), Reminded(None, {}, empty), Reminded(whole, {}, control=Reminded(other, {})),
                Reminded(whole, {}, control=Reminded(None, {}))]

    tries = [outcome("ls", resolved=True), *[outcome("ls")] * 4, outcome(trouble="infra_sandbox")]
    pool = Pool(tries, [outcome("ls", resolved=True), outcome("ls"), outcome(trouble="infra_sandbox")])
    report = evaluate([Attempt(f"{i}", TASK, i) for i in range(6)], pool, NONE, Passes(globals=globals_))
    starts = [start for _, start in pool.asked[1][0]]
    assert asked["n"] == 4 and starts == [whole, other, None] and all(seed > 1000 for seed, _ in pool.asked[1][0])
    assert report.retry == Retry(4, 3, 2, 1, {"the patch is empty": 1})
    assert report.scalars()["retry/resolution_rate"] == 0.5
    assert reminders_table([("x", report)]).splitlines()[-1].split() == ["x", "3/4", "1/2"]


def test_a_report_is_read_back_as_it_was_written(tmp_path):
    whole = Report(2, 2, 1, {"R1": 1}, {}, 3.0, following([outcome("ls", "ls", given=(ASK,))]), Retry(1, 1, 1, 0, {}))
    made = {"settings": {"eval.attempts": 1}, "inputs": {"data/tasks.jsonl": "0f"}}
    whole.save(tmp_path, made)
    assert Report.load(tmp_path) == (whole, made) and Report.load(tmp_path / "none") is None
    old = {"attempts": 2, "judged": 2, "resolved": 1, "events": {}, "endings": {}, "tokens": 3.0, "gone": 1}
    (tmp_path / "report.json").write_text(json.dumps(old))  # of an older version: what made it is not known
    assert Report.load(tmp_path) == (Report(2, 2, 1, {}, {}, 3.0), {"settings": {}, "inputs": {}})
    for damage in ("", "[]", "{}", '{"made": {}}', '{"made": {"settings": {}, "inputs": {}}, "attempt": 3}'):
        (tmp_path / "report.json").write_text(damage)
        with pytest.raises(ValueError, match="report.json is no report of this program .*move it away"):
            Report.load(tmp_path)


def test_every_attempt_has_its_own_name_and_seed():
    attempts = attempts_at([TASK, Task("u", "r", "0", "s", "", "", ("a",), (), {})], 3, seed=2, tag="eval")
    assert len({a.id for a in attempts}) == len({a.seed for a in attempts}) == 6
    (largest,) = attempts_at([TASK], 1, seed=2**32 - 1, tag="eval")
    assert largest.seed * 10_007 + 10_000 < 2**63  # the seed of a turn, which an engine must be able to take


def test_the_table_has_one_row_for_each_checkpoint():
    told = Following(4, 4, 4, 4, 3, {"c": 4}, {}, {"c": 1}, {"c": "R1"})
    report = Report(4, 4, 3, {c: 0 for c in CLASSES} | {"R2": 7}, {}, 12.4, told)
    head, _, row = table([("+ OPRD", report)]).splitlines()
    assert row.split("  ")[0] == "+ OPRD" and row.split()[2:] == ["3/4", "75.0%", "0", "7", "0", "0", "25.0%", "12"]
    assert len(head) == len(row) and reminders_table([("x", Report(1, 1, 1, {}, {}, 1.0))]) == ""
