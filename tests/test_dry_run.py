"""--dry-run: the numbers of every stage, and the mistakes that a stage could only fail with later; nothing is written."""

import json

import pytest

import train
from tests.command_help import refused


def dry(capsys, *argv) -> str:
    assert train.main([*map(str, argv), "--dry-run"]) == 0
    out = capsys.readouterr().out
    return out[out.index("\nstage  "):]


def test_every_stage_of_a_run_has_its_numbers_and_how_conversations_are_written(tiny, capsys):
    config, run = tiny
    text = dry(capsys, "--stage", "all", "--config", config)
    for words in ("stage           microswe, writes", "recordings      4 solved tasks for Coding SFT, 3 for IF SFT, each",
                  "random model    2 layers of width 32", f"refused         {run / 'oprd'} already holds a run; add --resume",
                  f"starts from     {run / 'if-sft' / 'model'}", f"steps           2 of 4 examples (6 in {run / 'data'}",
                  "refresh steps   [1]", "chat form       qwen3, for the model_type qwen3 (no chat template)",
                  f"attempts        3 (1 at each of 3 tasks of {run / 'data' / 'validation_tasks.jsonl'}) twice",
                  "cache of 65,536 tokens 16 MiB", "eval.following = True"):
        assert words in text
    assert f"finished        {run / 'oprd' / 'model'}" in dry(capsys, "--stage", "oprd", "--config", config, "--resume")


def test_a_recipe_from_ready_models_says_which(tiny, tmp_path, capsys):
    config, run = tiny
    (tmp_path / "ready").mkdir()
    (tmp_path / "ready" / "base").symlink_to(run / "base")
    text = dry(capsys, "--stage", "all", "--config", config, "--run.ready", tmp_path / "ready", "--run.folder",
               tmp_path / "new")
    assert f"pretrain: not trained, its model is {tmp_path / 'ready' / 'base' / 'model'}" in text
    assert "stage           microswe" not in text and "stage           coding-sft\n" in text
    assert not (tmp_path / "new").exists()


def test_the_commands_say_what_they_would_read_and_write(tiny, tmp_path, capsys):
    config, run = tiny
    model, ids = run / "base" / "model", tmp_path / "ids.jsonl"
    ids.write_text('{"ids": [1, 2, 3]}\n{"ids": [4]}\n')
    text = dry(capsys, "--stage", "score", "--model", model, "--input", ids)
    assert f"{model}, 24 tensors (0 carried along)" in text and f"{ids}, 2 lines, 4 tokens" in text
    text = dry(capsys, "--stage", "export", "--model", model, "--output", tmp_path / "out")
    assert f"writes          {tmp_path / 'out'}" in text and not (tmp_path / "out").exists()
    attempts = run / "oprd" / "attempts" / "step_00000.jsonl"
    assert f"{attempts}, 4 lines" in dry(capsys, "--stage", "annotate", "--input", attempts)
    assert "needs           --input" in dry(capsys, "--stage", "match-rules")


def test_what_a_stage_could_only_fail_with_later_is_the_same_error(tiny, tmp_path, capsys):
    config, run = tiny
    common = ("--config", config, "--dry-run", "--stage")
    assert "oprd.top_k = 5000 must not exceed the model's vocabulary of 420" in refused(
        capsys, *common, "oprd", "--oprd.top_k", "5000")
    assert "oprd.top_k = 5000 must not exceed microswe.vocabulary = 420" in refused(
        capsys, *common, "all", "--oprd.top_k", "5000")
    for stage in ("oprd", "eval", "all", "annotate"):
        assert "reminders.disabled names 'edit', which is no category" in refused(
            capsys, *common, stage, "--reminders.disabled", "edit")
    assert "train.batch = 3 must be a multiple of oprd.attempts_per_task = 2" in refused(
        capsys, *common, "oprd", "--train.batch", "3", "--oprd.attempts_per_task", "2")
    rows = [json.loads(line) for line in (run / "data" / "oprd_tasks.jsonl").read_text().splitlines()]
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, [rows[0], {**rows[1], "FAIL_TO_PASS": [3]}])))
    assert "tasks.jsonl:2" in refused(capsys, *common, "eval", "--data.tasks", tmp_path / "tasks.jsonl")
    assert "oprd was started with other settings than train.lr = 0.5" in refused(
        capsys, *common, "oprd", "--resume", "--train.lr", "0.5")
    for stage, option in (("export", "--output"), ("score", "--output")):
        assert f"{config} exists; name another --output" in refused(capsys, *common, stage, option, config)
    assert "nowhere does not exist" in refused(capsys, *common, "score", "--input", tmp_path / "nowhere")


@pytest.mark.parametrize("damage,words", [
    (lambda d: (d / "model.safetensors").write_bytes((d / "model.safetensors").read_bytes()[:5000]), "not a whole"),
    (lambda d: (d / "tokenizer.json").unlink(), "tokenizer.json: no such file"),
    (lambda d: (d / "config.json").write_text("[]"), "config.json: must hold a JSON object"),
])
def test_a_broken_start_is_found_in_the_headers(tiny, tmp_path, capsys, damage, words):
    import shutil

    config, run = tiny
    shutil.copytree(run / "oprd" / "model", tmp_path / "model")
    damage(tmp_path / "model")
    for stage in ("coding-sft", "eval"):
        assert words in refused(capsys, "--stage", stage, "--config", config, "--model", tmp_path / "model", "--dry-run",
                                "--run.folder", tmp_path / "new")
