"""A model as a Hugging Face directory: config.json, safetensors (one file or shards with an index), tokenizer files.

    model = load(folder)                      # any layout of a family that core/architecture.py knows
    save(model, other)                        # our own form: the language model alone, our names
    save_like(model, other, source=folder)    # the source's form: its names, dtypes, shards, and all we do not train

Coverage is proved on the headers before a tensor is read or written: every parameter is filled exactly once, and every
stored tensor is used, or is known to be carried along.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator, Mapping

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from oprd.core.architecture import ModelConfig
from oprd.core.disk import sync
from oprd.core.model import Model, stays_float32
from oprd.core.names import is_extra_head, is_untouched, own_form, pairs

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
CARRIED = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
           "merges.txt", "chat_template.jinja", "generation_config.json", "preprocessor_config.json",
           "video_preprocessor_config.json", "processor_config.json")  # files that go along unread
SHARD_BYTES = 5 * 10**9
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Stored:
    """The tensors of a directory without their data: `shards` file -> names in it, in the file's order; shape and
    safetensors dtype by name; the metadata of each file."""

    folder: Path
    shards: Mapping[str, tuple[str, ...]]
    shape: Mapping[str, tuple[int, ...]]
    dtype: Mapping[str, str]
    metadata: Mapping[str, dict[str, str] | None]


def load_config(path: str | Path) -> ModelConfig:
    """The ModelConfig of a directory. FileNotFoundError or ValueError name the file."""
    folder = Path(path)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such model directory")
    return ModelConfig.from_hf(_read_json(folder / "config.json"), source=str(folder / "config.json"))


def load(path: str | Path, dtype: torch.dtype = torch.float32) -> Model:
    """The model in a directory, on the CPU, in `dtype` (decays and norms: at least float32). Tensors are read one by one
    into their places, so the peak is the model and one tensor.

    FileNotFoundError: the directory, config.json, the weights, or a shard the index names is missing. ValueError:
    a file that cannot be read, a tensor that is missing, unexpected, of another shape, or not floating point.
    """
    config, stored = load_config(path), read_headers(path)
    check_coverage(stored, config)
    with torch.device("meta"):
        model = Model(config)
    wide = torch.promote_types(dtype, torch.float32)
    parameters = {name: torch.empty(p.shape, dtype=wide if stays_float32(name) else dtype)
                  for name, p in model.state_dict().items()}
    heads = []
    for name, tensor in read_tensors(stored):
        if is_extra_head(name, config):
            heads.append(tensor)
        elif not is_untouched(name):
            for _, source, target in pairs(name, tensor, parameters, config):
                target.copy_(source)
    for head in heads:
        if not torch.equal(head.to(dtype), parameters["model.embed_tokens.weight"]):
            raise ValueError(f"{path}: tie_word_embeddings = true, but lm_head.weight differs from the embedding")
    model.load_state_dict(parameters, assign=True)
    return model


def save(model: Model, path: str | Path, tokenizer_from: str | Path | None = None, overwrite: bool = False,
         dtype: torch.dtype | None = None, shard_bytes: int = SHARD_BYTES) -> None:
    """Write the language model in our own form, as a directory that appears whole or not at all.

    tokenizer_from: directory whose tokenizer files (`CARRIED`) are copied along. overwrite: replace an existing model
    directory (one with a config.json; anything else is never touched). dtype: stored dtype; None keeps each
    parameter's own. A shard holds at most `shard_bytes`, or one tensor.
    """
    state = model.state_dict()
    form = own_form(state, model.config)
    dtypes = {name: dtype or state.get(name, model.head_weight).dtype for name in form}
    with _new_folder(Path(path), overwrite) as folder:
        _write_json(folder / "config.json", {**model.config.to_hf(),
                                             "dtype": str(dtype or model.head_weight.dtype).removeprefix("torch.")})
        _carry_files(tokenizer_from, folder)
        shards = _split({n: math.prod(shape) * dtypes[n].itemsize for n, shape in form.items()}, shard_bytes)
        files = [SINGLE] if len(shards) == 1 else [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
                                                   for i in range(len(shards))]
        for file, names in zip(files, shards):
            save_file({name: _built(name, form[name], dtypes[name], state, model.config) for name in names}, folder / file,
                      metadata={"format": "pt"})
        if len(shards) > 1:
            total = sum(math.prod(shape) * dtypes[name].itemsize for name, shape in form.items())
            where = {name: file for file, names in zip(files, shards) for name in names}
            _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})


def save_like(model: Model, path: str | Path, source: str | Path, overwrite: bool = False,
              dtype: torch.dtype | None = None) -> str:
    """Write the model in the form of `source`, the directory it was loaded from: the same files, names and (unless
    `dtype` is given) dtypes; tensors that are not ours, config.json and `CARRIED` files byte for byte. Returns what was
    written, in words.

    Raises ValueError, before anything is written, when the source is of another model or its tensors are not exactly
    ours and the known carried ones.
    """
    stored, config = read_headers(source), load_config(source)
    if config != model.config:
        raise ValueError(f"{source}: config.json is of another model than the one to be saved")
    carried = check_coverage(stored, config)
    parameters = model.state_dict()
    with _new_folder(Path(path), overwrite) as folder:
        for file, names in stored.shards.items():
            tensors = {}
            with safe_open(stored.folder / file, framework="pt") as f:
                for name in names:
                    tensors[name] = f.get_tensor(name) if is_untouched(name) else _built(
                        name, stored.shape[name], dtype or DTYPES[stored.dtype[name]], parameters, config)
            save_file(tensors, folder / file, metadata=stored.metadata[file])
        raw = Path(source, "config.json").read_bytes()
        (folder / "config.json").write_bytes(raw if dtype is None else _with_dtype(raw, dtype))
        _carry_files(source, folder)
        if (stored.folder / INDEX).is_file():
            shutil.copyfile(stored.folder / INDEX, folder / INDEX)
    return (f"{path}: {len(stored.shape)} tensors in {len(stored.shards)} files, {len(stored.shape) - carried} of them "
            f"the model's, {carried} carried along")


def export(source: str | Path, target: str | Path) -> str:
    """Read a model, prove that every tensor is accounted for, write it anew in the same form; returns what was written.

    Everything is read in float32 or wider, so no number changes.
    """
    stored = read_headers(source)
    wide = torch.float64 if "F64" in stored.dtype.values() else torch.float32
    return save_like(load(source, wide), target, source)


# --- reading ------------------------------------------------------------------------------------------------------

def read_headers(path: str | Path) -> Stored:
    """Names, shapes and dtypes of all tensors of a directory.

    FileNotFoundError: no weights, or a shard that the index names is missing. ValueError: a file that is not whole, or
    an index that does not say what is in the shards.
    """
    folder = Path(path)
    where: dict[str, str] | None = None
    if (folder / INDEX).is_file():
        where = _read_json(folder / INDEX).get("weight_map")
        if not isinstance(where, dict) or not where:
            raise ValueError(f"{folder / INDEX}: weight_map must map tensor names to shard files")
        files = sorted(set(where.values()))
        for name in files:
            if not (folder / name).is_file():
                raise FileNotFoundError(f"{folder / name}: shard named by {INDEX} is missing")
    elif (folder / SINGLE).is_file():
        files = [SINGLE]
    else:
        raise FileNotFoundError(f"{folder}: neither {SINGLE} nor {INDEX}")
    shards, shape, dtype, metadata = {}, {}, {}, {}
    for file in files:
        try:
            with safe_open(folder / file, framework="pt") as f:
                shards[file], metadata[file] = tuple(f.keys()), f.metadata()
                for name in shards[file]:
                    part = f.get_slice(name)
                    shape[name], dtype[name] = tuple(part.get_shape()), part.get_dtype()
        except SafetensorError as error:
            raise ValueError(f"{folder / file}: not a whole safetensors file ({error})") from None
        for name in shards[file]:
            if where is not None and where.get(name) != file:
                raise ValueError(f"{folder / file}: holds {name}, which {INDEX} "
                                 + (f"places in {where[name]}" if name in where else "does not name"))
    absent = [name for name in where or () if name not in shape]
    if absent:
        raise ValueError(f"{folder / where[absent[0]]}: {absent[0]} is in {INDEX} but not in the shard")
    return Stored(folder, shards, shape, dtype, metadata)


def read_tensors(stored: Stored) -> Iterator[tuple[str, Tensor]]:
    """Every tensor with its name, one at a time."""
    for file, names in stored.shards.items():
        with safe_open(stored.folder / file, framework="pt") as f:
            for name in names:
                yield name, f.get_tensor(name)


def check_coverage(stored: Stored, config: ModelConfig) -> int:
    """Prove that the stored tensors fill every parameter exactly once; returns how many are carried along instead.

    ValueError names the first tensor that is missing, unexpected, of another shape, or not floating point.
    """
    with torch.device("meta"):
        parameters = Model(config).state_dict()
    filled: Counter[str] = Counter()
    unexpected, carried = [], 0
    for name, shape in stored.shape.items():
        if is_untouched(name):
            carried += 1
            continue
        if stored.dtype[name] not in DTYPES:
            raise ValueError(f"{stored.folder}: {name} is stored as {stored.dtype[name]}, which needs dequantising first")
        try:
            for own, part, view in pairs(name, torch.empty(shape, device="meta"), parameters, config):
                assert part.shape == view.shape
                filled[own] += view.numel() if not is_extra_head(name, config) else 0
        except KeyError:
            unexpected.append(name)
        except ValueError as problem:
            raise ValueError(f"{stored.folder}: {name} {problem}") from None
    missing = [name for name in parameters if not filled[name]]
    for what, names in (("missing", missing), ("unexpected", unexpected)):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ValueError(f"{stored.folder}: {what} tensor {', '.join(sorted(names)[:3])}{more}")
    for name, p in parameters.items():
        if filled[name] != p.numel():
            raise ValueError(f"{stored.folder}: {name} is {'only partly' if filled[name] < p.numel() else 'more than once'}"
                             f" there ({filled[name]:,} of {p.numel():,} numbers)")
    return carried


# --- writing ------------------------------------------------------------------------------------------------------

@contextmanager
def _new_folder(target: Path, overwrite: bool) -> Iterator[Path]:
    """A folder beside `target` to write into, which then takes its place; if anything fails, it is removed."""
    _sweep(target)
    _refuse_overwrite(target, overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.parent / f".{target.name}.{os.getpid()}.tmp"
    aside.mkdir()
    try:
        yield aside
        for file in aside.iterdir():
            sync(file)
        _publish(aside, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _sweep(target: Path) -> None:
    """Remove what killed saves to this target left beside it; an old model that had just been moved out comes back."""
    for left in target.parent.glob(f".{target.name}.*"):
        parts = left.name.removeprefix(f".{target.name}.").split(".")
        if len(parts) != 2 or not parts[0].isdigit() or parts[1] not in ("tmp", "old"):
            continue
        if parts[0] != str(os.getpid()) and Path("/proc", parts[0]).exists():
            continue  # another save is at work
        if parts[1] == "old" and not target.exists():
            left.rename(target)
        else:
            shutil.rmtree(left)


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
        target.rename(old)
    aside.rename(target)
    sync(target.parent)
    if old is not None:
        shutil.rmtree(old)


def _built(name: str, shape: tuple[int, ...], dtype: torch.dtype, parameters: Mapping[str, Tensor],
           config: ModelConfig) -> Tensor:
    """A stored tensor, from the parameters it is made of."""
    tensor = torch.empty(shape, dtype=dtype)
    for _, target, ours in pairs(name, tensor, parameters, config):
        target.copy_(ours)
    return tensor


def _split(sizes: Mapping[str, int], shard_bytes: int) -> list[list[str]]:
    """Names by shard, in their order; a shard holds at most shard_bytes, or one tensor."""
    shards: list[list[str]] = [[]]
    room = shard_bytes
    for name, size in sizes.items():
        if shards[-1] and size > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= size
    return shards


def _carry_files(source: str | Path | None, folder: Path) -> None:
    for name in CARRIED if source is not None else ():
        if (Path(source) / name).is_file():
            shutil.copyfile(Path(source) / name, folder / name)


def _with_dtype(raw: bytes, dtype: torch.dtype) -> bytes:
    """A config.json that says another dtype, wherever it says one."""
    config = json.loads(raw)
    for part in (config, config.get("text_config")):
        if isinstance(part, dict):
            part.update({key: str(dtype).removeprefix("torch.") for key in ("dtype", "torch_dtype") if key in part})
    return (json.dumps(config, indent=2) + "\n").encode()


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
