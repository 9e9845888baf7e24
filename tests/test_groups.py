"""Groups of attempts: each ends in one fate, masked members leave no trace, and silence stops the run."""

from dataclasses import replace

import numpy as np
import pytest
from test_teach import TALK, TASK, outcome as judged

from oprd.core.types import Ending
from oprd.rollout.attempts import Attempt
from oprd.rollout.groups import GroupPolicy, GroupSettings, OutcomeRewards, Reward
from oprd.rollout.teach import Forgetful

S = GroupSettings(most_tokens=1000, masked=("context_limit",))


class Says(Forgetful):
    notes = ()

    def __init__(self, rewards):
        self.given = rewards

    def __call__(self, outcomes):
        return self.given


def member(group, resolved=False, ending=Ending.SUBMITTED, **more):
    made = judged(resolved, **more)
    told = made.trajectory and replace(made.trajectory, ending=ending)
    return replace(made, attempt=Attempt(f"{group}{id(made)}", TASK, 0, group), trajectory=told)


def fates(policy, outcomes):
    return [lesson.fate for lesson in policy(outcomes)]


def test_the_advantage_is_the_weight_of_every_sampled_token():
    policy = GroupPolicy(OutcomeRewards(), S)
    lessons = policy([member("a", True), member("a"), member("a")])
    assert [lesson.fate for lesson in lessons] == ["trained_policy"] * 3
    for lesson, advantage in zip(lessons, (1.0, -0.5, -0.5)):
        example = lesson.example
        assert example.branch == "policy" and example.weights["pg"].tolist() == [advantage] * 4
        assert example.old_logprobs.tolist() == [-1.0, -2.0, -1.0, -1.0] and example.teacher is None


def test_masked_members_leave_the_statistics_and_have_fates_of_their_own():
    broken, cut = member("a", trouble="infra_sandbox"), member("a", ending=Ending.CONTEXT_LIMIT)
    replayed = replace(TALK, turns=tuple(replace(t, replayed=True) for t in TALK.turns))
    empty = member("a", trajectory=replayed)
    policy = GroupPolicy(OutcomeRewards(), S)
    lessons = policy([broken, member("a", True), cut, member("a"), empty, member("a", trouble="replay_diverged")])
    assert [lesson.fate for lesson in lessons] == [
        "dropped_infra_sandbox", "trained_policy", "masked_context_limit", "trained_policy", "dropped_no_turn",
        "dropped_replay_diverged"]
    assert [lesson.example.weights["pg"][0] for lesson in lessons if lesson.example] == [1.0, -1.0]
    assert policy.rewards == [None, 1.0, None, 0.0, None, None]


def test_a_masked_member_cannot_give_a_group_its_signal():
    policy = GroupPolicy(OutcomeRewards(), S)
    assert fates(policy, [member("a"), member("a"), member("a", True, ending=Ending.CONTEXT_LIMIT)]) == [
        "dropped_no_signal", "dropped_no_signal", "masked_context_limit"]
    assert fates(policy, [member("a", True), member("a", trouble="infra_verifier")])[0] == "dropped_no_signal"


@pytest.mark.parametrize("why", ["rate_limited", "malformed", ""])
def test_an_attempt_without_a_reward_is_dropped_by_name_and_changes_nobody_elses(why):
    score = Says([Reward(None if i == 0 else float(i), why) for i in range(3)])
    lessons = GroupPolicy(score, S)([member("a"), member("a"), member("a")])
    assert lessons[0].fate == f"dropped_no_reward_{why or 'not_finite'}" and lessons[0].example is None
    assert [lesson.example.weights["pg"][0] for lesson in lessons[1:]] == [-1.0, 1.0]
    nan = GroupPolicy(Says([Reward(float("nan")), Reward(0.0), Reward(0.35)]), S)([member("a")] * 3)
    assert nan[0].fate == "dropped_no_reward_not_finite" and nan[2].example.weights["pg"][0] == 0.35


def test_groups_are_told_apart_by_their_id_and_counted():
    policy = GroupPolicy(OutcomeRewards(), S)
    found = fates(policy, [member("a", True), member("b"), member("a"), member("b"), member("c", True)])
    assert found == ["trained_policy", "dropped_no_signal", "trained_policy", "dropped_no_signal", "dropped_no_signal"]
    numbers = policy.measured()
    assert numbers["policy/groups_with_signal"] == (1, 1) and numbers["policy/groups_without_signal"] == (2, 1)
    assert numbers["policy/reward"] == (2.0, 5) and numbers["policy/advantage_energy"] == (2.0, 3)
    assert numbers["policy/reward_std_in_group"] == (0.5, 3)


def test_when_every_group_agrees_so_many_steps_in_a_row_there_is_a_reason_to_stop():
    policy = GroupPolicy(OutcomeRewards(), replace(S, patience=3))
    same, apart = [member("a"), member("a")], [member("a", True), member("a")]
    for step in (same, same, apart, same, same):
        policy(step)
        assert policy.stop() == ""
    policy(same)
    assert "every group agreed in 3 steps in a row (mean reward 0.000)" in policy.stop()
    policy([member("a", trouble="infra_sandbox"), member("a", ending=Ending.CONTEXT_LIMIT)])
    assert "4 steps in a row (no attempt has a reward)" in policy.stop()
    never = GroupPolicy(OutcomeRewards(), S)
    for _ in range(50):
        never(same)
    assert never.stop() == ""


def test_a_kl_to_the_reference_reads_the_same_row_and_counts_twice_for_room():
    policy = GroupPolicy(OutcomeRewards(), replace(S, kl=0.1, most_tokens=20))
    example = policy([member("a", True), member("a")])[0].example
    assert example.weights["kl"].tolist() == [0.1] * 4 and example.teacher.order.tolist() == [0, 1, 2, 3]
    assert np.array_equal(example.teacher.rows[0].ids, example.row.ids)
    lessons = GroupPolicy(OutcomeRewards(), replace(S, kl=0.1, most_tokens=19))([member("a", True), member("a")])
    assert [lesson.fate for lesson in lessons] == ["dropped_too_long"] * 2


def test_only_the_continuation_of_a_replayed_prefix_has_weights():
    turns = (replace(TALK.turns[0], replayed=True), TALK.turns[1])
    lessons = GroupPolicy(OutcomeRewards(), S)([member("a", True, trajectory=replace(TALK, turns=turns)), member("a")])
    assert lessons[0].example.row.targets.tolist() == [8, 9] and lessons[0].example.weights["pg"].tolist() == [1.0, 1.0]
