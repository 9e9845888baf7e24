"""The audit of finished attempts: a model is asked once an attempt, about all of it, and several attempts at once."""

import json

import pytest

from judge_server import says, serving, slowly
from oprd.core.settings import Config
from oprd.core.types import Ending, Observation, ToolCall, Trajectory, Turn
from oprd.rollout.ask import Asker
from oprd.rollout.attempts import Attempt, Outcome
from oprd.rollout.audit import LEAST, MAX_TURNS, ModelAudit, each_boundary, instructions, question
from oprd.rollout.endpoint import Counts
from oprd.rollout.events import error_events
from oprd.rollout.harness import Harness
from oprd.rollout.rubric import MICRO, load_rubric
from oprd.rollout.scripted import ScriptedJudge
from oprd.sandbox.microswe import generate
from oprd.sandbox.verify import Verdict

RUBRIC = load_rubric()
STATEMENT = 'Make `kemi` in `src/zuvo.py` return "lami".'
READ = (ToolCall("read", {"path": "src/bado.py"}), Observation("def kemi(mode): ..."))
EDIT = (ToolCall("edit", {"path": "src/zuvo.py", "old_string": "x", "new_string": "y"}), Observation("updated."))
SUBMIT = (ToolCall("submit", {}), None)


class Says:
    identity = "model"

    def __init__(self, *decisions):
        self.answer, self.asked = json.dumps({"decisions": list(decisions)}), []

    def complete(self, messages):
        self.asked.append(messages)
        return self.answer


def decision(category="named_path_over_neighbor", turn=0, evidence="def kemi", confidence=0.95):
    return {"category": category, "turn": turn, "evidence": evidence, "confidence": confidence}


def trajectory(*steps):
    turns = tuple(Turn((), (), call=call, observation=seen) for call, seen in steps)
    return Trajectory("a", "t", turns, (), Ending.SUBMITTED)


def audited(model, *steps):
    asker = Asker(model, None, Counts())
    found = error_events(STATEMENT, trajectory(*steps), RUBRIC, ModelAudit(RUBRIC, asker))
    return [(e.category, e.turn) for e in found], asker.counts.take()


def test_one_question_shows_every_turn_and_asks_for_every_contextual_category():
    model = Says(decision())
    found, counts = audited(model, READ, EDIT, READ, EDIT, SUBMIT)
    assert found == [("named_path_over_neighbor", 0)] and counts == {"asked": 1, "answered": 1} and len(model.asked) == 1
    shown = json.loads(model.asked[0][1]["content"])
    assert [t["turn"] for t in shown["turns"]] == [0, 1, 2, 3, 4] and shown["turns"][4]["call"]["tool"] == "submit"
    assert all(c.trigger in instructions(RUBRIC) for c in RUBRIC.contextual)


@pytest.mark.parametrize("wrong, counted", [
    (decision(evidence="not there"), "invented_quote"), (decision(turn=-1, evidence="kemi"), "invented_quote"),
    (decision(turn=2), "invented_quote"), (decision(confidence=0.8), None),
    (decision("change_surface_budget_guard"), None), (decision("patch_surface_from_task"), None)])
def test_an_event_needs_a_true_quote_confidence_its_phase_and_a_mistake_that_was_made(wrong, counted):
    found, counts = audited(Says(wrong), READ, READ, EDIT, SUBMIT)  # turn 0: before any edit, and the next is none
    assert found == [] and counts.get("invented_quote", 0) == (counted is not None)


def test_a_warning_before_an_edit_is_an_error_where_the_edit_follows():
    assert audited(Says(decision("patch_surface_from_task", turn=1)), READ, READ, EDIT)[0] == [("patch_surface_from_task", 1)]


def test_a_category_counts_once_and_hard_rules_go_first():
    missing = (ToolCall("read", {"path": "no.py"}), Observation("File does not exist: no.py", None, True))
    found, _ = audited(Says(decision(turn=1), decision(turn=0)), READ, READ, missing, missing)
    assert found == [("named_path_over_neighbor", 0), ("hard_missing_file_path_narrow", 2)]


def test_a_conversation_without_a_call_is_not_asked_about():
    model = Says()
    assert audited(model, (None, Observation("Invalid reply", is_error=True)))[0] == [] and model.asked == []


def test_a_long_conversation_is_shown_whole_in_shorter_pieces():
    turns = [(READ[0], Observation("x" * 5000))] * 300
    shown = question(STATEMENT, trajectory(*turns))["turns"]
    assert len(shown) == 300 and all(len(t["output"]) < LEAST + 60 for t in shown)
    few = question(STATEMENT, trajectory(*turns[:40]))["turns"]
    assert MAX_TURNS // 40 <= len(few[0]["output"]) < MAX_TURNS // 40 + 60


def test_the_scripted_judge_is_walked_over_every_boundary():
    short = load_rubric(MICRO)
    events = error_events(STATEMENT, trajectory(READ, EDIT, READ), short, each_boundary(ScriptedJudge(short)))
    assert [(e.category, e.turn) for e in events] == [("named_path_over_neighbor", 0)]


def test_an_evaluation_asks_once_an_attempt_and_several_at_once(tmp_path):
    outcomes = [Outcome(Attempt(f"{i}", generate(3, i), 0), trajectory(READ, EDIT, READ, EDIT, SUBMIT),
                        verdict=Verdict(False)) for i in range(8)]
    with serving(slowly(0.3, says('{"decisions": []}'))) as server:
        made = Harness(Config.model_validate({
            "run": {"folder": str(tmp_path)},
            "reminders": {"judge": "model", "judge_url": server.url, "judge_model": "m", "judge_concurrency": 4}}), None)
        made.each(made.events, outcomes)
        assert len(server.seen) == 8 and 2 <= server.most <= 4
    assert made.judge_counts() == {"judge/asked": 8, "judge/answered": 8}


def test_a_run_asks_only_where_an_answer_could_be_used(tmp_path):
    """Post hoc for a teacher: no question without a turn that could read the reminder, none with all classes off."""
    task = generate(3, 0)
    told = Outcome(Attempt("a", task, 0), trajectory(READ, EDIT, READ), verdict=Verdict(False, patch_empty=True))
    with serving(says('{"decisions": []}')) as server:
        url = {"judge": "model", "judge_url": server.url, "judge_model": "m"}
        for settings, asked in (({}, 2), ({"classes": ["R1"]}, 0), ({"local": False}, 0), ({"budget": 0}, 0)):
            run = {"run": {"folder": str(tmp_path / str(asked) / str(len(settings)))}, "reminders": {**url, **settings}}
            made = Harness(Config.model_validate(run), None)
            made.reminders([told], lambda o: True)
            assert made.judge_counts().get("judge/asked", 0) == asked
