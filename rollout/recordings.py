"""MicroSWE's files: what `--stage microswe` writes under run.folder/data.

    pretrain.jsonl          plain text in which names recur, as real code has it (see `pretraining_texts`)
    coding_sft.jsonl        chat rows of the expert's clean solutions, each really executed and verified
    if_sft.jsonl            chat rows in which an inserted reminder is followed (see `expert.py`), and clean rows of the
                            same tasks, so that plain work is not forgotten
    oprd_tasks.jsonl        task rows; validation_tasks.jsonl: task rows with names no training row has
    tokenizer.json          a small BPE of the rows' text

Recordings are executed once and then written under several consistent renamings (`microswe.relabel`).
"""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterable, Sequence

from oprd.core.disk import write_jsonl
from oprd.core.settings import MicroSWE
from oprd.core.types import Reminder, ToolCall
from oprd.rollout.agent import Remind
from oprd.rollout.attempts import OpenBox
from oprd.rollout.expert import (Step, chat_row, followed_rows, hasty, mistake, perform, recovery_rows, solution,
                                 taught)
from oprd.rollout.global_reminder import global_reminder
from oprd.sandbox.microswe import FAMILIES, Difficulty, fixed_source, generate, pick, relabel, relabelling
from oprd.sandbox.repo import extract_patch
from oprd.sandbox.task import Task
from oprd.sandbox.verify import verify

# Numbers of the training family are split between the files, so that no two share a task.
STREAMS = {"coding": 1, "if": 2, "oprd": 3, "validation": 4, "pretrain": 5}


@dataclass(frozen=True)
class Recorder:
    """Executes scripts in sandboxes. `remind` is the reminder pipeline that runs beside the scripted mistakes."""

    open_box: OpenBox
    remind: Remind
    system: str
    threads: int
    careful: float

    def coding(self, tasks: Sequence[Task], done: Callable[[], None]) -> list[dict[str, Any]]:
        """One clean, verified solution a task."""
        return self._each(tasks, lambda task: [self._clean(task)], done)

    def following(self, tasks: Sequence[Task], done: Callable[[], None]) -> list[dict[str, Any]]:
        """The IF rows of one scripted mistake a task (what was done before the recovery counts as a failed attempt)."""
        return self._each(tasks, self._follow, done)

    def _each(self, tasks, record, done) -> list[dict[str, Any]]:
        lock = threading.Lock()

        def one(task: Task) -> list[dict[str, Any]]:
            rows = record(task)
            with lock:
                done()
            return rows

        with ThreadPoolExecutor(self.threads) as pool:
            return [row for rows in pool.map(one, tasks) for row in rows]

    def _clean(self, task: Task) -> dict[str, Any]:
        """The row of the hasty expert, who yet solves the task."""
        steps = self._solved(task, hasty(task, self.careful))
        return chat_row(f"{task.instance_id}/solution", self.system, task, steps, taught(task, steps))

    def _solved(self, task: Task, calls: Sequence[ToolCall]) -> list[Step]:
        """The steps of a script that solves the task, verified."""
        with self.open_box(task) as box:
            steps = perform(task, box, calls, self.remind)
            patch = extract_patch(box)
        verdict = verify(task, patch, self.open_box)
        if not verdict.resolved:
            raise RuntimeError(f"the expert did not solve {task.instance_id}: {verdict.log[-500:]}")
        return steps

    def _follow(self, task: Task) -> list[dict[str, Any]]:
        wrong, recovery = mistake(task, random.Random(task.instance_id), self.careful)
        with self.open_box(task) as box:
            steps = perform(task, box, wrong, self.remind)
            patch = extract_patch(box)
            steps = perform(task, box, recovery, self.remind, earlier=steps)
        reminder = global_reminder(task, verify(task, patch, self.open_box)) if patch else None
        rows = recovery_rows(task.instance_id, self.system, task, steps, len(wrong))
        careful = self._solved(task, solution(task))
        rows += followed_rows(f"{task.instance_id}/clean", self.system, task, careful, 0)
        if reminder:
            rows.append(chat_row(f"{task.instance_id}/global", self.system, task, careful, [True] * len(careful),
                                 start=reminder))
        return [*rows, self._clean(task)]


