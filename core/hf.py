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
import shutil
from collections import Counter
from functools import reduce
from pathlib import Path
from typing import Mapping

import torch
from torch import Tensor

from oprd.core.architecture import ModelConfig
from oprd.core.folder import new_folder
from oprd.core.model import Model, stays_float32
from oprd.core.names import EMBEDDING, is_extra_head, is_untouched, own_form, own_name, pairs
from oprd.core.tensors import (DTYPES, INDEX, NAMES, SINGLE, Entry, Stored, entries, make_header, metadata_of,
                               read_headers, read_json, total_bytes, write_file)
from oprd.core.whole import with_whole_state
from oprd.parallel.mesh import Mesh

CARRIED = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
           "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json",
           "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")  # go along unread
SHARD_BYTES = 5 * 10**9


def load_config(path: str | Path) -> ModelConfig:
    """The ModelConfig of a directory. FileNotFoundError or ValueError name the file."""
    folder = Path(path)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such model directory")
    return ModelConfig.from_hf(read_json(folder / "config.json"), source=str(folder / "config.json"))


def load(path: str | Path, dtype: torch.dtype = torch.float32, mesh: Mesh = Mesh(), recompute: bool = False) -> Model:
    """The model in a directory, on the mesh's device, in `dtype` (decays and norms: at least float32); on a mesh this
    rank's part of it. Parameters are read one by one, so the peak is the part, one whole parameter and one tensor.

    FileNotFoundError: the directory, config.json, the weights, or a shard the index names is missing. ValueError:
    a file that cannot be read, a tensor that is missing, unexpected, of another shape, or not floating point.
    """
    config, stored = load_config(path), read_headers(path)
    check_coverage(stored, config)
    whole = _shapes(config)
    holders: dict[str, list[str]] = {name: [] for name in whole}  # which stored tensors a parameter is made of
    for name, entry in stored.tensors.items():
        if not is_untouched(name) and not is_extra_head(name, config):
            for own, *_ in pairs(name, torch.empty(entry.shape, device="meta"), whole, config):
                holders[own].append(name)
    model = blank(config, dtype, mesh, recompute)
    for name, p in model.state_dict().items():
        full = torch.empty(whole[name].shape, dtype=p.dtype)
        for held in holders[name]:
            _fill(full, name, held, stored, whole, config)
        p.copy_(model.cuts[name].take(full))
    return model


def _fill(full: Tensor, name: str, held: str, stored, whole: dict[str, Tensor], config: ModelConfig) -> None:
    """Copy what a stored tensor says of a parameter; a function of its own, so that the tensor goes before the next."""
    for own, source, target in pairs(held, stored.tensor(held), {**whole, name: full}, config):
        if own == name:
            target.copy_(source)


def blank(config: ModelConfig, dtype: torch.dtype = torch.float32, mesh: Mesh = Mesh(),
          recompute: bool = False) -> Model:
    """A model (on a mesh this rank's part of it) that is all zeros, in the dtypes of load()."""
    with torch.device("meta"):
        model = Model(config, mesh, recompute)
    wide = torch.promote_types(dtype, torch.float32)
    model.load_state_dict({name: torch.zeros(p.shape, dtype=wide if stays_float32(name) else dtype, device=mesh.device)
                           for name, p in model.state_dict().items()}, assign=True)
    return model


def _shapes(config: ModelConfig) -> dict[str, Tensor]:
    """Every whole parameter on the meta device."""
    with torch.device("meta"):
        return Model(config).state_dict()


def save(model: Model, path: str | Path, tokenizer_from: str | Path | None = None, overwrite: bool = False,
         dtype: torch.dtype | None = None, shard_bytes: int = SHARD_BYTES) -> None:
    """Write the language model in our own form, as a directory that appears whole or not at all.

    tokenizer_from: directory whose tokenizer files (`CARRIED`) are copied along. overwrite: replace an existing model
    directory (one with a config.json; anything else is never touched). dtype: of every stored tensor; None keeps each
    parameter's own. A shard holds at most `shard_bytes`, or one tensor.
    """
    with_whole_state(model, lambda state: _save(model, state, Path(path), tokenizer_from, overwrite, dtype, shard_bytes))


