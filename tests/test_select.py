"""The selection pipeline: every gate by a conversation that passes and one that does not; no look at the future."""

import random
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest

from oprd.core.types import Ending, Observation, Reminder, ToolCall, Trajectory, Turn
from oprd.rollout.judge import Candidate, Case, NoJudge, Probe
from oprd.rollout.rubric import MICRO, load_rubric
from oprd.rollout.scripted import ScriptedJudge
from oprd.rollout.select import SelectSettings, annotate_trajectory, remind, select
from oprd.rollout.select import decide as at_run_time

RUBRIC = load_rubric(MICRO)
STATEMENT = '`kemi("dova")` in `src/zuvo.py` must return "lami", `src/bado.py` is right.'
READ = (ToolCall("read", {"path": "src/zuvo.py"}), Observation("def kemi(mode): ..."))
NEIGHBOUR = (ToolCall("read", {"path": "src/bado.py"}), Observation("def kemi(mode): ..."))
CALL = ToolCall("edit", {"path": "src/zuvo.py", "old_string": "x", "new_string": "y"})
EDIT = (CALL, Observation("The file src/zuvo.py has been updated."))
STRAY = (ToolCall("edit", {"path": "src/bado.py", "old_string": "x", "new_string": "y"}), EDIT[1])
AMBIGUOUS = (CALL, Observation("Found 2 matches of the string to replace, but replace_all is false.", None, True))
MISSING = (ToolCall("read", {"path": "src/nono.py"}), Observation("File does not exist: src/nono.py", None, True))
CHECK = ToolCall("bash", {"command": "python check.py"})
PASSED = (CHECK, Observation("ok 4", 0))
FAILED = (CHECK, Observation("Exit code 1\nFAIL test_kemi_dova: 'a' != 'lami'\nfailed 1", 1, True))
BROKE = (CHECK, Observation("Exit code 1\nFAIL test_bolo: 'lami' != 'bolo'\nfailed 1", 1, True))
ALL = (READ, NEIGHBOUR, EDIT, STRAY, AMBIGUOUS, MISSING, PASSED, FAILED, BROKE)


@dataclass(frozen=True)
class Says:
    """A judge with fixed answers."""

    candidates: tuple[Candidate, ...]

    def decide(self, case):
        return list(self.candidates)


def says(*categories, confidence=0.95, text=None):
    return Says(tuple(Candidate(c, text or f"do {c}", "seen", confidence) for c in categories))


def given(category, text="earlier", evidence="seen"):
    return Reminder(category, RUBRIC[category].class_, text, evidence, 0)


def decide(*turns, judge=NoJudge(), inserted=(), probe=None, **settings):
    return select(Case(STATEMENT, turns, tuple(inserted), probe), RUBRIC, judge, SelectSettings(**settings))


def reasons(selection):
    return [d.reason for d in selection.dropped]


def test_a_hard_rule_inserts_the_rubrics_text_word_for_word():
    chosen = decide(READ, AMBIGUOUS).reminder
    assert chosen.category == "hard_ambiguous_edit_old_string" and chosen.turn == 1 and chosen.confidence == 1.0
    assert chosen.text == RUBRIC[chosen.category].action and chosen.class_ == "R1"
    assert decide(READ, EDIT).reminder is None


def test_hard_rules_go_before_the_judge_which_is_then_not_asked():
    class Never:
        def decide(self, case):
            raise AssertionError("asked")

    assert decide(MISSING, judge=Never()).reminder.category == "hard_missing_file_path_narrow"
    assert decide(READ, judge=says("named_path_source_guard")).reminder.category == "named_path_source_guard"


@pytest.mark.parametrize("confidence, passes", [(0.90, True), (0.899, False)])
def test_a_contextual_candidate_must_be_sure_enough(confidence, passes):
    selection = decide(READ, judge=says("named_path_source_guard", confidence=confidence))
    assert (selection.reminder is not None) == passes
    assert reasons(selection) == ([] if passes else ["confidence 0.90 below 0.90"])


@pytest.mark.parametrize("category, inside, outside", [
    ("change_surface_budget_guard", (EDIT, READ), (READ,)),
    ("change_surface_budget_guard", (EDIT,), (AMBIGUOUS[:1] + (Observation("String not found", None, True),),)),
    ("assertion_diff_local_repair", (EDIT, FAILED), (EDIT,)),
    ("diff_wrapup_format_test", (EDIT, READ), (READ, EDIT)),
    ("patch_surface_from_task", (READ,), (READ, EDIT)),
])
def test_a_phase_must_be_visible(category, inside, outside):
    assert decide(*inside, judge=says(category)).reminder.category == category
    selection = decide(*outside, judge=says(category))
    assert selection.reminder is None
    assert reasons(selection) == [f"phase {RUBRIC[category].phase} is not visible"]


