"""What follows from the settings before anything runs: where a stage reads and writes, its steps, its memory."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Sequence

from oprd.core import hf, provenance
from oprd.core.chat import Chat
from oprd.core.disk import check_makeable
from oprd.core.settings import Config
from oprd.core.model import Model, ModelConfig
from oprd.core.template import frame
from oprd.core.tokenizer import Tokenizer
from oprd.core.types import Example

log = logging.getLogger("oprd.plan")

FOLDERS = {"microswe": "random", "pretrain": "base", "coding-sft": "coding-sft", "if-sft": "if-sft", "oprd": "oprd",
           "rl": "rl", "rft": "rft"}
BEFORE = {"pretrain": "microswe", "coding-sft": "pretrain", "if-sft": "coding-sft", "oprd": "if-sft", "rl": "if-sft",
          "rft": "if-sft", "eval": "oprd"}
DATA = {"pretrain": "pretrain.jsonl", "coding-sft": "coding_sft.jsonl", "if-sft": "if_sft.jsonl",
        "oprd": "oprd_tasks.jsonl", "rl": "oprd_tasks.jsonl", "rft": "oprd_tasks.jsonl",
        "eval": "validation_tasks.jsonl"}
ACTS = ("oprd", "rl", "rft", "eval")  # stages that attempt tasks


def stage_folder(config: Config, stage: str) -> Path:
    """Where a stage keeps its checkpoints, its curves and, once it is finished, `model/`."""
    return Path(config.run.folder) / FOLDERS[stage]


def start_folder(config: Config, stage: str) -> Path:
    """The model folder a stage starts from: the one named in the settings, or what the stage before left."""
    return Path(config.model.path) if config.model.path else stage_folder(config, BEFORE[stage]) / "model"


def starting_point(config: Config, stage: str) -> tuple[Path, Chat]:
    """The model a stage starts from, and its chat frame. Raises FileNotFoundError and ValueError."""
    path = start_folder(config, stage)
    if not path.is_dir():
        how = "is no folder" if path.exists() else "does not exist"
        raise FileNotFoundError(f"{path} {how}; run --stage {BEFORE[stage]} first, or set model.path")
    chat = chat_of(config, path, acts=stage in ACTS)
    log.warning("%s starts from %s; chat form: %s", stage, path, chat.form)
    return path, chat


def chat_of(config: Config, path: Path, acts: bool) -> Chat:
    """The chat frame of a model folder; acts: whether the model's tool calls will be read."""
    tokenizer, model = Tokenizer.load(path), hf.load_config(path)
    tokenizer.fits(model.vocab_size)
    chat = frame(path, tokenizer, config.chat.form, config.chat.thinking, model.model_type)
    if acts and chat.cannot_act:
        raise ValueError(f"{path}: {chat.cannot_act}")
    return chat


def data_path(config: Config, stage: str) -> Path:
    """The file (of rows: or folder) a stage reads: the one named in the settings, or MicroSWE's."""
    named = config.data.tasks if stage in ACTS else config.data.rows
    return Path(named) if named else Path(config.run.folder) / "data" / DATA[stage]


def data_file(config: Config, stage: str) -> Path:
    """`data_path`, which must exist; run.folder, which a stage will write into, must be makeable."""
    path = data_path(config, stage)
    check_makeable(Path(config.run.folder) / "data")
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; --stage microswe makes MicroSWE's files, or name your own")
    return path


def inputs(config: Config, stage: str) -> dict[str, Path]:
    """The files a stage reads beside weights (`provenance.input_files`)."""
    return provenance.input_files(data_path(config, stage), start_folder(config, stage), config)


def done(config: Config, stage: str, resume: bool) -> bool:
    """Whether a resumed run finds this stage finished. ValueError when it was started with other settings or files."""
    folder = stage_folder(config, stage)
    finished = resume and (folder / "model").exists()
    if resume and (folder / provenance.SETTINGS).exists():
        files = inputs(config, stage)
        provenance.check_settings(folder, stage, config)
        provenance.check_inputs(folder, provenance.digests(files), files, finished)
    return finished


def results(config: Config, stage: str) -> str:
    """Where a finished stage has left what, for the end of a run."""
    run = Path(config.run.folder)
    if stage == "microswe":
        return f"data and tokenizer: {run / 'data'}; random model: {stage_folder(config, stage) / 'model'}"
    if stage == "all":
        return f"table: {run / 'table.txt'}; models, curves and attempts: {run}"
    if stage == "eval":
        return f"report, attempts and curves: {run / 'eval'}"
    folder = stage_folder(config, stage)
    return f"model: {folder / 'model'}; curves and checkpoints: {folder}"


def total_steps(config: Config, items: int) -> int:
    """Optimizer steps over so many rows or attempts."""
    return config.train.steps or math.ceil(items * config.train.epochs / config.train.batch)


def refresh_steps(config: Config, steps: int) -> frozenset[int]:
    """The optimizer steps before which the teacher takes the student's weights."""
    o = config.oprd
    if o.refresh == "fractions":
        return frozenset(round(f * steps) for f in o.refresh_at) & frozenset(range(1, steps))
    return frozenset(range(o.refresh_every, steps, o.refresh_every)) if o.refresh == "every" else frozenset()


