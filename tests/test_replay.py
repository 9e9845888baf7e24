"""A replayed prefix in a real sandbox: the same tree, working directory and observations, and never a target."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from sandbox_help import open_local
from test_agent import CHAT, LIMITS, SAMPLING, Engine, call
from test_views import GLOBAL, contexts, encode, local, trajectory

from oprd.core.batch import collate
from oprd.core.objective import Distillation, PolicyGradient, batch_loss, normalise
from oprd.core.types import Observation
from oprd.parallel.layers import Head
from oprd.rollout.agent import Diverged, converse
from oprd.rollout.attempts import Attempt, Attempts
from oprd.rollout.expert import mistake, solution
from oprd.rollout.views import student_example, student_row, teacher_view, teacher_view_slow
from oprd.sandbox.box import Limits
from oprd.sandbox.microswe import generate
from oprd.sandbox.repo import state_of

SEEING = replace(LIMITS, states=True, max_turns=20, max_context_tokens=20_000, max_turn_tokens=2000,
                 command_s=60.0, attempt_s=600.0)
TASK = generate(0, 5)
PATIENT = Limits(command_s=120.0, cpu_s=120.0)
CALLS = [("bash", {"command": "mkdir -p .hidden/x; printf '\\0\\1' > .hidden/x/bin; chmod 755 check.py; ln -s a b; cd src"}),
         ("bash", {"command": "pwd; git status --short; false"}),
         ("edit", {"path": TASK.meta["path"], "old_string": TASK.meta["anchor"], "new_string": TASK.meta["anchor"] + " "}),
         ("read", {"path": "nowhere.py"})]


def play(calls, prefix=(), task=TASK, limits=SEEING):
    engine = Engine([CHAT.assistant("", [c]) if not isinstance(c, tuple) else call(c[0], **c[1]) for c in calls])
    with open_local(task, PATIENT) as box:
        told = converse("a", task, engine, CHAT, box, limits, SAMPLING, 5, prefix=prefix).trajectory
        return told, state_of(box), engine


@pytest.mark.parametrize("cut", range(1, 6))
def test_a_replayed_prefix_leaves_tree_working_directory_observations_and_ids_as_they_were(cut):
    told, _, _ = play([*CALLS, ("bash", {"command": "python check.py"}), ("submit", {})])
    again, state, engine = play([("submit", {})], told.turns[:cut])
    assert [t.observation for t in again.turns[:cut]] == [t.observation for t in told.turns[:cut]]
    assert state == told.turns[cut - 1].state != "" and len(engine.prompts) == 1
    assert [t.replayed for t in again.turns] == [True] * cut + [False]
    sampled = again.turns[-1]
    # what the policy goes on from is, id by id, what stood there in the original
    assert sampled.context_ids == told.turns[cut].context_ids
    row, before = student_row(again), student_row(told)
    start = len(row.ids) - len(sampled.sampled_ids)
    assert (row.ids[:start] == before.ids[:start]).all() and (row.targets >= start).all()
    assert len(row.targets) == len(sampled.sampled_ids)


@pytest.mark.parametrize("index", range(4))
def test_scripts_of_microswe_replay_to_the_same_state(index):
    task = generate(3, index)
    wrong, recovery = mistake(task, random.Random(index))
    for calls in (solution(task), wrong + recovery):
        told, _, _ = play(calls, task=task)
        cut = len(told.turns) - 1
        _, state, _ = play([calls[-1]], told.turns[:cut], task)
        assert state == told.turns[cut - 1].state


def test_the_state_is_the_content_of_every_file_and_nothing_else():
    with open_local(TASK) as box:
        seen = [state_of(box)]
        for command in ("true", "touch a", "echo x > a", "chmod +x a", "mkdir e", "rm a", "echo c >> .gitignore; echo 1 > c"):
            box.run(command)
            seen.append(state_of(box))
        box.run("git add -A; git -c user.name=a -c user.email=a@b commit -qm done; touch -d 2001-01-01 check.py")
        seen.append(state_of(box))
    assert seen[0] == seen[1] and len(set(seen[2:5])) == 3 and seen[4] == seen[5] and seen[6] == seen[0]
    assert seen[7] != seen[6] and seen[8] == seen[7]


@pytest.mark.parametrize("change,message", [
    (lambda t: replace(t, observation=Observation("other", 0)), "answered otherwise"),
    (lambda t: replace(t, state="f00 repo"), "another state"),
    (lambda t: replace(t, context_ids=t.context_ids[:-1]), "another context")])
def test_a_replay_that_leads_elsewhere_is_noticed(change, message):
    told, _, _ = play([*CALLS, ("submit", {})])
    with pytest.raises(Diverged, match=message):
        play([("submit", {})], [told.turns[0], change(told.turns[1])])


def test_a_diverging_replay_is_dropped_and_named_and_the_others_go_on():
    clock = [("bash", {"command": "date +%N; cat /proc/sys/kernel/random/uuid"}), ("submit", {})]
    told, _, _ = play(clock)
    engine = Engine([call("submit")])
    pool = Attempts(engine, CHAT, open_local, SEEING, SAMPLING, 2, 1)
    lost, kept = pool.run([Attempt("a", TASK, 0, "g", "head_start", told.turns[:1]), Attempt("b", TASK, 0)])
    assert lost.trouble == "replay_diverged" and lost.trajectory is None and kept.trouble is None


# --- rows ---------------------------------------------------------------------------------------------------------

def replaying(told, n):
    return replace(told, turns=tuple(replace(t, replayed=k < n, logprobs=(-1.0 - k,) * len(t.sampled_ids))
                                     for k, t in enumerate(told.turns)))


@pytest.mark.parametrize("seed", range(12))
def test_no_view_scores_a_replayed_token_and_the_others_keep_their_contexts(seed):
    rng = random.Random(seed)
    whole = replaying(trajectory(seed, turns=rng.randint(2, 6)), 0)
    n = rng.randint(1, len(whole.turns) - 1)
    told = replaying(whole, n)
    first = sum(len(t.sampled_ids) for t in told.turns[:n])
    hints = {k: local(k, "r" * rng.randint(1, 3)) for k in range(len(told.turns)) if rng.random() < 0.6}
    shown = GLOBAL if rng.random() < 0.5 else None
    row, full = student_row(told), student_row(whole)
    assert row.ids.tolist() == full.ids.tolist() and row.targets.tolist() == full.targets[first:].tolist()
    view = teacher_view(told, encode, shown, hints)
    assert contexts(view) == contexts(teacher_view(whole, encode, shown, hints))[first:]
    assert contexts(view) == contexts(teacher_view_slow(told, encode, shown, hints))
    for losses in ({"nll": 1.0}, {"pg": -0.5}, {"kl": 1.0}):
        example = student_example(told, losses, "policy", view if "kl" in losses else None)
        assert all(len(w) == len(row.targets) for w in example.weights.values())
        assert example.old_logprobs.tolist() == [x for t in told.turns[n:] for x in t.logprobs]


@pytest.mark.parametrize("loss", ["nll", "kl", "pg"])
def test_the_gradient_at_replayed_tokens_is_exactly_zero(loss):
    """Of the logits of every position: only those that predict a sampled token of this attempt move."""
    class Table(torch.nn.Module):
        """Hidden states that are parameters, one a position: their gradient is the position's own."""

        def __init__(self, length, seed):
            super().__init__()
            torch.manual_seed(seed)
            self.states = torch.nn.Parameter(torch.randn(length, 8, dtype=torch.float64))
            self.head = Head(torch.randn(1200, 8, dtype=torch.float64), 1200)

        def hidden(self, ids, cu_seqlens=None, positions=None, caches=None, routers=None):
            return self.states[: len(ids)]

    told = replaying(trajectory(1, turns=4), 2)
    view = teacher_view(told, encode, GLOBAL, {}) if loss == "kl" else None
    example = student_example(told, {loss: 0.7}, "policy" if loss == "pg" else "success", view)
    student, teacher = Table(200, 0), Table(200, 1)
    batch = collate(normalise([example]))
    total, _ = batch_loss(student, teacher, batch, Distillation(k=10), policy=PolicyGradient())
    total.backward()
    moved = set(torch.nonzero(student.states.grad.abs().sum(1)).flatten().tolist())
    assert moved == set((example.row.targets - 1).tolist()) and len(moved) == sum(len(t.sampled_ids) for t in told.turns[2:])
