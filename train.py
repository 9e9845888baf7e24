#!/usr/bin/env python
"""Trains a coding agent, one stage at a time: `python train.py --stage NAME --config FILE.toml [--section.field value]`.

Stages: microswe (make MicroSWE's data, tokenizer and a random model), pretrain (a base model from it), coding-sft, if-sft, oprd, eval, and all (the
whole recipe with a table). docs/architecture.md is the map.
"""

from __future__ import annotations

import logging
import math
import sys
import zlib
from collections import Counter
from pathlib import Path
from typing import Callable

import torch

from oprd.core import config as settings
from oprd.core import hf
from oprd.core.chat import Chat
from oprd.core.config import Config
from oprd.core.data import Order, read_sft, read_text
from oprd.core.metrics import Last, Log, Mean, Progress, Sum
from oprd.core.model import Model, ModelConfig
from oprd.core.objective import Distillation, Objective
from oprd.core.tokenizer import Tokenizer, train_bpe
from oprd.core.trainer import Plan, Stopped, Trainer
from oprd.parallel.mesh import Mesh
from oprd.rollout import recordings
from oprd.rollout.attempts import Attempt
from oprd.rollout.evaluate import Report, attempts_at, evaluate, table
from oprd.rollout.harness import Harness
from oprd.rollout.native import NativeEngine
from oprd.rollout.teach import OutcomeRouting, fates
from oprd.sandbox.microswe import Difficulty
from oprd.sandbox.task import Task, read_tasks

FOLDERS = {"microswe": "random", "pretrain": "base", "coding-sft": "coding-sft", "if-sft": "if-sft", "oprd": "oprd"}
BEFORE = {"pretrain": "microswe", "coding-sft": "pretrain", "if-sft": "coding-sft", "oprd": "if-sft", "eval": "oprd"}

DATA = {"pretrain": "pretrain.jsonl", "coding-sft": "coding_sft.jsonl", "if-sft": "if_sft.jsonl",
        "oprd": "oprd_tasks.jsonl", "eval": "validation_tasks.jsonl"}


def main(argv: list[str]) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        options, given = settings.parse(argv)
        load = lambda stage: settings.load(options.config, stage, given)  # noqa: E731
        config = load(options.stage)
        Mesh.from_environment()
        torch.set_num_threads(config.run.threads or torch.get_num_threads())
        if options.dry_run:
            print(settings.dump(config) + "\n" + describe(options.stage, config))
            return 0
        STAGE[options.stage](config, load, options.resume)
    except Stopped as stopped:
        print(stopped)
    except (ValueError, OSError) as problem:
        settings.fail(problem)
    return 0


# --- stages -------------------------------------------------------------------------------------------------------

def make_microswe(config: Config, load, resume: bool) -> None:
    """Files under run.folder/data and a random model under run.folder/random/model."""
    data, m = Path(config.run.folder) / "data", config.microswe
    if (model := stage_folder(config, "microswe") / "model").exists():
        if resume:
            return
        raise ValueError(f"{model} exists; add --resume to keep it, or choose another run.folder")
    tasks = {stream: recordings.tasks_of(stream, config.run.seed, count, Difficulty(m.functions, m.branches))
             for stream, count in (("coding", m.coding_tasks), ("if", m.if_tasks), ("oprd", m.oprd_tasks),
                                   ("validation", m.validation_tasks))}
    harness = Harness(config, chat=None)
    harness.sweep()
    recorder = recordings.Recorder(harness.open_box, harness.remind(), config.chat.system, config.rollout.verifiers)
    bar = Progress(m.coding_tasks + m.if_tasks, name="recording")
    coding = recorder.coding(tasks["coding"], lambda: bar.advance({}))
    following = recorder.following(tasks["if"], lambda: bar.advance({}))
    bar.close()
    tokenizer = train_bpe(recordings.corpus(coding + following), m.vocabulary)
    texts = recordings.pretraining_texts(config.run.seed, m.pretrain_texts, Difficulty(m.functions, m.branches))
    recordings.write_jsonl(data / "pretrain.jsonl", [{"text": text} for text in texts])
    recordings.write_jsonl(data / "coding_sft.jsonl", recordings.renamed(coding, m.relabels))
    recordings.write_jsonl(data / "if_sft.jsonl", recordings.renamed(following, m.relabels))
    recordings.write_jsonl(data / "oprd_tasks.jsonl", [t.to_row() for t in tasks["oprd"]])
    recordings.write_jsonl(data / "validation_tasks.jsonl", [t.to_row() for t in tasks["validation"]])
    tokenizer.save(data)
    hf.save(random_model(config, tokenizer), model, tokenizer_from=data)


