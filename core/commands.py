"""Commands of train.py that train nothing and need no rollouts: each takes the settings and the command line's options."""

from __future__ import annotations

import json
from pathlib import Path

from oprd.core import hf
from oprd.core.disk import check_free, write_jsonl
from oprd.core.plan_report import report
from oprd.core.score import read_lines, score_lines
from oprd.core.settings import Config


def score(config: Config, options) -> None:
    """Write the log-probabilities of given ids (float32), one line for one line: to --output, or to the terminal."""
    folder = _model_folder(config, "score")
    if not options.input:
        raise ValueError('--stage score needs --input FILE.jsonl with lines of {"ids": [...]}')
    lines = read_lines(options.input, hf.load_config(folder).vocab_size)
    check_free(options.output)
    scored = score_lines(hf.load(folder), lines, config.train.micro_batch_tokens)
    if options.output:
        write_jsonl(Path(options.output), scored)
        print(f"{len(lines)} lines scored: {options.output}")
    else:
        for line in scored:
            print(json.dumps(line), flush=True)


def export(config: Config, options) -> None:
    """Read a model, prove that every tensor is accounted for, and write it anew in the same names, dtypes, shards."""
    folder = _model_folder(config, "export")
    if not options.output:
        raise ValueError("--stage export needs --output DIR, the folder to write")
    print(hf.export(folder, options.output))


def _model_folder(config: Config, stage: str) -> Path:
    if not config.model.path:
        raise ValueError(f"--stage {stage} needs --model DIR, a Hugging Face folder")
    return Path(config.model.path)


def plan(config: Config, options) -> None:
    """What a rank of the layout in the settings holds, computes and sends; a layout that cannot fit is refused."""
    print(report(config))


COMMANDS = {"score": score, "export": export, "plan": plan}
