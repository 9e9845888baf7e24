"""Sampling the next token of many requests at once, each with its own temperature, top-p and random numbers.

N running requests (rows), V vocabulary. A row's samples depend on its own logits, settings and seed only: its uniform
numbers are drawn when it joins, and every row goes through the same arithmetic whatever its neighbours ask for.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from oprd.rollout.engine import Sampling

class Sampler:
    """Rows 0..N-1 are occupied; leave(row) moves the last row into the hole, as the decoder does."""

    def __init__(self, rows: int):
        self.n = 0
        self.temperature = torch.ones(rows, 1)  # 1 for a greedy row: its log-probabilities are those of the logits
        self.top_p = torch.ones(rows, 1, dtype=torch.float64)
        self.greedy = torch.zeros(rows, dtype=torch.bool)
        self.slot = torch.zeros(rows, dtype=torch.int64)  # where the next token's numbers lie in the flat tables below
        self.uniforms = torch.zeros(rows, 64, 2, dtype=torch.float64)  # two numbers for a token
        self.logprobs = torch.zeros(rows, 64)
        self.settings: list[Sampling] = []  # of the occupied rows: what need not be looked up in a tensor

    def join(self, sampling: Sampling, seed: int) -> None:
        """Add a request as the last row. Its uniforms are a function of the seed alone (a prefix, however many)."""
        row, most = self.n, sampling.max_new_tokens
        if most > self.uniforms.shape[1]:
            self._widen(most)
        generator = torch.Generator().manual_seed(seed)
        # float32 numbers in float64 arithmetic: u * total stays below total, so no draw falls off the end
        self.uniforms[row, :most] = torch.rand(most, 2, generator=generator)
        self.greedy[row] = sampling.temperature == 0
        self.temperature[row] = sampling.temperature or 1.0
        self.top_p[row] = sampling.top_p if sampling.top_p < 1 else math.inf  # all tokens, whatever rounding does
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
        uniforms = self.uniforms.view(-1, 2).index_select(0, slot)
        if all(s.top_p == 1 for s in settings):
            ids = _drawn(logprobs.exp(), uniforms[:, :1])
        else:
            ids = _nucleus(logprobs.exp(), self.top_p[rows], uniforms)
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
        rows, old = self.logprobs.shape
        self.slot += torch.arange(rows) * (width - old)
        pad = torch.zeros(rows, width - old)
        self.uniforms = torch.cat([self.uniforms, self.uniforms.new_zeros(rows, width - old, 2)], dim=1)
        self.logprobs = torch.cat([self.logprobs, pad], dim=1)


def _drawn(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """The token at which the running sum of the probabilities [N, V] first exceeds its share uniforms [N, 1]: [N]."""
    sums = probabilities.cumsum(-1, dtype=torch.float64)
    total = sums[:, -1:]
    if not math.isfinite(total.sum().item()):
        raise FloatingPointError("logits are not finite: the weights have diverged")
    return torch.searchsorted(sums, uniforms * total, right=True).squeeze(1)


def _nucleus(probabilities: Tensor, top_p: Tensor, uniforms: Tensor) -> Tensor:
    """A draw from the smallest set of likeliest tokens whose probabilities reach top_p [N, 1]; uniforms [N, 2]: [N].

    A draw from all tokens that falls into the set is a draw from the set. The others, 1 - top_p of them, are drawn anew
    from the set itself, with their second number: only they need a sort, which costs more than all the rest.
    """
    ids = _drawn(probabilities, uniforms[:, :1])
    outside = (_ahead(probabilities, ids) >= top_p.squeeze(1)).nonzero().squeeze(1)
    if len(outside):
        ids[outside] = _from_set(probabilities[outside], top_p[outside], uniforms[outside, 1:])
    return ids


def _ahead(probabilities: Tensor, ids: Tensor) -> Tensor:
    """The probability of all tokens that stand before ids [N]: likelier ones, and equally likely ones of lower id."""
    ids = ids.unsqueeze(1)
    own = probabilities.gather(1, ids)
    tied = (probabilities == own).logical_and_(torch.arange(probabilities.shape[1]) < ids)
    return torch.where(tied.logical_or_(probabilities > own), probabilities, 0.0).sum(-1)


def _from_set(probabilities: Tensor, top_p: Tensor, uniforms: Tensor) -> Tensor:
    """A draw from the set itself; uniforms [N, 1]."""
    values, order = probabilities.sort(dim=-1, descending=True, stable=True)
    sums = values.cumsum(-1, dtype=torch.float64)
    last = torch.searchsorted(sums, top_p).clamp_(max=sums.shape[1] - 1)
    return order.gather(1, torch.searchsorted(sums, uniforms * sums.gather(1, last), right=True)).squeeze(1)