def sft(stage: str) -> Callable:
    def run(config: Config, load, resume: bool) -> None:
        """Imitate recorded conversations (pretrain: plain text): run.folder/<stage>/model."""
        if done(config, stage, resume):
            return
        start, chat = starting_point(config, stage)
        path = data_file(config, config.data.rows, stage)
        rows = (read_text(path, chat.tokenizer, config.data.max_tokens) if stage == "pretrain" else
                read_sft(path, chat, config.data.max_tokens, config.data.strict))
        order, t = Order(len(rows), config.run.seed), config.train
        plan = Plan(total_steps(config, len(rows)), t, bf16=config.run.precision == "bf16")
        trainer = Trainer(plan, stage_folder(config, stage), start, resume)
        write_settings(config, stage)
        trainer.run(lambda step: ([rows[order[step * t.batch + i]] for i in range(t.batch)], {}))
    return run


def oprd(config: Config, load, resume: bool) -> None:
    """Attempt tasks without reminders, imitate successes, distil failures: run.folder/oprd/model."""
    if done(config, "oprd", resume):
        return
    start, chat = starting_point(config, "oprd")
    tasks = read_tasks(data_file(config, config.data.tasks, "oprd"))
    o, t, seed = config.oprd, config.train, config.run.seed
    if t.batch % o.attempts_per_task:
        raise ValueError(f"train.batch = {t.batch} must be a multiple of oprd.attempts_per_task = {o.attempts_per_task}")
    check_support(config, hf.load_config(start))
    steps, order = total_steps(config, len(tasks) * o.attempts_per_task), Order(len(tasks), seed)
    plan = Plan(steps, t, Objective(o.lambda_success, o.lambda_failure, o.aggregate, o.denominator),
                Distillation(o.top_k, o.temperature, o.direction, o.support), teacher=True,
                shared=o.refresh == "shared", refresh=refresh_steps(config, steps), bf16=config.run.precision == "bf16")
    trainer = Trainer(plan, stage_folder(config, "oprd"), start, resume)
    write_settings(config, "oprd")
    harness = Harness(config, chat)
    harness.sweep()
    teach = OutcomeRouting(harness.reminded, chat.reminder, o.routing, o.without_reminder)
    engine = native_engine(config, trainer.model, trainer.step)
    pool = harness.pool(engine, config.rollout)

    def supply(step: int):
        n = t.batch // o.attempts_per_task
        chosen = [tasks[order[step * n + i]] for i in range(n)]
        attempts = [Attempt(f"step{step}/{i}.{j}/{task.instance_id}", task, attempt_seed(seed, step, i, j))
                    for i, task in enumerate(chosen) for j in range(o.attempts_per_task)]
        outcomes = pool.run(attempts)
        lessons = [teach(outcome) for outcome in outcomes]
        return [lesson.example for lesson in lessons if lesson.example], rollout_metrics(outcomes, lessons)

    try:
        trainer.run(supply, lambda step: engine.load(trainer.model, step), ("train/loss", "rollout/pass_rate"))
    finally:
        engine.close()


def evaluation(config: Config, load, resume: bool) -> None:
    """Resolution rate of one model without reminders, as a table and in TensorBoard."""
    start, _ = starting_point(config, "eval")
    report = evaluate_model(config, start, Path(config.run.folder) / "eval", start.parent.name)
    print(table([(str(start), report)]))


