"""Log-probabilities of given token ids, for comparing this program with another: JSON lines in, the same lines out."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from oprd.core import sources
from oprd.core.types import Row
from oprd.kernels.cross_entropy import token_nll

log = logging.getLogger(__name__)


@torch.inference_mode()
def logprobs(model, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
    """log p(ids[i] | ids[:i]) for i >= 1 of every sequence, all packed into one forward: float32 [L - 1] each."""
    ids = torch.tensor([i for sequence in sequences for i in sequence], dtype=torch.int64)
    lengths = [len(sequence) for sequence in sequences]
    ends = np.cumsum(lengths)
    hidden = model.hidden(ids, torch.tensor([0, *ends], dtype=torch.int32))
    last = torch.zeros(len(ids), dtype=torch.bool)
    last[torch.from_numpy(ends) - 1] = True  # predicts nothing of its own sequence
    at = (~last).nonzero().squeeze(1)
    values = -token_nll(hidden[at], model.head_weight, ids[at + 1])
    return list(values.split([n - 1 for n in lengths]))


@torch.inference_mode()
def target_logprobs(model, rows: Sequence[Row], token_budget: int, temperature: float = 1.0) -> list[np.ndarray]:
    """log p of every target of every row, p = softmax(logits / temperature), float64 [len(row.targets)] each; rows are
    packed up to token_budget tokens."""
    found: list[np.ndarray] = []
    while len(found) < len(rows):
        first, tokens, end = len(found), 0, len(found)
        while end < len(rows) and (end == first or tokens + len(rows[end].ids) <= token_budget):
            tokens += len(rows[end].ids)
            end += 1
        some = rows[first:end]
        starts = np.cumsum([0, *(len(row.ids) for row in some)])
        device = model.head_weight.device
        ids = torch.from_numpy(np.concatenate([row.ids for row in some])).to(device)
        at = torch.from_numpy(np.concatenate([row.targets + start for row, start in zip(some, starts)])).to(device)
        hidden = model.hidden(ids, torch.tensor(starts, dtype=torch.int32, device=device))
        values = -token_nll(hidden[at - 1] / temperature, model.head_weight, ids[at])
        found += [part.double().cpu().numpy() for part in values.split([len(row.targets) for row in some])]
    return found


def score_lines(model, lines: Sequence[dict[str, Any]], token_budget: int) -> Iterator[dict[str, Any]]:
    """Every line with `logprobs`, in order; neighbours share a forward of at most token_budget tokens, and a longer
    line has one of its own. A log-probability that is no number is null, as JSON has none, and is told in the log."""
    start = wrong = 0
    while start < len(lines):
        end, tokens = start, 0
        while end < len(lines) and (end == start or tokens + len(lines[end]["ids"]) <= token_budget):
            tokens += len(lines[end]["ids"])
            end += 1
        found = logprobs(model, [line["ids"] for line in lines[start:end]])
        for line, values in zip(lines[start:end], found, strict=True):
            numbers = [value if math.isfinite(value) else None for value in values.tolist()]
            wrong += numbers.count(None)
            yield {**line, "logprobs": numbers}
        start = end
    if wrong:
        log.warning("%d log-probabilities are not finite and stand as null; are the model's weights whole?", wrong)


def read_lines(path: str | Path, vocab_size: int) -> list[dict[str, Any]]:
    """Lines {"ids": [...], ...} of a JSONL file, at least one. FileNotFoundError; ValueError names file and line."""
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file")
    lines = []
    for number, text in sources.lines(file):
        where = f"{file}:{number}"
        try:
            line = sources.parse(number, text)
        except ValueError as problem:
            raise ValueError(f"{where}: {problem}") from None
        ids = line.get("ids")
        if not isinstance(ids, list) or not ids or any(type(i) is not int for i in ids):
            raise ValueError(f'{where}: must be an object with "ids", a list of at least one token id')
        wrong = next((i for i in ids if not 0 <= i < vocab_size), None)
        if wrong is not None:
            raise ValueError(f"{where}: ids holds {wrong}, the model's vocabulary is 0..{vocab_size - 1}")
        if "logprobs" in line:
            raise ValueError(f"{where}: has a field logprobs already, which scoring would replace; rename it")
        lines.append(line)
    if not lines:
        raise ValueError(f"{file}: no lines in the file")
    return lines
