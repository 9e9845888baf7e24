"""A run goes on on another mesh: weights, moments, position and curve; a rank killed at any moment loses one save."""

import json
import os
import signal
import time

import numpy as np
import pytest
import torch
from families_help import randomised
from parallel_help import HEADS, mesh_of
from ranks_help import ranks

from oprd.core import hf
from oprd.core.checkpoint import newest
from oprd.core.objective import Distillation
from oprd.core.settings import Parallel, Train
from oprd.core.trainer import Plan, Stopped, Trainer
from oprd.core.types import Example, Row, View
from oprd.parallel.mesh import Sizes

torch.set_num_threads(1)
PLAN = Plan(6, Train(batch=3, lr=1e-2, checkpoint_every=2, warmup=0.2, micro_batch_tokens=64), teacher=True,
            distillation=Distillation(k=5), refresh=frozenset({1, 3}))


def supply(step):
    rng = np.random.default_rng(step)
    rows = [Row(rng.integers(0, 37, n), np.arange(3, n)) for n in (11, 14, 9)]
    ids = rows[1].ids
    view = View((Row(np.concatenate([ids[:2], [1, 2], ids[2:]]), rows[1].targets + 2),), np.arange(11))
    return [Example(rows[0], {"nll": np.ones(8)}, "success"), Example(rows[1], {"kl": np.ones(11)}, "failure", view),
            Example(rows[2], {"nll": np.ones(6)}, "success")], {}


def leg(folder, start, resume, sizes, parallel, until):
    """Train to a step, as a kill would end it or to the end; returns whether this rank speaks for all."""
    trainer = Trainer(PLAN, folder, start, resume, mesh_of(sizes), parallel)

    def stop(done):
        if done == until:
            raise KeyboardInterrupt

    try:
        trainer.run(supply, stop)
    except KeyboardInterrupt:
        trainer._saved()
    return trainer.mesh.first


def curve(folder):
    return [json.loads(line)["train/loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def start(tmp_path):
    hf.save(randomised("qwen3_5_moe_text", **{**HEADS, "num_experts": 8, "shared_expert_intermediate_size": 12}),
            tmp_path / "start", dtype=torch.float32)
    return tmp_path / "start"


def test_a_run_that_changes_its_mesh_twice_is_the_run_of_one_rank(start, tmp_path):
    leg(tmp_path / "one", start, False, Sizes(), Parallel(), 99)
    folder = tmp_path / "many"
    first = ranks(2).run(leg, folder, start, False, Sizes(tp=2, ep=2), Parallel(zero=2, async_save=True), 3)
    assert first == [True, False] and newest(folder / "checkpoints").name == "step_2"
    leg(folder, start, True, Sizes(), Parallel(), 5)
    ranks(2).run(leg, folder, start, True, Sizes(cp=2), Parallel(zero=1), 99)
    one, many = curve(tmp_path / "one"), curve(folder)
    assert many == pytest.approx(one, rel=2e-5) and len(many) == 6  # float32, summed in other orders
    expected, found = (hf.load(path / "model").state_dict() for path in (tmp_path / "one", folder))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-5, msg=name)


def killed(folder, start, victim, after_s):
    """Rank `victim` is killed as soon as it has been in its second save for so long."""
    trainer = Trainer(PLAN, folder, start, False, mesh_of(Sizes(dp=2)), Parallel(zero=1))
    if trainer.mesh.world.rank == victim:
        save = trainer._save

        def deadly():
            if trainer.step == 4:
                from threading import Timer
                Timer(after_s, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
            save()
            if trainer.step == 4:
                time.sleep(60)

        trainer._save = deadly
    trainer.run(supply)


@pytest.mark.parametrize("victim, after_s", [(0, 0.0), (1, 0.0), (0, 0.02), (1, 0.01), (0, 0.05)])
def test_a_rank_killed_during_a_save_leaves_what_resume_can_use(start, tmp_path, victim, after_s):
    with pytest.raises(AssertionError, match="rank"):
        ranks(2).run(killed, tmp_path / "run", start, victim, after_s)
    assert newest(tmp_path / "run" / "checkpoints").name in ("step_2", "step_4")
    leg(tmp_path / "run", start, True, Sizes(), Parallel(), 99)
    assert len(curve(tmp_path / "run")) == 6


def stopped(folder, start, parallel):
    trainer = Trainer(PLAN, folder, start, False, mesh_of(Sizes(dp=2)), parallel)
    told = trainer.mesh.world.rank == 1
    try:
        trainer.run(supply, lambda step: told and step == 3 and os.kill(os.getpid(), signal.SIGTERM))
    except Stopped as reason:
        return str(reason)


@pytest.mark.parametrize("async_save", [False, True])
def test_a_signal_to_one_rank_stops_all_at_the_same_step(start, tmp_path, async_save):
    said = ranks(2).run(stopped, tmp_path / "run", start, Parallel(async_save=async_save))
    assert said == ["stopped after step 3 of 6, saved; --resume goes on"] * 2
    assert newest(tmp_path / "run" / "checkpoints").name == "step_3"


def exported(folder, source, sizes):
    model = hf.load(source, mesh=mesh_of(sizes))
    hf.save(model, folder / "own")
    hf.save_like(model, folder / "like", source)


@pytest.mark.parametrize("sizes", [Sizes(tp=2, ep=2), Sizes(cp=2, ep=2)], ids=str)
def test_any_mesh_exports_the_bytes_of_one_rank(start, tmp_path, sizes):
    ranks(2).run(exported, tmp_path / "two", start, sizes)
    exported(tmp_path / "one", start, Sizes())
    for form in ("own", "like"):
        one, two = ((tmp_path / n / form / "model.safetensors").read_bytes() for n in ("one", "two"))
        assert one == two


def offloaded(folder, start):
    leg(folder, start, False, Sizes(tp=2), Parallel(zero=2, weights="bf16", offload=True, recompute=True,
                                                    teacher_on_cpu=True), 99)


def test_bf16_weights_with_offloaded_masters_train_and_go_on(start, tmp_path):
    ranks(2).run(offloaded, tmp_path / "run", start)
    leg(tmp_path / "one", start, False, Sizes(), Parallel(), 99)
    assert curve(tmp_path / "run") == pytest.approx(curve(tmp_path / "one"), rel=0.1)
    trainer = Trainer(PLAN, tmp_path / "run", start, True, parallel=Parallel(weights="bf16"))
    masters = {name: rows for kind, name, _, rows in trainer.optimizer.parts() if kind == "model"}
    assert all(torch.equal(p, masters[name].to(p.dtype)) for name, p in trainer.model.named_parameters())
    assert any(not torch.equal(p.float(), masters[name]) for name, p in trainer.model.named_parameters())
