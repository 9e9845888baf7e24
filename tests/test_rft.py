"""Rubric-filtered fine-tuning: the GRM's answers, the scripted one, and what is kept in which order."""

import json
import time
from dataclasses import replace

import pytest
from judge_server import completion, garbage, hang, reply, says, serving, status
from test_teach import TALK, TASK

from oprd.core.types import Ending, Observation, ToolCall, Trajectory, Turn
from oprd.rollout.ask import Asker
from oprd.rollout.attempts import Attempt, Outcome
from oprd.rollout.endpoint import Counts, Endpoint, EndpointSettings, Malformed
from oprd.rollout.grm import Behaviour, ModelGRM, judge_all, load_items, read_behaviour
from oprd.rollout.judge_cache import Cache
from oprd.rollout.rft import Filtration, FiltrationSettings, rates, table
from oprd.rollout.scripted_grm import FINDERS, ScriptedGRM
from oprd.sandbox.verify import Verdict

ITEMS = load_items()
GOOD, BAD, WORST = "validates_last_edit", "submits_unvalidated", "edits_tests"


def told(*steps):
    """Steps are (tool, argument, failed) or text that is no call."""
    names = {"bash": "command", "read": "path", "edit": "path"}
    turns = []
    for step in steps:
        if isinstance(step, str):
            turns.append(Turn((1,), (2,), text=step, observation=Observation("Invalid reply", is_error=True)))
            continue
        tool, value, failed = (*step, "", False)[:3] if len(step) < 3 else step
        call = ToolCall(tool, {names[tool]: value} if tool in names else {})
        seen = None if tool == "submit" else Observation("out", 1 if failed else 0, bool(failed))
        turns.append(Turn((1,), (2,), call=call, observation=seen))
    return Trajectory("a", "t", tuple(turns), (9,), Ending.SUBMITTED)


READ, CHECK, FAIL = ("read", "a.py", False), ("bash", "python check.py", False), ("bash", "python check.py", True)
EDIT, LOST, SUBMIT = ("edit", "a.py", False), ("edit", "a.py", True), ("submit", "", False)


@pytest.mark.parametrize("steps,shown", [
    ([READ, FAIL, EDIT, CHECK, SUBMIT], {"reads_before_editing": (0,), "reproduces_first": (1,),
                                         "validates_last_edit": (3,), "small_change": (2,), "reads_the_failure": (1, 2)}),
    ([EDIT, SUBMIT], {"small_change": (0,), "submits_unvalidated": (0, 1)}),
    ([READ, EDIT, FAIL, SUBMIT], {"reads_before_editing": (0,), "small_change": (1,), "submits_over_failure": (2, 3)}),
    ([LOST, LOST, READ], {"repeats_failed_call": (0, 1), "reads_the_failure": (1, 2)}),
    ([READ, READ], {"needless_repetition": (0, 1)}),
    ([CHECK, EDIT, CHECK], {"small_change": (1,), "validates_last_edit": (2,)}),
    (["hm", SUBMIT], {"malformed_reply": (0,)}),
    ([EDIT, ("bash", "git checkout .", False), EDIT, CHECK, SUBMIT],
     {"undone_work": (0, 1), "small_change": (0, 2), "validates_last_edit": (3,)}),
    ([("edit", "tests/test_a.py", False), SUBMIT], {"edits_tests": (0,), "submits_unvalidated": (0, 1), "small_change": (0,)}),
    ([("edit", "src/latest.py", False), CHECK], {"small_change": (0,), "validates_last_edit": (1,)}),
    ([("bash", "rm -rf src", False)], {"destroys": (0,)}), ([("bash", "rm -rf build/tmp", False)], {}),
    ([("bash", "git clean -fd", False)], {"destroys": (0,)}), ([("bash", "git status", False)], {}),
    ([EDIT, ("edit", "b.py", False), SUBMIT], {"submits_unvalidated": (1, 2)}),
    ([("bash", "cat a.py", False), EDIT, CHECK], {"reads_before_editing": (0,), "small_change": (1,),
                                                  "validates_last_edit": (2,)}),
])
def test_the_scripted_grm_on_attempts_by_hand(steps, shown):
    assert ScriptedGRM(ITEMS).judge("s", told(*steps)).shown == shown


def test_the_rubric_names_each_item_once_and_the_script_knows_them_all():
    assert {i.name for i in ITEMS} == set(FINDERS) and len(ITEMS) == len(FINDERS)
    assert {i.name for i in ITEMS if i.disqualifies} == {"edits_tests", "destroys"}
    with pytest.raises(ValueError, match="cannot judge 'elegance'"):
        ScriptedGRM([replace(ITEMS[0], name="elegance")])


