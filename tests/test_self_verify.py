"""Soft-SVeRL: the policy's votes become rows against an anchor, and every stabiliser does what it says."""

import json
import random
from contextlib import contextmanager

import pytest
from test_agent import CHAT
from test_checklists import TASK, outcome

from oprd.rollout.checklist import checklists
from oprd.rollout.engine import Completion
from oprd.rollout.item_verifier import PolicyVerifier, Question, own_question
from oprd.rollout.self_verify import SelfSettings, SelfVerification, Watching
from oprd.rollout.soft_reward import SoftRewards
from oprd.sandbox.microif import answer, generate


class Voter:
    """An engine that says yes with a chance that depends on the question, decided by the seed."""

    version = 1

    def __init__(self, chance=lambda text: 1.0, garbage=0):
        self.chance, self.garbage, self.asked = chance, garbage, []

    @contextmanager
    def worker(self):
        yield

    def generate(self, session, ids, sampling, seed):
        text = CHAT.tokenizer.decode(ids)
        self.asked.append(text)
        if self.garbage:
            self.garbage -= 1
            return Completion(CHAT.assistant("maybe"), (-1.0,) * len(CHAT.assistant("maybe")), 1, "stop")
        said = CHAT.assistant("yes" if random.Random(seed).random() < self.chance(text) else "no")
        return Completion(said, (-0.5,) * len(said), 1, "stop")

    def forget(self, session):
        pass


def policy(chance=lambda text: 1.0, votes=1, retries=1, garbage=0):
    made = PolicyVerifier(CHAT, "Write.", lambda *place: hash(place) % 2**31, votes, retries, workers=1, max_tokens=20)
    made.engine = Voter(chance, garbage)
    return made


ASKED = [Question("Use gali.", "gali bemu", "Use gali.", True), Question("Use gali.", "bemu", "Use gali.", False)]


def test_a_policys_votes_are_sampled_recorded_and_counted():
    own = policy(lambda text: float("gali bemu" in text), votes=3)
    assert own.verify(ASKED, "t") == [True, False]
    assert [len(v) for v in own.said] == [3, 3] and len(own.engine.asked) == 6
    said = own.said[0][0]
    assert said.told.turns[0].logprobs == (-0.5,) * len(said.told.turns[0].sampled_ids) and said.met
    assert own_question(ASKED[0]) in own.engine.asked[0]


def test_what_is_neither_yes_nor_no_is_asked_again_and_then_is_no_verdict():
    assert policy(garbage=1).verify(ASKED, "t") == [True, True]
    assert policy(garbage=4).verify(ASKED, "t") == [None, None]
    with pytest.raises(RuntimeError, match="before its engine serves"):
        PolicyVerifier(CHAT, "", lambda *p: 0).verify(ASKED, "t")


# --- rows ---------------------------------------------------------------------------------------------------------

def verification(own, frozen=None, tasks=(TASK,), **settings):
    rewards = SoftRewards(checklists(tasks), Watching(frozen or own))
    return SelfVerification(rewards, own, SelfSettings(**settings), tasks)


def answers(task=TASK):
    return [outcome(answer(task, random.Random(i), broken), task=task) for i, broken in enumerate([(), (0,), (1, 2), (0, 3)])]


def weights(made):
    """met -> the set of advantages of votes that said so."""
    found = {True: set(), False: set()}
    for row in made.rows:
        if "pg" in row.weights:
            yes = CHAT.tokenizer.decode(row.row.ids[row.row.targets]).startswith("yes")
            found[yes].add(round(float(row.weights["pg"][0]), 6))
    return found


def mixed(text):
    return 0.5


def test_against_the_truth_a_right_vote_is_better_than_a_wrong_one():
    made = verification(policy(mixed, votes=4, retries=0), anchor="gold", rows=1000)
    made(answers())
    votes = [(s, s.met == s.question.truth) for own in made.own.said for s in own]
    assert 0 < sum(right for _, right in votes) < len(votes) == 4 * 4 * 4 and len(made.rows) == 64
    for (said, right), row in zip(sorted(votes, key=lambda v: v[0].told.attempt_id), sorted(made.rows, key=lambda r: r.source)):
        assert (row.weights["pg"][0] > 0) == right and row.branch == "policy"
        assert row.old_logprobs.tolist() == list(said.told.turns[0].logprobs)


