"""Commands of train.py over trajectories and tasks that need no model: each takes the settings and the command
line's options."""

from __future__ import annotations

import json

from oprd.core.settings import Config
from oprd.rollout.annotate import inputs
from oprd.rollout.grm import judge_all
from oprd.rollout.harness import Harness
from oprd.rollout.match_rules import match_lines
from oprd.rollout.records import read_records
from oprd.rollout.rft import rates, table
from oprd.rollout.rubric import load_rubric


def match_rules(config: Config, options) -> None:
    """The hard rules that fire on recorded tool calls, one line for one line, to the terminal."""
    if not options.input:
        raise ValueError('--stage match-rules needs --input FILE.jsonl with lines of {"id", "tool", "arguments", '
                         '"exit_code", "output"}')
    r = config.reminders
    for line in match_lines(options.input, load_rubric(*([r.rubric] if r.rubric else [])), r.disabled):
        print(json.dumps(line), flush=True)


def behaviours(config: Config, options) -> None:
    """How often recorded attempts show the behaviours of the GRM's rubric: a table with a column for every file."""
    if not options.input:
        raise ValueError("--stage behaviours needs --input PATH, a file of recorded attempts or a folder of them")
    items, grm = Harness(config, chat=None).grm()
    found = []
    for file in inputs(options.input):
        asked = [(row["statement"], trajectory) for row, trajectory in read_records(file)]
        found.append(rates(file.stem, judge_all(grm, asked, config.verifier.concurrency), items))
    print(table(found, items))


COMMANDS = {"match-rules": match_rules, "behaviours": behaviours}
