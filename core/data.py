"""Recorded conversations to training examples, and the order in which examples are read.

A row, a line of JSON or a Parquet row (core/sources.py), is in the plainest case

    {"messages": [...], "tools": optional, "id": optional}

with `messages` as core/messages.py describes them; the published sets' other shapes are in core/shapes.py. The loss
falls on what an assistant message sampled.
"""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Callable

import numpy as np

from oprd.core import shapes, sources
from oprd.core.chat import Chat
from oprd.core.messages import FieldError
from oprd.core.tokenizer import Tokenizer
from oprd.core.types import Example, Row

log = logging.getLogger(__name__)


def read_sft(path: str | Path, chat: Chat, max_tokens: int, strict: bool = True, skipped: Counter | None = None,
             only_resolved: bool = False) -> list[Example]:
    """Examples (branch `sft`, `nll` weight 1 on every trained token) of a file of rows or a folder of them, in order.

    A bad row is a ValueError that names file, line, id and field. With strict=False it is left out, counted by reason
    in `skipped` and reported once in the log. A row longer than max_tokens is bad: a conversation cut in the middle
    would teach a turn without its end. only_resolved leaves out (and counts) rows whose own mark says that the task was
    not solved; a row without a mark is bad.
    """
    return _read(path, lambda row, where: _example(row, chat, max_tokens, where), strict, skipped, only_resolved)


def read_text(path: str | Path, tokenizer: Tokenizer, max_tokens: int, strict: bool = True,
              skipped: Counter | None = None, only_resolved: bool = False) -> list[Example]:
    """Examples of rows {"text": ...}: every token but the first is trained; long texts are cut. The rest: read_sft."""
    return _read(path, lambda row, where: _text_example(row, tokenizer, max_tokens, where), strict, skipped,
                 only_resolved)


class Order:
    """Which of n items stands at position 0, 1, 2, ... of an endless, shuffled reading.

    Every epoch (n positions) holds each item once, in its own order. `order[position]` is a pure function of n, seed
    and position, so a resumed run needs to keep nothing but its position.
    """

    def __init__(self, n: int, seed: int):
        if n < 1:
            raise ValueError(f"items = {n} must be at least 1 to be put in an order")
        self.n, self.seed = n, seed
        self._epoch, self._permutation = -1, np.empty(0, np.int64)

    def __getitem__(self, position: int) -> int:
        """The item at a position >= 0."""
        if position < 0:
            raise IndexError(f"position = {position} must be at least 0")
        epoch, offset = divmod(position, self.n)
        if epoch != self._epoch:  # remembered only to save time
            rng = np.random.Generator(np.random.PCG64([self.seed, epoch]))
            self._epoch, self._permutation = epoch, rng.permutation(self.n)
        return int(self._permutation[offset])


def _read(path: str | Path, made: Callable[[dict, str], Example], strict: bool, skipped: Counter | None,
          only_resolved: bool) -> list[Example]:
    """made: (row, its place) -> its example; raises FieldError."""
    examples: list[Example] = []
    left_out: Counter = Counter()
    for where, row in sources.rows(path):
        try:
            if isinstance(row, FieldError):
                raise row
            if only_resolved and not shapes.resolved(row):
                left_out["unresolved"] += 1
            else:
                examples.append(made(row, where))
        except FieldError as error:
            if strict:
                raise ValueError(f"{_place(where, row)}: {error}") from None
            left_out[error.reason] += 1
    if left_out:
        counts = ", ".join(f"{reason} {count}" for reason, count in sorted(left_out.items()))
        log.warning("%s: left out %d of %d rows: %s", path, left_out.total(), left_out.total() + len(examples), counts)
    if skipped is not None:
        skipped.update(left_out)
    if not examples:
        raise ValueError(f"{path}: no usable row ({left_out.total()} left out); at least one is needed")
    return examples


def _text_example(row: dict, tokenizer: Tokenizer, max_tokens: int, where: str) -> Example:
    text = row.get("text")
    if not isinstance(text, str):
        raise FieldError("text", f"must be a string, got {type(text).__name__}", "text")
    ids = np.asarray(tokenizer.encode(text), np.int64)[:max_tokens]
    if len(ids) < 2:
        raise FieldError("text", f"{text!r} must have two tokens or more", "too_short")
    return Example(Row(ids, np.arange(1, len(ids))), {"nll": np.ones(len(ids) - 1)}, source=_place(where, row))


def _example(row: dict, chat: Chat, max_tokens: int, where: str) -> Example:
    recorded = shapes.read_row(row)
    try:
        ids, trained = chat.render(recorded.messages, recorded.tools)
    except FieldError as error:
        if recorded.field == "messages":
            raise
        problem = str(error).removeprefix(f"{error.field}: ")
        raise FieldError(error.field, f"{problem} ({recorded.field} read as {recorded.shape})", error.reason) from None
    targets = np.flatnonzero(np.array(trained, bool))
    if not len(targets):
        raise FieldError(recorded.field, "no token to train; a row needs an assistant message of weight 1", "no_target")
    if len(ids) > max_tokens:
        problem = f"{len(ids)} tokens must be at most max_tokens = {max_tokens}; raise it or leave the row out"
        raise FieldError(recorded.field, problem, "too_long")
    weights = {"nll": np.ones(len(targets))}
    unit = shapes.own_id(row) or where
    return Example(Row(np.array(ids, np.int64), targets), weights, unit=unit, source=_place(where, row))


def _place(where: str, row: dict | FieldError) -> str:
    name = None if isinstance(row, FieldError) else shapes.shown_id(row)
    return where if name is None else f"{where} (id {name})"
