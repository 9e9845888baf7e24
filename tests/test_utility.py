"""The utility of a reminder: how far it moves the teacher at the bad step, by hand and with a real model."""

import numpy as np
import pytest
import torch

from oprd.core.model import Model, ModelConfig
from oprd.core.score import target_logprobs
from oprd.core.types import Ending, Observation, Reminder, Row, ToolCall, Trajectory, Turn
from oprd.rollout.teach import Reminded
from oprd.rollout.utility import measured, utilities

SHORT = ToolCall("edit", {"path": "a.py", "old_string": "x", "new_string": "y"})
LONG = ToolCall("edit", {"path": "a.py", "old_string": "w\nx", "new_string": "w\ny"})
FAILED = Observation("Found 2 matches of the string to replace, but replace_all is false.", None, True)
DONE = Observation("The file a.py has been updated.")
ASK = "hard_ambiguous_edit_old_string"


def trajectory(*calls):
    """Turns of two sampled tokens each."""
    turns = tuple(Turn((1, 3), (10 + k, 20 + k), call=call, observation=FAILED if call is SHORT else DONE)
                  for k, call in enumerate(calls))
    return Trajectory("a", "t", turns, (9,), Ending.TURN_LIMIT)


def encode(text):
    return tuple(ord(c) % 30 for c in text)


def reminder(k, category=ASK, text="z"):
    return Reminder(category, "R1", text, turn=k)


def score(rows):
    """-1 a token, and -3 in a row that holds the reminder's id."""
    return [np.full(len(row.targets), -3.0 if encode("z")[0] in row.ids.tolist() else -1.0) for row in rows]


def test_a_reminder_that_makes_the_bad_action_less_likely_is_useful_and_one_that_makes_a_good_one_so_is_not():
    bad = trajectory(SHORT, SHORT, LONG)  # what follows observation 0 is the error again, what follows 1 is not
    assert utilities(bad, encode, None, {0: reminder(0), 1: reminder(1)}, score) == {0: 4.0, 1: -4.0}
    unclear = reminder(0, category="public_contract_before_edit")
    submit = trajectory(SHORT, ToolCall("submit", {}))
    assert utilities(submit, encode, None, {0: unclear}, score) == {0: 4.0}
    assert utilities(bad, encode, None, {2: reminder(2)}, score) == {}  # no turn reads it


def test_below_the_least_utility_a_reminder_is_dropped_with_the_reason():
    told, both = trajectory(SHORT, SHORT, LONG), {0: reminder(0), 1: reminder(1)}
    kept = measured(Reminded(None, both), told, encode, score, None)
    assert kept.local == both and kept.utility == {0: 4.0, 1: -4.0} and kept.dropped == ()
    some = measured(Reminded(None, both), told, encode, score, 0.5)
    assert some.local == {0: both[0]} and some.utility == kept.utility
    assert [(d.category, d.turn, d.gate, d.reason) for d in some.dropped] == [(ASK, 1, "utility", "utility -4.00 below 0.50")]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Model(ModelConfig(vocab_size=31, hidden_size=24, intermediate_size=28, num_hidden_layers=2,
                             num_attention_heads=2, num_key_value_heads=1, head_dim=8, initializer_range=0.3)).init(0)


def plain(model, ids, targets):
    """log p of the targets by one forward of its own, in float64."""
    ids = torch.tensor(ids)
    logits = model.logits(ids, torch.tensor([0, len(ids)])).double()
    return [torch.log_softmax(logits[t - 1], -1)[ids[t]].item() for t in targets]


@pytest.mark.parametrize("budget", [1, 9, 1000])
def test_targets_are_scored_as_by_one_forward_a_row_however_they_are_packed(model, budget):
    rows = [Row(np.array(ids), np.array(targets)) for ids, targets in
            [([1, 2, 3, 4], [1, 3]), ([5, 6], [1]), ([7, 8, 9, 10, 11, 12], [2, 3, 5]), ([3, 1, 4], [2])]]
    with torch.no_grad():
        for found, row in zip(target_logprobs(model, rows, budget), rows, strict=True):
            assert found == pytest.approx(plain(model, row.ids, row.targets), abs=1e-5)


def test_utilities_of_a_real_model_are_differences_of_its_log_probabilities(model):
    told = trajectory(SHORT, SHORT, LONG)
    whole = Reminder("g", "G", "q", turn=-1)
    found = utilities(told, encode, whole, {0: reminder(0), 1: reminder(1)}, lambda rows: target_logprobs(model, rows, 64))
    g, z = encode("q"), encode("z")
    start = [1, 3, *g, 9, 10, 20]
    with torch.no_grad():
        for k, context, sign in ((0, start, 1), (1, [*start, 1, 3, 9, 11, 21], -1)):
            said = [11 + k, 21 + k]
            without, with_ = [*context, 1, 3, 9, *said], [*context, 1, 3, *z, 9, *said]
            logprobs = [sum(plain(model, ids, [len(ids) - 2, len(ids) - 1])) for ids in (without, with_)]
            assert found[k] == pytest.approx(sign * (logprobs[0] - logprobs[1]), abs=1e-4) and abs(found[k]) > 1e-3