def check_oprd(config: Config, model: ModelConfig) -> None:
    """ValueError for settings that an OPRD run could only fail with later."""
    o, t, context = config.oprd, config.train, config.rollout.max_context_tokens
    if t.batch % o.attempts_per_task:
        raise ValueError(f"train.batch = {t.batch} must be a multiple of oprd.attempts_per_task = "
                         f"{o.attempts_per_task}")
    if config.prefix.on and o.attempts_per_task < 2:
        raise ValueError("prefix.on = true needs oprd.attempts_per_task of at least 2: a pass rate needs a group")
    if o.support != "full" and o.top_k > model.vocab_size:
        raise ValueError(f"oprd.top_k = {o.top_k} must not exceed the model's vocabulary of "
                         f"{model.vocab_size}; lower it or set oprd.support = full")
    if context > t.micro_batch_tokens:
        raise ValueError(f"rollout.max_context_tokens = {context} must not exceed train.micro_batch_tokens = "
                         f"{t.micro_batch_tokens}; raise the second")


def per_task(config: Config, stage: str) -> int:
    """Attempts at each task in a step of a stage that trains on them."""
    return {"oprd": config.oprd, "rl": config.rl, "rft": config.rft}[stage].attempts_per_task


def check_rollout(config: Config) -> None:
    """ValueError for settings of the rollout engine that exclude each other."""
    r, s = config.rollout, config.sglang
    if r.max_staleness and r.engine == "native":
        raise ValueError(f"rollout.max_staleness = {r.max_staleness} needs rollout.engine = sglang: the native engine "
                         "takes new weights only while no turn runs; set it to 0")
    if r.max_staleness and config.prefix.on:
        raise ValueError(f"rollout.max_staleness = {r.max_staleness} must be 0 with prefix.on = true: which prefixes a "
                         "step starts from depends on the step before")
    if s.servers and s.count > 1:
        raise ValueError(f"sglang.count = {s.count} is for servers of ours, but sglang.servers names running ones; "
                         "leave one of the two out")


def check_alone(config: Config, ranks: int) -> None:
    """ValueError for what needs a whole copy of the teacher beside the trainer, on a run of several processes."""
    if ranks == 1:
        return
    if config.reminders.utility != "off":
        raise ValueError(f"reminders.utility = {config.reminders.utility!r} needs the teacher whole on one rank; set "
                         "it to off, or start one process")
    if config.verifier.kind == "frozen":
        raise ValueError("verifier.kind = 'frozen' needs the teacher whole on one rank; serve the model of the start "
                         "yourself and set verifier.kind = endpoint, or start one process")


def check_groups(config: Config, stage: str) -> None:
    """ValueError for settings that a stage with groups of attempts could only fail with later."""
    t, r, n = config.train, config.rollout, per_task(config, stage)
    if t.batch % n:
        raise ValueError(f"train.batch = {t.batch} must be a multiple of {stage}.attempts_per_task = {n}")
    if stage == "rl" and (r.temperature == 0 or r.top_p < 1):
        raise ValueError(f"rollout.temperature = {r.temperature} must be above 0 and rollout.top_p = {r.top_p} be 1: "
                         "a policy gradient needs the probabilities that were sampled from")
    if r.max_context_tokens > t.micro_batch_tokens:
        raise ValueError(f"rollout.max_context_tokens = {r.max_context_tokens} must not exceed "
                         f"train.micro_batch_tokens = {t.micro_batch_tokens}; raise the second")


def check_fits(config: Config, rows: Sequence[Example]) -> None:
    """ValueError for a row that no micro-batch can hold."""
    most = config.train.micro_batch_tokens
    if long := next((row for row in rows if len(row.row.ids) > most), None):
        raise ValueError(f"{long.source}: {len(long.row.ids)} tokens must not exceed train.micro_batch_tokens = "
                         f"{most}; raise it or lower data.max_tokens")


def check_recipe(config: Config, oprd: Config) -> None:
    """ValueError for a setting that would make every stage of the recipe start or read the same, or that its last stage
    (oprd: its settings) would fail with after all the others."""
    for section, field in (("model", "path"), ("data", "rows"), ("data", "tasks")):
        if value := getattr(getattr(config, section), field):
            raise ValueError(f"{section}.{field} = {value!r} would count for every stage of --stage all; set it for "
                             f"one, under [stages.NAME.{section}] in the settings file, or run the stages one by one")
    o, entries = oprd.oprd, config.microswe.vocabulary
    if o.support == "topk" and o.top_k > entries and not config.run.ready:
        raise ValueError(f"oprd.top_k = {o.top_k} must not exceed microswe.vocabulary = {entries}; lower it or set "
                         "oprd.support = full")


def random_sizes(config: Config, vocabulary: int, end: int | None = None) -> ModelConfig:
    """A new model's sizes; end: the id that ends a turn. ValueError for sizes that do not fit each other."""
    m = config.model
    try:
        return ModelConfig(vocab_size=vocabulary, hidden_size=m.hidden, intermediate_size=m.intermediate,
                           num_hidden_layers=m.layers, num_attention_heads=m.heads, num_key_value_heads=m.kv_heads,
                           head_dim=m.head_dim, tie_word_embeddings=m.tied, eos_token_id=end)
    except ValueError as problem:
        raise ValueError(f"[model] {problem} (model.heads, model.kv_heads, model.head_dim)") from None


def random_model(config: Config, tokenizer: Tokenizer) -> Model:
    """A new model of the size the settings give, with random weights."""
    return Model(random_sizes(config, tokenizer.vocab_size, tokenizer.token_id("<|im_end|>"))).init(config.run.seed)


def write_settings(config: Config, folder: Path, stage: str) -> None:
    """The resolved settings and what the stage reads, before step 0 (`done` compares them on a resume)."""
    provenance.write(folder, config, provenance.digests(inputs(config, stage)))
