"""Sampling the next token of many requests at once, each with its own temperature, top-p and random numbers.

N running requests (rows), V vocabulary. A row's samples depend on its own logits, settings and seed only: its uniform
numbers are drawn when it joins, and every row goes through the same arithmetic whatever its neighbours ask for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oprd.rollout.engine import Sampling

LIKELIEST = 64  # tokens looked at first for top-p; a full sort follows only when they do not reach it


class Sampler:
    """Rows 0..N-1 are occupied; leave(row) moves the last row into the hole, as the decoder does."""

    def __init__(self, rows: int):
        self.n = 0
        self.temperature = torch.ones(rows, 1)  # 1 for a greedy row: its log-probabilities are those of the logits
        self.top_p = torch.ones(rows, 1, dtype=torch.float64)
        self.greedy = torch.zeros(rows, dtype=torch.bool)
        self.slot = torch.zeros(rows, dtype=torch.int64)  # where the next token's numbers lie in the flat tables below
        self.uniforms = torch.zeros(rows, 64, dtype=torch.float64)
        self.logprobs = torch.zeros(rows, 64)
        self.settings: list[Sampling] = []  # of the occupied rows: what need not be looked up in a tensor

    def join(self, sampling: Sampling, seed: int) -> None:
        """Add a request as the last row. Its uniforms are a function of the seed alone (a prefix, however many)."""
        row, most = self.n, sampling.max_new_tokens
        if most > self.uniforms.shape[1]:
            self._widen(most)
        generator = torch.Generator().manual_seed(seed)
        # float32 numbers in float64 arithmetic: u * total stays below total, so no draw falls off the end
        self.uniforms[row, :most] = torch.rand(most, generator=generator)
        self.greedy[row] = sampling.temperature == 0
        self.temperature[row] = sampling.temperature or 1.0
        self.top_p[row] = sampling.top_p
        self.slot[row] = row * self.uniforms.shape[1]
        self.settings.append(sampling)
        self.n += 1

    def sample(self, logits: Tensor, first: int) -> list[int]:
        """The next token of rows first..N-1 from their logits [N - first, V]; remembers the log-probabilities.

        FloatingPointError: logits hold NaN or infinity."""
        rows, settings = slice(first, self.n), self.settings[first:]
        plain = all(s.temperature in (0, 1) for s in settings)
        logprobs = torch.log_softmax(logits if plain else logits / self.temperature[rows], dim=-1)
        slot = self.slot[rows]
        uniforms = self.uniforms.view(-1).index_select(0, slot).unsqueeze(1)
        narrow = [i for i, s in enumerate(settings) if s.top_p < 1]
        if len(narrow) == len(settings):
            ids = _nucleus(logprobs, self.top_p[rows], uniforms)
        else:
            ids = _drawn(logprobs.exp(), uniforms)
            if narrow:
                ids[narrow] = _nucleus(logprobs[narrow], self.top_p[rows][narrow], uniforms[narrow])
        if any(s.temperature == 0 for s in settings):
            ids = torch.where(self.greedy[rows], logits.argmax(-1), ids)
        self.logprobs.view(-1).index_copy_(0, slot, logprobs.gather(1, ids.unsqueeze(1)).squeeze(1))
        slot += 1
        return ids.tolist()

    def leave(self, row: int, tokens: int) -> list[float]:
        """Take a request out; returns its log-probabilities. The last row moves into its place."""
        logprobs = self.logprobs[row, :tokens].tolist()
        self.n -= 1
        used = int(self.slot[self.n]) - self.n * self.uniforms.shape[1]
        for values in (self.temperature, self.top_p, self.greedy, self.uniforms, self.logprobs):
            values[row] = values[self.n]
        self.slot[row] = row * self.uniforms.shape[1] + used
        self.settings[row] = self.settings[self.n]
        self.settings.pop()
        return logprobs

    def _widen(self, width: int) -> None:
        """Room for `width` tokens in every row."""
        rows, old = self.uniforms.shape
        self.slot += torch.arange(rows) * (width - old)
        pad = torch.zeros(rows, width - old)
        self.uniforms = torch.cat([self.uniforms, pad.double()], dim=1)
        self.logprobs = torch.cat([self.logprobs, pad], dim=1)


def _drawn(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """The token at which the running sum of the probabilities [N, V] first exceeds its share uniforms [N, 1]: [N]."""
    sums = probabilities.cumsum(-1, dtype=torch.float64)
    if not sums[:, -1].isfinite().all():
        raise FloatingPointError("logits are not finite: the weights have diverged")
    return torch.searchsorted(sums, uniforms * sums[:, -1:], right=True).squeeze(1)


def _nucleus(logprobs: Tensor, top_p: Tensor, uniforms: Tensor) -> Tensor:
    """A draw from the smallest set of likeliest tokens whose probabilities reach top_p [N, 1]: [N].

    The likeliest LIKELIEST tokens nearly always reach it; a row in which they do not is drawn from all of its own,
    sorted, so that what a row gets never depends on another.
    """
    values, order = logprobs.topk(min(LIKELIEST, logprobs.shape[1]), dim=-1)
    sums = values.exp_().cumsum(-1, dtype=torch.float64)
    reached = (sums[:, -1:] >= top_p).squeeze(1)
    if sums.shape[1] == logprobs.shape[1] or reached.all():
        return _within(sums, order, top_p, uniforms)
    if not reached.any():
        return _from_all(logprobs, top_p, uniforms)
    ids, short = torch.empty(len(logprobs), dtype=torch.int64), ~reached
    ids[reached] = _within(sums[reached], order[reached], top_p[reached], uniforms[reached])
    ids[short] = _from_all(logprobs[short], top_p[short], uniforms[short])
    return ids


def _from_all(logprobs: Tensor, top_p: Tensor, uniforms: Tensor) -> Tensor:
    """_nucleus() over the whole vocabulary, sorted."""
    values, order = logprobs.sort(dim=-1, descending=True, stable=True)
    return _within(values.exp_().cumsum(-1, dtype=torch.float64), order, top_p, uniforms)


def _within(sums: Tensor, order: Tensor, top_p: Tensor, uniforms: Tensor) -> Tensor:
    """A draw from the sorted tokens `order` up to the first whose running sum reaches top_p."""
    last = torch.searchsorted(sums, top_p).clamp_(max=sums.shape[1] - 1)
    total = sums.gather(1, last)
    if not total.isfinite().all():
        raise FloatingPointError("logits are not finite: the weights have diverged")
    return order.gather(1, torch.searchsorted(sums, uniforms * total, right=True)).squeeze(1)
