"""Commands of train.py over trajectories and tasks that need no model: each takes the settings and the command
line's options."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

from oprd.core.disk import check_free, write_jsonl
from oprd.core.settings import Config
from oprd.rollout import reminder_commands, reward_commands
from oprd.rollout.harness import box_opener
from oprd.rollout.match_rules import match_lines
from oprd.rollout.rubric import load_rubric
from oprd.rollout.tasks import read_tasks
from oprd.sandbox.box import Broke
from oprd.sandbox.check_tasks import Checked, check_all
from oprd.sandbox.logs import PASSED, check_parser, opinion, parse_log


def match_rules(config: Config, options) -> None:
    """The hard rules that fire on recorded tool calls, one line for one line, to the terminal."""
    if not options.input:
        raise ValueError('--stage match-rules needs --input FILE.jsonl with lines of {"id", "tool", "arguments", '
                         '"exit_code", "output"}')
    r = config.reminders
    for line in match_lines(options.input, load_rubric(*([r.rubric] if r.rubric else [])), r.disabled):
        print(json.dumps(line), flush=True)


def parse_test_log(config: Config, options) -> None:
    """A test log's statuses as one JSON object, {"test": "PASSED", ...}, to the terminal; to stderr, what our stricter
    reading has against them. Raises ValueError for an unknown parser, and for a log without any test."""
    if not (options.input and options.parser):
        raise ValueError("--stage parse-log needs --parser NAME and --input LOG, the output of a test run")
    check_parser(options.parser)
    log = Path(options.input).read_bytes().decode("utf-8", "replace")
    status = parse_log(options.parser, log)
    if not status:
        raise ValueError(f"{options.input}: {options.parser} finds no test in this log")
    print(json.dumps(status, indent=1, ensure_ascii=False), flush=True)
    second = opinion(options.parser, log)
    if second is None:
        return
    unseen = [test for test, s in status.items() if s == PASSED != second.status.get(test)]
    says = "no summary" if second.passes is None else (
        f"a summary by {second.runner}" + (f": {second.passes:.0f} passed" if second.passes < float("inf") else ""))
    print(f"stricter reading: {says}; {len(unseen)} passes not confirmed{''.join(f', {test}' for test in unseen[:5])}",
          file=sys.stderr)


def check_tasks(config: Config, options, progress) -> None:
    """Write the tasks that grade their own patch 1 and no patch 0, always; name the others, with the reason, here and
    in OUTPUT.checked.jsonl, from which --resume goes on. `progress`: makes a progress bar of a number of tasks."""
    if not options.input or not options.output:
        raise ValueError("--stage check-tasks needs --input TASKS and --output FILTERED.jsonl")
    report = Path(f"{options.output}.checked.jsonl")
    if not options.resume:
        check_free(options.output)
        if report.exists():
            raise ValueError(f"{report} exists; add --resume to go on with it, or name another --output")
    tasks, s = read_tasks(options.input, config.data), config.sandbox
    where = json.dumps(s.model_dump(include={"kind", "image", "memory_mib", "file_mib", "processes", "cpus", "disk_mib",
                                             "network", "environment"}))
    open_box, bar, states = box_opener(config), progress(len(tasks), name="check-tasks"), Counter()

    def done(checked: Checked) -> None:
        states[checked.state] += 1
        bar.advance(dict(states))

    try:
        open_box.sweep()
        checked = check_all(tasks, open_box, report, config.check.times, s.tests_s, config.check.workers, where, done)
    finally:
        open_box.close()
        bar.close()
    if all(c.state == "infra" for c in checked):
        raise Broke(f"no task could be checked: {checked[0].reason}")
    write_jsonl(Path(options.output), (task.to_row() for task, c in zip(tasks, checked) if c.state == "ok"))
    for c in checked:
        if c.state != "ok":
            print(f"{c.instance_id}: {c.state}: {c.reason}")
    print(f"{states['ok']} of {len(tasks)} tasks kept in {options.output}; " +
          (", ".join(f"{n} {state}" for state, n in sorted(states.items()) if state != "ok") or "none left out"))


COMMANDS = {"match-rules": match_rules, "parse-log": parse_test_log, **reward_commands.COMMANDS,
            **reminder_commands.COMMANDS}
