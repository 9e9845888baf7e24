"""The leak filter: does a text show a piece of the reference patch, or of the hidden tests' bodies?

Secret are the lines that either diff adds, less what can be read without it (lines the diffs keep or remove, the
task's statement). A text leaks when it shows

- a whole secret line (of at least 8 characters, spaces not counted), however it is spaced, or
- RUN tokens in a row of such lines, over line ends too, at least WORDS of them names outside quotes.

So a cut, re-indented, re-quoted or re-flowed piece is found; the values of an assertion ('a' != 'b', {'k': 1}) are
evidence and pass, and so are names alone: that `f` is missing is what a NameError is there to say.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Iterator

from oprd.sandbox.task import Task

RUN = 6
WORDS = 2
MIN_LINE = 8
TOKEN = re.compile(r"\w+|[^\w\s]")
PART = re.compile(r"(?P<quoted>\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*')|(?P<name>[^\W\d]\w*)|\w+|[^\w\s]")
VALUES = frozenset({"True", "False", "None", "true", "false", "null", "nil"})
BLANKS = re.compile(r"\\[nrt]")  # a line end or tab as a repr spells it
QUOTES = re.compile(r"[\"'`]")


@dataclass(frozen=True)
class Secrets:
    """What a task's reminders must not show: whole lines without blanks, and runs of tokens."""

    lines: frozenset[str]
    runs: frozenset[tuple[str, ...]]

    @staticmethod
    def of(task: Task) -> "Secrets":
        lines: set[str] = set()
        runs: set[tuple[str, ...]] = set()
        shown = [task.problem_statement]
        for diff in (task.patch, task.test_patch):
            for added, kept in _blocks(diff):
                lines |= {_bare(line) for line in added}
                runs |= _telling_runs("\n".join(added))
                shown.append("\n".join(kept))
        lines -= {_bare(line) for text in shown for line in text.splitlines()}
        return Secrets(frozenset(line for line in lines if len(line) >= MIN_LINE and re.search(r"\w", line)),
                       frozenset(runs - {run for text in shown for run in _runs(text)}))

    def shown_in(self, text: str) -> bool:
        bare = _bare(text)
        return any(line in bare for line in self.lines) or not self.runs.isdisjoint(_runs(text))


def _blocks(diff: str) -> Iterator[tuple[list[str], list[str]]]:
    """(lines added one after another, the other lines before them) of a unified diff; headers are neither."""
    added: list[str] = []
    kept: list[str] = []
    hunk = False
    for line in diff.splitlines():
        hunk = line.startswith("@@") or (hunk and not line.startswith("diff --git "))
        header = line.startswith(("@@", "diff ")) or (not hunk and line.startswith(("+++", "---")))
        if line.startswith("+") and not header:
            added.append(line[1:])
            continue
        if added:
            yield added, kept
            added, kept = [], []
        if not header:
            kept.append(line[1:])
    yield added, kept


def _bare(text: str) -> str:
    return "".join(BLANKS.sub(" ", text).split())


def _runs(text: str) -> Iterator[tuple[str, ...]]:
    tokens = TOKEN.findall(QUOTES.sub(" ", BLANKS.sub(" ", text)))
    return (tuple(tokens[i: i + RUN]) for i in range(len(tokens) - RUN + 1))


def _telling_runs(code: str) -> set[tuple[str, ...]]:
    """The runs of a piece of code that hold enough names outside quotes."""
    tokens: list[tuple[str, bool]] = []
    for part in PART.finditer(code):
        if part["quoted"]:
            tokens += [(token, False) for token in TOKEN.findall(QUOTES.sub(" ", BLANKS.sub(" ", part[0])))]
        elif not QUOTES.fullmatch(part[0]):
            tokens.append((part[0], part["name"] is not None and part[0] not in VALUES))
    windows = (tokens[i: i + RUN] for i in range(len(tokens) - RUN + 1))
    return {tuple(token for token, _ in window) for window in windows if sum(name for _, name in window) >= WORDS}
