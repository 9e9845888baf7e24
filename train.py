#!/usr/bin/env python
"""Trains a coding agent, one stage at a time:

    python train.py --stage NAME --config FILE.toml [--section.field value]

Stages: microswe (make MicroSWE's data, tokenizer and a random model), pretrain (a base model from it), coding-sft,
if-sft, oprd, rl (group policy gradient), rft (imitation of what a rubric ranks highest), eval, and all (the whole
recipe with a table); and, training nothing, score, export, annotate, match-rules,
behaviours, parse-log and check-tasks. docs/architecture.md is the map.
"""

from __future__ import annotations

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until main() there is nothing to unwind: Ctrl-C just ends it

import logging
import os
import sys
from collections import Counter
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Callable

import torch

from oprd.core import commands as core_commands
from oprd.core import config as configuration
from oprd.core import hf, provenance
from oprd.core.agreement import Agreement
from oprd.core.data import Order, read_sft, read_text
from oprd.core.disk import check_free, check_makeable, write_jsonl
from oprd.core.dry_run import preview
from oprd.core.folder import new_folder
from oprd.core.interrupt import unwinding
from oprd.core.metrics import Last, Log, Mean, Progress, Sum, next_number
from oprd.core.model import Model
from oprd.core.objective import Distillation, Objective, PolicyGradient
from oprd.core.plan import (ACTS, chat_of, check_alone, check_fits, check_groups, check_oprd, check_recipe,
                            check_rollout, data_file, data_path, done, per_task, random_model, random_sizes,
                            refresh_steps, results, stage_folder, starting_point, total_steps, write_settings)
from oprd.core.publish import Publisher
from oprd.core.ready import take_ready
from oprd.core.score import target_logprobs
from oprd.core.settings import RESUMED, Config
from oprd.core.tokenizer import Tokenizer, train_bpe
from oprd.core.trainer import Plan, Stopped, Trainer
from oprd.core.whole import Mirror
from oprd.parallel.mesh import Mesh, Sizes
from oprd.rollout import commands as rollout_commands
from oprd.rollout import recordings
from oprd.rollout.ahead import Ahead
from oprd.rollout.annotate import annotate, inputs
from oprd.rollout.annotate import table as annotation_table
from oprd.rollout.attempts import Outcome, attempt_seed
from oprd.rollout.engine import Engine
from oprd.rollout.evaluate import Passes, Report, attempts_at, evaluate, reminders_table, table
from oprd.rollout.groups import GroupPolicy, GroupSettings
from oprd.rollout.grm import judge_all
from oprd.rollout.harness import Harness, rubric_of
from oprd.rollout.native import NativeEngine
from oprd.rollout.prompt_report import check_known, prompt_report, prompt_table
from oprd.rollout.records import Keeper
from oprd.rollout.rft import Filtration, FiltrationSettings
from oprd.rollout.road import Road, Routed, Teacher
from oprd.rollout.serve import serve
from oprd.rollout.tasks import read_tasks
from oprd.rollout.teach import OutcomeRouting
from oprd.sandbox.box import Broke

AFTERWARDS = {stage: "--resume goes on from what is saved" for stage in RESUMED if stage != "microswe"}  # interrupted
RECIPE = {"base": "pretrain", "+ Coding SFT": "coding-sft", "+ IF SFT": "if-sft", "+ OPRD": "oprd"}  # table row: stage


def main(argv: list[str]) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    stage = ""
    try:
        with unwinding():
            options, given = configuration.parse(argv)
            stage = options.stage
            load = lambda stage: configuration.load(options.config, stage, given)  # noqa: E731
            run(stage, load(stage), load, options)
    except Stopped as stopped:
        if os.environ.get("RANK", "0") == "0":
            print(stopped)
        return stopped.code
    except KeyboardInterrupt as stop:
        print(f"interrupted; {AFTERWARDS.get(stage, 'start it again')}", file=sys.stderr)
        return getattr(stop, "code", 130)
    except (ValueError, OSError, FloatingPointError) as problem:
        configuration.fail(problem)
    except Broke as problem:
        print(f"error: the machine failed: {problem}; mend it, then {AFTERWARDS.get(stage, 'start it again')}",
              file=sys.stderr)
        return 1
    return 0


