"""The plain data that the rollout side and the training side exchange: no torch, no engine, no sandbox.

The flow, one noun a hop:

    Task -> Attempt -> Trajectory (Turns) -> Verdict -> Reminders -> View -> Example -> packed Batch

Task and Verdict live in `sandbox/` (they need no torch and no tokens), Attempt in `rollout/`, Batch in
`core/batch.py` (it holds tensors). Everything between is here.

Token sequences are tuples of int. One conversation is, in order, for every turn:

    context_ids (not sampled)  +  [reminder_ids (one turn only)]  +  generation_ids (not sampled)  +  sampled_ids

Nothing that was sampled is ever tokenised again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Mapping, Sequence

import numpy as np


class Ending(str, Enum):
    """How an attempt's conversation ended."""

    SUBMITTED = "submitted"
    TURN_LIMIT = "turn_limit"
    CONTEXT_LIMIT = "context_limit"  # the next turn would not fit; nothing after the last sampled token is kept
    REPLY_LIMIT = "reply_limit"  # a reply was cut at the token limit of one turn; it is never executed
    TIME_LIMIT = "time_limit"
    MALFORMED = "malformed"  # too many replies in a row without a well-formed tool call


@dataclass(frozen=True)
class ToolCall:
    """A tool call as the model wrote it. Arguments are raw strings, in the order written."""

    name: str
    arguments: Mapping[str, str]


@dataclass(frozen=True)
class Observation:
    """What a tool call gave. `exit_code` is None where no process ran (read, edit); `is_error` then tells.

    `output` is the text exactly as the agent saw it (already capped).
    """

    output: str
    exit_code: int | None = None
    is_error: bool = False


@dataclass(frozen=True)
class Reminder:
    """One corrective text, made of visible evidence only.

    category: rubric name, e.g. `hard_ambiguous_edit_old_string`; class_: R1..R4, or G for the Global Reminder;
    text: what is inserted; evidence: the quote that fired it; turn: the index k of the turn whose observation
    fired it (it is shown to turn k + 1 only); -1 for the Global Reminder (shown to every turn).
    """

    category: str
    class_: str
    text: str
    evidence: str = ""
    turn: int = -1
    confidence: float = 1.0


@dataclass(frozen=True)
class Span:
    """Tokens start:end of one turn's samples, all sampled by the weights of one version."""

    version: int
    start: int
    end: int


@dataclass(frozen=True)
class Turn:
    """One assistant turn: what came before it, what was sampled, what the tool answered.

    context_ids: tokens appended since the previous turn's sampled tokens, without reminder and generation prompt.
        Turn 0: system and user messages. Later: the separator after the end-of-turn token and the tool response.
    reminder_ids: a reminder shown to this turn only (run-time use), else empty. Later turns do not see it.
    sampled_ids: every sampled id, including the end-of-turn token when it was sampled.
    logprobs: log-probability of each sampled id under the sampling temperature (same length; empty when recorded
        from an expert).
    version: the policy version that sampled this turn, or its first token where spans tells more.
    spans: which version sampled which tokens, where new weights came in between; empty: all are `version`'s.
    text, call, problem: the reply decoded; its tool call, or None and why it is malformed.
    observation: the tool's answer; None when the conversation ended with this turn (submit included).
    replayed: sampled in an earlier attempt and executed again at the beginning of this one: context, never a target.
    state: hash of the sandbox after the observation (`sandbox/repo.py`), where such a turn may be compared; else "".
    probe: active mode only: the text of the reply that was thrown away for this one, which read a reminder.
    """

    context_ids: tuple[int, ...]
    sampled_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    version: int = 0
    reminder_ids: tuple[int, ...] = ()
    text: str = ""
    call: ToolCall | None = None
    problem: str | None = None
    observation: Observation | None = None
    replayed: bool = False
    state: str = ""
    probe: str = ""
    spans: tuple[Span, ...] = ()

    @property
    def versions(self) -> list[int]:
        """The version that sampled each token."""
        spans = self.spans or (Span(self.version, 0, len(self.sampled_ids)),)
        return [span.version for span in spans for _ in range(span.start, span.end)]


@dataclass(frozen=True)
class Trajectory:
    """One finished conversation. `generation_ids` is the generation prompt that precedes every turn's samples."""

    attempt_id: str
    task_id: str
    turns: tuple[Turn, ...]
    generation_ids: tuple[int, ...]
    ending: Ending

    def tokens(self) -> int:
        """Length of the whole conversation in tokens, one-turn reminders not counted."""
        return sum(len(t.context_ids) + len(self.generation_ids) + len(t.sampled_ids) for t in self.turns)


