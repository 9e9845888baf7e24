"""What --dry-run prints: the numbers that follow from the settings and from what is there already. Reads, never writes;
a mistake that a stage could only fail with later is the same ValueError here."""

from __future__ import annotations

from pathlib import Path
from typing import Callable, Sequence

import torch

from oprd.core import config as configuration
from oprd.core import hf, sources
from oprd.core.disk import check_free
from oprd.core.model import Model, ModelConfig
from oprd.core.plan import (ACTS, FOLDERS, chat_of, check_groups, check_oprd, check_recipe, check_rollout, data_path,
                            done, per_task, random_sizes, refresh_steps, stage_folder, start_folder, total_steps)
from oprd.core.score import read_lines
from oprd.core.settings import FILES, Config
from oprd.core.tensors import read_headers, total_bytes


def preview(stage: str, recipe: Sequence[str], load: Callable[[str], Config], options,
            check: Callable[[str, Config], None]) -> str:
    """The numbers of a stage, or of each in the recipe, with the settings of its own. check: (stage, its settings) ->
    ValueError for what is not this room's to know."""
    config, parts = load(stage), (stage,)
    if stage == "all":
        check_recipe(config, load("oprd"))
        parts = (*(() if config.run.ready else ("microswe",)), *recipe, "eval")
    told = []
    for part in parts:
        its = load(part)
        check(part, its)
        told.append((stage == "all" and part in recipe and ready(config, part)) or describe(part, its, options))
        told += configuration.changes(config, its)
    return "\n".join(told)


def describe(stage: str, config: Config, options) -> str:
    """Lines `what  numbers` of one stage. options: the command line's. Raises ValueError and FileNotFoundError."""
    if stage == "microswe":
        return _microswe(config)
    lines = [f"stage           {stage}"]
    if stage in FOLDERS:
        lines += _existing(config, stage, options.resume) + _training(config, stage)
    elif stage == "eval":
        lines += _evaluation(config)
    else:
        lines += _command(config, stage, options)
    return "\n".join(lines)


def ready(config: Config, stage: str) -> str | None:
    """The lines of a stage of the recipe whose model is taken from run.ready, or None."""
    source = Path(config.run.ready or "/nowhere") / stage_folder(config, stage).name
    if not source.is_dir():
        return None
    source = source / "model" if (source / "model").is_dir() else source
    return "\n".join([f"stage           {stage}: not trained, its model is {source}", *_model(config, source, True)[1]])


def _existing(config: Config, stage: str, resume: bool) -> list[str]:
    folder = stage_folder(config, stage)
    if done(config, stage, resume):
        return [f"finished        {folder / 'model'} is there already; nothing will be trained"]
    if not (folder / "metrics.jsonl").exists():
        return []
    return [f"resumes         {folder}" if resume else
            f"refused         {folder} already holds a run; add --resume, or choose another run.folder"]


def _training(config: Config, stage: str) -> list[str]:
    path, data, acts = start_folder(config, stage), data_path(config, stage), stage in ACTS
    lines = [f"starts from     {path}"]
    items = (sources.count(data) if data.exists() else 0) * (per_task(config, stage) if acts else 1)
    if not items and not config.train.steps:
        lines.append(f"steps           unknown: {data} does not exist yet and train.steps is 0")
    else:
        steps = total_steps(config, items)
        fewer = not acts and not config.train.steps and (config.data.only_resolved or not config.data.strict)
        longest = config.rollout.max_context_tokens if acts else config.data.max_tokens
        lines += [f"steps           {'at most ' if fewer else ''}{steps} of {config.train.batch} examples "
                  f"({items} in {data})",
                  f"tokens          at most {steps * config.train.batch * longest:,}"]
        if stage == "oprd":
            lines.append(f"refresh steps   {sorted(refresh_steps(config, steps)) or config.oprd.refresh}")
    if acts:
        check_rollout(config)
    if acts and stage != "oprd":
        check_groups(config, stage)
    if path.is_dir():
        model, told = _model(config, path, acts)
    elif config.plan.architecture:
        model, told = _blank(hf.load_config(config.plan.architecture)), []
    else:
        return [*lines, f"parameters      unknown: {path} does not exist yet"]
    if stage == "oprd":
        check_oprd(config, model.config)
    teacher = config.oprd.refresh != "shared" if stage == "oprd" else stage == "rl" and config.rl.kl > 0
    return lines + told + memory(model, config, teacher)