def run(stage: str, config: Config, load, options) -> None:
    torch.set_num_threads(config.run.threads or torch.get_num_threads())
    if options.dry_run:
        print(configuration.dump(config), preview(stage, tuple(RECIPE.values()), load, options, check), sep="\n")
        return
    with mesh_of(config, stage) as mesh:
        if stage in COMMANDS:
            COMMANDS[stage](config, options)
        else:
            STAGE[stage](config, load, options.resume, *([mesh] if stage in TRAINED else []))
            if mesh.first:
                print(results(config, stage))


def check(stage: str, config: Config) -> None:
    """What --dry-run looks at of the rollouts' side."""
    rubric_of(config.reminders)
    if stage in ACTS and data_path(config, stage).exists():
        read_tasks(data_path(config, stage), config.data)


# --- stages -------------------------------------------------------------------------------------------------------

def make_microswe(config: Config, load, resume: bool) -> None:
    """Files under run.folder/data, which appears whole or not at all; a random model under run.folder/random/model."""
    data, m = Path(config.run.folder) / "data", config.microswe
    model = stage_folder(config, "microswe") / "model"
    held = next((place for place in (model, data) if place.exists() and any(place.iterdir())), None)
    if held and not resume:
        raise ValueError(f"{held} exists; add --resume to keep it, or choose another run.folder")
    provenance.check_microswe(data, config)
    random_sizes(config, m.vocabulary)
    check_makeable(data)
    if not held:
        harness = Harness(config, chat=None)
        harness.sweep()
        recorder = recordings.Recorder(harness.open_box, harness.remind(), config.chat.system, config.rollout.verifiers,
                                       m.careful)
        bar = Progress(m.coding_tasks + m.if_tasks, name="recording")
        try:
            with new_folder(data, overwrite=False) as aside:
                corpus = recordings.make_files(aside, m, config.run.seed, recorder, lambda: bar.advance({}))
                train_bpe(corpus, m.vocabulary).save(aside)
                provenance.write(aside, config, {})
        finally:
            bar.close()
            harness.close()
    if not model.exists():
        hf.save(random_model(config, Tokenizer.load(data)), model, tokenizer_from=data)


def sft(stage: str) -> Callable:
    def run(config: Config, load, resume: bool, mesh: Mesh = Mesh()) -> None:
        """Imitate recorded conversations (pretrain: plain text): run.folder/<stage>/model."""
        if done(config, stage, resume):
            return
        start, chat = starting_point(config, stage)
        path = data_file(config, stage)
        d, t = config.data, config.train
        left_out: Counter = Counter()
        rows = (read_text(path, chat.tokenizer, d.max_tokens, d.strict, left_out, d.only_resolved)
                if stage == "pretrain" else
                read_sft(path, chat, d.max_tokens, d.strict, left_out, d.only_resolved))
        order = Order(len(rows), config.run.seed)
        check_fits(config, rows)
        plan = Plan(total_steps(config, len(rows)), t, bf16=config.run.precision == "bf16")
        trainer = Trainer(plan, stage_folder(config, stage), start, resume, mesh, config.parallel)
        if mesh.first:
            write_settings(config, stage_folder(config, stage), stage)
        counts = {f"data/left_out_{reason}": Last(n) for reason, n in left_out.items()}
        trainer.run(lambda step: ([rows[order[step * t.batch + i]] for i in range(t.batch)], counts))
    return run