@dataclass(frozen=True, eq=False)
class Row:
    """A token row somebody reads in one forward, and which of its tokens are scored as targets.

    ids: int64 [L]. targets: int64 [N], strictly increasing positions i >= 1 of scored tokens: token ids[i] is
    predicted from position i - 1.

    Worked example: ids = [5, 6, 7, 8] with 7 and 8 sampled has targets = [2, 3].
    """

    ids: np.ndarray
    targets: np.ndarray

    def __post_init__(self):
        t = self.targets
        if len(t) and not (t[0] >= 1 and t[-1] < len(self.ids) and (np.diff(t) > 0).all()):
            raise ValueError(f"targets must be increasing positions in 1..{len(self.ids) - 1}, got {t.tolist()[:8]}...")


@dataclass(frozen=True, eq=False)
class View:
    """How the teacher reads a trajectory: the same sampled tokens, other contexts.

    rows: one or more Rows (the trunk, and one branch per turn that has its own one-turn reminder).
    order: int64 [N]; concatenating the rows' targets gives N scored tokens, and the student's n-th scored token is
    the `order[n]`-th of them. The target ids agree position by position (checked by whoever builds the view).
    """

    rows: tuple[Row, ...]
    order: np.ndarray

    @cached_property
    def pieces(self) -> "list[Piece]":
        """The rows as a tree in which what several begin with stands once (see `pieces`)."""
        return pieces(self.rows)

    def tokens(self) -> int:
        """Tokens to be read when what several rows begin with is read once."""
        return sum(piece.end - piece.start for piece in self.pieces)


@dataclass(frozen=True)
class Piece:
    """Tokens start:end of row number `row`, read right after piece number `after` (-1: nothing is before them).

    rows: the numbers of all rows that go through it. depth: how many pieces are before it.
    """

    row: int
    start: int
    end: int
    after: int
    rows: tuple[int, ...]
    depth: int


def pieces(rows: Sequence[Row]) -> list[Piece]:
    """The rows as a tree of pieces in which a common beginning stands once; each piece comes after the one before it.

    Worked example: rows [1 2 3 4], [1 2 9] are the pieces [1 2], then [3 4] and [9] after it.
    """
    found: list[Piece] = []

    def grow(members: Sequence[int], start: int, after: int, depth: int) -> None:
        branches: dict[int, list[int]] = {}
        for r in members:
            if start < len(rows[r].ids):
                branches.setdefault(int(rows[r].ids[start]), []).append(r)
        for same in branches.values():
            first, end = rows[same[0]].ids, min(len(rows[r].ids) for r in same)
            for r in same[1:]:
                differ = np.flatnonzero(rows[r].ids[start:end] != first[start:end])
                end = start + int(differ[0]) if len(differ) else end
            found.append(Piece(same[0], start, end, after, tuple(same), depth))
            grow(same, end, len(found) - 1, depth + 1)

    grow(range(len(rows)), 0, -1, 0)
    return found


@dataclass(frozen=True, eq=False)
class Example:
    """One unit of training: the row the student reads, and per loss name one weight for each scored token.

    weights: loss name -> float64 [N], N = len(row.targets). Names: `nll` (imitation), `kl` (distillation; needs
    `teacher`), `pg` (policy gradient; a weight is an advantage, and needs `old_logprobs`). A loss the example does not
    take part in is absent.
    branch: names the denominator the weights share (`success`, `failure`, `policy`, or `sft`).
    old_logprobs: float64 [N], log-probability of each scored token when it was sampled; None when not known.
    versions: int64 [N], the policy version that sampled each scored token; None when no engine did.
    unit: trajectory the example belongs to (for per-trajectory averaging); source: where it came from, for messages.
    """

    row: Row
    weights: Mapping[str, np.ndarray]
    branch: str = "sft"
    teacher: View | None = None
    unit: str = ""
    source: str = ""
    old_logprobs: np.ndarray | None = field(default=None, repr=False)
    versions: np.ndarray | None = field(default=None, repr=False)

    def __post_init__(self):
        n = len(self.row.targets)
        for name, w in self.weights.items():
            if len(w) != n:
                raise ValueError(f"{self.source}: {len(w)} {name} weights for {n} scored tokens")
        if "kl" in self.weights:
            if self.teacher is None or len(self.teacher.order) != n:
                raise ValueError(f"{self.source}: a kl weight needs a teacher view that scores the same {n} tokens")
        if "pg" in self.weights and (self.old_logprobs is None or len(self.old_logprobs) != n):
            raise ValueError(f"{self.source}: a pg weight needs the {n} log-probabilities of its sampled tokens")