def everything(config: Config, load, resume: bool) -> None:
    """The recipe from nothing: data, random model, three stages, an evaluation of each checkpoint, one table."""
    make_microswe(load("microswe"), load, resume)
    reports = []
    for label, stage in (("base", "pretrain"), ("+ Coding SFT", "coding-sft"), ("+ IF SFT", "if-sft"), ("+ OPRD", "oprd")):
        STAGE[stage](load(stage), load, resume)
        model = stage_folder(config, stage) / "model"
        reports.append((label, evaluate_model(load("eval"), model, stage_folder(config, stage) / "eval", label)))
        print(table(reports[-1:]), flush=True)
    text = table(reports)
    (Path(config.run.folder) / "table.txt").write_text(text + "\n", encoding="utf-8")
    print("\n" + text)


STAGE = {"microswe": make_microswe, "pretrain": sft("pretrain"), "coding-sft": sft("coding-sft"), "if-sft": sft("if-sft"), "oprd": oprd,
         "eval": evaluation, "all": everything}


# --- parts --------------------------------------------------------------------------------------------------------

def stage_folder(config: Config, stage: str) -> Path:
    return Path(config.run.folder) / FOLDERS[stage]


def data_file(config: Config, named: str, stage: str) -> Path:
    """The file a stage reads: the one named in the settings, or MicroSWE's."""
    path = Path(named) if named else Path(config.run.folder) / "data" / DATA[stage]
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; --stage microswe makes MicroSWE's files, or name your own")
    return path


def starting_point(config: Config, stage: str) -> tuple[Path, Chat]:
    """The model a stage starts from, and its chat frame. Raises FileNotFoundError and ValueError."""
    path = Path(config.model.path) if config.model.path else stage_folder(config, BEFORE[stage]) / "model"
    if not path.is_dir():
        raise FileNotFoundError(f"{path} does not exist; run --stage {BEFORE[stage]} first, or set model.path")
    tokenizer = Tokenizer.load(path)
    tokenizer.fits(hf.load_config(path).vocab_size)
    return path, Chat(tokenizer, config.chat.dialect)


def done(config: Config, stage: str, resume: bool) -> bool:
    return resume and (stage_folder(config, stage) / "model").exists()


def total_steps(config: Config, items: int) -> int:
    return config.train.steps or math.ceil(items * config.train.epochs / config.train.batch)


def refresh_steps(config: Config, steps: int) -> frozenset[int]:
    """The optimizer steps before which the teacher takes the student's weights."""
    o = config.oprd
    if o.refresh == "fractions":
        return frozenset(round(f * steps) for f in o.refresh_at)
    return frozenset(range(o.refresh_every, steps, o.refresh_every)) if o.refresh == "every" else frozenset()


def check_support(config: Config, model: ModelConfig) -> None:
    if config.oprd.support == "topk" and config.oprd.top_k > model.vocab_size:
        raise ValueError(f"oprd.top_k = {config.oprd.top_k} must not exceed the model's vocabulary of "
                         f"{model.vocab_size}; lower it or set oprd.support = full")


def random_model(config: Config, tokenizer: Tokenizer) -> Model:
    m = config.model
    return Model(ModelConfig(vocab_size=tokenizer.vocab_size, hidden_size=m.hidden, intermediate_size=m.intermediate,
                             num_hidden_layers=m.layers, num_attention_heads=m.heads, num_key_value_heads=m.kv_heads,
                             head_dim=m.head_dim, tie_word_embeddings=m.tied,
                             eos_token_id=tokenizer.token_id("<|im_end|>"))).init(config.run.seed)


def native_engine(config: Config, model: Model, version: int) -> NativeEngine:
    r = config.rollout
    return NativeEngine(model, version, rows=r.workers, cached_tokens=r.cache_tokens, lockstep=r.lockstep)


def rollout_metrics(outcomes, lessons) -> dict:
    judged = [o for o in outcomes if not o.trouble]
    reminded = [lesson.reminders for lesson in lessons if lesson.reminders]
    found = {"rollout/pass_rate": Mean(sum(o.verdict.resolved for o in judged), len(judged)),
             "rollout/tokens_per_attempt": Mean(sum(o.trajectory.tokens() for o in judged), len(judged)),
             "oprd/local_reminders_per_failure": Mean(sum(len(r.local) for r in reminded), len(reminded)),
             "oprd/global_reminders_per_failure": Mean(sum(r.global_ is not None for r in reminded), len(reminded))}
    found |= {f"fate/{name}": Sum(n) for name, n in fates(lessons).items()}
    endings = Counter(o.trajectory.ending.value for o in judged)
    return found | {f"rollout/ending_{name}": Mean(n, len(judged)) for name, n in endings.items()}


