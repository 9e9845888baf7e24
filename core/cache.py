"""What a model remembers of one conversation: per layer an entry that is appended to, forked and rewound.

    cache = model.new_cache()
    model.hidden(first_piece, cu_seqlens, caches=[cache])      # appends
    branch = cache.fork()                                      # shares the past, costs nothing
    model.hidden(reminder, cu_seqlens, caches=[branch])        # the trunk does not see it
    cache.rewind(100)                                          # forget all but the first 100 tokens

An entry never writes into a tensor it has handed out, so forks share storage safely. The entry of a recurrent layer
(state and convolution window) cannot be cut at any length: it keeps snapshots and rewinds to one of them.
Many conversations at once are many Cache objects; `core/decode.py` lays them side by side for batched decoding.
"""

from __future__ import annotations

from typing import Protocol, Sequence

import torch
from torch import Tensor


class Entry(Protocol):
    """One layer's memory of one conversation. Each kind has its own append, called by the mixer that owns it."""

    length: int  # tokens remembered

    def fork(self) -> "Entry":
        """A second entry with the same past; what is appended to one is not seen by the other."""

    def rewind(self, length: int) -> None:
        """Forget everything after the first `length` tokens (0 <= length <= self.length)."""


class KVEntry:
    """Keys and values of an attention layer, k and v [L, G, K] (G key/value heads of size K), rotated already."""

    def __init__(self, k: Tensor | None = None, v: Tensor | None = None):
        self.k, self.v = k, v

    @property
    def length(self) -> int:
        return 0 if self.k is None else len(self.k)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add k, v [n, G, K]; returns all keys and values, [L + n, G, K]."""
        self.k = k if self.k is None else torch.cat([self.k, k])
        self.v = v if self.v is None else torch.cat([self.v, v])
        return self.k, self.v

    def fork(self) -> "KVEntry":
        return KVEntry(self.k, self.v)

    def rewind(self, length: int) -> None:
        assert 0 <= length <= self.length, f"rewind to {length} tokens of {self.length}"
        if length < self.length:
            self.k, self.v = (None, None) if length == 0 else (self.k[:length], self.v[:length])


class Cache:
    """One conversation: an entry per layer, all of the same length."""

    def __init__(self, entries: Sequence[Entry]):
        self.entries = list(entries)

    @property
    def length(self) -> int:
        """Tokens remembered."""
        return self.entries[0].length

    def fork(self) -> "Cache":
        return Cache([entry.fork() for entry in self.entries])

    def rewind(self, length: int) -> None:
        for entry in self.entries:
            entry.rewind(length)
