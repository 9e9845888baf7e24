"""Controls: each has its effect on what the teacher or the running agent reads, and on nothing else."""

from types import SimpleNamespace

import pytest

from oprd.core.settings import Config
from oprd.core.types import Ending, Observation, Reminder, ToolCall, Trajectory, Turn
from oprd.rollout.attempts import Attempt, Outcome
from oprd.rollout.controls import NO_OTHER, Placebo, controlled, pool_of
from oprd.rollout.harness import Harness
from oprd.rollout.judge import Probe
from oprd.rollout.teach import OutcomeRouting, Reminded, gates
from oprd.sandbox.microswe import generate
from oprd.sandbox.verify import Verdict

GLOBAL = {t: Reminder("test_outcome_feedback", "G", f"{t}: 1 failed") for t in "ab"}
LOCAL = {t: Reminder("c", "R1", f"{t}: look", turn=0) for t in "ab"}
FOUND = [Reminded(GLOBAL["a"], {0: LOCAL["a"]}), Reminded(GLOBAL["b"], {0: LOCAL["b"]})]
TALK = Trajectory("x", "t", (Turn((1, 2), (4,)), Turn((6,), (7,))), (9,), Ending.SUBMITTED)


def encode(text):
    return tuple(1000 + ord(c) for c in text)


def teacher_rows(reminded, without="drop"):
    outcome = Outcome(Attempt("x", SimpleNamespace(instance_id="t"), 0), TALK, verdict=Verdict(False))
    lesson = OutcomeRouting(encode, 10_000, without_reminder=without)(outcome, reminded)
    return lesson, [tuple(row.ids.tolist()) for row in lesson.example.teacher.rows] if lesson.example else []


def holds(rows, text):
    part = encode(text)
    return any(row[i : i + len(part)] == part for row in rows for i in range(len(row)))


def test_without_a_control_the_teacher_reads_its_own_reminders():
    one, _ = controlled("none", "ab", FOUND)
    _, rows = teacher_rows(one)
    assert holds(rows, "a: look") and holds(rows, "a: 1 failed") and not holds(rows, "b: look")


def test_a_placebo_is_another_tasks_reminder_of_the_same_scope_at_the_same_turn():
    one, two = controlled("placebo", "ab", FOUND)
    lesson, rows = teacher_rows(one)
    assert holds(rows, "b: look") and holds(rows, "b: 1 failed")
    assert not holds(rows, "a: look") and not holds(rows, "a: 1 failed")
    assert lesson.fate == "trained_failure" and one.local == FOUND[0].local  # what was found is still what is counted
    assert two.control.local[0].text == "a: look" and two.control.local[0].turn == 0


def test_a_placebo_is_never_of_the_same_task_or_text_and_repeats():
    same = Reminder("c", "R1", "a: look", turn=5)
    pool = Placebo((("a", LOCAL["a"]), ("b", same), ("c", LOCAL["b"]), ("d", GLOBAL["b"])))
    stands = [pool.instead("a", Reminder("c", "R1", "a: look", turn=k)) for k in range(20)]
    assert {s.text for s in stands} == {"b: look"} and [s.turn for s in stands] == list(range(20))
    assert stands == [pool.instead("a", Reminder("c", "R1", "a: look", turn=k)) for k in range(20)]
    many = pool_of([(str(i), Reminded(None, {0: Reminder("c", "R1", f"{i}", turn=0)})) for i in range(9)])
    assert len({many.instead("x", Reminder("c", "R1", "mine", turn=k)).text for k in range(40)}) > 4


def test_a_reminder_without_a_placebo_is_dropped_with_the_reason_and_alone_it_teaches_nothing():
    [one] = controlled("placebo", "a", FOUND[:1])
    assert [(d.gate, d.reason) for d in one.dropped] == [("placebo", NO_OTHER)] * 2
    lesson, rows = teacher_rows(one)
    assert lesson.fate == "dropped_no_reminder" and rows == [] and gates([lesson]) == {"placebo": 2}


def test_withheld_reminders_leave_the_same_failures_to_a_reminder_free_teacher():
    one, _ = controlled("withheld", "ab", FOUND)
    lesson, rows = teacher_rows(one)
    assert rows == [(1, 2, 9, 4, 6, 9, 7)] and lesson.fate == "trained_failure"  # the student's row
    assert lesson.reminders.local == FOUND[0].local  # counted as found
    [nothing] = controlled("withheld", "a", [Reminded(None, {})])
    assert teacher_rows(nothing)[0].fate == "dropped_no_reminder"  # not a failure that reminders would have taught
    assert teacher_rows(nothing, "distil")[0].fate == "trained_failure"


# --- through a run's settings

