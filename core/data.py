"""Recorded conversations to training examples, and the order in which examples are read.

One line of an SFT file is one JSON object:

    {"messages": [...], "tools": optional, "id": optional}

with `messages` as core/messages.py describes them. The loss falls on what an assistant message sampled.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any, Callable

import numpy as np

from oprd.core.chat import Chat
from oprd.core.messages import FieldError
from oprd.core.tokenizer import Tokenizer
from oprd.core.types import Example, Row

log = logging.getLogger(__name__)


def read_sft(
    path: str | Path, chat: Chat, max_tokens: int, strict: bool = True, skipped: Counter | None = None
) -> list[Example]:
    """Examples (branch `sft`, `nll` weight 1 on every trained token) of a JSONL file, in the file's order.

    A bad row is a ValueError that names file, line, id and field. With strict=False it is left out, counted by reason
    in `skipped` and reported once in the log. A row longer than max_tokens is bad: a conversation cut in the middle
    would teach a turn without its end.
    """
    return _read(path, lambda row, where: _example(row, chat, max_tokens, where), strict, skipped)


def read_text(path: str | Path, tokenizer: Tokenizer, max_tokens: int, strict: bool = True,
              skipped: Counter | None = None) -> list[Example]:
    """Examples of a JSONL file of {"text": ...} lines: every token but the first is trained; long texts are cut.
    Bad rows: see read_sft."""
    return _read(path, lambda row, where: _text_example(row, tokenizer, max_tokens, where), strict, skipped)


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


def _read(path: str | Path, made: Callable[[dict, str], Example], strict: bool,
          skipped: Counter | None) -> list[Example]:
    """made: (row, its place) -> its example; raises FieldError."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected JSON lines")
    examples: list[Example] = []
    reasons: Counter = Counter()
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            row: Any = None
            try:
                row = _parse(line)
                examples.append(made(row, where))
            except FieldError as error:
                if strict:
                    raise ValueError(f"{_place(where, row)}: {error}") from None
                reasons[error.reason] += 1
    if reasons:
        counts = ", ".join(f"{reason} {count}" for reason, count in sorted(reasons.items()))
        log.warning("%s: left out %d of %d rows: %s", path, reasons.total(), reasons.total() + len(examples), counts)
    if skipped is not None:
        skipped.update(reasons)
    if not examples:
        raise ValueError(f"{path}: no usable row ({reasons.total()} left out); at least one is needed")
    return examples


def _text_example(row: dict, tokenizer: Tokenizer, max_tokens: int, where: str) -> Example:
    text = row.get("text")
    if not isinstance(text, str):
        raise FieldError("text", f"must be a string, got {type(text).__name__}", "text")
    ids = np.asarray(tokenizer.encode(text), np.int64)[:max_tokens]
    if len(ids) < 2:
        raise FieldError("text", f"{text!r} must have two tokens or more", "too_short")
    return Example(Row(ids, np.arange(1, len(ids))), {"nll": np.ones(len(ids) - 1)}, source=_place(where, row))


def _parse(line: bytes) -> dict:
    try:
        row = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise FieldError("row", f"is not valid JSON ({error}); is the line cut off?", "json") from None
    if not isinstance(row, dict):
        raise FieldError("row", "must be a JSON object", "json")
    return row


def _example(row: dict, chat: Chat, max_tokens: int, where: str) -> Example:
    if "messages" not in row:
        raise FieldError("messages", f"is missing; the row has {', '.join(sorted(row)) or 'no field'}", "messages")
    ids, trained = chat.render(row["messages"], row.get("tools"))
    targets = np.flatnonzero(np.array(trained, bool))
    if not len(targets):
        raise FieldError("messages", "no token to train; a row needs an assistant message of weight 1", "no_target")
    if len(ids) > max_tokens:
        problem = f"{len(ids)} tokens must be at most max_tokens = {max_tokens}; raise it or leave the row out"
        raise FieldError("messages", problem, "too_long")
    weights = {"nll": np.ones(len(targets))}
    name = str(row.get("id", where))
    return Example(Row(np.array(ids, np.int64), targets), weights, unit=name, source=_place(where, row))


def _place(where: str, row: Any) -> str:
    named = isinstance(row, dict) and row.get("id") is not None
    return f"{where} (id {row['id']})" if named else where