def tasks_of(stream: str, seed: int, count: int, difficulty: Difficulty) -> list[Task]:
    family = "validation" if stream == "validation" else "train"
    return [generate(seed * 10 + STREAMS[stream], i, family, difficulty=difficulty) for i in range(count)]


def pretraining_texts(seed: int, count: int, difficulty: Difficulty) -> list[str]:
    """Plain text that teaches what a base model brings along: that names recur and can be copied.

    A third are names without gaps, repeated; a third are lists of names with one of several separators, repeated; a
    third are repositories file by file under their paths, the wrong file again as it is after its fix, and the request
    at both ends: names that come back after some hundred tokens, as a path does when its file is edited. Copying is
    learnt within a few hundred steps on the first kind, carries over to the others, and is what every stage after this
    one builds on: without it a model of this size stays for thousands of steps at guessing names.
    """
    texts = []
    for i, task in enumerate(tasks_of("pretrain", seed, count, difficulty)):
        rng = random.Random(f"pretrain/{seed}/{i}")
        if i % 3 == 0:
            texts.append("".join((pick(rng, "train", rng.choice((3, 4, 6, 8, 12))) * 20)[:60]))
        elif i % 3 == 1:
            names = pick(rng, "train", rng.choice((2, 3, 4, 6, 8, 12, 16, 20)))
            separator = rng.choice((" ", "\n", "/", "_", ", ", '" "', "()\n"))
            texts.append(separator.join((names * 25)[: max(50, 2 * len(names))]))
        else:
            files = [f"{path}\n{text}" for path, text in sorted(task.files.items()) if path != "check.py"]
            rng.shuffle(files)
            fixed = f"{task.meta['path']}\n{fixed_source(task)}"
            texts.append("\n".join([task.problem_statement, *files, fixed, task.problem_statement]))
    return texts


def make_files(folder: Path, size: MicroSWE, seed: int, recorder: Recorder, done: Callable[[], None]) -> list[str]:
    """Write all files but the tokenizer; `done` hears of each recorded task. Returns the text to train it on."""
    difficulty = Difficulty(size.functions, size.branches)
    coding = recorder.coding(tasks_of("coding", seed, size.coding_tasks, difficulty), done)
    following = recorder.following(tasks_of("if", seed, size.if_tasks, difficulty), done)
    texts = pretraining_texts(seed, size.pretrain_texts, difficulty)
    for name, rows in (("pretrain", [{"text": text} for text in texts]),
                       ("coding_sft", renamed(coding, size.relabels)),
                       ("if_sft", renamed(following, size.relabels))):
        write_jsonl(folder / f"{name}.jsonl", rows)
    make_task_files(folder, size, seed)
    return corpus(coding + following)


def make_task_files(folder: Path, size: MicroSWE, seed: int) -> None:
    """Write the tasks of OPRD and of the evaluation: all that a run from ready checkpoints needs."""
    difficulty = Difficulty(size.functions, size.branches)
    for name, stream, count in (("oprd_tasks", "oprd", size.oprd_tasks),
                                ("validation_tasks", "validation", size.validation_tasks)):
        write_jsonl(folder / f"{name}.jsonl", [task.to_row() for task in tasks_of(stream, seed, count, difficulty)])


def renamed(rows: Iterable[dict[str, Any]], copies: int) -> list[dict[str, Any]]:
    """Every row, and `copies - 1` consistent renamings of it into other training names."""
    rows = list(rows)
    result = list(rows)
    for row in rows:
        for copy in range(1, copies):
            names = relabelling(row["messages"], random.Random(f"{row['id']}/{copy}"))
            result.append({**row, "id": f"{row['id']}~{copy}", "messages": relabel(row["messages"], names)})
    return result


def corpus(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Text to train the tokenizer on: the rows as they will be read, and the training names often enough that their
    syllables become tokens before any accidental pair of letters does (validation names are not shown)."""
    return [_frame(row) for row in rows] + [" ".join(FAMILIES["train"])] * 200


def _frame(row: dict[str, Any]) -> str:
    """A row's text with tool calls in the XML form, without control tokens."""
    parts = []
    for message in row["messages"]:
        parts.append(f"{message['role']}\n{message.get('content') or ''}")
        for call in message.get("tool_calls", ()):
            function = call["function"]
            values = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in function["arguments"].items())
            parts.append(f"\n<function={function['name']}>\n{values}</function>\n")
    return "\n".join(parts)
