"""Prefix Sampling: which groups are helped, how far, and that a resume goes on exactly."""

import json
from dataclasses import replace

import pytest
from test_teach import TALK, TASK

from oprd.core.types import Ending, Observation, ToolCall, Trajectory, Turn
from oprd.rollout.attempts import Attempt, Outcome
from oprd.rollout.prefix import HANDICAP, HEAD_START, PrefixSampling, PrefixSettings, band, length, measured
from oprd.rollout.road import Road
from oprd.rollout.teach import Forgetful, Lesson
from oprd.sandbox.verify import Verdict

S = PrefixSettings()
TURNS = tuple(Turn((k,), (k, 5), (-0.1, -0.2), text=f"t{k}", call=ToolCall("bash", {"command": str(k)}), state=f"s{k}",
                   observation=Observation(f"o{k}", 0)) for k in range(10))


@pytest.mark.parametrize("passed,kind", [*enumerate([None, HEAD_START, HEAD_START, None, None, None, HANDICAP,
                                                       HANDICAP, None])])
def test_the_papers_bands_of_eight(passed, kind):
    assert band(passed, 8, S) == kind


@pytest.mark.parametrize("kind,steps,ratio,more,turns", [
    (HEAD_START, 20, 0.75, {}, 5), (HEAD_START, 20, 0.75, {"remaining_cap": 10}, 10), (HEAD_START, 20, 1.0, {}, 1),
    (HEAD_START, 20, 0.0, {}, 19), (HEAD_START, 2, 0.75, {}, 1), (HEAD_START, 1, 0.5, {}, 0), (HEAD_START, 5, 0.45, {}, 3),
    (HANDICAP, 20, 0.25, {}, 5), (HANDICAP, 20, 0.55, {"prefix_cap": 7}, 7), (HANDICAP, 20, 1.0, {}, 19),
    (HANDICAP, 3, 0.25, {}, 1), (HANDICAP, 20, 0.0, {}, 1), (HANDICAP, 1, 0.5, {}, 0), (HANDICAP, 10, 0.3, {}, 3)])
def test_larger_ratios_are_harder_for_both_kinds(kind, steps, ratio, more, turns):
    assert length(kind, steps, ratio, PrefixSettings(**more)) == turns


def group(name, results, turns=TURNS, origin="task", prefix=()):
    """Outcomes of one group; None: masked."""
    task = replace(TASK, instance_id=f"task-{name}")
    made = [Outcome(Attempt(f"{name}.{j}", task, 0, name, origin, prefix),
                    Trajectory(f"{name}.{j}", "t", turns, (9,), Ending.SUBMITTED), verdict=Verdict(bool(r)))
            for j, r in enumerate(results)]
    return made, [None if r is None else float(r) for r in results]


def observe(sampling, step, *groups):
    outcomes, rewards = ([x for g in groups for x in g[i]] for i in (0, 1))
    sampling.observe(step, outcomes, rewards)


def sampling(n=8, steps=100, **settings):
    return PrefixSampling(PrefixSettings(**settings), n, steps)


def test_a_rare_success_is_a_head_start_and_a_rare_failure_a_handicap_in_the_next_step():
    s = sampling()
    observe(s, 0, group("step0/0", [1, 0, 0, 0, 0, 0, 0, 0]), group("step0/1", [1, 1, 0, 1, 1, 1, 1, 1]),
            group("step0/2", [0] * 8), group("step0/3", [1, 1, 1, 1, 0, 0, 0, 0]))
    assert [(b.task.instance_id, b.kind, b.bucket, len(b.turns)) for b in s.kept] == [
        ("task-step0/0", HEAD_START, "1/8", 3), ("task-step0/1", HANDICAP, "7/8", 2)]
    attempts = s.attempts(1, lambda i, j: 100 * i + j)
    assert len(attempts) == 16 and len({a.id for a in attempts}) == 16 and len({a.group for a in attempts}) == 2
    assert {a.origin for a in attempts} == {HEAD_START, HANDICAP} and attempts[0].prefix == TURNS[:3]
    assert [a.seed for a in attempts] == [*range(8), *range(100, 108)]


def test_the_beginning_is_of_the_rare_outcome_and_of_a_valid_member():
    rare = tuple(replace(t, text="rare") for t in TURNS)
    outcomes, rewards = group("step0/0", [0, None, 1, 0, 0, 0, 0, 0])
    for i, turns in ((2, rare), (1, TURNS[:1])):
        outcomes[i] = replace(outcomes[i], trajectory=replace(outcomes[i].trajectory, turns=turns))
    s = sampling()
    s.observe(0, outcomes, rewards)
    assert {t.text for t in s.kept[0].turns} == {"rare"} and s.kept[0].bucket == "1/8"  # 1 of 7 valid


def test_replayed_groups_leave_no_beginnings_and_nothing_is_kept_longer_than_a_step():
    s = sampling()
    observe(s, 0, group("step0/0", [1, 0, 0, 0, 0, 0, 0, 0]))
    observe(s, 1, group("step1/head_start0", [1, 0, 0, 0, 0, 0, 0, 0], origin=HEAD_START, prefix=TURNS[:3]))
    assert s.kept == ()


