"""Commands of train.py about rewards: each takes the settings and the command line's options, and trains nothing."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from oprd.core.disk import check_free, write_jsonl
from oprd.core.settings import Config
from oprd.rollout import microif_files
from oprd.rollout.annotate import inputs
from oprd.rollout.checklist_writer import write_all
from oprd.rollout.grm import judge_all
from oprd.rollout.records import read_records
from oprd.rollout.rewarders import Rewarders
from oprd.rollout.rft import rates, table
from oprd.rollout.separability import read_report
from oprd.rollout.tasks import read_tasks
from oprd.rollout.verifier import verifier_asker


def behaviours(config: Config, options) -> None:
    """How often recorded attempts show the behaviours of the GRM's rubric: a table with a column for every file."""
    if not options.input:
        raise ValueError("--stage behaviours needs --input PATH, a file of recorded attempts or a folder of them")
    items, grm = Rewarders(config, chat=None).grm()
    found = []
    for file in inputs(options.input):
        asked = [(row["statement"], trajectory) for row, trajectory in read_records(file)]
        found.append(rates(file.stem, judge_all(grm, asked, config.verifier.concurrency), items))
    print(table(found, items))


def make_microif(config: Config, options) -> None:
    """MicroIF's files under run.folder/data."""
    microif_files.make(Path(config.run.folder) / "data", config.microif, config.run.seed, config.chat.system)


def write_checklists(config: Config, options) -> None:
    """A checklist for every task of data.tasks, by the verifier's model: --output FILE.jsonl, to be read and edited.
    --input: recorded attempts whose answers show the model what goes wrong."""
    if not options.output or not config.data.tasks:
        raise ValueError("--stage checklists needs --output FILE.jsonl and --data.tasks FILE.jsonl")
    if config.verifier.kind != "endpoint":
        raise ValueError(f"verifier.kind = {config.verifier.kind} must be endpoint: a model writes the checklists")
    check_free(options.output)
    tasks, shown = read_tasks(config.data.tasks, config.data), defaultdict(list)
    for file in inputs(options.input) if options.input else ():
        for row, _ in read_records(file):
            if len(shown[row["task_id"]]) < config.checklist.candidates and row["patch"] not in shown[row["task_id"]]:
                shown[row["task_id"]].append(row["patch"])
    rows, missing = write_all(tasks, verifier_asker(config, None), shown, config.verifier.concurrency)
    write_jsonl(Path(options.output), rows)
    without = f"; none for {', '.join(missing[:5])}" if missing else ""
    print(f"{len(rows)} of {len(tasks)} tasks have a checklist{without}")


def checklist_report(config: Config, options) -> None:
    """Whether a checklist or a holistic reward tells recorded answers apart better."""
    if not options.input:
        raise ValueError("--stage checklist-report needs --input PATH, attempts recorded by --stage rl with checklists")
    print(read_report([row for file in inputs(options.input) for row, _ in read_records(file)]))


COMMANDS = {"behaviours": behaviours, "microif": make_microif, "checklists": write_checklists,
            "checklist-report": checklist_report}
