"""A model as a Hugging Face directory: config.json, safetensors (one file or shards with an index), tokenizer files."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Mapping

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from oprd.core.disk import sync
from oprd.core.model import Model, ModelConfig

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
CARRIED = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
           "generation_config.json")  # files that go along unread
SHARD_BYTES = 5 * 10**9


def load_config(path: str | Path) -> ModelConfig:
    """The ModelConfig of a directory. FileNotFoundError or ValueError name the file."""
    folder = Path(path)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such model directory")
    return ModelConfig.from_hf(_read_json(folder / "config.json"), source=str(folder / "config.json"))


def load(path: str | Path, dtype: torch.dtype = torch.float32) -> Model:
    """The model in a directory, on the CPU, every parameter in `dtype`.

    FileNotFoundError: the directory, config.json, the weights, or a shard the index names is missing. ValueError:
    a file that cannot be read, a tensor that is missing, unexpected, of another shape, or not floating point.
    """
    config = load_config(path)
    tensors = read_tensors(path)
    head, embed = tensors.get("lm_head.weight"), tensors.get("model.embed_tokens.weight")
    if config.tie_word_embeddings and head is not None:
        if embed is not None and not torch.equal(head, embed):
            raise ValueError(f"{path}: tie_word_embeddings = true, but lm_head.weight differs from the embedding")
        del tensors["lm_head.weight"]
    with torch.device("meta"):
        model = Model(config)
    check_tensors(model.state_dict(), tensors, str(path))
    model.load_state_dict({name: t.to(dtype) for name, t in tensors.items()}, assign=True)
    return model


def save(model: Model, path: str | Path, tokenizer_from: str | Path | None = None, overwrite: bool = False,
         dtype: torch.dtype | None = None, shard_bytes: int = SHARD_BYTES) -> None:
    """Write the model as a directory that appears whole or not at all.

    tokenizer_from: directory whose tokenizer files (`CARRIED`) are copied along. overwrite: replace an existing model
    directory (one with a config.json; anything else is never touched). dtype: stored dtype; None keeps each
    parameter's own. A shard holds at most `shard_bytes`, or one tensor.
    """
    target = Path(path)
    _refuse_overwrite(target, overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.parent / f".{target.name}.{os.getpid()}.tmp"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        tensors = {n: t.detach().to("cpu", dtype or t.dtype).contiguous() for n, t in model.state_dict().items()}
        stored = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
        _write_json(aside / "config.json", {**model.config.to_hf(), "dtype": stored})
        _write_tensors(aside, tensors, shard_bytes)
        for name in CARRIED if tokenizer_from is not None else ():
            if (Path(tokenizer_from) / name).is_file():
                shutil.copyfile(Path(tokenizer_from) / name, aside / name)
        for file in aside.iterdir():
            sync(file)
        _publish(aside, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def read_tensors(path: str | Path) -> dict[str, Tensor]:
    """All tensors of a directory by name, as stored."""
    folder = Path(path)
    if (folder / INDEX).is_file():
        where: dict[str, str] = _read_json(folder / INDEX).get("weight_map", {})
        files = sorted(set(where.values()))
        for name in files:
            if not (folder / name).is_file():
                raise FileNotFoundError(f"{folder / name}: shard named by {INDEX} is missing")
    elif (folder / SINGLE).is_file():
        where, files = {}, [SINGLE]
    else:
        raise FileNotFoundError(f"{folder}: neither {SINGLE} nor {INDEX}")
    tensors = {}
    for name in files:
        try:
            with safe_open(folder / name, framework="pt") as f:
                tensors.update({key: f.get_tensor(key) for key in f.keys()})
        except SafetensorError as error:
            raise ValueError(f"{folder / name}: not a whole safetensors file ({error})") from None
    absent = [key for key in where if key not in tensors]
    if absent:
        raise ValueError(f"{folder / where[absent[0]]}: {absent[0]} is in {INDEX} but not in the shard")
    return tensors


def check_tensors(wanted: Mapping[str, Tensor], given: Mapping[str, Tensor], source: str) -> None:
    """ValueError unless `given` has exactly the names and shapes of `wanted`, all floating point."""
    missing, unexpected = sorted(set(wanted) - set(given)), sorted(set(given) - set(wanted))
    for what, names in (("missing", missing), ("unexpected", unexpected)):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ValueError(f"{source}: {what} tensor {', '.join(names[:3])}{more}")
    for name, tensor in given.items():
        if tensor.shape != wanted[name].shape:
            raise ValueError(
                f"{source}: {name} has shape {list(tensor.shape)}, config.json asks for {list(wanted[name].shape)}"
            )
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            raise ValueError(f"{source}: {name} is stored as {tensor.dtype}, which needs dequantising first")


def _write_tensors(folder: Path, tensors: dict[str, Tensor], shard_bytes: int) -> None:
    """Write one file, or shards and their index."""
    shards: list[dict[str, Tensor]] = [{}]
    room = shard_bytes
    for name, tensor in tensors.items():
        if shards[-1] and tensor.nbytes > room:
            shards.append({})
            room = shard_bytes
        shards[-1][name] = tensor
        room -= tensor.nbytes
    if len(shards) == 1:
        save_file(shards[0], folder / SINGLE, metadata={"format": "pt"})
        return
    where = {}
    for i, shard in enumerate(shards, start=1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        where.update(dict.fromkeys(shard, file))
    total = sum(tensor.nbytes for tensor in tensors.values())
    _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})


def _refuse_overwrite(target: Path, overwrite: bool) -> None:
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not (target / "config.json").is_file():
        raise ValueError(f"{target}: exists and is not a model directory; name another place")
    if not overwrite:
        raise ValueError(f"{target}: already holds a model; name another place or allow overwriting")


def _publish(aside: Path, target: Path) -> None:
    """Rename `aside` to `target`; an old directory is moved out first and removed after."""
    old = None
    if target.exists():
        old = target.parent / f".{target.name}.{os.getpid()}.old"
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    aside.rename(target)
    sync(target.parent)
    if old is not None:
        shutil.rmtree(old)


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _read_json(path: Path) -> dict:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: must hold a JSON object")
    return value