def _save(model: Model, state: Mapping[str, Tensor], path: Path, tokenizer_from: str | Path | None, overwrite: bool,
          dtype: torch.dtype | None, shard_bytes: int) -> None:
    own, config = model.state_dict(), model.config
    base = dtype or model.head_weight.dtype
    form = {name: _form(dtype or (own[name].dtype if name in own else base), shape)
            for name, shape in own_form(_shapes(config), config).items()}
    shards = _split({name: size for name, (_, _, size) in form.items()}, shard_bytes)
    files = [SINGLE] if len(shards) == 1 else [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
                                               for i in range(len(shards))]
    headers = {file: make_header({name: form[name] for name in names}, {"format": "pt"})
               for file, names in zip(files, shards)}
    with new_folder(path, overwrite) as folder:
        _write_json(folder / "config.json", {**config.to_hf(), "dtype": str(base).removeprefix("torch.")})
        _carry_files(tokenizer_from, folder)
        for file, header in headers.items():
            write_file(folder / file, header, lambda name, entry: _built(name, entry, state, config))
        if len(shards) > 1:
            where = {name: file for file, names in zip(files, shards) for name in names}
            total = sum(total_bytes(entries(header, file)) for file, header in headers.items())
            _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})


def save_like(model: Model, path: str | Path, source: str | Path, overwrite: bool = False,
              dtype: torch.dtype | None = None) -> str | None:
    """Write the model in the form of `source`, the directory it was loaded from: the same files, headers and names;
    tensors that are not ours, config.json and `CARRIED` files byte for byte. Returns what was written, in words, on the
    first rank of a mesh; all must call it.

    dtype: what to store our tensors in, instead of the source's dtypes; those that the source keeps wider than its
    embedding (decays in float32) stay so.

    Raises ValueError, before anything is written, when the source is of another model or its tensors are not exactly
    ours and the known carried ones.
    """
    return with_whole_state(model, lambda state: _save_like(model, state, path, source, overwrite, dtype))


def _save_like(model: Model, state: Mapping[str, Tensor], path: str | Path, source: str | Path, overwrite: bool,
               dtype: torch.dtype | None) -> str:
    stored, config = read_headers(source), load_config(source)
    _check_same_model(source, config, model.config)
    carried = check_coverage(stored, config)
    headers = stored.headers if dtype is None else recast(stored, dtype)

    def numbers(name: str, entry: Entry) -> Tensor:
        return stored.read(name) if is_untouched(name) else _built(name, entry, state, config)

    with new_folder(Path(path), overwrite) as folder:
        for file, header in headers.items():
            write_file(folder / file, header, numbers)
        _carry_files(source, folder)
        for name in ("config.json", INDEX):
            if (stored.folder / name).is_file():
                shutil.copyfile(stored.folder / name, folder / name)
        if dtype is not None:
            _say_dtype(folder, dtype, sum(total_bytes(entries(header, file)) for file, header in headers.items()))
    return (f"{path}: {len(stored.tensors)} tensors in {len(headers)} files, {len(stored.tensors) - carried} of them "
            f"the model's, {carried} carried along")


def export(source: str | Path, target: str | Path) -> str:
    """Read a model, prove that every tensor is accounted for, write it anew in the same form; returns what was written.

    It is read in the narrowest dtype that holds every number exactly. Raises ValueError, too, for a target within the
    source: reading would find it there.
    """
    if Path(target).resolve().is_relative_to(Path(source).resolve()):
        raise ValueError(f"{target} lies within {source}, the model to be read; name a place outside it")
    stored = read_headers(source)
    check_coverage(stored, load_config(source))
    dtypes = [DTYPES[entry.dtype] for name, entry in stored.tensors.items()
              if not is_untouched(name) and (entry.dtype == "F64" or not stays_float32(name))]
    return save_like(load(source, reduce(torch.promote_types, dtypes)), target, source)


