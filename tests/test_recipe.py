"""The whole road through train.py: all stages end to end, kill -9 and resume, and what a person can get wrong."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import train
from oprd.sandbox.sweep import MARKER
from tests.command_help import refused

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = ROOT / "configs" / "micro" / "checkpoints" / "if-sft"


def test_all_stages_run_and_the_table_has_a_row_for_every_checkpoint(tiny):
    _, run = tiny
    rows = (run / "table.txt").read_text().splitlines()
    names = ["base", "+ Coding SFT", "+ IF SFT", "+ OPRD"]
    assert [row.split("  ")[0] for row in rows[2:6]] == names
    assert [row.split("  ")[0] for row in rows[9:]] == names and "captured" in rows[7]  # what became of reminders
    for stage in ("base", "coding-sft", "if-sft", "oprd"):
        assert (run / stage / "model" / "tokenizer.json").is_file()
        assert (run / stage / "settings.toml").is_file() and list((run / stage / "tensorboard").iterdir())
        assert len((run / stage / "metrics.jsonl").read_text().splitlines()) == 2


def test_the_fates_of_every_step_add_up_to_the_attempts_asked_for(tiny):
    _, run = tiny
    for line in (run / "oprd" / "metrics.jsonl").read_text().splitlines():
        assert sum(v for name, v in json.loads(line).items() if name.startswith("fate/")) == 4


def test_every_attempt_is_recorded_and_can_be_annotated(tiny, tmp_path, capsys):
    config, run = tiny
    for step in range(2):
        rows = [json.loads(line) for line in (run / "oprd/attempts" / f"step_0000{step}.jsonl").read_text().splitlines()]
        assert len(rows) == 4 and all(row["fate"] and row["turns"] for row in rows)
    assert len((run / "oprd/eval/attempts/eval_00000.jsonl").read_text().splitlines()) == 2 * 3  # also with reminders
    out = tmp_path / "events.jsonl"
    command = ["--stage", "annotate", "--config", str(config), "--input", str(run / "oprd/attempts"), "--output", str(out)]
    assert train.main(command) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()[2:4]] == ["4", "4"]
    assert len(out.read_text().splitlines()) == 8 and list((run / "annotate" / "tensorboard").iterdir())
    with pytest.raises(SystemExit):
        train.main(command)
    assert "events.jsonl exists" in capsys.readouterr().err


def test_a_finished_recipe_is_kept_by_resume_and_refused_without(tiny, capsys):
    config, run = tiny
    before = {p: p.stat().st_mtime_ns for p in run.rglob("model/*")}
    assert train.main(["--stage", "oprd", "--config", str(config), "--resume"]) == 0
    assert f"model: {run / 'oprd' / 'model'}" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        train.main(["--stage", "oprd", "--config", str(config)])
    assert stop.value.code == 2 and "add --resume" in capsys.readouterr().err
    assert {p: p.stat().st_mtime_ns for p in run.rglob("model/*")} == before


def test_an_evaluation_never_replaces_another(tiny, capsys):
    config, run = tiny
    for _ in range(2):
        assert train.main(["--stage", "eval", "--config", str(config), "--eval.tasks", "1"]) == 0
    assert [json.loads(line)["step"] for line in (run / "eval" / "metrics.jsonl").read_text().splitlines()] == [0, 1]
    assert "resolved" in capsys.readouterr().out


@pytest.mark.parametrize("stage", ["pretrain", "coding-sft", "if-sft", "oprd", "eval", "all", "microswe"])
def test_a_dry_run_prints_settings_and_numbers_and_writes_nothing(tiny, tmp_path, stage, capsys):
    config, run = tiny
    before = sorted(run.rglob("*"))
    assert train.main(["--stage", stage, "--config", str(config), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "[oprd]" in out and sorted(run.rglob("*")) == before
    if stage == "oprd":
        assert "steps           2 of 4 examples" in out and "parameters" in out and "memory" in out
    assert train.main(["--stage", stage, "--dry-run", "--run.folder", str(tmp_path / "none")]) == 0
    assert not (tmp_path / "none").exists()


# --- what a person can get wrong ----------------------------------------------------------------------------------

def broken_model(run, folder, change):
    shutil.copytree(run / "oprd" / "model", folder)
    change(folder)
    return folder


@pytest.mark.parametrize("break_it,message", [
    (lambda d: (d / "config.json").unlink(), "config.json"),
    (lambda d: (d / "model.safetensors").unlink(), "model.safetensors"),
    (lambda d: (d / "tokenizer.json").unlink(), "tokenizer.json"),
    (lambda d: (d / "model.safetensors").write_bytes((d / "model.safetensors").read_bytes()[:5000]), "model.safetensors"),
    (lambda d: (d / "config.json").write_text((d / "config.json").read_text().replace('"vocab_size": 420', '"vocab_size": 99')),
     "vocab"),
])
def test_a_broken_checkpoint_is_one_line(tiny, tmp_path, capsys, break_it, message):
    config, run = tiny
    model = broken_model(run, tmp_path / "model", break_it)
    error = refused(capsys, "--stage", "oprd", "--config", config, "--run.folder", tmp_path / "new",
                    "--model.path", model, "--data.tasks", run / "data" / "oprd_tasks.jsonl")
    assert message in error and not (tmp_path / "new").exists()


def test_a_missing_shard_is_named(tiny, tmp_path, capsys):
    config, run = tiny

    def shard(folder):
        index = {"metadata": {}, "weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    model = broken_model(run, tmp_path / "model", shard)
    assert "model-00001-of-00002.safetensors" in refused(capsys, "--stage", "eval", "--config", config, "--model.path", model)


def test_bad_data_names_file_line_and_field(tiny, tmp_path, capsys):
    config, run = tiny
    rows = (run / "data" / "coding_sft.jsonl").read_text().splitlines()
    bad = tmp_path / "rows.jsonl"
    bad.write_text(rows[0] + "\n" + rows[1][:80] + "\n")
    common = ("--config", config, "--run.folder", tmp_path / "new", "--model.path", run / "base" / "model")
    assert "rows.jsonl:2" in refused(capsys, "--stage", "coding-sft", *common, "--data.rows", bad)
    assert "nowhere.jsonl" in refused(capsys, "--stage", "coding-sft", *common, "--data.rows", tmp_path / "nowhere.jsonl")
    task = json.loads((run / "data" / "oprd_tasks.jsonl").read_text().splitlines()[0])
    del task["FAIL_TO_PASS"]
    bad.write_text(json.dumps(task) + "\n")
    error = refused(capsys, "--stage", "oprd", *common, "--data.tasks", bad)
    assert "rows.jsonl:1" in error and "FAIL_TO_PASS" in error
    assert not (tmp_path / "new").exists()


def test_bad_settings_name_the_nearest_and_the_two_numbers(tiny, tmp_path, capsys):
    config, run = tiny
    assert "did you mean oprd.top_k?" in refused(capsys, "--stage", "oprd", "--config", config, "--oprd.topk", "3")
    assert "nothere.toml" in refused(capsys, "--stage", "oprd", "--config", tmp_path / "nothere.toml")
    error = refused(capsys, "--stage", "oprd", "--config", config, "--run.folder", tmp_path / "new", "--model.path",
                    run / "if-sft" / "model", "--data.tasks", run / "data" / "oprd_tasks.jsonl", "--oprd.top_k", "5000")
    assert "oprd.top_k = 5000" in error and "420" in error and not (tmp_path / "new").exists()
    assert "reminders.disabled" in refused(capsys, "--stage", "eval", "--config", config, "--reminders.disabled", "nonsense")


# --- kill -9 ------------------------------------------------------------------------------------------------------

@pytest.mark.skipif(not SHIPPED.is_dir(), reason=f"no shipped checkpoint at {SHIPPED}")
def test_kill_9_loses_only_the_step_in_hand_and_leaves_no_sandbox(tmp_path):
    """A real OPRD run from the shipped checkpoint: the killed and resumed run repeats the whole one to the bit."""
    from oprd.core.disk import write_jsonl
    from oprd.rollout.recordings import tasks_of
    from oprd.sandbox.microswe import Difficulty

    write_jsonl(tmp_path / "tasks.jsonl", [t.to_row() for t in tasks_of("oprd", 5, 40, Difficulty())])

    def command(folder, *more):
        return [sys.executable, str(ROOT / "train.py"), "--stage", "oprd", "--config", str(ROOT / "configs/micro/recipe.toml"),
                "--run.folder", str(tmp_path / folder), "--run.threads", "1", "--model.path", str(SHIPPED), "--data.tasks",
                str(tmp_path / "tasks.jsonl"), "--train.steps", "4", "--train.batch", "8", "--rollout.workers", "8",
                "--train.checkpoint_every", "1", *more]

    def losses(folder):
        lines = (tmp_path / folder / "oprd" / "metrics.jsonl").read_text().splitlines()
        return [(row["step"], row["train/loss"], row["rollout/pass_rate"]) for row in map(json.loads, lines)]

    subprocess.run(command("whole"), check=True, timeout=120)
    victim = subprocess.Popen(command("cut"))
    checkpoints = tmp_path / "cut" / "oprd" / "checkpoints"
    deadline = time.monotonic() + 60
    while not (checkpoints.is_dir() and list(checkpoints.glob("step_*"))) and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.3)  # into the next step's rollouts
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    time.sleep(0.5)
    assert not _sandboxed(f".{victim.pid}.")
    subprocess.run(command("cut", "--resume"), check=True, timeout=120)
    assert losses("cut") == losses("whole") and len(losses("whole")) == 4


def _sandboxed(part: str) -> list[str]:
    """Processes of boxes whose label holds `part`."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        found += [pid for entry in environment if entry.startswith(f"{MARKER}=") and part in entry]
    return found
