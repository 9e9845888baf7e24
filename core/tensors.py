"""The safetensors files of a model directory: what is stored where, and reading and writing one tensor at a time.

A file is a header, then the numbers. The header is its own length (8 bytes, little-endian) and JSON: for each name its
dtype, shape and place behind the header, and free text under `__metadata__`. Files are written here, not by the
library, because a mirror keeps its source's header to the byte (the library sorts tensors and shuffles metadata), and
because no more than one tensor of a shard is then in memory.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Mapping

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
METADATA = "__metadata__"


@dataclass(frozen=True)
class Entry:
    """One stored tensor: its file, safetensors dtype and shape, and the bytes of the file it takes, [start, end)."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Stored:
    """The weights of a directory without their numbers. headers: by file, byte for byte; tensors: by name, in the order
    of the files and of their numbers within."""

    folder: Path
    headers: Mapping[str, bytes]
    tensors: Mapping[str, Entry]

    def read(self, name: str) -> Tensor:
        """The bytes of a tensor, uint8 [end - start]."""
        entry = self.tensors[name]
        raw = torch.empty(entry.end - entry.start, dtype=torch.uint8)
        with open(self.folder / entry.file, "rb") as f:
            f.seek(entry.start)
            if f.readinto(raw.numpy()) != len(raw):
                raise ValueError(f"{self.folder / entry.file}: ends within {name}; was it changed while being read?")
        return raw

    def tensor(self, name: str) -> Tensor:
        """A tensor whose dtype is one of DTYPES, as stored."""
        entry = self.tensors[name]
        return self.read(name).view(DTYPES[entry.dtype]).reshape(entry.shape)


def read_headers(path: str | Path) -> Stored:
    """What a directory stores, in one file or in the shards of an index.

    FileNotFoundError: no weights, or a shard that the index names is missing. ValueError: a file that is not whole, an
    index that does not say what is in the shards, or both forms side by side.
    """
    folder = Path(path)
    index = _read_index(folder)
    where = index["weight_map"] if index else None
    if where is None and not (folder / SINGLE).is_file():
        raise FileNotFoundError(f"{folder}: neither {SINGLE} nor {INDEX}")
    headers, tensors = {}, {}
    for file in sorted(set(where.values())) if where else [SINGLE]:
        headers[file] = _read_header(folder / file)
        for name, entry in entries(headers[file], file).items():
            if where is not None and where.get(name) != file:
                raise ValueError(f"{folder / file}: holds {name}, which {INDEX} "
                                 + (f"places in {where[name]}" if name in where else "does not name"))
            tensors[name] = entry
    absent = [name for name in where or () if name not in tensors]
    if absent:
        raise ValueError(f"{folder / where[absent[0]]}: {absent[0]} is in {INDEX} but not in the shard")
    stored = Stored(folder, headers, tensors)
    said = (index or {}).get("metadata", {}).get("total_size")
    if said is not None and said != total_bytes(tensors):
        raise ValueError(f"{folder / INDEX}: total_size = {said}, but the shards hold {total_bytes(tensors)} bytes")
    return stored


def total_bytes(tensors: Mapping[str, Entry]) -> int:
    """Bytes of the numbers, what an index calls total_size."""
    return sum(entry.end - entry.start for entry in tensors.values())


def entries(header: bytes, file: str) -> dict[str, Entry]:
    """The tensors that a header describes, in the order of their numbers."""
    found = {}
    for name, at in json.loads(header[8:]).items():
        if name != METADATA:
            start, end = (len(header) + offset for offset in at["data_offsets"])
            found[name] = Entry(file, at["dtype"], tuple(at["shape"]), start, end)
    return dict(sorted(found.items(), key=lambda item: (item[1].start, item[1].end)))


def make_header(form: Mapping[str, tuple[str, tuple[int, ...], int]], metadata: Mapping[str, str] | None) -> bytes:
    """The header of a file with these tensors (name -> safetensors dtype, shape, bytes): as the library has it, widest
    numbers first, which aligns them all, then by name."""
    width = {name: size // max(1, math.prod(shape)) for name, (_, shape, size) in form.items()}
    header: dict[str, object] = {METADATA: dict(metadata)} if metadata else {}
    end = 0
    for name in sorted(form, key=lambda name: (-width[name], name)):
        dtype, shape, size = form[name]
        start, end = end, end + size
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def metadata_of(header: bytes) -> dict[str, str] | None:
    return json.loads(header[8:]).get(METADATA)


def write_file(path: Path, header: bytes, numbers: Callable[[str, Entry], Tensor]) -> None:
    """Write a file: the header, then for each tensor of it what `numbers` gives, asked for one by one."""
    with open(path, "wb") as f:
        f.write(header)
        for name, entry in entries(header, path.name).items():
            f.write(numbers(name, entry).contiguous().reshape(-1).view(torch.uint8).numpy())
            assert f.tell() == entry.end, (name, entry, f.tell())


def read_json(path: Path) -> dict:
    """A JSON object. FileNotFoundError or ValueError name the file."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: must hold a JSON object")
    return value


def _read_index(folder: Path) -> dict | None:
    """The index of a directory that has one, its weight_map checked: every shard it names is there."""
    path = folder / INDEX
    if not path.is_file():
        return None
    index = read_json(path)
    where = index.get("weight_map")
    files = where.values() if isinstance(where, dict) else ()
    if not files or not all(isinstance(file, str) and Path(file).name == file for file in files):
        raise ValueError(f"{path}: weight_map must map tensor names to files of this folder")
    if not isinstance(index.get("metadata", {}), dict):
        raise ValueError(f"{path}: metadata = {str(index['metadata'])[:40]} must be a JSON object")
    for file in sorted(set(files)):
        if not (folder / file).is_file():
            raise FileNotFoundError(f"{folder / file}: shard named by {INDEX} is missing")
    if (folder / SINGLE).is_file() and SINGLE not in files:
        raise ValueError(f"{folder}: holds {SINGLE} and {INDEX}, which does not name it; remove the one that is stale")
    return index


def _read_header(path: Path) -> bytes:
    """A header, byte for byte, of a file that the library finds whole."""
    try:
        with safe_open(path, framework="pt"):
            pass
    except SafetensorError as error:
        raise ValueError(f"{path}: not a whole safetensors file ({error})") from None
    with open(path, "rb") as f:
        length = f.read(8)
        return length + f.read(int.from_bytes(length, "little"))
