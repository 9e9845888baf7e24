"""What a person can get wrong with a run that is there already, or stop in the middle: one line, and nothing is lost."""

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
from oprd.core import hf
from oprd.rollout import recordings
from oprd.rollout.attempts import Attempts
from oprd.sandbox.sweep import FOLDER_PREFIX, folders, run_label
from tests.command_help import refused

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def copied(tiny, tmp_path):
    """A copy of the tiny run that may be changed, and the command's common part."""
    config, run = tiny
    shutil.copytree(run, tmp_path / "run")
    return tmp_path / "run", ("--config", str(config), "--run.folder", str(tmp_path / "run"))


def everything_in(folder):
    return {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}


def test_a_finished_stage_is_not_kept_under_other_settings_or_other_data(copied, capsys):
    run, common = copied
    before = everything_in(run)
    error = refused(capsys, "--stage", "oprd", *common, "--resume", "--oprd.top_k", "7")
    assert "oprd was started with other settings than oprd.top_k = 7" in error
    tasks = run / "data" / "oprd_tasks.jsonl"
    text = tasks.read_text()
    tasks.write_text("".join(text.splitlines(keepends=True)[:-1]))
    assert f"{tasks} is no longer what it was when" in refused(capsys, "--stage", "all", *common, "--resume")
    tasks.write_text(text)
    before.pop(tasks)
    assert before.items() <= everything_in(run).items()


def test_one_table_never_mixes_evaluations_made_under_different_settings(copied, capsys):
    run, common = copied
    stages = ("base", "coding-sft", "if-sft", "oprd")
    kept = {stage: (run / stage / "eval" / "report.json").read_bytes() for stage in stages}
    assert train.main(["--stage", "all", *common, "--resume"]) == 0
    assert all((run / stage / "eval" / "report.json").read_bytes() == kept[stage] for stage in stages)
    shutil.rmtree(run / "oprd" / "eval")  # as if it had been stopped before its last row
    capsys.readouterr()
    assert train.main(["--stage", "all", *common, "--resume", "--eval.temperature", "0.5"]) == 0
    for stage in stages:
        made = json.loads((run / stage / "eval" / "report.json").read_text())["made"]
        assert made["settings"]["eval.temperature"] == 0.5
        assert len((run / stage / "eval" / "metrics.jsonl").read_text().splitlines()) == (1 if stage == "oprd" else 2)
    (run / "oprd" / "eval" / "report.json").write_text('{"attempts": 3}')
    assert "report.json is no report of this program" in refused(capsys, "--stage", "all", *common, "--resume",
                                                                 "--eval.temperature", "0.5")


def test_microswe_never_replaces_files_and_goes_on_with_its_own(copied, capsys, monkeypatch):
    run, common = copied
    before = everything_in(run)
    assert f"{run / 'random' / 'model'} exists; add --resume" in refused(capsys, "--stage", "microswe", *common)
    shutil.rmtree(run / "random")
    assert f"{run / 'data'} exists; add --resume" in refused(capsys, "--stage", "microswe", *common)
    error = refused(capsys, "--stage", "microswe", *common, "--resume", "--microswe.if_tasks", "9")
    assert "data was made with other settings than microswe.if_tasks = 9" in error
    assert train.main(["--stage", "microswe", *common, "--resume"]) == 0  # the data are kept, the model is made
    assert everything_in(run / "data").items() <= before.items()
    hf.load(run / "random" / "model")


def test_a_stopped_microswe_leaves_nothing_and_says_to_start_again(tiny, tmp_path, capsys, monkeypatch):
    config, _ = tiny

    def stopped(*_):
        (_[0] / "pretrain.jsonl").write_text("half")
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)

    monkeypatch.setattr(recordings, "make_files", stopped)
    assert train.main(["--stage", "microswe", "--config", str(config), "--run.folder", str(tmp_path / "new")]) == 143
    assert list((tmp_path / "new").iterdir()) == []
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted; start it again"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("number,code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stopped_evaluation_ends_soon_without_a_sandbox_and_says_to_start_again(copied, capsys, monkeypatch, number,
                                                                                  code):
    run, common = copied
    original, told = Attempts._attempt, []

    def attempt(self, *arguments):
        if not told:
            told.append(os.kill(os.getpid(), number))
        return original(self, *arguments)

    monkeypatch.setattr(Attempts, "_attempt", attempt)
    assert train.main(["--stage", "eval", *common]) == code
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted; start it again"
    left = [p for place in folders() for f in place.glob(f"{FOLDER_PREFIX}{run_label(run)}*") for p in (f, *f.rglob("*"))]
    assert not left, left
    assert not (run / "eval" / "report.json").exists()


