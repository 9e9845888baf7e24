"""Commands of train.py over reminders that need no model of ours: each takes the settings and the command line's options."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path

from oprd.core.disk import check_free, write_jsonl
from oprd.core.settings import Config
from oprd.rollout.annotate import inputs
from oprd.rollout.harness import Harness
from oprd.rollout.if_data import Maker, capped, table
from oprd.rollout.records import read_records, reminder_free
from oprd.rollout.tasks import read_tasks
from oprd.sandbox.tools import SCHEMAS


def if_data(config: Config, options) -> None:
    """Chat rows for if-sft from recorded attempts: to --output, and what was left out, with its reason, beside it."""
    if not options.input or not options.output:
        raise ValueError("--stage if-data needs --input PATH, recorded attempts, and --output FILE.jsonl")
    if not config.data.tasks:
        raise ValueError("--stage if-data needs --data.tasks FILE.jsonl, the tasks the attempts were made at: no row may "
                         "show a piece of their patches or tests")
    output = Path(options.output)
    aside = output.with_name(f"{output.stem}.left_out.jsonl")
    check_free(str(output))
    check_free(str(aside))
    harness, settings = Harness(config, chat=None), config.if_data
    tasks = {task.instance_id: task for task in read_tasks(config.data.tasks, config.data)}
    maker = Maker(harness.rubric, tasks, settings.sources, config.chat.system, SCHEMAS if config.chat.tools else None,
                  settings.only_resolved)

    def found(attempt):
        free = reminder_free(attempt[0]) and "unaided" in settings.sources
        return harness.local(attempt[0]["statement"], attempt[1]) if free else None

    for file in inputs(options.input):
        attempts = list(read_records(file))
        for (row, trajectory), annotation in zip(attempts, harness.each(found, attempts)):
            maker.take(row, trajectory, annotation)
    rows, more = capped(maker.rows, settings.per_category)
    if not rows:
        raise ValueError(f"{options.input}: gives no row; left out: "
                         f"{dict(Counter(left.gate for left in maker.left)) or 'nothing'}")
    write_jsonl(output, rows)
    write_jsonl(aside, [asdict(left) for left in maker.left + more])
    print(table(rows, maker.left + more))
    for name, n in harness.judge_counts().items():
        print(f"{name} {n}")


COMMANDS = {"if-data": if_data}