@pytest.mark.parametrize("settings,kept", [({"kinds": (HEAD_START,)}, [HEAD_START]), ({"most": 1}, [HEAD_START]),
                                           ({"kinds": ()}, []), ({"kinds": (HANDICAP,)}, [HANDICAP])])
def test_what_is_not_wanted_or_too_short_is_left_out(settings, kept):
    s = sampling(**settings)
    observe(s, 0, group("step0/0", [1] + [0] * 7), group("step0/1", [0] + [1] * 7))
    assert [b.kind for b in s.kept] == kept


def test_turns_that_cannot_be_replayed_are_not_kept():
    for bad in ({"observation": None}, {"reminder_ids": (1,)}):
        s = sampling()
        observe(s, 0, group("step0/0", [1] + [0] * 7, turns=(replace(TURNS[0], **bad), *TURNS[1:])))
        assert s.kept == () and s.left_out == 1


def test_the_controller_of_a_bucket_hears_of_its_own_replayed_groups():
    s = sampling(adaptive=True)
    for step in range(6):
        before = [group(f"step{step}/{b.kind}{i}", [1] * 7 + [None], origin=b.kind, prefix=b.turns)
                  for i, b in enumerate(s.kept)]
        observe(s, step, group(f"step{step}/0", [1] + [0] * 7), group(f"step{step}/1", [0] + [1] * 7), *before)
    # five steps of pass rate 1: one move towards harder in each bucket, 0.75 -> 0.8 and 0.25 -> 0.3
    assert {k: c.ratio for k, c in s.controllers.items()} == pytest.approx({"1/8": 0.8, "7/8": 0.3})
    assert [len(b.turns) for b in s.kept] == [2, 3]


def test_help_is_withdrawn_over_training_and_the_controller_rests_meanwhile():
    s = sampling(adaptive=True, withdraw=(0.5, 0.9), prefix=0.8)
    assert [s.help(step) for step in (0, 49, 50, 70, 90, 99)] == [1, 1, 1, 0.5, 0, 0]
    lengths = []
    for step in (0, 48, 69, 88, 95):
        observe(s, step, group(f"step{step}/0", [0] + [1] * 7))
        lengths.append(sum(len(b.turns) for b in s.kept))
    assert lengths == [8, 8, 4, 0, 0]
    s.kept = ()
    observe(s, 70, group("step70/handicap0", [1] * 8, origin=HANDICAP, prefix=TURNS[:1]))
    assert s.controllers == {}


def test_memory_through_json_gives_the_same_attempts():
    s = sampling(adaptive=True)
    observe(s, 0, group("step0/0", [1] + [0] * 7), group("step0/1", [0] + [1] * 7))
    observe(s, 1, group("step1/head_start0", [1] * 8, origin=HEAD_START, prefix=TURNS[:3]), group("step1/1", [0] + [1] * 7))
    again = sampling(adaptive=True)
    again.recall(json.loads(json.dumps(s.memory())), {b.task.instance_id: b.task for b in s.kept})
    assert again.kept == s.kept and again.controllers == s.controllers and s.controllers
    seeds = lambda i, j: (i, j)  # noqa: E731
    assert again.attempts(2, seeds) == s.attempts(2, seeds)


def test_metrics_tell_origins_and_divergence_apart():
    whole, lost = group("a", [1, 0, None]), group("h", [1, 1], origin=HEAD_START, prefix=TURNS[:2])
    gone = replace(lost[0][0], trouble="replay_diverged", trajectory=None)
    found = measured([*whole[0], gone, lost[0][1]], [*whole[1], None, 1.0])
    assert found["prefix/pass_rate_task"] == (1, 2) and found["prefix/pass_rate_head_start"] == (1, 1)
    assert found["prefix/diverged"] == (1, 2) and found["prefix/groups_head_start"] == (1, 1)
    assert "prefix/pass_rate_handicap" not in found and measured(*whole).keys() == {"prefix/pass_rate_task"}


def test_a_road_puts_replayed_groups_beside_the_originals_of_the_next_step():
    class Pool:
        asked = []

        def run(self, attempts):
            self.asked.append(attempts)
            return [Outcome(a, replace(TALK, turns=TURNS), verdict=Verdict(a.id.endswith("0.0/t"))) for a in attempts]

    class Teach(Forgetful):
        def __call__(self, outcomes):
            self.rewards = [float(o.verdict.resolved) for o in outcomes]
            return [Lesson("trained_policy") for _ in outcomes]

    pool = Pool()
    road = Road(lambda step: [TASK], 4, lambda *place: hash(place), pool, Teach(), lambda *found: None, sampling(n=4))
    first, second = road(0), road(1)
    assert [len(asked) for asked in pool.asked] == [4, 8] and second.sums["rollout/attempts"] == 8
    assert [a.origin for a in pool.asked[1]] == ["task"] * 4 + [HEAD_START] * 4
    assert len({a.seed for asked in pool.asked for a in asked}) == 12 and first.stop == ""
    assert first.means["prefix/kept"] == (1.0, 1) and second.means["prefix/groups_head_start"] == (1, 1)


def test_mistakes_are_named():
    for bad in ({"low": 0.8, "high": 0.2}, {"remaining": 1.5}, {"withdraw": (0.9, 0.1)}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            PrefixSettings(**bad)