def on_policy(stage: str, parts: Callable) -> Callable:
    """A stage that trains on its own attempts; parts(config, steps, harness, start, tasks): its Plan and Teacher."""
    def run(config: Config, load, resume: bool, mesh: Mesh = Mesh()) -> None:
        if done(config, stage, resume):
            return
        check_rollout(config)
        start, chat = starting_point(config, stage)
        folder, tasks = stage_folder(config, stage), read_tasks(data_file(config, stage), config.data)
        n, seed = per_task(config, stage), config.run.seed
        steps, order = total_steps(config, len(tasks) * n), Order(len(tasks), seed)
        harness = Harness(config, chat)
        (plan, teach), steer = parts(config, steps, harness, start, tasks), harness.steer(n, steps)
        check_alone(config, mesh.world.size)
        trainer = Trainer(plan, folder, start, resume, mesh, config.parallel)
        mirror = Mirror(trainer.model)
        if not mesh.first:  # attempts are made by the first rank; the others wait for what they teach
            trainer.run(None, lambda step: mirror.refresh())
            return
        harness.sweep()
        write_settings(config, folder, stage)
        harness.score = lambda rows: target_logprobs(trainer.teacher, rows, config.train.micro_batch_tokens)
        engine, frozen = engine_of(config, mirror.model, trainer.step, start), harness.rewarders.frozen
        if frozen:
            frozen.engine = native_engine(config, trainer.teacher, trainer.step)
        keep, per_step = Keeper(config.rollout.record, chat), config.train.batch // n
        road = Road(lambda step: [tasks[order[step * per_step + i]] for i in range(per_step)], n,
                    lambda *place: attempt_seed(seed, *place), harness.pool(engine, config.rollout), teach,
                    lambda step, *found: keep(folder / "attempts" / f"step_{step:05d}.jsonl", *found),
                    steer, Ahead(config.rollout.max_staleness, steps))
        agree = Agreement.of(config.rollout, config.train.micro_batch_tokens)
        road.recall(trainer.memory, tasks)

        def supply(step: int):
            if frozen and step in plan.refresh:
                frozen.engine.load(trainer.teacher, step)
            taken = road(step)
            if taken.stop:
                raise Stopped(f"stopped before step {step} of {steps}: {taken.stop}", code=3)
            sums = {**taken.sums, **harness.judge_counts()}
            examples, compared = agree(mirror.model, taken.examples, step)
            return examples, {**{name: Mean(*pair) for name, pair in taken.means.items()}, **compared,
                              **{name: Sum(count) for name, count in sums.items()},
                              **{f"engine/{name}": Last(value) for name, value in engine.measured().items()}}

        def updated(step: int) -> None:
            mirror.refresh()
            engine.load(mirror.model, step)

        try:
            trainer.run(supply, updated, ("train/loss", "rollout/pass_rate"), road.memory)
        finally:
            for served in (engine, *([frozen.engine] if frozen else [])):
                served.close()
            road.ahead.close()
            harness.close()
    return run


def oprd_parts(config: Config, steps: int, harness: Harness, start: Path, tasks) -> tuple[Plan, Teacher]:
    """Attempt tasks without reminders, imitate successes, distil failures: run.folder/oprd/model."""
    o, most = config.oprd, config.train.micro_batch_tokens
    check_oprd(config, hf.load_config(start))
    plan = Plan(steps, config.train, Objective(o.lambda_success, o.lambda_failure, o.aggregate, o.denominator),
                Distillation(o.top_k, o.temperature, o.direction, o.support), teacher=True,
                shared=o.refresh == "shared", refresh=refresh_steps(config, steps), bf16=config.run.precision == "bf16")
    teach = OutcomeRouting(harness.chat.reminder, most, o.routing, o.without_reminder)
    return plan, Routed(teach, harness.reminders)


def rl_parts(config: Config, steps: int, harness: Harness, start: Path, tasks) -> tuple[Plan, Teacher]:
    """Attempt every task several times, compare the attempts with each other: run.folder/rl/model."""
    r, rollout, renew = config.rl, config.rollout, config.selfverify.renew
    check_groups(config, "rl")
    score = harness.rewarders.score(tasks, lambda *place: attempt_seed(config.run.seed, *place))
    frozen = harness.rewarders.frozen is not None  # serves the teacher's weights
    plan = Plan(steps, config.train, Objective(aggregate=r.aggregate, length=r.length or rollout.max_context_tokens),
                Distillation(min(100, hf.load_config(start).vocab_size)),
                PolicyGradient(r.clip_low, r.clip_high, r.ratio_cap, r.ratio, rollout.temperature),
                teacher=r.kl > 0 or frozen, bf16=config.run.precision == "bf16",
                refresh=frozenset(range(renew, steps, renew)) if frozen and renew else frozenset())
    settings = GroupSettings(config.train.micro_batch_tokens, r.advantage, r.std, r.masked, r.kl, r.patience)
    return plan, GroupPolicy(score, settings)


