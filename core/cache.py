"""What a model remembers of one conversation: per layer an entry that is appended to, forked and rewound.

    cache = model.new_cache()
    model.hidden(first_piece, cu_seqlens, caches=[cache])      # appends
    branch = cache.fork()                                      # shares the past, costs nothing
    model.hidden(reminder, cu_seqlens, caches=[branch])        # the trunk does not see it
    held = cache.rewind(100)                                   # forget all after the first 100 tokens, or a little more

An entry never writes into a tensor it has handed out, so forks share storage safely. Keys and values can be cut at any
length; a recurrent state cannot, so a rewind ends at the last point at or below the length asked for where a piece had
ended, and says which. Many conversations at once are many Cache objects; `core/decode.py` lays them side by side.
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

    def rewind(self, length: int) -> int:
        """Forget everything after the first `length` tokens (0 <= length <= self.length), or after fewer where the
        entry has no state for that length; returns the tokens still remembered."""


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

    def rewind(self, length: int) -> int:
        assert 0 <= length <= self.length, f"rewind to {length} tokens of {self.length}"
        if length < self.length:
            self.k, self.v = (None, None) if length == 0 else (self.k[:length], self.v[:length])
        return length


class RecurrentEntry:
    """State [H, K, V] and convolution window [W - 1, C] of a Gated DeltaNet layer.

    Kept for the end of the last KEPT pieces, so that a conversation can go back to before its last turn or a reminder
    that is taken out again; going back further starts from nothing.
    """

    KEPT = 3  # the present state, and those after the last answer and after what was read before it

    def __init__(self, points: Sequence[tuple[int, Tensor, Tensor]] = ()):
        self._points = list(points)  # (tokens, state, window) where pieces ended, oldest first

    @property
    def length(self) -> int:
        return self._points[-1][0] if self._points else 0

    @property
    def held(self) -> tuple[Tensor, Tensor] | None:
        """(state, window) after the last token, None before the first."""
        return self._points[-1][1:] if self._points else None

    def append(self, n: int, state: Tensor, window: Tensor) -> None:
        """n more tokens were read; state and window after them."""
        if n:
            self._points = [*self._points, (self.length + n, state, window)][-self.KEPT:]

    def fork(self) -> "RecurrentEntry":
        return RecurrentEntry(self._points)

    def rewind(self, length: int) -> int:
        assert 0 <= length <= self.length, f"rewind to {length} tokens of {self.length}"
        self._points = [point for point in self._points if point[0] <= length]
        return self.length


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

    def rewind(self, length: int) -> int:
        """Forget everything after the first `length` tokens; returns the tokens still remembered (at most `length`)."""
        length = min(entry.rewind(length) for entry in self.entries)
        for entry in self.entries:  # the recurrent layers may have gone back further than the others
            entry.rewind(length)
        return length
