"""MicroSWE on the Docker sandbox, through train.py: the same policy on the same tasks does as it does locally."""

import json
from pathlib import Path

import pytest

import train
from docker_image import engine, image
from oprd.sandbox.microswe import generate
from oprd.sandbox.sweep import run_label

CLIENT, WHY_NOT = engine()
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200), pytest.mark.skipif(CLIENT is None, reason=WHY_NOT)]
ROOT = Path(__file__).resolve().parents[1]


def attempts(run: Path) -> list[dict]:
    rows = [json.loads(line) for line in (run / "eval" / "attempts" / "eval_00000.jsonl").read_text().splitlines()]
    return sorted(rows, key=lambda row: row["id"])


def test_an_evaluation_in_containers_is_the_local_one(tmp_path):
    tasks = tmp_path / "tasks.jsonl"
    made = [generate(11, i, family="validation") for i in range(4)]
    tasks.write_text("".join(json.dumps(task.to_row()) + "\n" for task in made))
    common = ["--stage", "eval", "--config", str(ROOT / "configs/micro/recipe.toml"), "--model",
              str(ROOT / "configs/micro/checkpoints/if-sft"), "--data.tasks", str(tasks), "--eval.following", "false",
              "--rollout.workers", "4", "--run.threads", "1"]
    ways = {"local": [], "docker": ["--sandbox.kind", "docker", "--sandbox.image", image(CLIENT), "--sandbox.warm", "2",
                                    "--sandbox.command_s", "60"]}
    seen = {}
    for way, more in ways.items():
        assert train.main([*common, *more, "--run.folder", str(tmp_path / way)]) == 0
        seen[way] = attempts(tmp_path / way)
    assert len(seen["docker"]) == 4
    for local, docker in zip(seen["local"], seen["docker"]):
        assert (docker["ending"], docker["resolved"], docker["trouble"]) == (local["ending"], local["resolved"], None)
        assert [turn["reply"] for turn in docker["turns"]] == [turn["reply"] for turn in local["turns"]]
    label = f"oprd.run={run_label(tmp_path / 'docker')}"
    assert CLIENT.containers.list(all=True, filters={"label": label}) == []


def test_every_kind_of_task_grades_its_patch_one_and_none_nought_in_containers(tmp_path, capsys):
    source, output = tmp_path / "tasks.jsonl", tmp_path / "good.jsonl"
    source.write_text("".join(json.dumps(generate(5, i).to_row()) + "\n" for i in range(4)))
    assert train.main(["--stage", "check-tasks", "--input", str(source), "--output", str(output), "--check.times", "1",
                       "--sandbox.kind", "docker", "--sandbox.image", image(CLIENT), "--run.folder",
                       str(tmp_path / "run")]) == 0
    assert "4 of 4 tasks kept" in capsys.readouterr().out and output.read_text() == source.read_text()
