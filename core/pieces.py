"""A training state as boxes of whole tensors, written and read through torch.distributed.checkpoint.

Every rank gives the boxes it has; on any other mesh a rank asks for the boxes it needs and gets them from whatever
files they lie in. Names: `model/NAME` (the numbers the optimizer updates), `teacher/NAME`, `exp_avg/NAME`,
`exp_avg_sq/NAME`. What a mesh pads is no part of a whole tensor and is not stored.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Iterable, Iterator, Sequence

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties,
                                                   TensorStorageMetadata)
from torch.distributed.checkpoint.planner import (LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner,
                                                  TensorWriteData, WriteItem, WriteItemType)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from oprd.core.model import Model
from oprd.core.optim import AdamW
from oprd.parallel.layers import Cut
from oprd.parallel.mesh import Axis


@dataclass(frozen=True, eq=False)
class Piece:
    """A box of a whole tensor: `tensor` (its sizes) at `offsets` of the tensor `name` of shape `whole`."""

    name: str
    whole: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: Tensor

    @property
    def index(self) -> MetadataIndex:
        return MetadataIndex(self.name, torch.Size(self.offsets))

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(offsets=torch.Size(self.offsets), sizes=self.tensor.shape)

    def copied(self) -> "Piece":
        """With numbers of its own, in CPU memory."""
        return replace(self, tensor=self.tensor.detach().to("cpu", copy=True).contiguous())


def boxes(name: str, rows: Tensor, first: int, part: Sequence[int], cut: Cut) -> Iterator[Piece]:
    """The boxes of a rank's part (of shape `part`) of a parameter that are its rows first .. first + len(rows)."""
    whole = cut.whole_shape(part)
    for start, place, length in cut.runs():
        if cut.dim == 0:
            low, high = max(first, place), min(first + len(rows), place + length)
            if low < high:
                yield Piece(name, whole, (start + low - place, *[0] * (len(part) - 1)), rows[low - first : high - first])
        elif len(rows):
            offsets = [0] * len(part)
            offsets[0], offsets[cut.dim] = first, start
            yield Piece(name, whole, tuple(offsets), rows.narrow(cut.dim, place, length))


def state_pieces(model: Model, optimizer: AdamW, teacher: Model | None, writing: bool) -> list[Piece]:
    """The training state of this rank: for writing, what the ranks that have the same numbers leave to it; else all."""
    found: list[Piece] = []
    cuts, parameters = model.cuts, optimizer.parameters
    parts = [(kind, name, first, rows, parameters[name].shape) for kind, name, first, rows in optimizer.parts()]
    parts += [("teacher", name, 0, p, p.shape) for name, p in (teacher.state_dict() if teacher else {}).items()]
    for kind, name, first, rows, part in parts:
        low, high = own_rows(part[0], cuts[name].replicas) if writing else (0, part[0])
        low, high = max(low, first), min(high, first + len(rows))
        if low < high:
            found += boxes(f"{kind}/{name}", rows[low - first : high - first], low, part, cuts[name])
    return found


def own_rows(rows: int, replicas: Axis) -> tuple[int, int]:
    """Which rows of a parameter this rank writes, of those that have the same ones: from, to."""
    share = -(-rows // replicas.size)
    return min(replicas.rank * share, rows), min((replicas.rank + 1) * share, rows)


def write(path: Path, pieces: Iterable[Piece], axis: Axis) -> None:
    """Write all ranks' pieces into one folder; together they must be every number of every tensor once."""
    writer = dcp.FileSystemWriter(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({}, storage_writer=writer, planner=_Writing(pieces), process_group=axis.group, no_dist=axis.size == 1)


def read(path: Path, pieces: Iterable[Piece], axis: Axis) -> None:
    """Fill the pieces from a folder. ValueError: a tensor that is not there, or of another shape."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load({}, storage_reader=dcp.FileSystemReader(path), planner=_Reading(pieces), process_group=axis.group,
                 no_dist=axis.size == 1)


class _Writing(SavePlanner):
    def __init__(self, pieces: Iterable[Piece]):
        self.pieces = {piece.index: piece for piece in pieces}

    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False) -> None:
        """Everything was given already."""

    def create_local_plan(self) -> SavePlan:
        return SavePlan([WriteItem(index, WriteItemType.SHARD, tensor_data=TensorWriteData(
            piece.chunk, TensorProperties.create_from_tensor(piece.tensor), torch.Size(piece.whole)))
            for index, piece in self.pieces.items()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = create_default_global_save_plan(all_plans, rewrite_index_hints=False)
        for name, tensor in metadata.state_dict_metadata.items():
            there = sum(chunk.sizes.numel() for chunk in tensor.chunks)
            assert there == tensor.size.numel(), f"{name}: {there} of {tensor.size.numel()} numbers are to be written"
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.pieces[write_item.index].tensor.detach()


class _Reading(LoadPlanner):
    def __init__(self, pieces: Iterable[Piece]):
        self.pieces = {piece.index: piece for piece in pieces}

    def set_up_planner(self, state_dict, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self.stored = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for index, piece in self.pieces.items():
            stored = self.stored.get(index.fqn)
            if not isinstance(stored, TensorStorageMetadata) or tuple(stored.size) != piece.whole:
                have = f"has shape {list(stored.size)}" if isinstance(stored, TensorStorageMetadata) else "is missing"
                raise ValueError(f"{index.fqn} {have}, the model's is {list(piece.whole)}")
            items += create_read_items_for_chunk_list(index.fqn, stored, [piece.chunk])
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value) -> None:
        raise AssertionError("nothing but tensors is stored")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        piece = self.pieces[MetadataIndex(read_item.dest_index.fqn, read_item.dest_index.offset)]
        target = piece.tensor.detach()
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths)):
            target = target.narrow(dim, offset, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Read straight into its place."""