def evaluate_model(config: Config, path: Path, folder: Path, name: str) -> Report:
    tokenizer = Tokenizer.load(path)
    chat, e = Chat(tokenizer, config.chat.dialect), config.eval
    tasks = read_tasks(data_file(config, config.data.tasks, "eval"))
    tasks: list[Task] = tasks[: e.tasks or len(tasks)]
    harness, engine = Harness(config, chat), native_engine(config, hf.load(path), 0)
    harness.sweep()
    attempts = attempts_at(tasks, e.attempts, config.run.seed, "eval")
    bar = Progress(len(attempts) * (2 if e.following else 1), name=f"eval {name}")
    try:
        report = evaluate(attempts, harness.pool(engine, e), harness.events, harness.remind() if e.following else None,
                          lambda outcome: bar.advance({}))
    finally:
        engine.close()
        bar.close()
    earlier = folder / "metrics.jsonl"
    number = sum(1 for _ in earlier.open("rb")) if earlier.exists() else 0  # an evaluation never replaces another
    with Log(folder, number) as log:
        log.write(number, {metric: Last(value) for metric, value in report.scalars().items()})
    return report


def write_settings(config: Config, stage: str) -> None:
    """The resolved settings, before step 0."""
    folder = stage_folder(config, stage)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "settings.toml").write_text(settings.dump(config), encoding="utf-8")


def attempt_seed(*parts: int) -> int:
    """One number from run seed, step and places: the same in every process."""
    return zlib.crc32("/".join(map(str, parts)).encode())


def describe(stage: str, config: Config) -> str:
    """Numbers that follow from the settings, for --dry-run. Reads what exists, writes nothing."""
    if stage not in FOLDERS or stage == "microswe":
        return f"stage {stage}: no training steps of its own"
    path = Path(config.model.path) if config.model.path else stage_folder(config, BEFORE[stage]) / "model"
    lines = [f"stage           {stage}, starts from {path}"]
    named = config.data.tasks if stage == "oprd" else config.data.rows
    data = Path(named) if named else Path(config.run.folder) / "data" / DATA[stage]
    items = sum(1 for line in data.open("rb") if line.strip()) if data.is_file() else 0
    if stage == "oprd":
        items *= config.oprd.attempts_per_task
    if not items and not config.train.steps:
        lines.append(f"steps           unknown: {data} does not exist yet and train.steps is 0")
    else:
        steps = total_steps(config, items)
        longest = config.rollout.max_context_tokens if stage == "oprd" else config.data.max_tokens
        lines += [f"steps           {steps} of {config.train.batch} examples ({items} in {data})",
                  f"tokens          at most {steps * config.train.batch * longest:,}"]
        if stage == "oprd":
            lines.append(f"refresh steps   {sorted(refresh_steps(config, steps)) or config.oprd.refresh}")
    if path.is_dir():
        with torch.device("meta"):
            model = Model(hf.load_config(path))
        lines += memory(model, config, teacher=stage == "oprd" and config.oprd.refresh != "shared")
    else:
        lines.append(f"parameters      unknown: {path} does not exist yet")
    return "\n".join(lines)


def memory(model: Model, config: Config, teacher: bool) -> list[str]:
    """Parameter count and an estimate of resident memory: fp32 weights, gradients and two Adam moments, the teacher's
    and the rollout engine's copies, and per token of a micro-batch what each layer keeps for the backward pass."""
    n, c = sum(p.numel() for p in model.parameters()), model.config
    kept = 10 * c.hidden_size + 4 * c.intermediate_size + 4 * c.num_attention_heads * c.head_dim  # floats a layer
    state, copies = 16 * n, 4 * n * (2 if teacher else 0)
    activations = 4 * config.train.micro_batch_tokens * c.num_hidden_layers * kept
    mib = lambda size: f"{size / 2**20:,.0f} MiB"  # noqa: E731
    return [f"parameters      {n:,}", f"memory          {mib(state + copies + activations)} (weights, gradients, Adam "
            f"{mib(state)}; copies {mib(copies)}; activations {mib(activations)})"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
