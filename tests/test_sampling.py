"""rollout/sampling.py: top-p, temperature, and samples that depend on nothing but the request."""

import math

import pytest
import torch

from oprd.rollout.engine import Sampling
from oprd.rollout.sampling import Sampler, _nucleus

torch.set_num_threads(1)


def set_of(p, top_p):
    """The tokens that evenly spread pairs of uniform numbers draw from one row of probabilities, and how often."""
    grid = (torch.arange(9000, dtype=torch.float64) + 0.5) / 9000
    pairs = torch.stack([grid, (torch.arange(9000) * 0.6180339887498949).double() % 1], dim=1)
    drawn = _nucleus(p.expand(9000, -1), torch.full((9000, 1), top_p, dtype=torch.float64), pairs)
    return {i: round(n / 9000, 2) for i, n in enumerate(drawn.bincount().tolist()) if n}


def test_top_p_keeps_the_smallest_set_that_reaches_it_and_draws_by_probability():
    p = torch.tensor([0.1, 0.5, 0.15, 0.25], dtype=torch.float64)
    assert set_of(p, 0.4) == set_of(p, 0.5) == {1: 1.0}
    assert set_of(p, 0.6) == {1: 0.67, 3: 0.33}
    assert set_of(p, 0.8) == {1: 0.56, 2: 0.17, 3: 0.28}
    assert set_of(p, 1.0) == {0: 0.1, 1: 0.5, 2: 0.15, 3: 0.25}
    # the density falls from 1.5 to 0.5, so 1.5 x - x^2 / 2 = 0.9 at x = 0.829, that is 415 of 500; beside it a row that
    # one token fills
    flat = torch.linspace(0.5, 1.5, 500, dtype=torch.float64)
    assert len(set_of(flat / flat.sum(), 0.9)) == pytest.approx(415, abs=1)
    rows = torch.stack([flat / flat.sum(), torch.eye(500, dtype=torch.float64)[7]])
    both = _nucleus(rows, torch.tensor([[0.9], [0.9]]).double(), torch.tensor([[0.01, 0.3]] * 2).double())
    alone = _nucleus(rows[:1], torch.tensor([[0.9]]).double(), torch.tensor([[0.01, 0.3]]).double())
    assert both.tolist() == [alone.item(), 7] and alone.item() > 85  # the first number alone would draw a token below
    assert set_of(torch.full((8,), 0.125, dtype=torch.float64), 0.5) == {i: 0.25 for i in range(4)}  # ties: by their id
    p = p[None]
    n = 4000
    sampler = Sampler(n)
    for seed in range(n):
        sampler.join(Sampling(0.5, 0.7, 1, ()), seed)
    drawn = sampler.sample(p.float().sqrt().log().expand(n, 4), 0)  # temperature 0.5 squares: back to p
    share = torch.tensor(drawn).bincount(minlength=4) / n
    assert share[0] == share[2] == 0
    assert abs(share[1].item() - 2 / 3) < 4 * math.sqrt(2 / 9 / n)  # four standard deviations
    assert sampler.leave(0, 1) == pytest.approx([math.log([0.1, 0.5, 0.15, 0.25][drawn[0]])], abs=1e-5)


def test_a_row_samples_the_same_beside_other_settings_as_alone():
    logits = torch.randn(3, 90, generator=torch.Generator().manual_seed(0)) * 2
    settings = [Sampling(1.0, 1.0, 9, ()), Sampling(0.6, 0.5, 70, ()), Sampling(0.0, 0.9, 9, ())]
    together, alone = Sampler(3), []
    for seed, s in enumerate(settings):
        together.join(s, seed)
        single = Sampler(1)
        single.join(s, seed)
        alone.append(([single.sample(logits[seed, None], 0)[0] for _ in range(9)], single.leave(0, 9)))
    drawn = [together.sample(logits, 0) for _ in range(9)]
    for row in (2, 1, 0):
        assert ([ids[row] for ids in drawn], together.leave(row, 9)) == alone[row]


def test_a_request_draws_the_same_numbers_whatever_its_length_limit():
    drawn = []
    for most in (1, 7, 64, 1000):
        sampler = Sampler(1)
        sampler.join(Sampling(1.0, 1.0, most, ()), seed=9)
        drawn.append(sampler.uniforms[0, :most])
    assert all(torch.equal(short, drawn[-1][: len(short)]) for short in drawn)