def test_a_majority_anchor_rewards_agreeing_with_oneself_and_a_frozen_one_with_the_other():
    own = policy(mixed, votes=5, retries=0)
    made = verification(own, anchor="majority", rows=1000)
    made(answers())
    by_vote = {said.told.attempt_id: said.met == (2 * sum(s.met for s in votes) > 5) for votes in own.said for said in votes}
    assert all((row.weights["pg"][0] > 0) == by_vote[row.source] for row in made.rows)
    frozen = policy(lambda text: 0.0, votes=1)
    made = verification(policy(mixed, votes=2), frozen, anchor="frozen", rows=1000)
    made(answers())
    assert all(w > 0 for w in weights(made)[False]) and all(w < 0 for w in weights(made)[True]) and made.rows


def test_without_an_anchor_nothing_is_trained_and_with_rows_no_more_than_asked():
    made = verification(policy(mixed), anchor="none")
    made(answers())
    assert made.rows == []
    made = verification(policy(mixed, votes=4, retries=0), anchor="gold", rows=7)
    made(answers())
    assert len(made.rows) == 7


def test_the_penalty_takes_from_a_yes_as_much_as_yes_is_inflated():
    always = lambda text: 0.9  # noqa: E731
    free, held = (verification(policy(always, votes=4, retries=0), anchor="majority", rows=1000, penalty=p) for p in (0.0, 50.0))
    for made in (free, held):
        made(answers())  # learns how inflated yes is
        made(answers())
    assert held.inflation > 0.05 and free.inflation == held.inflation
    assert max(weights(free)[True]) > 0 and max(weights(held)[True]) < 0 < min(weights(held)[False])


def test_gold_rows_are_the_chat_frame_of_the_question_and_its_true_reply_in_equal_numbers():
    made = verification(policy(mixed), anchor="none", gold=6)
    made(answers())
    assert len(made.rows) == 6
    replies = [CHAT.tokenizer.decode(row.row.ids[row.row.targets]) for row in made.rows]
    assert sum(r.startswith("yes") for r in replies) == 3 == sum(r.startswith("no") for r in replies)
    q = ASKED[1]
    row = made.imitate(q, False)
    ids, mask = CHAT.render([{"role": "system", "content": "Write."}, {"role": "user", "content": own_question(q)},
                             {"role": "assistant", "content": "no"}])
    assert tuple(row.row.ids) == tuple(ids)[: len(row.row.ids)] and row.row.targets.tolist() == [i for i, m in enumerate(mask) if m]
    assert row.branch == "sft" and set(row.weights) == {"nll"}


def test_canaries_that_pass_raise_an_alarm_and_then_end_the_run():
    made = verification(policy(lambda text: 1.0), anchor="none", canaries=3, alarm=0.5, patience=2)
    made(answers())
    assert made.stop() == "" and made.measured()["selfverify/canary_pass_rate"] == (3, 3)
    made(answers())
    assert "passed 100% of the answers known to be wrong (alarm at 50%) in 2 steps in a row" in made.stop()
    honest = verification(policy(lambda text: 0.0), anchor="none", canaries=3, patience=1)
    honest(answers())
    assert honest.stop() == "" and honest.measured()["selfverify/alarms"] == (0, 1)
    bare = type(TASK)(**{**vars(TASK), "meta": {"checklist": TASK.meta["checklist"]}})
    with pytest.raises(ValueError, match="needs tasks with canaries"):
        verification(policy(), tasks=[bare], canaries=1)


def test_what_it_says_of_itself_is_held_against_the_truth():
    made = verification(policy(lambda text: 1.0), anchor="gold")
    rewards = made(answers())
    found = made.measured()
    assert [r.value for r in rewards] == [1.0] * 4  # it passes everything
    truth = sum(c.truth(answer_.patch.decode()) for answer_ in answers() for c in checklists([TASK])[TASK.instance_id])
    assert found["selfverify/self_minus_gold"] == (16 - truth, 16) and found["selfverify/agreement"] == (truth, 16)


def test_memory_keeps_inflation_and_alarms():
    made = verification(policy(lambda text: 1.0), anchor="gold", canaries=2)
    made(answers())
    again = verification(policy(), anchor="gold", canaries=2)
    again.recall(json.loads(json.dumps(made.memory())))
    assert again.memory() == made.memory() and again.inflation > 0


def test_an_unknown_anchor_is_named():
    with pytest.raises(ValueError, match="anchor = 'odd'"):
        SelfSettings(anchor="odd")
    assert generate(0, 0).meta["canaries"]