def test_a_family_speaks_once_in_a_case():
    inserted = [given("named_path_over_neighbor")]
    selection = decide(READ, judge=says("named_path_source_guard"), inserted=inserted)
    assert reasons(selection) == ["family source_path_slot is at its cap of 1"]
    assert decide(READ, judge=says("root_cause_before_symptom_patch"), inserted=inserted).reminder
    assert decide(READ, judge=says("named_path_source_guard"), inserted=inserted, family_cap=2).reminder


def test_the_budget_of_a_case_ends_all_reminders():
    inserted = [given("hard_malformed_search"), given("named_path_over_neighbor")]
    assert reasons(decide(READ, AMBIGUOUS, inserted=inserted, budget=2)) == ["the case's budget of 2 is spent"]
    assert decide(READ, AMBIGUOUS, inserted=inserted, budget=3).reminder


def test_a_contextual_text_is_not_repeated():
    inserted = [given("named_path_over_neighbor", text="Read  the FILE.")]
    judge = says("one_condition_repair", text="read the file.")
    assert reasons(decide(READ, judge=judge, inserted=inserted)) == ["the same text was inserted before"]
    assert decide(READ, judge=says("one_condition_repair", text="read it."), inserted=inserted).reminder


def test_the_same_hard_error_is_answered_once_and_another_one_again():
    first = decide(MISSING).reminder
    assert reasons(decide(MISSING, MISSING, inserted=[first])) == ["the same error was answered before"]
    other = (ToolCall("read", {"path": "src/gigi.py"}), Observation("File does not exist: src/gigi.py", None, True))
    assert decide(MISSING, other, inserted=[first]).reminder.text == first.text
    three = (CALL, replace(AMBIGUOUS[1], output=AMBIGUOUS[1].output.replace("2", "3")))  # only a number differs
    assert decide(AMBIGUOUS, three, inserted=[decide(AMBIGUOUS).reminder]).reminder is None


def test_at_most_one_reminder_at_a_boundary_the_surest():
    sure = Candidate("one_condition_repair", "a", "seen", 0.99)
    selection = decide(READ, judge=Says(says("named_path_source_guard").candidates + (sure,)))
    assert selection.reminder.category == "one_condition_repair"
    assert reasons(selection) == ["one_condition_repair is inserted at this boundary"]


def test_an_unknown_category_is_dropped_and_nothing_else_takes_its_place():
    selection = decide(READ, judge=says("made_up"))
    assert selection.reminder is None and reasons(selection) == ["unknown category"]


def test_every_gate_that_drops_a_candidate_has_a_name_and_a_reason():
    sure = Candidate("one_condition_repair", "a", "seen", 0.99)
    hard = decide(AMBIGUOUS).reminder
    cases = {
        "unknown": decide(READ, judge=says("made_up")), "off": decide(READ, AMBIGUOUS, classes=("R2", "R3", "R4")),
        "confidence": decide(READ, judge=says("named_path_source_guard", confidence=0.5)),
        "phase": decide(READ, judge=says("change_surface_budget_guard")),
        "family_cap": decide(READ, judge=says("named_path_source_guard"), inserted=[given("named_path_over_neighbor")]),
        "budget": decide(READ, AMBIGUOUS, inserted=[given("named_path_over_neighbor")], budget=1),
        "repeated_text": decide(READ, judge=says("one_condition_repair", text="earlier"),
                                inserted=[given("named_path_over_neighbor")]),
        "same_error": decide(AMBIGUOUS, AMBIGUOUS, inserted=[hard]),
        "outranked": decide(READ, judge=Says(says("named_path_source_guard").candidates + (sure,))),
        "unneeded": decide(AMBIGUOUS, probe=Probe(ToolCall("edit", {"path": "src/zuvo.py", "old_string": "w\nx"}))),
    }
    for gate, selection in cases.items():
        assert [d.gate for d in selection.dropped] == [gate] and selection.dropped[0].reason
        assert (selection.reminder is None) == (gate != "outranked")


def test_in_active_mode_what_the_probe_does_unasked_needs_no_reminder():
    longer = ToolCall("edit", {"path": "src/zuvo.py", "old_string": "w\nx", "new_string": "w\ny"})
    assert decide(READ, AMBIGUOUS, probe=Probe(longer)).reminder is None
    for probe in (Probe(CALL), Probe(None), Probe(ToolCall("submit", {}))):
        assert decide(READ, AMBIGUOUS, probe=probe).reminder.category == "hard_ambiguous_edit_old_string"
    # dropped as needless by one rule, the boundary is still open to the judge
    assert decide(READ, AMBIGUOUS, judge=says("named_path_source_guard"), probe=Probe(longer)).reminder


def test_a_probe_that_submits_is_completion_evidence_and_a_decision_without_an_edit_is_not():
    submit, judge = Probe(ToolCall("submit", {})), says("diff_wrapup_format_test")
    assert decide(READ, EDIT, judge=judge, probe=submit).reminder
    assert reasons(decide(READ, judge=judge, probe=submit)) == ["phase validation is not visible"]
    assert reasons(decide(READ, EDIT, judge=judge, probe=Probe(CALL))) == ["phase validation is not visible"]