def rft_parts(config: Config, steps: int, harness: Harness, start: Path, tasks) -> tuple[Plan, Teacher]:
    """Attempt every task several times, imitate the solutions that a rubric ranks highest: run.folder/rft/model."""
    check_groups(config, "rft")
    items, grm = harness.rewarders.grm()
    settings = FiltrationSettings(config.rft.select, config.rft.top, config.rft.cap, config.run.seed,
                                  config.train.micro_batch_tokens)
    teach = Filtration(items, lambda asked: judge_all(grm, asked, config.verifier.concurrency), settings)
    return Plan(steps, config.train, bf16=config.run.precision == "bf16"), teach


def evaluation(config: Config, load, resume: bool) -> None:
    """Resolution rate of one model without reminders, as a table and in TensorBoard."""
    start, _ = starting_point(config, "eval")
    report = evaluate_model(config, start, Path(config.run.folder) / "eval", start.parent.name)
    print_report([(str(start), report)])


def everything(config: Config, load, resume: bool) -> None:
    """The recipe: data, random model, four stages, an evaluation of each checkpoint, one table. With run.ready, the
    stages that have a model there are not trained again."""
    check_recipe(config, load("oprd"))
    taken = take_ready(config, tuple(RECIPE.values()), resume, lambda data: recordings.make_task_files(
        data, config.microswe, config.run.seed)) if config.run.ready else set()
    if not taken:
        make_microswe(load("microswe"), load, resume)
    reports = []
    for label, stage in RECIPE.items():
        if stage not in taken:
            STAGE[stage](load(stage), load, resume)
        model = stage_folder(config, stage) / "model"
        folder = stage_folder(config, stage) / "eval"
        kept = kept_report(load("eval"), model, folder) if resume else None
        reports.append((label, kept or evaluate_model(load("eval"), model, folder, label)))
        print_report(reports[-1:])
    print()
    (Path(config.run.folder) / "table.txt").write_text(print_report(reports) + "\n", encoding="utf-8")


TRAINED = {"pretrain": sft("pretrain"), "coding-sft": sft("coding-sft"), "if-sft": sft("if-sft"),
           "oprd": on_policy("oprd", oprd_parts), "rl": on_policy("rl", rl_parts), "rft": on_policy("rft", rft_parts)}
STAGE = {"microswe": make_microswe, **TRAINED, "eval": evaluation, "all": everything}


# --- commands that train nothing ----------------------------------------------------------------------------------

def annotation(config: Config, options) -> None:
    """Error events of recorded attempts: a table, JSON lines to --output, and scalars under run.folder/annotate."""
    if not options.input:
        raise ValueError("--stage annotate needs --input PATH, a file of recorded attempts or a folder of them")
    check_free(options.output)
    check_makeable(folder := Path(config.run.folder) / "annotate")
    harness, found, lines, asked = Harness(config, chat=None), [], [], []
    for file in inputs(options.input):
        for line, seen in annotate(file, harness.rubric, harness.audit, harness.each):
            lines.append({"file": seen.name, **line})
        found.append(seen)
        asked.append(harness.judge_counts())
    if options.output:
        write_jsonl(Path(options.output), lines)
    with Log(folder, number := next_number(folder)) as log:
        for i, (seen, counts) in enumerate(zip(found, asked), start=number):
            scalars = {**seen.scalars(), **counts}
            log.write(i, {metric: Last(value) for metric, value in scalars.items()})
    print(annotation_table(found, harness.rubric))
    print(f"\n{len(lines)} attempts annotated: {', '.join(filter(None, (options.output, str(folder))))}")


COMMANDS = {**core_commands.COMMANDS, **rollout_commands.COMMANDS, "annotate": annotation,
            "check-tasks": partial(rollout_commands.check_tasks, progress=Progress)}


