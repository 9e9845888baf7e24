"""Soft-RLVR: checklists, verifiers with known errors, soft rewards by hand, and which reward separates better."""

import itertools
import json
import math
import random

import numpy as np
import pytest
from judge_server import garbage, hang, says, serving, status

from oprd.core.types import Ending, Trajectory, Turn
from oprd.rollout.ask import Asker
from oprd.rollout.attempts import Attempt, Outcome
from oprd.rollout.checklist import CheckItem, checklists, item_from, problems
from oprd.rollout.checklist_writer import write, write_all
from oprd.rollout.endpoint import Counts, Endpoint, EndpointSettings, Malformed
from oprd.rollout.groups import GroupPolicy, GroupSettings
from oprd.rollout.item_verifier import ModelVerifier, Question, ScriptedVerifier, read_met
from oprd.rollout.separability import Measured, holistic_separation, measure, report, right, scores, separation, whole_score
from oprd.rollout.soft_reward import Rates, SoftRewards, SoftSettings, soft_reward
from oprd.sandbox.microif import Constraint, generate
from oprd.sandbox.verify import Verdict

ITEMS = (CheckItem("a", 1.0), CheckItem("b", 3.0), CheckItem("c", 1.0, gate=True))


# --- rewards ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("said,settings,reward", [
    ([1, 1, 1], {}, 1.0), ([1, 0, 1], {}, 0.4), ([0, 1, 1], {}, 0.8), ([1, 1, 0], {}, 0.0), ([0, 0, 1], {}, 0.2),
    ([0, 1, 1], {"bonus": 0.5}, 0.4), ([1, 1, 1], {"bonus": 0.5}, 1.0), ([0, 1, 1], {"bonus": 1.0}, 0.0)])
def test_soft_rewards_by_hand(said, settings, reward):
    assert soft_reward(ITEMS, [bool(s) for s in said], SoftSettings(**settings)) == pytest.approx(reward)


@pytest.mark.parametrize("a,b", [(0.9, 0.2), (0.7, 0.4), (1.0, 0.0)])
@pytest.mark.parametrize("truth", list(itertools.product([0, 1], repeat=3)))
def test_the_corrected_reward_is_unbiased_exactly(a, b, truth):
    items = (CheckItem("a", 1.0), CheckItem("b", 3.0), CheckItem("c", 1.0))
    mean = 0.0
    for said in itertools.product([0, 1], repeat=3):
        p = math.prod((a if t else b) if s else 1 - (a if t else b) for s, t in zip(said, truth))
        mean += p * soft_reward(items, [bool(s) for s in said], rates=(a, b))
    assert mean == pytest.approx(sum(i.weight * t for i, t in zip(items, truth)) / 5, abs=1e-12)


def test_saturated_items_can_be_left_out_but_never_all_of_them():
    assert soft_reward(ITEMS, [True, False, True], counted=[False, True, False]) == 0.0
    assert soft_reward(ITEMS, [True, False, True], counted=[False] * 3) == 0.4


def test_rates_are_used_only_when_they_are_known_and_tell_something():
    rates = Rates()
    for truth, said in [(True, True)] * 18 + [(True, False)] * 2 + [(False, True)] * 4 + [(False, False)] * 16 + [(None, True)]:
        rates.add(truth, said)
    rates.add(True, None)
    assert rates.correction(20) == (0.9, 0.2) and rates.correction(21) == (1.0, 0.0)
    assert Rates(50, 100, 50, 100).correction(20) == (1.0, 0.0)


TASK = generate(0, 1)
WORDS = TASK.problem_statement


def outcome(text, group="g", task=TASK):
    told = Trajectory(text, task.instance_id, (Turn((1, 2), (3, 4), (-1.0, -1.0), text=text),), (9,), Ending.SUBMITTED)
    return Outcome(Attempt(f"{group}/{text}", task, 0, group), told, patch=text.encode(), verdict=Verdict(False))


class Tells:
    """A verifier that says what it is told, question by question."""

    def __init__(self, *answers):
        self.answers, self.asked = list(answers), []

    def verify(self, asked, tag):
        self.asked += asked
        return [self.answers.pop(0) for _ in asked]


def test_an_item_without_a_verdict_masks_the_attempt_and_changes_no_other_reward():
    lists = checklists([TASK])
    full = SoftRewards(lists, Tells(*[True] * 4, *[True, False] * 2, *[False] * 4))
    some = SoftRewards(lists, Tells(*[True] * 4, True, None, True, False, *[False] * 4))
    asked = [outcome(t) for t in "xyz"]
    assert [r.value for r in full(asked)] == [1.0, 0.5, 0.0]
    assert [(r.value, r.why) for r in some(asked)] == [(1.0, ""), (None, "unverified"), (0.0, "")]
    some = SoftRewards(lists, Tells(*[True] * 4, True, None, True, False, *[False] * 4))
    policy = GroupPolicy(some, GroupSettings(1000))
    lessons = policy(asked)
    assert [lesson.fate for lesson in lessons] == ["trained_policy", "dropped_no_reward_unverified", "trained_policy"]
    assert [lesson.example.weights["pg"][0] for lesson in lessons if lesson.example] == [1.0, -1.0]
    assert policy.measured()["checklist/unverified"] == (1, 3) and lessons[0].notes["said"] == [True] * 4