def _evaluation(config: Config) -> list[str]:
    path, data, e = start_folder(config, "eval"), data_path(config, "eval"), config.eval
    tasks = sources.count(data) if data.exists() else 0
    n = (min(tasks, e.tasks) if e.tasks else tasks) * e.attempts
    passes = " twice, the second time with reminders" if e.following else ""
    lines = [f"evaluates       {path}",
             f"attempts        {n} ({e.attempts} at each of {n // e.attempts} tasks of {data}){passes}" if data.exists()
             else f"attempts        unknown: {data} does not exist yet"]
    if data.exists():
        lines.append(f"tokens          at most {n * (2 if e.following else 1) * config.rollout.max_context_tokens:,}")
    if not path.is_dir():
        return [*lines, f"parameters      unknown: {path} does not exist yet"]
    model, told = _model(config, path, True)
    c, n = model.config, sum(p.numel() for p in model.parameters())
    layers = sum(kind == "full_attention" for kind in c.layer_types)
    cache = 4 * config.rollout.cache_tokens * layers * 2 * c.num_key_value_heads * c.head_dim
    return lines + told + [f"parameters      {n:,}", f"memory          {_mib(8 * n + cache)} (weights and the engine's "
                           f"copy {_mib(8 * n)}; cache of {config.rollout.cache_tokens:,} tokens {_mib(cache)})"]


def _microswe(config: Config) -> str:
    m, model, data = config.microswe, config.model, Path(config.run.folder) / "data"
    size = (f"{model.layers} layers of width {model.hidden}, {model.heads} heads and {model.kv_heads} key/value heads "
            f"of {model.head_dim}")
    random_sizes(config, m.vocabulary)
    held = [f"there already   {data}"] if data.exists() else []
    return "\n".join([f"stage           microswe, writes {data} and {stage_folder(config, 'microswe')}", *held,
                      f"texts           {m.pretrain_texts:,} for the base model",
                      f"recordings      {m.coding_tasks:,} solved tasks for Coding SFT, {m.if_tasks:,} for IF SFT, "
                      f"each written under {m.relabels} namings",
                      f"tasks           {m.oprd_tasks:,} for OPRD, {m.validation_tasks:,} for evaluation",
                      f"tokenizer       at most {m.vocabulary} entries", f"random model    {size}"])


def _command(config: Config, stage: str, options) -> list[str]:
    lines = []
    given, wanted = getattr(options, "input", None), stage in FILES["input"]
    if wanted and given and not Path(given).exists():
        raise FileNotFoundError(f"--input {given} does not exist")
    if given and Path(given).suffix == ".jsonl" and stage != "score":
        lines.append(f"input           {given}, {sources.count(given):,} lines")
    check_free(options.output)
    if stage in ("score", "export") and config.model.path:
        path = Path(config.model.path)
        stored = read_headers(path)
        carried = hf.check_coverage(stored, hf.load_config(path))
        lines.append(f"model           {path}, {len(stored.tensors)} tensors ({carried} carried along), "
                     f"{_mib(total_bytes(stored.tensors))}")
        if stage == "score" and given:
            found = read_lines(given, hf.load_config(path).vocab_size)
            lines.append(f"input           {given}, {len(found):,} lines, {sum(len(x['ids']) for x in found):,} tokens")
    lines += [f"needs           --{name}" for name in FILES if stage in FILES[name] and not getattr(options, name)
              and not (name == "output" and stage != "export")]
    if stage in ("score", "export") and not config.model.path:
        lines.append("needs           --model DIR")
    where = options.output or ("" if stage == "export" else "to the terminal")
    return lines + ([f"writes          {where}"] if where else [])


def _model(config: Config, path: Path, acts: bool) -> tuple[Model, list[str]]:
    """A model folder: on the meta device, its stored tensors proved, and how conversations are written."""
    sizes = hf.load_config(path)
    hf.check_coverage(read_headers(path), sizes)
    return _blank(sizes), [f"chat form       {chat_of(config, path, acts).form}"]


def _blank(sizes: ModelConfig) -> Model:
    with torch.device("meta"):
        return Model(sizes)


def memory(model: Model, config: Config, teacher: bool) -> list[str]:
    """Parameter count and an estimate of resident memory: fp32 weights, gradients and two Adam moments, the teacher's
    and the rollout engine's copies, and per token of a micro-batch what each layer keeps for the backward pass."""
    n, c = sum(p.numel() for p in model.parameters()), model.config
    kept = 10 * c.hidden_size + 4 * c.intermediate_size + 4 * c.num_attention_heads * c.head_dim  # floats a layer
    state, copies = 16 * n, 4 * n * (2 if teacher else 0)
    activations = 4 * config.train.micro_batch_tokens * c.num_hidden_layers * kept
    return [f"parameters      {n:,}", f"memory          {_mib(state + copies + activations)} (weights, gradients, Adam "
            f"{_mib(state)}; copies {_mib(copies)}; activations {_mib(activations)})"]


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
