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
        self.count = torch.zeros(rows, dtype=torch.int64)  # tokens sampled
        self.uniforms = torch.zeros(rows, 64, dtype=torch.float64)
        self.logprobs = torch.zeros(rows, 64)

    def join(self, sampling: Sampling, seed: int) -> None:
        """Add a request as the last row. Its uniforms are a function of the seed alone (a prefix, however many)."""
        row, most = self.n, sampling.max_new_tokens
        width = self.uniforms.shape[1]
        if most > width:
            pad = torch.zeros(len(self.uniforms), most - width)
            self.uniforms = torch.cat([self.uniforms, pad.double()], dim=1)
            self.logprobs = torch.cat([self.logprobs, pad], dim=1)
        generator = torch.Generator().manual_seed(seed)
        # float32 numbers in float64 arithmetic: u * total stays below total, so no draw falls off the end
        self.uniforms[row, :most] = torch.rand(most, generator=generator)
        self.greedy[row] = sampling.temperature == 0
        self.temperature[row] = sampling.temperature or 1.0
        self.top_p[row] = sampling.top_p
        self.count[row] = 0
        self.n += 1

    def sample(self, logits: Tensor, first: int) -> list[int]:
        """The next token of rows first..N-1 from their logits [N - first, V]; remembers the log-probabilities.

        FloatingPointError: logits hold NaN or infinity."""
        rows = torch.arange(first, self.n)
        logprobs = torch.log_softmax(logits / self.temperature[first : self.n], dim=-1)
        kept = logprobs.exp()
        top_p = self.top_p[first : self.n]
        if (top_p < 1).any():
            kept = torch.where(top_p < 1, _nucleus(kept, top_p), kept)
        sums = kept.cumsum(-1, dtype=torch.float64)
        if not sums[:, -1].isfinite().all():
            raise FloatingPointError("logits are not finite: the weights have diverged")
        targets = self.uniforms[rows, self.count[first : self.n], None] * sums[:, -1:]
        drawn = torch.searchsorted(sums, targets, right=True).squeeze(1)  # first index whose sum exceeds the target
        ids = torch.where(self.greedy[first : self.n], logits.argmax(-1), drawn)
        self.logprobs[rows, self.count[first : self.n]] = logprobs.gather(1, ids[:, None]).squeeze(1)
        self.count[first : self.n] += 1
        return ids.tolist()

    def leave(self, row: int, tokens: int) -> list[float]:
        """Take a request out; returns its log-probabilities. The last row moves into its place."""
        logprobs = self.logprobs[row, :tokens].tolist()
        self.n -= 1
        for values in (self.temperature, self.top_p, self.greedy, self.count, self.uniforms, self.logprobs):
            values[row] = values[self.n]
        return logprobs


def _nucleus(probabilities: Tensor, top_p: Tensor) -> Tensor:
    """Probabilities [N, V] with all but the smallest set of likeliest tokens that reaches top_p [N, 1] set to 0.

    Tokens exactly as likely as the last of that set stay too.
    """
    most = probabilities.shape[1]
    for count in sorted({min(LIKELIEST, most), most}):
        ordered = probabilities.topk(count, dim=-1).values
        sums = ordered.cumsum(-1, dtype=torch.float64)
        if count == most or (sums[:, -1:] >= top_p).all():
            break
    kept = (sums - ordered < top_p).sum(-1, keepdim=True)  # mass of the likelier ones; 0 for the first, which stays
    return probabilities.masked_fill(probabilities < ordered.gather(-1, kept - 1), 0.0)