def test_saturation_within_a_group_is_measured_and_drops_what_says_nothing():
    answers = [True, True, False, False, True, False, False, True]  # items 0 and 2 agree
    soft = SoftRewards(checklists([TASK]), Tells(*answers), SoftSettings(drop_saturated=True))
    assert [r.value for r in soft([outcome("x"), outcome("y")])] == [0.5, 0.5]
    assert soft.measured()["checklist/saturated"] == (2, 4)


def test_the_holistic_baseline_asks_once_and_knows_the_truth_of_the_whole():
    verifier = Tells(True, False)
    soft = SoftRewards(checklists([TASK]), verifier, SoftSettings("holistic"))
    assert [r.value for r in soft([outcome("x"), outcome("y")])] == [1.0, 0.0] and len(verifier.asked) == 2
    assert verifier.asked[0].truth is False and "holds" in verifier.asked[0].requirement


def test_memory_keeps_the_rates_over_a_resume():
    soft = SoftRewards(checklists([TASK]), ScriptedVerifier(0.9, 0.2))
    soft([outcome("x"), outcome("y")])
    again = SoftRewards(checklists([TASK]), ScriptedVerifier(0.9, 0.2))
    again.recall(json.loads(json.dumps(soft.memory())))
    assert again.rates == soft.rates and again.calls == 1


# --- verifiers ----------------------------------------------------------------------------------------------------

def test_a_scripted_verifier_errs_at_its_rates_and_always_alike():
    asked = [Question("s", str(i), "r", truth=i % 2 == 0) for i in range(8000)]
    said = ScriptedVerifier(0.9, 0.2).verify(asked)
    assert said == ScriptedVerifier(0.9, 0.2).verify(asked)
    yes = np.array(said)
    assert abs(yes[0::2].mean() - 0.9) < 0.02 and abs(yes[1::2].mean() - 0.2) < 0.02
    voted = np.array(ScriptedVerifier(0.9, 0.2, votes=3).verify(asked))
    assert abs(voted[0::2].mean() - 0.972) < 0.02 and abs(voted[1::2].mean() - 0.104) < 0.02
    with pytest.raises(ValueError, match="needs the truth"):
        ScriptedVerifier().verify([Question("s", "x", "r")])


def model(server, votes=1, retries=1, total_s=30.0, request_s=10.0):
    counts = Counts()
    settings = EndpointSettings(server.url, "m", request_s=request_s, total_s=total_s, backoff_s=0.05)
    return ModelVerifier(Asker(Endpoint(settings, counts), None, counts), votes, retries, 4)


ASKED = [Question("task", "answer", "It rhymes.", True)]


def test_votes_decide_and_the_truth_is_never_shown():
    with serving(says('{"met": true}'), says('{"met": false, "why": "no"}'), says('{"met": false}')) as server:
        assert model(server, votes=3).verify(ASKED, "t") == [False]
        sent = [json.loads(m["messages"][1]["content"]) for m in server.seen]
    assert [s["reading"] for s in sent] == [0, 1, 2] and set(sent[0]) == {"reading", "task", "answer", "requirement"}


@pytest.mark.parametrize("script", [[hang], [garbage], [status(429, Retry_After="0")], [status(403)], [says('{"met": 1}')]])
def test_trouble_is_no_verdict(script):
    with serving(*script) as server:
        assert model(server, total_s=0.8, request_s=0.4).verify(ASKED, "t") == [None]


def test_trouble_that_passes_leaves_the_verdict_as_it_is():
    for trouble in (garbage, status(503), status(429, Retry_After="0"), says("met, I think")):
        with serving(trouble, says('{"met": true}')) as server:
            assert model(server).verify(ASKED, "t") == [True]


@pytest.mark.parametrize("text", ["yes", '{"met": "yes"}', '{"met": true, "score": 3}', "[true]", '{"why": "x"}'])
def test_another_form_is_malformed(text):
    with pytest.raises(Malformed):
        read_met(text)


# --- checklists ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("texts,wrong", [
    (["Begin with gali.", "End with gali."], None), (["The function returns 3 and the tests must pass."], "several"),
    (["Write a good answer."], "taste"), (["Begin with gali.", "begin with gali"], "the same as item 0"),
    (["First. Second."], "several"), ([], "no item"), (["x" * 500], "longer"), (["Name salt and pepper."], None)])
def test_what_is_wrong_with_a_checklist_is_said(texts, wrong):
    found = problems([CheckItem(t) for t in texts])
    assert (found == []) if wrong is None else any(wrong in f for f in found), found


