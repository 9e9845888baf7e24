"""MicroIF's files: what `--stage microif` writes under run.folder/data.

    microif_sft.jsonl         chat rows: answers that meet each constraint with the chance `quality`, and verification
                              rows (a question about an answer, and yes or no) that are right with the chance `honesty`
    microif_tasks.jsonl       prompts for --stage rl; microif_validation.jsonl: prompts with words no training row has

So a policy trained on the first can do both things badly, which is what --stage rl starts from.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from oprd.core.disk import write_jsonl
from oprd.core.settings import MicroIF
from oprd.rollout.item_verifier import NO, YES, Question, own_question
from oprd.sandbox.microif import answer, constraints_of, generate, task_row

STREAMS = {"sft": 1, "tasks": 2, "validation": 3}


def make(folder: Path, size: MicroIF, seed: int, system: str) -> None:
    """Write all files. Nothing that is there is replaced: ValueError."""
    files = [folder / f"microif_{name}.jsonl" for name in STREAMS]
    if taken := next((file for file in files if file.exists()), None):
        raise ValueError(f"{taken} exists; choose another run.folder")
    rows = []
    for i in range(size.sft_rows):
        rows += _rows(seed, i, size, system)
    write_jsonl(folder / "microif_sft.jsonl", rows)
    for name, count in (("tasks", size.tasks), ("validation", size.validation_tasks)):
        family = "validation" if name == "validation" else "train"
        write_jsonl(folder / f"microif_{name}.jsonl", [
            task_row(generate(seed * 10 + STREAMS[name], i, family, size.items)) for i in range(count)])


def _rows(seed: int, i: int, size: MicroIF, system: str) -> list[dict[str, Any]]:
    """One answer, and one question about one."""
    rng = random.Random(f"microif_sft/{seed}/{i}")
    task = generate(seed * 10 + STREAMS["sft"], i, "train", size.items)
    n = len(constraints_of(task))
    some = lambda: tuple(k for k in range(n) if rng.random() >= size.quality)  # noqa: E731
    written, shown = answer(task, rng, some()), answer(task, rng, some())
    item = rng.choice(constraints_of(task))
    truth = item.holds(shown)
    said = truth if rng.random() < size.honesty else rng.random() < size.leniency
    question = own_question(Question(task.problem_statement, shown, item.text(), truth))
    return [_row(f"{task.instance_id}/answer", system, task.problem_statement, written),
            _row(f"{task.instance_id}/verify", system, question, YES if said else NO)]


def _row(name: str, system: str, user: str, assistant: str) -> dict[str, Any]:
    return {"id": name, "messages": [{"role": "system", "content": system}, {"role": "user", "content": user},
                                     {"role": "assistant", "content": assistant}]}
