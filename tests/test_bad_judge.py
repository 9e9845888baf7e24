"""A whole small OPRD run from the shipped checkpoint with a judge that misbehaves: it ends as one without a judge does, to
the bit, and its counts say what happened. (The minute of 429 is scaled down by the judge's time limits.)"""

import json
from pathlib import Path

import pytest

import train
from judge_server import garbage, hang, says, serving, status
from oprd.core.disk import write_jsonl
from oprd.rollout.recordings import tasks_of
from oprd.sandbox.microswe import Difficulty

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = ROOT / "configs" / "micro" / "checkpoints" / "coding-sft"
STEPS, BATCH = 2, 6
pytestmark = pytest.mark.skipif(not SHIPPED.is_dir(), reason=f"no shipped checkpoint at {SHIPPED}")


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """(name, judge's settings) -> the metrics of every step and the records of all attempts of that run."""
    home = tmp_path_factory.mktemp("judges")
    write_jsonl(home / "tasks.jsonl", [t.to_row() for t in tasks_of("oprd", 5, STEPS * BATCH, Difficulty(2, 2))])

    def run(name, **judge):
        given = [part for key, value in judge.items() for part in (f"--reminders.{key}", str(value))]
        assert train.main(["--stage", "oprd", "--config", str(ROOT / "configs/micro/recipe.toml"), "--run.folder",
                           str(home / name), "--run.threads", "1", "--model.path", str(SHIPPED), "--data.tasks",
                           str(home / "tasks.jsonl"), "--train.steps", str(STEPS), "--train.batch", str(BATCH),
                           "--rollout.workers", str(BATCH), *given]) == 0
        folder = home / name / "oprd"
        metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        records = [json.loads(line) for file in sorted((folder / "attempts").glob("*.jsonl"))
                   for line in file.read_text().splitlines()]
        return metrics, records

    return run


@pytest.fixture(scope="module")
def without(ran):
    return ran("none", judge="none")


def judged_by(server, **more):
    return {"judge": "model", "judge_url": server.url, "judge_model": "m", **more}


def total(metrics, name):
    return sum(row.get(f"judge/{name}", 0) for row in metrics)


@pytest.mark.parametrize("trouble, counted, seconds", [(garbage, "malformed", (10, 20)), (hang, "timed_out", (0.15, 0.4)),
                                                       (status(429), "rate_limited", (1, 2))])
def test_a_judge_that_never_answers_costs_nothing_but_its_reminders(ran, without, trouble, counted, seconds):
    with serving(trouble) as server:
        metrics, records = ran(counted, **judged_by(server, judge_request_s=seconds[0], judge_total_s=seconds[1]))
    plain, plain_records = without
    for row, other in zip(metrics, plain, strict=True):
        same = [name for name in other if name.split("/")[0] in ("train", "rollout", "fate", "oprd", "distillation")]
        assert len(same) > 8 and {n: row[n] for n in same} == {n: other[n] for n in same}
        assert sum(v for n, v in row.items() if n.startswith("fate/")) == BATCH
    assert [r["teacher"] for r in records] == [r["teacher"] for r in plain_records] and any(r["teacher"] for r in records)
    assert total(metrics, "asked") == total(metrics, "no_decision") > 0 and total(metrics, "answered") == 0
    assert total(metrics, counted) > 0 and total(plain, "asked") == 0


def test_a_judge_that_is_overrun_for_a_while_is_waited_for_and_then_answers(ran, without):
    """429 to the first requests, then answers: within a question's time limit nothing is lost."""
    with serving(*[status(429)] * 6, says('{"decisions": []}')) as server:
        metrics, _ = ran("later", **judged_by(server, judge_total_s=120, judge_request_s=30))
    asked = total(metrics, "asked")
    assert asked == total(metrics, "answered") + total(metrics, "no_decision") + total(metrics, "cached")
    assert total(metrics, "rate_limited") == 6 and total(metrics, "answered") > 0
    # only the evidence judge finds no decision in this answer, whose form is the other judge's: asked twice, then patterns
    assert total(metrics, "malformed") == 2 * total(metrics, "no_decision")
    assert [row["train/loss"] for row in metrics] == [row["train/loss"] for row in without[0]]
