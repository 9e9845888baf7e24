"""The loop: exact resume, refused overwrites, clean stops."""

import json
import os
import signal

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from oprd.core import hf
from oprd.core.settings import Train
from oprd.core.model import Model, ModelConfig
from oprd.core.objective import Distillation
from oprd.core.trainer import Plan, Stopped, Trainer
from oprd.core.types import Example, Row, View

torch.set_num_threads(1)
CONFIG = ModelConfig(vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
                     num_key_value_heads=1, head_dim=8, tie_word_embeddings=True)


@pytest.fixture
def start(tmp_path):
    hf.save(Model(CONFIG).init(0), tmp_path / "start")
    return tmp_path / "start"


def supply(step):
    """A pure function of the step: one imitated row, one distilled with a teacher that reads two more tokens."""
    rng = np.random.default_rng(step)
    ids = rng.integers(0, 31, 12)
    targets = np.arange(4, 12)
    told = np.concatenate([ids[:3], [1, 2], ids[3:]])
    view = View((Row(told, targets + 2),), np.arange(8))
    return [Example(Row(ids, targets), {"nll": np.ones(8)}, "success"),
            Example(Row(ids, targets), {"kl": np.ones(8)}, "failure", view)], {}


def plan(steps=8, **more):
    return Plan(steps, Train(batch=2, lr=1e-2, checkpoint_every=3, warmup=0.2), distillation=Distillation(k=5),
                teacher=True, refresh=frozenset({2, 5}), **more)


def curve(folder):
    return [json.loads(line)["train/loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


class Killed(Exception):
    pass


def killed_at(step):
    def stop(done):
        if done == step:
            raise Killed
    return stop


@pytest.mark.parametrize("kill", [1, 4, 7])
def test_a_resumed_run_has_bit_identical_losses_and_weights(start, tmp_path, kill):
    Trainer(plan(), tmp_path / "whole", start, False).run(supply)
    with pytest.raises(Killed):  # an end without a save, as kill -9 leaves it
        Trainer(plan(), tmp_path / "cut", start, False).run(supply, killed_at(kill))
    Trainer(plan(), tmp_path / "cut", start, True).run(supply)
    assert curve(tmp_path / "cut") == curve(tmp_path / "whole") and len(curve(tmp_path / "cut")) == 8
    whole, cut = (hf.load(tmp_path / name / "model").state_dict() for name in ("whole", "cut"))
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


def test_the_teacher_moves_only_at_refreshes(start, tmp_path):
    trainer = Trainer(plan(), tmp_path / "run", start, False)
    seen = []
    trainer.run(supply, lambda step: seen.append(trainer.teacher.model.norm.weight.clone()))
    moved = [i for i in range(1, 8) if not torch.equal(seen[i], seen[i - 1])]
    assert moved == [2, 5]


def test_a_shared_teacher_is_the_student(start, tmp_path):
    trainer = Trainer(plan(shared=True), tmp_path / "run", start, False)
    assert trainer.teacher is trainer.model
    trainer.run(supply)
    stored = FileSystemReader(tmp_path / "run" / "checkpoints" / "step_8" / "state").read_metadata().state_dict_metadata
    assert {name.split("/")[0] for name in stored} == {"model", "exp_avg", "exp_avg_sq"}


def test_an_existing_run_is_never_overwritten_silently(start, tmp_path):
    Trainer(plan(), tmp_path / "run", start, False).run(supply)
    with pytest.raises(ValueError, match="already holds a run; add --resume"):
        Trainer(plan(), tmp_path / "run", start, False)
    with pytest.raises(ValueError, match="made for 8 steps, the settings now give 9; .*train.steps"):
        Trainer(plan(9), tmp_path / "run", start, True)


def test_a_damaged_state_is_one_line_with_the_remedy(start, tmp_path):
    Trainer(plan(), tmp_path / "run", start, False).run(supply)
    found = tmp_path / "run" / "checkpoints" / "step_8"
    for file in (found / "state").iterdir():
        whole = file.read_bytes()
        file.write_bytes(b"\0" * len(whole))
        with pytest.raises(ValueError, match="step_8: state/ .*move .*step_8 away") as caught:
            Trainer(plan(), tmp_path / "run", start, True)
        assert "\n" not in str(caught.value)
        file.write_bytes(whole)
    assert Trainer(plan(), tmp_path / "run", start, True).step == 8


def test_sigterm_saves_at_the_step_boundary_and_resume_goes_on(start, tmp_path):
    Trainer(plan(), tmp_path / "whole", start, False).run(supply)
    trainer = Trainer(plan(), tmp_path / "run", start, False)
    with pytest.raises(Stopped, match="stopped after step 4 of 8"):
        trainer.run(supply, lambda step: step == 4 and os.kill(os.getpid(), signal.SIGTERM))
    assert (tmp_path / "run" / "checkpoints" / "step_4").is_dir()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    Trainer(plan(), tmp_path / "run", start, True).run(supply)
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")


def test_what_a_supply_remembers_comes_back_with_the_checkpoint_it_belongs_to(start, tmp_path):
    seen = []

    def counting(step):
        seen.append(step)
        return supply(step)

    with pytest.raises(Killed):
        Trainer(plan(), tmp_path / "run", start, False).run(counting, killed_at(4), remember=lambda: {"seen": list(seen)})
    again = Trainer(plan(), tmp_path / "run", start, True)
    assert again.memory == {"seen": list(range(again.step))}
    assert Trainer(plan(), tmp_path / "new", start, False).memory is None


def test_a_supply_that_stops_the_run_leaves_it_saved(start, tmp_path):
    def stopping(step):
        if step == 3:
            raise Stopped("enough")
        return supply(step)

    with pytest.raises(Stopped, match="enough"):
        Trainer(plan(), tmp_path / "run", start, False).run(stopping)
    assert Trainer(plan(), tmp_path / "run", start, True).step == 3