def test_a_judge_is_asked_only_where_its_answer_could_pass():
    class Counts:
        asked = 0

        def decide(self, case):
            self.asked += 1
            return []

    for settings in ({"budget": 0}, {"classes": ("R1",)}, {"scopes": ("global",)}, {"family_cap": 0},
                     {"off": tuple(c.name for c in RUBRIC.contextual)}):
        decide(READ, judge=(judge := Counts()), **settings)
        assert judge.asked == 0, settings
    decide(READ, judge=(judge := Counts()))
    assert judge.asked == 1


def test_classes_categories_and_scopes_can_be_switched_off():
    assert reasons(decide(READ, AMBIGUOUS, classes=("R2", "R3", "R4"))) == ["switched off"]
    assert reasons(decide(READ, AMBIGUOUS, off=("hard_ambiguous_edit_old_string",))) == ["switched off"]
    assert decide(READ, AMBIGUOUS, scopes=("global",)).reminder is None
    for bad in ({"classes": ("R5",)}, {"scopes": ("lokal",)}, {"confidence": 1.5}, {"budget": -1}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            SelectSettings(**bad)


def trajectory(turns, last_is_open=False):
    made = [Turn((1,), (2,), call=call, observation=seen) for call, seen in turns]
    made += [Turn((1,), (2,), call=ToolCall("submit", {}))] if last_is_open else []
    return Trajectory("a", "t", tuple(made), (9,), Ending.SUBMITTED)


def test_a_whole_trajectory_is_annotated_boundary_by_boundary():
    told = trajectory([NEIGHBOUR, AMBIGUOUS, EDIT, FAILED, AMBIGUOUS], last_is_open=True)
    annotation = annotate_trajectory(STATEMENT, told, RUBRIC, ScriptedJudge(RUBRIC))
    assert {k: r.category for k, r in annotation.reminders.items()} == {
        0: "named_path_over_neighbor", 1: "hard_ambiguous_edit_old_string", 3: "assertion_diff_local_repair"}
    assert all(r.turn == k for k, r in annotation.reminders.items())
    assert [(d.turn, d.category, d.reason) for d in annotation.dropped] == [
        (4, "hard_ambiguous_edit_old_string", "the same error was answered before")]


@pytest.mark.parametrize("seed", range(60))
def test_removing_everything_after_observation_k_never_changes_the_decisions_at_k(seed):
    rng = random.Random(seed)
    turns = [rng.choice(ALL) for _ in range(rng.randint(1, 9))]
    judge, settings = ScriptedJudge(RUBRIC), SelectSettings(budget=rng.choice([1, 3, 8]))
    whole = annotate_trajectory(STATEMENT, trajectory(turns, rng.random() < 0.5), RUBRIC, judge, settings)
    k = rng.randrange(len(turns))
    part = annotate_trajectory(STATEMENT, trajectory(turns[: k + 1]), RUBRIC, judge, settings)
    assert part.reminders == {i: r for i, r in whole.reminders.items() if i <= k}
    assert part.dropped == tuple(d for d in whole.dropped if d.turn <= k)


@pytest.mark.parametrize("seed", range(20))
def test_run_time_and_post_hoc_decide_the_same(seed):
    rng = random.Random(seed)
    turns = [rng.choice(ALL) for _ in range(rng.randint(1, 9))]
    at, shown = remind(RUBRIC, ScriptedJudge(RUBRIC)), {}
    for k in range(len(turns)):
        reminder = at(SimpleNamespace(problem_statement=STATEMENT), turns[: k + 1], list(shown.values()))
        shown.update({k: reminder} if reminder else {})
    assert shown == annotate_trajectory(STATEMENT, trajectory(turns), RUBRIC, ScriptedJudge(RUBRIC)).reminders


@pytest.mark.parametrize("seed", range(20))
def test_an_active_decision_at_k_sees_the_turns_up_to_k_and_the_probe_alone(seed):
    rng = random.Random(seed)
    turns = [rng.choice(ALL) for _ in range(rng.randint(2, 9))]
    at, task = at_run_time(RUBRIC, ScriptedJudge(RUBRIC)), SimpleNamespace(problem_statement=STATEMENT)
    shown, probes = [], [Probe(rng.choice(ALL)[0]) for _ in turns]
    for k, probe in enumerate(probes):
        chosen = at(task, turns[: k + 1], shown, probe)
        again = annotate_prefix(turns[: k + 1], tuple(shown), probe)
        assert chosen == again
        shown += [chosen.reminder] if chosen.reminder else []


def annotate_prefix(turns, inserted, probe):
    """The decision from a freshly built case that holds nothing later."""
    return select(Case(STATEMENT, tuple(turns), inserted, Probe(probe.call)), RUBRIC, ScriptedJudge(RUBRIC), SelectSettings())