AMBIGUOUS = (ToolCall("edit", {"path": "src/x.py", "old_string": "x", "new_string": "y"}),
             Observation("Found 2 matches of the string to replace, but replace_all is false.", None, True))


def failed(index):
    """A rejected attempt that read the wrong file and then made an ambiguous edit: an R2 and an R1 reminder."""
    task = generate(3, index, kind="scope")
    wrong = (ToolCall("read", {"path": task.meta["neighbour"]}), Observation("def f(): ..."))
    turns = [Turn((1,), (2,), call=call, observation=seen) for call, seen in (wrong, AMBIGUOUS)]
    told = Trajectory(f"a{index}", task.instance_id, (*turns, Turn((1,), (2,), call=ToolCall("submit", {}))), (9,),
                      Ending.SUBMITTED)
    verdict = Verdict(False, patch_applied=True, touched=("src/x.py",), failed_f2p=task.fail_to_pass, log="no")
    return Outcome(Attempt(f"a{index}", task, 0), told, verdict=verdict)


def harness(**reminders):
    return Harness(Config.model_validate({"reminders": reminders}), chat=None)


def found(made, outcomes):
    return [(sorted(r.class_ for r in reminded.local.values()), reminded.global_ is not None)
            for reminded in made.reminders(outcomes, lambda o: True)]


@pytest.mark.parametrize("settings, classes, whole", [
    ({}, ["R1", "R2"], True), ({"local": False}, [], True), ({"global": False}, ["R1", "R2"], False),
    ({"classes": ["R1"]}, ["R1"], True), ({"classes": ["R2"]}, ["R2"], True),
    ({"classes": ["R1"], "global": False}, ["R1"], False), ({"disabled": ["hard_ambiguous_edit_old_string"]}, ["R2"], True)])
def test_scopes_and_classes_are_settings(settings, classes, whole):
    assert found(harness(**settings), [failed(0)]) == [(classes, whole)]


def test_the_control_of_the_settings_reaches_the_teacher():
    outcomes = [failed(0), failed(1)]
    plain, placebo, held = (harness(control=c).reminders(outcomes, lambda o: True) for c in ("none", "placebo", "withheld"))
    assert [r.control for r in plain] == [None, None] and [r.control for r in held] == [Reminded(None, {})] * 2
    assert placebo[0].control.global_.text == plain[1].global_.text != plain[0].global_.text
    assert placebo[0].control.local[0].text in {r.text for r in plain[1].local.values()}
    # the hard rule's text is the same for every task, so an R2 text stands in for it
    assert placebo[0].control.local[1].text == plain[1].local[0].text and placebo[0].local == plain[0].local


def test_the_control_of_the_settings_reaches_the_running_agent():
    outcomes, task = [failed(0), failed(1)], failed(0).attempt.task
    visible = [(t.call, t.observation) for t in outcomes[0].trajectory.turns[:1]]
    texts = {}
    for control in ("none", "placebo", "withheld"):
        reminding = harness(control=control).reminding(outcomes)
        reminder = reminding.decide(task, visible, [], None).reminder
        texts[control] = reminding.shown(task, reminder)
        assert reminder.category == "named_path_over_neighbor" and not reminding.active
    named = outcomes[1].attempt.task.meta["path"]
    assert texts["none"] == reminder.text and texts["withheld"] is None and texts["placebo"] != reminder.text
    assert named in texts["placebo"] or "old_string" in texts["placebo"]


def test_active_mode_is_a_setting_and_asks_for_a_reminder_only_where_the_probe_needs_one():
    made = Harness(Config.model_validate({"eval": {"mode": "active"}}), chat=None)
    task = failed(0).attempt.task
    visible = [(t.call, t.observation) for t in failed(0).trajectory.turns[:1]]
    reminding = made.reminding()
    right = Probe(ToolCall("read", {"path": task.meta["path"]}))
    needless, needed = (reminding.decide(task, visible, [], probe) for probe in (right, Probe(None)))
    assert reminding.active and needless.reminder is None and needed.reminder.category == "named_path_over_neighbor"
    assert [d.gate for d in needless.dropped] == ["unneeded"]


def test_global_reminders_of_retries_are_under_the_same_control():
    outcomes = [failed(0), failed(1)]
    plain, placebo = (harness(control=c).globals(outcomes) for c in ("none", "placebo"))
    assert placebo[0].control.global_.text == plain[1].global_.text
    accepted = Outcome(outcomes[0].attempt, outcomes[0].trajectory, verdict=Verdict(False, patch_empty=True))
    [reminded] = harness().globals([accepted])
    assert reminded.global_ is None and [d.gate for d in reminded.dropped] == ["ineligible"]
    assert harness(**{"global": False}).globals([accepted])[0].dropped == ()
