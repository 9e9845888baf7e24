"""Can a task be graded, and always the same? Its own patch must score 1 and no patch 0, several times, under the
limits that attempts have. A task for which that is not so teaches nothing, or something wrong."""

from __future__ import annotations

import hashlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Callable, Iterator, Mapping, Sequence

from oprd.sandbox.box import Broke, Unusable
from oprd.sandbox.jsonl import read_jsonl
from oprd.sandbox.task import Task
from oprd.sandbox.verify import OpenBox, Verdict, verify, without_patch

TRIES = 2  # at a grading on which the machine fails


@dataclass(frozen=True)
class Checked:
    """What became of a task's check. state: `ok`; `broken`: its own patch fails, or a test that must fail passes
    without it; `unstable`: it is graded now so, now so; `unusable`: it cannot be opened; `infra`: the machine failed,
    and nothing is known. gold, empty: the score of each grading, None where the grading cannot be trusted. digest: of
    the task and what it was checked with, so that another task or setting is checked anew. seconds: wall clock."""

    instance_id: str
    digest: str
    state: str
    reason: str = ""
    gold: tuple[int | None, ...] = ()
    empty: tuple[int | None, ...] = ()
    seconds: float = 0.0


def digest(task: Task, times: int, seconds: float, where: str) -> str:
    """Of everything a check depends on; `where`: kind and limits of the boxes."""
    row = json.dumps([task.to_row(), times, seconds, where], sort_keys=True, default=str)
    return hashlib.sha256(row.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def check_task(task: Task, open_box: OpenBox, times: int, seconds: float, key: str) -> Checked:
    """Grade the task's own patch and no patch, `times` each. Never raises for what a task or the machine does."""
    gold: list[Verdict] = []
    empty: list[Verdict] = []
    state, reason = "ok", ""
    try:
        for _ in range(times):  # in turns: what drifts with time shows in both
            gold.append(_graded(lambda: verify(task, task.patch.encode(), open_box, seconds)))
            empty.append(_graded(lambda: without_patch(task, open_box, seconds)))
            if not gold[0].resolved or empty[0].resolved:
                break  # broken or unstable: one more grading tells which
        if len(gold) < times:
            gold.append(_graded(lambda: verify(task, task.patch.encode(), open_box, seconds)))
    except Broke as problem:
        state, reason = "infra", str(problem)
    except Unusable as problem:
        state, reason = "unusable", str(problem)
    if state == "ok":
        state, reason = judge(task, gold, empty)
    return Checked(task.instance_id, key, state, reason, tuple(map(_score, gold)), tuple(map(_score, empty)),
                   round(sum(v.seconds for v in gold + empty), 2))


def _graded(grade: Callable[[], Verdict]) -> Verdict:
    for attempt in range(TRIES):
        try:
            return grade()
        except Broke:
            if attempt == TRIES - 1:
                raise
    raise AssertionError


def _score(verdict: Verdict) -> int | None:
    return int(verdict.resolved) if verdict.valid else None


def judge(task: Task, gold: Sequence[Verdict], empty: Sequence[Verdict]) -> tuple[str, str]:
    """(state, reason) of a task that was graded so."""
    solved = [v for v in gold if v.resolved]
    if len(solved) < len(gold):
        bad = next(v for v in gold if not v.resolved)
        if not solved:
            return "broken", f"its own patch does not resolve it: {bad.reason}"
        return "unstable", f"its own patch resolved it {len(solved)} of {len(gold)} times: {bad.reason}"
    for verdict in empty:
        # A tree that does not even build prints no test result; that is the state before the fix of many tasks.
        if not verdict.valid and not verdict.exit_code:
            return "broken", f"it cannot be graded without a patch: {verdict.reason}"
        passing = [test for test in task.fail_to_pass if test not in verdict.failed_f2p]
        if passing:
            always = all(passing[0] not in v.failed_f2p for v in empty)
            return ("broken" if always else "unstable",
                    f"FAIL_TO_PASS test {passing[0]} passes without a patch{'' if always else ' now and then'}")
    for name, runs in (("with its own patch", gold), ("without a patch", empty)):
        changing = [test for test in (*task.fail_to_pass, *task.pass_to_pass)
                    if len({test in v.failed_f2p or test in v.failed_p2p for v in runs}) > 1]
        if changing:
            return "unstable", f"{name}, {changing[0]} passes now and then ({len(changing)} such tests)"
    return "ok", ""


def check_all(tasks: Sequence[Task], open_box: OpenBox, report: Path, times: int, seconds: float, workers: int,
              where: str, on_done: Callable[[Checked], None] = lambda checked: None) -> list[Checked]:
    """Check every task, `workers` at once; in the order of `tasks`. Every result is a line of `report` as soon as it
    is known; what `report` already knows of this very task is not checked again, but for `infra`.

    ValueError: two tasks of one id, or a report that cannot be read.
    """
    ids = [task.instance_id for task in tasks]
    if len(set(ids)) < len(ids):
        raise ValueError(f"two tasks have the id {next(i for i in ids if ids.count(i) > 1)}")
    keys = {task.instance_id: digest(task, times, seconds, where) for task in tasks}
    known = {c.instance_id: c for c in read_report(report)
             if keys.get(c.instance_id) == c.digest and c.state != "infra"}
    lock, stop = threading.Lock(), threading.Event()

    def one(task: Task) -> Checked | None:
        if stop.is_set():
            return None
        checked = check_task(task, open_box, times, seconds, keys[task.instance_id])
        with lock, open(report, "a", encoding="utf-8") as out:
            out.write(json.dumps(asdict(checked)) + "\n")
        return checked

    report.parent.mkdir(parents=True, exist_ok=True)
    for checked in known.values():
        on_done(checked)
    with ThreadPoolExecutor(workers) as pool:
        try:
            for future in as_completed([pool.submit(one, task) for task in tasks if task.instance_id not in known]):
                known[future.result().instance_id] = future.result()
                on_done(future.result())
        except BaseException:  # Ctrl-C too: tasks that have not begun are not begun
            stop.set()
            raise
    return [known[task.instance_id] for task in tasks]


def read_report(path: Path) -> Iterator[Checked]:
    """The lines of a report, the later of two about one task counting; a last line cut off by a kill is left out."""
    if not path.exists():
        return
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        path.write_bytes(data[:data.rfind(b"\n") + 1])
    for where, row in read_jsonl(path):
        if not isinstance(row, Mapping) or set(row) != set(Checked.__dataclass_fields__):
            raise ValueError(f"{where}: no line of a check-tasks report; name another --output")
        yield Checked(**row | {"gold": tuple(row["gold"]), "empty": tuple(row["empty"])})