# --- parts --------------------------------------------------------------------------------------------------------

@contextmanager
def mesh_of(config: Config, stage: str):
    """The mesh of the ranks that the launcher started; only what trains takes more than one."""
    p = config.parallel
    sizes = Sizes(p.dp, p.cp, p.tp, p.ep) if stage in TRAINED else Sizes(dp=1)
    mesh = Mesh.from_environment(sizes, timeout_s=p.timeout_s)
    yield mesh
    mesh.close()


def native_engine(config: Config, model: Model, version: int) -> NativeEngine:
    r = config.rollout
    return NativeEngine(model, version, rows=r.workers, cached_tokens=r.cache_tokens, lockstep=r.lockstep)


def engine_of(config: Config, model: Model, version: int, folder: Path) -> Engine:
    """The engine of the settings, serving `model` as `version`. folder: the Hugging Face folder of the model's form."""
    s = config.sglang
    if config.rollout.engine == "native":
        return native_engine(config, model, version)
    publisher = Publisher(folder, s.dtype, s.bucket_mib * 2**20, s.backend, s.update_s,
                          "cuda" if s.backend == "nccl" else "cpu")
    bar = Progress(len(s.servers) or s.count, name="rollout servers ready")
    try:
        return serve(config, publisher, folder, model, version, bar.reach)
    finally:
        bar.close()


def kept_report(config: Config, model: Path, folder: Path) -> Report | None:
    """The report of an earlier evaluation of this model, if it was made as one would be now."""
    report, made = Report.load(folder) or (None, {})
    inputs = provenance.digests(provenance.input_files(data_file(config, "eval"), model, config))
    return report if report and provenance.still_holds(folder, made, provenance.made_from(config, inputs)) else None


def evaluate_model(config: Config, path: Path, folder: Path, name: str) -> Report:
    chat, e = chat_of(config, path, acts=True), config.eval
    tasks = read_tasks(data_file(config, "eval"), config.data)
    tasks = tasks[: e.tasks or len(tasks)]
    check_known(tasks)
    inputs = provenance.digests(provenance.input_files(data_file(config, "eval"), path, config))
    harness, model = Harness(config, chat), hf.load(path)
    provenance.write(folder, config, inputs)  # before the rollouts: a folder that cannot be written shows now
    harness.sweep()
    attempts = attempts_at(tasks, e.attempts, config.run.seed, "eval")
    bar = Progress(len(attempts) * (2 if e.following else 1), name=f"eval {name}")
    outcomes: list[Outcome] = []

    def done(outcome: Outcome) -> None:
        outcomes.append(outcome)
        if outcome.attempt.origin == "task":  # nobody knows beforehand how many retries there are
            bar.advance({})

    engine = engine_of(config, model, 0, path)
    try:
        passes = Passes(harness.reminding if e.following else None, harness.globals if e.retry else None)
        report = evaluate(attempts, harness.pool(engine, e), lambda judged: harness.each(harness.events, judged), passes,
                          done)
    finally:
        engine.close()
        harness.close()
        bar.close()
    number = next_number(folder)  # an evaluation never replaces another
    Keeper(config.rollout.record, chat)(folder / "attempts" / f"eval_{number:05d}.jsonl", outcomes)
    if not report.judged:
        first = outcomes[0]
        raise Broke(f"none of {report.attempts} attempts could be judged, {first.attempt.id} first: {first.trouble}"
                    + (f" ({first.verdict.reason})" if first.verdict else ""))
    with Log(folder, number) as log:
        scalars = {**report.scalars(), **prompt_report(outcomes).scalars(), **harness.judge_counts()}
        log.write(number, {metric: Last(value) for metric, value in scalars.items()})
    report.save(folder, provenance.made_from(config, inputs))
    if config.data.world == "prompts":
        print(prompt_table([(name, prompt_report(outcomes))]))
    return report


def print_report(rows: list[tuple[str, Report]]) -> str:
    text = "\n\n".join(part for part in (table(rows), reminders_table(rows)) if part)
    print(text, flush=True)
    return text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