def test_a_file_of_checklists_goes_before_the_rows_and_its_mistakes_name_the_line(tmp_path):
    file = tmp_path / "c.jsonl"
    file.write_text(json.dumps({"task_id": TASK.instance_id, "items": ["One.", {"text": "Two.", "weight": 2, "gate": True}]}))
    (items,) = checklists([TASK], file).values()
    assert items == (CheckItem("One."), CheckItem("Two.", 2.0, True))
    for bad, message in ((["One.", "one"], "the same as item 0"), ([{"text": "a", "weight": 0}], r"items\[0\].weight = 0"),
                         ([{"text": "a", "gate": 1}], "gate = 1"), ([{"text": ""}], "not empty"), ([{"a": 1}], "must be")):
        file.write_text(json.dumps({"task_id": TASK.instance_id, "items": bad}))
        with pytest.raises(ValueError, match=f"c.jsonl:1: {TASK.instance_id}.*{message}"):
            checklists([TASK], file)
    bare = generate(0, 2)
    bare = type(bare)(**{**vars(bare), "meta": {}})
    with pytest.raises(ValueError, match="has no checklist"):
        checklists([bare])


def test_a_model_writes_checklists_and_is_told_what_is_wrong_with_them():
    bad = json.dumps({"items": [{"text": "Be good.", "weight": 1, "gate": False}]})
    good = json.dumps({"items": [{"text": "Begin with gali.", "weight": 60, "gate": True}]})
    with serving(says(bad), says(good)) as server:
        asker = model(server).asker
        assert write(TASK, asker, ["candidate"]) == (CheckItem("Begin with gali.", 60.0, True),)
        assert "matter of taste" in server.seen[1]["messages"][-1]["content"]
        assert json.loads(server.seen[0]["messages"][1]["content"])["answers"] == ["candidate"]
    with serving(says(bad)) as server:
        rows, missing = write_all([TASK], model(server).asker, {}, 2)
        assert rows == [] and missing == [TASK.instance_id]


def test_what_is_written_can_be_read():
    entry = {"text": "a", "weight": 60.0, "gate": True}
    assert item_from(entry, "x") == CheckItem("a", 60.0, True)
    assert item_from({**entry, "check": {"kind": "use", "word": "b", "n": 0}}, "x").check == Constraint("use", "b")


# --- which reward separates better --------------------------------------------------------------------------------

@pytest.mark.parametrize("m,e,wanted", [(5, 1, 0.71), (20, 1, 0.36), (20, 10, 3.38)])
def test_separations_are_those_worked_out_in_the_facts(m, e, wanted):
    assert separation(m, 0, e, 0.9, 0.2) == pytest.approx(wanted, abs=0.006)
    assert holistic_separation(0, e, 0.9, 0.2) == pytest.approx(1.40, abs=0.005)


@pytest.mark.parametrize("m,d,e,a,b", [(4, 0, 1, 0.9, 0.2), (6, 1, 4, 0.8, 0.3), (3, 2, 3, 0.99, 0.5), (1, 0, 1, 0.7, 0.1)])
def test_the_probability_of_the_right_order_is_that_of_a_simulation(m, d, e, a, b):
    rng = np.random.default_rng(0)
    draw = lambda k: rng.binomial(m - k, a, 200_000) + rng.binomial(k, b, 200_000)  # noqa: E731
    x, y = draw(d), draw(e)
    assert right(scores(m, d, a, b), scores(m, e, a, b)) == pytest.approx(((x > y) + (x == y) / 2).mean(), abs=0.004)
    assert right(whole_score(0, a, b), whole_score(1, a, b)) == pytest.approx(a * (1 - b) + (a * b + (1 - a) * (1 - b)) / 2)
    spread = (x - y).mean() / (x - y).std()
    assert separation(m, d, e, a, b) == pytest.approx(spread, rel=0.02)


def records(pairs, m=4, rates=(0.9, 0.2), seed=0):
    rng, rows = random.Random(seed), []
    for g, (d, e) in enumerate(pairs):
        for k in (d, e):
            truth = [i >= k for i in range(m)]
            rows.append({"group": str(g), "notes": {"kind": "checklist", "truth": truth, "said": [
                rng.random() < rates[not t] for t in truth], "holistic": rng.random() < rates[k > 0]}})
    return rows


def test_the_report_prefers_the_checklist_between_incomplete_answers_and_the_whole_for_near_misses():
    far, near = report(measure(records([(2, 5), (1, 5), (3, 6)] * 100, 6))), report(measure(records([(0, 1)] * 300, 12)))
    assert far.endswith("a checklist reward orders more pairs rightly")
    assert near.endswith("a holistic reward orders more pairs rightly")
    assert "complete against one missing" in near and "complete against" not in far.replace("complete against incomplete", "")


def test_where_the_holistic_question_was_not_asked_its_rates_are_said_to_be_assumed():
    rows = records([(0, 2)] * 50)
    for row in rows:
        del row["notes"]["holistic"]
    found = measure(rows)
    assert found.assumed and "assumed" in report(found) and isinstance(found, Measured)
    with pytest.raises(ValueError, match="no two recorded attempts"):
        measure(records([(1, 1)]))
