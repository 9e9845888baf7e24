"""The controller against simulated tasks: it comes to the target from anywhere and does not swing."""

import random

import pytest

from oprd.rollout.controller import Controller, ControlSettings

S = ControlSettings()
# pass rate as a function of the ratio (larger is harder); each is 0.5 at some ratio within the bounds
WORLDS = {"line": lambda x: 1 - x, "steep": lambda x: min(1.0, max(0.0, 1.2 - 1.4 * x)), "flat": lambda x: 0.7 - 0.4 * x,
          "bent": lambda x: 1 - x * x, "early": lambda x: (1 - x) ** 2,
          "stairs": lambda x: 1 - int(x * 20 + 1e-9) / 20}


def simulate(start, world, steps=600, settings=S, group=0, seed=0):
    rng, c = random.Random(seed), Controller(start)
    ratios, rates = [], []
    for _ in range(steps):
        p = world(c.ratio)
        rates.append(p)
        ratios.append(c.ratio)
        c = c.seen(sum(rng.random() < p for _ in range(group)) / group if group else p, settings)
    return ratios, rates


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("start", [0.05, 0.25, 0.5, 0.75, 0.95])
def test_from_any_start_the_pass_rate_comes_within_005_of_the_target_and_never_swings_beyond_a_move(world, start):
    ratios, rates = simulate(start, WORLDS[world])
    assert abs(sum(rates[-200:]) / 200 - 0.5) <= 0.05 and all(abs(r - 0.5) <= 0.05 + 1e-9 for r in rates[-200:])
    assert max(ratios[-200:]) - min(ratios[-200:]) <= S.move + 1e-9
    turns = [b - a for a, b in zip(ratios, ratios[1:]) if a != b]
    first_back = next((i for i, t in enumerate(turns) if t * turns[0] < 0), len(turns))
    assert all(abs(t) <= S.move + 1e-9 for t in turns)
    # after the first turn back the ratio stays within one move of where it turned: no overshoot
    held = ratios[0] + sum(turns[:first_back])
    assert all(abs(r - held) <= S.move + 1e-9 for r in ratios[-200:])


@pytest.mark.parametrize("start", [0.05, 0.5, 0.95])
@pytest.mark.parametrize("seed", range(3))
def test_with_sampled_groups_the_mean_pass_rate_still_comes_to_the_target(start, seed):
    _, rates = simulate(start, WORLDS["line"], 1500, group=32, seed=seed)
    assert abs(sum(rates[-1000:]) / 1000 - 0.5) <= 0.05


def test_a_mean_that_remembers_other_ratios_swings():
    """Why `restart` is the default: the plain exponential mean of the same settings overshoots by several moves."""
    ratios, _ = simulate(0.95, WORLDS["line"], settings=ControlSettings(restart=False))
    assert min(ratios) < 0.5 - 2 * S.move - 1e-9


def test_the_plain_mean_by_hand():
    c = Controller(0.45).seen(1.0, ControlSettings(restart=False))
    assert c.mean == pytest.approx(0.525) and c.ratio == 0.45
    for _ in range(4):
        c = c.seen(1.0, ControlSettings(restart=False))
    assert c.mean == pytest.approx(1 - 0.5 * 0.95**5) and c.ratio == 0.5 and c.since == 0


def test_the_corrected_mean_by_hand():
    c = Controller(0.5)
    for rate in (1.0, 0.0):
        c = c.seen(rate, S)
    assert c.mean == pytest.approx(0.95 / 1.95)  # weights 0.05 * 0.95 and 0.05


@pytest.mark.parametrize("rate,moves", [(0.53, 0), (0.5301, 1), (0.47, 0), (0.4699, -1), (1.0, 1), (0.0, -1)])
def test_it_moves_only_outside_the_dead_zone_and_after_the_cool_down(rate, moves):
    c = Controller(0.5)
    for i in range(5):
        assert c.ratio == 0.5
        c = c.seen(rate, S)
    assert c.ratio == pytest.approx(0.5 + 0.05 * moves)


def test_the_ratio_stays_within_its_bounds():
    assert max(simulate(0.5, lambda x: 1.0)[0]) == S.most and min(simulate(0.5, lambda x: 0.0)[0]) == S.least


def test_mistakes_are_named():
    for bad in ({"alpha": 0.0}, {"cooldown": 0}, {"least": 0.9, "most": 0.1}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            ControlSettings(**bad)
