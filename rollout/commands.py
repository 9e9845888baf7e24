"""Commands of train.py over trajectories and tasks that need no model: each takes the settings and the command
line's options."""

from __future__ import annotations

import json

from oprd.core.settings import Config
from oprd.rollout.match_rules import match_lines
from oprd.rollout.rubric import load_rubric


def match_rules(config: Config, options) -> None:
    """The hard rules that fire on recorded tool calls, one line for one line, to the terminal."""
    if not options.input:
        raise ValueError('--stage match-rules needs --input FILE.jsonl with lines of {"id", "tool", "arguments", '
                         '"exit_code", "output"}')
    r = config.reminders
    for line in match_lines(options.input, load_rubric(*([r.rubric] if r.rubric else [])), r.disabled):
        print(json.dumps(line), flush=True)


COMMANDS = {"match-rules": match_rules}
