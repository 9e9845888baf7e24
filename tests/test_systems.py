"""The stages rl and rft through train.py: random tiny models, real sandboxes and prompts, resume, a run that must stop."""

import json
import shutil
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


# --- prompts: checklists and self-verification -------------------------------------------------------------------

@pytest.fixture(scope="module")
def prompts(tiny):
    """MicroIF's files, and the settings that read them."""
    config, folder = tiny
    common = ["--config", str(config), "--data.world", "prompts", "--rl.reward", "checklist", "--rl.patience", "0",
              "--rollout.max_turn_tokens", "8"]
    made = ["--microif.sft_rows", "4", "--microif.tasks", "6", "--microif.validation_tasks", "3"]
    assert train.main(["--stage", "microif", *common, *made, "--run.folder", str(folder / "microif")]) == 0
    return common, folder / "microif" / "data", folder


def rl(prompts, name, *more):
    common, data, folder = prompts
    command = ["--stage", "rl", *common, "--data.tasks", str(data / "microif_tasks.jsonl"), "--run.folder",
               str(folder / name), *more]
    assert train.main(command) == 0
    return metrics(folder / name / "rl"), folder / name / "rl", command


def test_soft_rewards_train_and_are_reported_and_an_answer_is_as_good_as_its_items(prompts, capsys):
    lines, folder, _ = rl(prompts, "soft", "--checklist.ask_holistic", "true", "--rl.attempts_per_task", "4")
    assert sum(line.get("fate/trained_policy", 0) for line in lines) > 0
    for line in lines:
        assert sum(v for name, v in line.items() if name.startswith("fate/")) == 4
        assert 0 <= line["checklist/items_met"] <= 1 and 0 <= line["verifier/agreement"] <= 1
    rows = [json.loads(text) for text in (folder / "attempts" / "step_00000.jsonl").read_text().splitlines()]
    assert all(len(row["notes"]["said"]) == 4 == len(row["notes"]["truth"]) for row in rows)
    for row in rows:
        assert row["reward"] == pytest.approx(sum(row["notes"]["said"]) / 4)
    for i, row in enumerate(rows):  # random weights answer alike: as if the first missed nothing, the last three
        row["notes"]["truth"] = [k >= i for k in range(4)]
    answers = folder / "answers.jsonl"
    answers.write_text("".join(json.dumps(row) + "\n" for row in rows))
    capsys.readouterr()
    assert train.main(["--stage", "checklist-report", *prompts[0], "--input", str(answers)]) == 0
    out = capsys.readouterr().out
    assert "4 items, 0 against 3 missing" in out and "any two answers" in out


def test_a_policy_that_cannot_verify_gives_no_reward_and_that_is_counted(prompts):
    lines, _, _ = rl(prompts, "sverl", "--verifier.kind", "frozen", "--selfverify.on", "true", "--selfverify.gold", "4",
                     "--selfverify.canaries", "2", "--selfverify.renew", "2", "--verifier.retries", "0")
    for line in lines:  # random weights say neither yes nor no
        assert line["fate/dropped_no_reward_unverified"] == 4 and line["checklist/unverified"] == 1.0
        assert line["selfverify/rows"] == line["train/examples"] <= 4  # only the gold rows train
    assert all(line["train/nll"] > 0 and line["train/gradient_norm"] > 0 for line in lines)


def test_a_resumed_run_of_soft_rewards_is_the_uninterrupted_one(prompts):
    whole, folder, command = rl(prompts, "whole", "--rl.attempts_per_task", "4", "--checklist.correct", "true")
    shutil.copytree(folder.parent, folder.parent.parent / "cut")
    cut = folder.parent.parent / "cut" / "rl"
    shutil.rmtree(cut / "model")
    shutil.rmtree(cut / "checkpoints" / "step_3")
    command[command.index("--run.folder") + 1] = str(cut.parent)
    assert train.main([*command, "--resume"]) == 0
    drop = lambda line: {k: v for k, v in line.items() if not k.startswith("perf/") and "time" not in k}  # noqa: E731
    assert [drop(line) for line in metrics(cut)] == [drop(line) for line in whole]
    same = [(path / "model" / "model.safetensors").read_bytes() for path in (folder, cut)]
    assert same[0] == same[1]


def test_an_evaluation_of_prompts_tables_the_truth(prompts, capsys):
    common, data, folder = prompts
    command = ["--stage", "eval", *common, "--data.tasks", str(data / "microif_validation.jsonl")]
    assert train.main([*command, "--run.folder", str(folder / "evaluated")]) == 0
    out = capsys.readouterr().out
    assert "items met" in out and "0.0%" in out
    (line,) = metrics(folder / "evaluated" / "eval")
    assert line["eval/answers"] == 3 and 0 <= line["eval/items_met"] <= 1


@pytest.mark.parametrize("more,message", [
    (["--rl.reward", "outcome", "--selfverify.on", "true"], "selfverify.on = true needs rl.reward"),
    (["--verifier.kind", "endpoint"], "judge url"), (["--verifier.kind", "endpoint", "--verifier.body", "[]"], "verifier.body")])
def test_rewards_that_cannot_work_are_refused_before_anything_is_written(prompts, tmp_path, more, message, capsys):
    common, data, _ = prompts
    with pytest.raises(SystemExit) as stop:
        train.main(["--stage", "rl", *common, "--data.tasks", str(data / "microif_tasks.jsonl"), "--run.folder",
                    str(tmp_path / "new"), *more])
    assert stop.value.code == 2 and message in capsys.readouterr().err and not (tmp_path / "new").exists()


ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("file", sorted(ROOT.glob("configs/*/*.toml")), ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_every_settings_file_that_ships_is_read_by_its_stages_and_names_real_ones(file, capsys):
    named = {line.split("--stage ")[1].split()[0] for line in file.read_text().splitlines() if "--stage " in line
             and line.startswith("#")}
    assert named, f"{file} does not say for which stage it is"
    for stage in named:
        assert train.main(["--stage", stage, "--config", str(file), "--dry-run"]) == 0
