"""The stages rl and rft through train.py: a random tiny model, real sandboxes, resume, and a run that must stop."""

import json
from pathlib import Path

import pytest

import train
from oprd.core import hf
from oprd.core.settings import Config, MicroSWE, Model
from oprd.core.plan import random_model
from oprd.core.tokenizer import Tokenizer
from oprd.rollout import recordings

SHIPPED = Path(__file__).resolve().parents[1] / "configs" / "micro" / "checkpoints" / "if-sft"
TINY = """
[run]
folder = "{folder}/run"
threads = 1
[chat]
form = "bare"
tools = false
[model]
path = "{folder}/start"
[data]
tasks = "{folder}/data/oprd_tasks.jsonl"
[train]
steps = 3
batch = 4
micro_batch_tokens = 2048
lr = 1e-3
checkpoint_every = 1
[rollout]
workers = 4
max_turn_tokens = 8
max_turns = 2
[rl]
attempts_per_task = 2
masked = []
patience = 2
[rft]
attempts_per_task = 2
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Settings, a model of random weights and four tasks."""
    folder = tmp_path_factory.mktemp("systems")
    recordings.make_task_files(folder / "data", MicroSWE(oprd_tasks=4, validation_tasks=1), 0)
    sizes = Model(hidden=32, layers=1, heads=2, kv_heads=1, head_dim=16, intermediate=32)
    hf.save(random_model(Config(model=sizes), Tokenizer.load(SHIPPED)), folder / "start", tokenizer_from=SHIPPED)
    config = folder / "tiny.toml"
    config.write_text(TINY.format(folder=folder))
    return config, folder


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_rl_stops_with_the_reason_when_every_group_agrees_and_saves_what_it_has(tiny, capsys):
    config, folder = tiny
    assert train.main(["--stage", "rl", "--config", str(config)]) == 3
    assert "stopped before step 1 of 3: every group agreed in 2 steps in a row (mean reward 0.000)" in capsys.readouterr().out
    (line,) = metrics(folder / "run" / "rl")
    assert line["fate/dropped_no_signal"] == 4 == line["rollout/attempts"] and line["train/skipped_steps"] == 1
    assert line["policy/groups_without_signal"] == 2 and (folder / "run/rl/checkpoints/step_1").is_dir()
    assert not (folder / "run/rl/model").exists()


def test_rft_runs_to_its_end_counts_every_attempt_and_its_behaviours_can_be_tabled(tiny, capsys):
    config, folder = tiny
    assert train.main(["--stage", "rft", "--config", str(config)]) == 0
    for line in metrics(folder / "run" / "rft"):
        assert sum(v for name, v in line.items() if name.startswith("fate/")) == 4 and line["rft/kept"] == 0
    assert (folder / "run/rft/model/tokenizer.json").is_file()
    position = json.loads((folder / "run/rft/checkpoints/step_3/position.json").read_text())
    assert position["memory"] == {"steer": None, "teach": {}}
    capsys.readouterr()
    assert train.main(["--stage", "behaviours", "--config", str(config), "--input", str(folder / "run/rft/attempts")]) == 0
    out = capsys.readouterr().out
    assert "malformed_reply" in out and "step_00002" in out


@pytest.mark.parametrize("more,message", [
    (["--rollout.top_p", "0.9"], "rollout.top_p = 0.9"), (["--rl.attempts_per_task", "3"], "rl.attempts_per_task = 3"),
    (["--rl.advantage", "ppo"], "rl.advantage"), (["--prefix.low", "0.9", "--prefix.on", "true"], "low = 0.9")])
def test_what_a_person_can_get_wrong_is_said_before_anything_is_written(tiny, tmp_path, more, message, capsys):
    config, _ = tiny
    with pytest.raises(SystemExit) as stop:
        train.main(["--stage", "rl", "--config", str(config), "--run.folder", str(tmp_path / "new"), *more])
    assert stop.value.code == 2 and message in capsys.readouterr().err and not (tmp_path / "new").exists()


@pytest.mark.parametrize("stage", ["rl", "rft"])
def test_a_dry_run_prints_the_numbers(tiny, stage, capsys):
    config, folder = tiny
    assert train.main(["--stage", stage, "--config", str(config), "--dry-run"]) == 0
    assert "steps           3 of 4 examples (8 in" in capsys.readouterr().out
