"""rollout/sampling.py: top-p, temperature, and samples that depend on nothing but the request."""

import math

import pytest
import torch

from oprd.rollout.engine import Sampling
from oprd.rollout.sampling import Sampler, _nucleus

torch.set_num_threads(1)


def test_top_p_keeps_the_smallest_set_that_reaches_it_and_draws_by_probability():
    p = torch.tensor([[0.1, 0.5, 0.15, 0.25]], dtype=torch.float64)
    kept = {q: _nucleus(p, torch.tensor([[q]], dtype=torch.float64)).tolist()[0] for q in (0.4, 0.5, 0.6, 0.8, 1.0)}
    assert kept == {0.4: [0, 0.5, 0, 0], 0.5: [0, 0.5, 0, 0], 0.6: [0, 0.5, 0, 0.25], 0.8: [0, 0.5, 0.15, 0.25],
                    1.0: [0.1, 0.5, 0.15, 0.25]}
    flat = torch.full((2, 500), 1 / 500)  # the set is larger than the tokens looked at first
    flat[0, 7], flat[1] = 1.0, flat[1] * torch.linspace(0.5, 1.5, 500)
    sizes = (_nucleus(flat / flat.sum(-1, keepdim=True), torch.tensor([[0.4], [0.9]], dtype=torch.float64)) > 0).sum(-1)
    # row 1: the density falls from 1.5 to 0.5, so 1.5 x - x^2 / 2 = 0.9 at x = 0.829, that is 415 of 500
    assert sizes.tolist() == [1, pytest.approx(415, abs=1)]
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