@pytest.mark.parametrize("text,message", [
    ("item = 3", "must hold"), ("[[item]]\nname = 'a'", "item 1: polarity"), ("x", "not TOML"),
    ("[[item]]\nname='a'\npolarity='good'\nweight=1\ndefinition='d'\nevidence='e'", "polarity must be"),
    ("[[item]]\nname='a'\npolarity='encouraged'\nweight=1\ndefinition='d'\nevidence='e'\ndisqualifies=true", "disqualify"),
    (2 * "[[item]]\nname='a'\npolarity='discouraged'\nweight=1\ndefinition='d'\nevidence='e'\n", "is taken")])
def test_a_rubric_files_mistakes_are_named(tmp_path, text, message):
    (tmp_path / "r.toml").write_text(text)
    with pytest.raises(ValueError, match=message):
        load_items(tmp_path / "r.toml")


# --- the model's answers ------------------------------------------------------------------------------------------

def answer(**shown):
    return json.dumps({"items": [{"item": i.name, "shown": i.name in shown, "turns": shown.get(i.name, [])}
                                 for i in ITEMS]})


def test_an_answer_is_read_and_a_behaviour_without_evidence_is_not_shown():
    assert read_behaviour(answer(small_change=[2, 0], destroys=[]), ITEMS, 3).shown == {"small_change": (0, 2)}


@pytest.mark.parametrize("damage", [
    lambda d: d["items"].pop(), lambda d: d["items"].append(d["items"][0]), lambda d: d["items"][0].update(turns=[7]),
    lambda d: d["items"][0].update(shown="yes"), lambda d: d["items"][0].update(turns=[True]),
    lambda d: d["items"][0].update(why="x"), lambda d: d.update(score=1), lambda d: d["items"][0].update(item=["x"]),
    lambda d: d["items"][0].update(turns=None)])
def test_an_answer_of_another_form_is_malformed(damage):
    entry = json.loads(answer(small_change=[1]))
    damage(entry)
    with pytest.raises(Malformed):
        read_behaviour(json.dumps(entry), ITEMS, 3)


def grm(server, tmp_path=None, votes=1, retries=1, total_s=30.0, request_s=10.0):
    settings = EndpointSettings(server.url, "m", request_s=request_s, total_s=total_s, backoff_s=0.05)
    counts = Counts()
    return ModelGRM(ITEMS, Asker(Endpoint(settings, counts), Cache(tmp_path) if tmp_path else None, counts), votes, retries)


TOLD = told(READ, EDIT, SUBMIT)


def test_votes_decide_item_by_item_and_are_cached_one_by_one(tmp_path):
    script = [says(answer(small_change=[1], edits_tests=[1])), says(answer(small_change=[0])), says(answer(destroys=[2]))]
    with serving(*script) as server:
        judge = grm(server, tmp_path, votes=3)
        assert judge.judge("s", TOLD).shown == {"small_change": (0, 1)} and len(server.seen) == 3
        assert judge.judge("s", TOLD).shown == {"small_change": (0, 1)} and len(server.seen) == 3
        asked = json.loads(server.seen[0]["messages"][1]["content"])
    assert asked["task"] == "s" and [t["call"]["tool"] for t in asked["turns"]] == ["read", "edit", "submit"]
    assert "resolved" not in json.dumps(asked) and "verdict" not in json.dumps(asked)


@pytest.mark.parametrize("script", [[hang], [garbage], [status(429, Retry_After="0")], [status(401)], [says("[]")]])
def test_trouble_is_no_answer_and_never_a_behaviour(script):
    with serving(*script) as server:
        began = time.monotonic()
        judge = grm(server, total_s=0.8, request_s=0.4)
        assert judge.judge("s", TOLD) is None and time.monotonic() - began < 15
        counts = judge.asker.counts.take()
    assert counts["asked"] == counts["no_decision"] >= 1


def test_trouble_that_passes_changes_nothing():
    fine = says(answer(small_change=[1]))
    for trouble in (status(503), garbage, status(429, Retry_After="0"), says("no JSON")):
        with serving(trouble, fine) as server:
            assert grm(server).judge("s", TOLD).shown == {"small_change": (1,)}


def test_two_of_three_votes_are_no_answer():
    calls = iter(range(100))

    def act(h):  # the third reading never comes through
        reading = json.loads(server.seen[-1]["messages"][1]["content"])["reading"]
        reply(h, 200, completion(answer(small_change=[1]) if reading < 2 else "garbage"))

    with serving(act) as server:
        assert grm(server, votes=3, retries=2).judge("s", TOLD) is None
        assert grm(server, votes=2, retries=0).judge("s", TOLD).shown == {"small_change": (1,)}
    assert next(calls) == 0