def test_an_evaluation_learns_before_the_rollouts_that_it_cannot_write(copied, capsys, monkeypatch):
    run, common = copied
    (run / "eval").write_text("a file")
    monkeypatch.setattr(train, "evaluate", lambda *_: pytest.fail("the rollouts ran"))
    assert f"{run / 'eval'}" in refused(capsys, "--stage", "eval", *common)


def test_an_evaluation_that_judged_nothing_is_no_result(copied, capsys):
    run, common = copied
    tasks = [json.loads(line) for line in (run / "data" / "validation_tasks.jsonl").read_text().splitlines()]
    for task in tasks:
        task["install_config"]["test_cmd"] = "true"
    (run / "data" / "validation_tasks.jsonl").write_text("\n".join(map(json.dumps, tasks)))
    # a model this small writes no patch, which needs no test: let every attempt have one
    from oprd.rollout import attempts

    patch = tasks[0]["patch"].encode()
    attempts_patch, attempts.extract_patch = attempts.extract_patch, lambda box: patch
    try:
        assert train.main(["--stage", "eval", *common, "--eval.tasks", "1"]) == 1
    finally:
        attempts.extract_patch = attempts_patch
    out, err = capsys.readouterr()
    assert "none of 1 attempts could be judged" in err and "no test result in the log" in err and "0/0" not in out
    assert not (run / "eval" / "report.json").exists() and not (run / "eval" / "metrics.jsonl").exists()
    assert (run / "eval" / "attempts" / "eval_00000.jsonl").is_file()


def test_ready_models_are_proved_before_anything_is_copied(tiny, tmp_path, capsys, monkeypatch):
    config, run = tiny
    ready, new = tmp_path / "ready", tmp_path / "new"
    for stage in ("base", "coding-sft", "if-sft"):
        shutil.copytree(run / stage / "model", ready / stage)
    new.mkdir()  # an empty folder is as good as none
    common = ("--stage", "all", "--config", str(config), "--run.folder", str(new), "--run.ready", str(ready))
    weights = ready / "if-sft" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:5000])
    assert "if-sft/model.safetensors: not a whole safetensors file" in refused(capsys, *common)
    assert list(new.iterdir()) == []
    weights.write_bytes(whole)
    shutil.move(ready / "if-sft", tmp_path / "away")
    assert "data/if_sft.jsonl does not exist" in refused(capsys, *common)
    assert list(new.iterdir()) == []
    shutil.move(tmp_path / "away", ready / "if-sft")

    def stopped(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:  # stopped when the models are copied and the tasks are not
        patch.setattr(recordings, "make_task_files", stopped)
        assert train.main([*common]) == 130
    assert "exists; add --resume to go on with this run" in refused(capsys, *common)
    with monkeypatch.context() as patch:  # the rest of the recipe is tested elsewhere
        patch.setattr(train, "evaluate_model", stopped)
        assert train.main([*common, "--resume"]) == 130
    assert {p.name for p in (new / "data").glob("*.jsonl")} == {"oprd_tasks.jsonl", "validation_tasks.jsonl"}
    assert "holds none of base, coding-sft, if-sft, oprd" in refused(capsys, *common[:-1], tmp_path)


def test_ctrl_c_in_the_first_seconds_is_no_traceback():
    child = subprocess.Popen([sys.executable, str(ROOT / "train.py"), "--help"], stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while "libtorch" not in Path(f"/proc/{child.pid}/maps").read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert child.returncode in (-signal.SIGINT, 130) and "Traceback" not in err