def check_coverage(stored: Stored, config: ModelConfig) -> int:
    """Prove that the stored tensors fill every parameter exactly once; returns how many are carried along instead.

    ValueError names the first tensor that is missing, unexpected, there twice, of another shape, or not floating point,
    and a head that is not the embedding it is tied to.
    """
    parameters = _shapes(config)
    filled: Counter[str] = Counter()
    seen, unexpected, carried = set(), [], 0
    for name, entry in stored.tensors.items():
        if is_untouched(name):
            carried += 1
            continue
        if entry.dtype not in DTYPES:
            raise ValueError(f"{stored.folder}: {name} is stored as {entry.dtype}, which needs dequantising first")
        try:
            found = list(pairs(name, torch.empty(entry.shape, device="meta"), parameters, config))
        except KeyError:
            unexpected.append(name)
            continue
        except ValueError as problem:
            raise ValueError(f"{stored.folder}: {name} {problem}") from None
        for own, _, view in () if is_extra_head(name, config) else found:
            # views of one parameter are the same or apart, so counting numbers is proof once none is there twice
            if (place := (own, view.storage_offset(), view.shape)) in seen:
                raise ValueError(f"{stored.folder}: {own} is more than once there, again in {name}")
            seen.add(place)
            filled[own] += view.numel()
    missing = [name for name in parameters if not filled[name]]
    for what, names in (("missing", missing), ("unexpected", unexpected)):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ValueError(f"{stored.folder}: {what} tensor {', '.join(sorted(names)[:3])}{more}")
    for name, p in parameters.items():
        if filled[name] != p.numel():
            how = "only partly" if filled[name] < p.numel() else "more than once"
            raise ValueError(f"{stored.folder}: {name} is {how} there ({filled[name]:,} of {p.numel():,} numbers)")
    _check_extra_head(stored, config)
    return carried


def _check_extra_head(stored: Stored, config: ModelConfig) -> None:
    heads = [name for name in stored.tensors if is_extra_head(name, config)]
    if heads:
        embedding = stored.tensor(next(name for name in stored.tensors if own_name(name) == EMBEDDING))
        head = stored.tensor(heads[0])
        wide = torch.promote_types(head.dtype, embedding.dtype)
        if not torch.equal(head.to(wide), embedding.to(wide)):
            raise ValueError(f"{stored.folder}: tie_word_embeddings = true, but lm_head.weight differs from the "
                             "embedding")


def _check_same_model(source: str | Path, config: ModelConfig, ours: ModelConfig) -> None:
    """Compared as language models alone, which is what a multi-modal source is after a checkpoint."""
    theirs, wanted = config.to_hf(), ours.to_hf()
    for name in sorted(theirs.keys() | wanted.keys()):
        if theirs.get(name) != wanted.get(name):
            raise ValueError(f"{source}: config.json is of another model than the one to be saved: {name} = "
                             f"{theirs.get(name)!r}, the model has {wanted.get(name)!r}")


def _built(name: str, entry: Entry, parameters: Mapping[str, Tensor], config: ModelConfig) -> Tensor:
    """A stored tensor, from the parameters it is made of."""
    tensor = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
    for _, target, ours in pairs(name, tensor, parameters, config):
        target.copy_(ours)
    return tensor


def _form(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...], int]:
    """What a header says of a tensor: its dtype's name, its shape, its bytes."""
    return NAMES[dtype], shape, math.prod(shape) * dtype.itemsize


def recast(stored: Stored, dtype: torch.dtype) -> dict[str, bytes]:
    """The headers of the same files with our tensors in another dtype."""
    base = next(DTYPES[e.dtype] for name, e in stored.tensors.items() if own_name(name) == EMBEDDING)

    def recast(name: str, entry: Entry) -> tuple[str, tuple[int, ...], int]:
        if is_untouched(name):
            return entry.dtype, entry.shape, entry.end - entry.start
        now = DTYPES[entry.dtype]
        return _form(torch.promote_types(now, dtype) if now.itemsize > base.itemsize else dtype, entry.shape)

    return {file: make_header({name: recast(name, entry) for name, entry in entries(header, file).items()},
                              metadata_of(header)) for file, header in stored.headers.items()}


# --- writing -----------------------------------------------------------------------------------------------------

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


def _say_dtype(folder: Path, dtype: torch.dtype, total: int) -> None:
    """Correct a copied config.json and index, where they tell the language model's dtype and the size."""
    config = read_json(folder / "config.json")
    for part in (config, config.get("text_config")):
        if isinstance(part, dict):
            part.update({key: str(dtype).removeprefix("torch.") for key in ("dtype", "torch_dtype") if key in part})
    _write_json(folder / "config.json", config)
    if (folder / INDEX).is_file():
        index = read_json(folder / INDEX)
        index["metadata"] = {**index.get("metadata", {}), "total_size": total}
        _write_json(folder / INDEX, index)


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