# --- filtration ---------------------------------------------------------------------------------------------------

def attempt(task, n, resolved=True, shown=(), trouble=None):
    made = Attempt(f"{task}.{n}", replace(TASK, instance_id=task), 0, task)
    talk = replace(TALK, attempt_id=",".join(shown) or "-")
    return Outcome(made, trouble=trouble) if trouble else Outcome(made, talk, verdict=Verdict(resolved))


def judge(asked):
    """What the test wrote into the attempt's id; `?` is no answer."""
    return [None if t.attempt_id == "?" else Behaviour({name: (0,) for name in t.attempt_id.split(",") if name != "-"})
            for _, t in asked]


def filtered(outcomes, **settings):
    teach = Filtration(ITEMS, judge, FiltrationSettings(**settings))
    return teach, [lesson.fate for lesson in teach(outcomes)]


STEP = [attempt("a", 0, shown=[GOOD]), attempt("a", 1, shown=[BAD]), attempt("a", 2, shown=[GOOD, "small_change"]),
        attempt("a", 3, shown=[GOOD, WORST]), attempt("a", 4, False, [GOOD]), attempt("a", 5, shown=["?"]),
        attempt("a", 6, trouble="infra_sandbox"), attempt("b", 0, shown=[BAD]), attempt("c", 0, False)]


def test_the_order_of_gates_by_hand():
    teach, fates = filtered(STEP)
    assert fates == ["dropped_rank", "dropped_rank", "trained_success", "dropped_disqualified", "dropped_unresolved",
                     "dropped_unjudged", "dropped_infra_sandbox", "trained_success", "dropped_unresolved"]
    found = teach.measured()
    assert found["rft/kept"] == (2.0, 1) and found["rft/kept_small_change"] == (1, 2)
    assert found[f"rft/kept_{BAD}"] == (1, 2) and found[f"rft/dropped_{BAD}"] == (1, 3)
    assert found["rft/score_kept"] == (3.0 - 2.0, 2)
    assert filtered(STEP, top=2)[1][:3] == ["trained_success", "dropped_rank", "trained_success"]


def test_the_controls_differ_in_the_choice_alone():
    teach, fates = filtered(STEP, select="outcome")
    assert [f for f in fates if f == "trained_success"] == ["trained_success"] * 6 and teach.measured() == {"rft/kept": (0.0, 1)}
    for seed in range(20):
        _, fates = filtered(STEP, select="random", seed=seed)
        assert sum(f == "trained_success" for f in fates[:7]) == 1 and fates[7] == "trained_success"
        assert fates[4] == "dropped_unresolved" and fates[6] == "dropped_infra_sandbox"
    drawn = {fates.index("trained_success") for seed in range(40) for fates in [filtered(STEP, select="random", seed=seed)[1]]}
    assert drawn == {0, 1, 2, 3, 5}  # any that solved the task, a disqualified and an unjudged one too


def test_the_cap_of_a_task_counts_over_the_run_and_survives_a_resume():
    teach = Filtration(ITEMS, judge, FiltrationSettings(cap=2))
    one = [attempt("a", 0, shown=[GOOD])]
    assert [teach(one)[0].fate for _ in range(2)] == ["trained_success"] * 2
    again = Filtration(ITEMS, judge, FiltrationSettings(cap=2))
    again.recall(json.loads(json.dumps(teach.memory())))
    assert teach(one)[0].fate == again(one)[0].fate == "dropped_cap"


def test_what_is_kept_is_imitated_whole_and_the_record_says_why():
    lesson = Filtration(ITEMS, judge, FiltrationSettings())(STEP[:3])[2]
    assert lesson.example.weights["nll"].tolist() == [1.0] * 4 and lesson.example.branch == "success"
    assert lesson.reward == 3.0 and lesson.notes == {GOOD: [0], "small_change": [0]}


def test_rates_of_files_stand_side_by_side():
    before = rates("before", [Behaviour({BAD: (0,)}), Behaviour({}), None], ITEMS)
    after = rates("after", [Behaviour({GOOD: (0,)})], ITEMS)
    assert before.discouraged(ITEMS) == 0.5 and (before.judged, before.unjudged) == (2, 1)
    lines = {line.split()[1]: line.split()[2:] for line in table([before, after], ITEMS).splitlines()[2:]}
    assert lines[BAD] == ["50.0%", "0.0%"] and lines[GOOD] == ["0.0%", "100.0%"]


def test_many_are_judged_at_once_and_come_back_in_order():
    found = judge_all(ScriptedGRM(ITEMS), [("s", told(READ, READ)), ("s", told("hm"))] * 8, 4)
    assert [sorted(b.shown) for b in found] == [["needless_repetition"], ["malformed_reply"]] * 8
