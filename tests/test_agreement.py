"""core/agreement.py and rollout/ahead.py: what of the engine's tokens the trainer believes, and how old they may be."""

import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from oprd.core.agreement import Agreement
from oprd.core.metrics import values
from oprd.core.plan import check_rollout
from oprd.core.settings import Config
from oprd.core.types import Example, Row
from oprd.rollout.ahead import Ahead
from tests.sglang_help import VOCAB, a_model, plain_logprobs

torch.set_num_threads(1)
pytestmark = pytest.mark.timeout(60)


def rows(model, n, version, temperature=1.0, off=0.0):
    """Rows of 4 + 6 tokens whose log-probabilities are the model's, moved by `off`."""
    made = []
    for i in range(n):
        ids = torch.randint(VOCAB, (10,), generator=torch.Generator().manual_seed(i)).tolist()
        old = plain_logprobs(model, ids[:4], ids[4:], temperature)[0].double().numpy() + off
        made.append(Example(Row(np.array(ids), np.arange(4, 10)), {"nll": np.ones(6)}, "success", None, f"u{i}", "", old,
                            np.full(6, version)))
    return made


def agreement(**settings):
    return Agreement(**{"temperature": 1.0, "rows": 4, "alarm": 0.05, "clip": 2.0, "token_budget": 25, **settings})


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_engines_own_numbers_agree_and_the_first_step_says_so(temperature, caplog):
    model, check = a_model(), agreement(temperature=temperature)
    examples, found = check(model, rows(model, 6, 3, temperature), 3)
    shown = values(found)
    assert shown["rollout/difference_max"] < 1e-5 and shown["rollout/difference_k3"] < 1e-9
    assert shown["rollout/staleness"] == 0 and shown["rollout/difference_alarms"] == 0
    assert all((e.weights["nll"] == 1).all() for e in examples)
    assert "24 sampled tokens" in caplog.text  # 4 of the 6 rows
    caplog.clear()
    check(model, rows(model, 6, 4, temperature), 4)
    assert not caplog.text


def test_a_difference_beyond_the_alarm_stops_the_first_step_and_warns_of_later_ones(caplog):
    model = a_model()
    with pytest.raises(ValueError, match="step 0: .* 24 sampled tokens.*mean difference 0.1,.*difference_alarm = 0.05"):
        agreement()(model, rows(model, 4, 0, off=0.1), 0)
    check = agreement()
    check(model, rows(model, 4, 0), 0)
    _, found = check(model, rows(model, 4, 1, off=-0.1), 1)
    assert "more than rollout.difference_alarm" in caplog.text
    shown = values(found)
    assert shown["rollout/difference_alarms"] == 1 and shown["rollout/difference_mean"] == pytest.approx(0.1, abs=1e-4)
    assert shown["rollout/difference_k3"] == pytest.approx(np.exp(0.1) - 1.1, abs=1e-4)


def test_stale_tokens_count_by_their_ratio_up_to_the_clip_and_fresh_ones_as_they_are():
    """By hand: p_trainer / p_engine is e^0.5 = 1.65 for the first row and e^1 = 2.72, clipped to 2, for the second."""
    model = a_model()
    mixed = rows(model, 3, 5)
    mixed[0] = replace(mixed[0], old_logprobs=mixed[0].old_logprobs - 0.5, versions=np.array([4, 4, 4, 5, 5, 5]))
    mixed[0].old_logprobs[3:] += 0.5
    mixed[1] = replace(mixed[1], old_logprobs=mixed[1].old_logprobs - 1.0, versions=np.full(6, 3))
    examples, found = agreement()(model, mixed, 5)
    np.testing.assert_allclose(examples[0].weights["nll"], [np.exp(0.5)] * 3 + [1.0] * 3, atol=1e-4)
    np.testing.assert_allclose(examples[1].weights["nll"], [2.0] * 6)
    np.testing.assert_allclose(examples[2].weights["nll"], [1.0] * 6)
    shown = values(found)
    assert shown["rollout/staleness_max"] == 2 and shown["rollout/staleness"] == pytest.approx((3 + 12) / 18)
    assert shown["rollout/importance_clipped"] == pytest.approx(6 / 9) and shown["rollout/difference_max"] < 1e-5


def test_rows_that_no_engine_sampled_are_left_alone():
    plain = [replace(e, old_logprobs=None, versions=None) for e in rows(a_model(), 2, 0)]
    examples, found = agreement()(a_model(), plain, 9)
    assert examples == plain and not found


@pytest.mark.parametrize("n", [0, 1, 2])
def test_generation_runs_ahead_by_at_most_n_versions_and_after_a_resume_too(n):
    for first in (0, 4):  # 4: a resumed run
        version, began = first, {}
        lock = threading.Lock()

        def make(step):
            with lock:
                began[step] = version
            time.sleep(0.005)
            return step * 10

        ahead = Ahead(n, steps=9)
        for step in range(first, 9):
            assert ahead.take(step, make) == step * 10
            time.sleep(0.01)
            with lock:
                version = step + 1
        ahead.close()
        ages = [step - began[step] for step in range(first, 9)]
        assert max(ages) <= n and sorted(began) == list(range(first, 9))
        assert n == 0 or max(ages) >= 1  # it does run ahead


def test_what_fails_ahead_is_raised_at_its_own_step():
    def make(step):
        if step == 2:
            raise OSError("step 2")
        return step

    ahead = Ahead(2, steps=5)
    assert [ahead.take(0, make), ahead.take(1, make)] == [0, 1]
    with pytest.raises(OSError, match="step 2"):
        ahead.take(2, make)
    ahead.close()


@pytest.mark.parametrize("settings, message", [
    ({"rollout": {"max_staleness": 1}}, "max_staleness = 1 needs rollout.engine = sglang"),
    ({"rollout": {"max_staleness": 1, "engine": "sglang"}, "prefix": {"on": True}}, "must be 0 with prefix.on"),
    ({"sglang": {"servers": ["http://h:1"], "count": 2}}, "sglang.count = 2"),
])
def test_settings_of_the_engine_that_exclude_each_other_are_one_line(settings, message):
    with pytest.raises(ValueError, match=message):
        check_rollout(Config.model_validate(settings))
