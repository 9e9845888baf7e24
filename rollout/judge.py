"""Who decides the contextual categories: what a judge sees, what it answers, and the judge that answers nothing.

A judge sees one Case, the visible prefix at one insertion boundary, and nothing else: no later turn, no verifier
label, no task field beside the statement. It proposes; `select.py` gates and chooses. The scripted judge of MicroSWE
is in `scripted.py`, the one that asks a model in `model_judge.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from oprd.core.types import Observation, Reminder, ToolCall
from oprd.rollout.toolresult import ToolResult, is_test, is_validation, same_file, tool_result

SLOT_TEXTS = {"path": "the named path", "target": "the named case", "name": "a sibling", "line": "the failure"}
"""What an action's slot holds when the evidence fills it with nothing."""


@dataclass(frozen=True)
class Probe:
    """Active mode: the action that the model would take next, sampled and never executed. None: it held no call."""

    call: ToolCall | None


@dataclass(frozen=True)
class Case:
    """What is visible right after observation k = len(turns) - 1.

    turns: (call, observation) of every turn so far; the call is None where the reply held no well-formed one.
    inserted: the local reminders inserted at earlier boundaries of this conversation.
    probe: active mode only; it decides whether a reminder is needed and is then forgotten.
    """

    statement: str
    turns: tuple[tuple[ToolCall | None, Observation], ...]
    inserted: tuple[Reminder, ...] = ()
    probe: Probe | None = None

    @cached_property
    def results(self) -> tuple[ToolResult | None, ...]:
        return tuple(tool_result(call, seen) if call else None for call, seen in self.turns)

    @property
    def latest(self) -> ToolResult | None:
        return self.results[-1] if self.results else None

    @cached_property
    def edits(self) -> tuple[int, ...]:
        """Turns whose edit succeeded and that no later `git checkout`, `restore`, `reset` or `stash` took back."""
        undone = [i for i, r in enumerate(self.results) if r and r.runs("git", "checkout", "restore", "reset", "stash")]
        return tuple(i for i, r in enumerate(self.results)
                     if r and r.kind == "edit" and not r.failed and i > max(undone, default=-1))

    @cached_property
    def edited(self) -> bool:
        """Whether any successful edit is visible, taken back or not."""
        return any(r and r.kind == "edit" and not r.failed for r in self.results)

    @cached_property
    def planned(self) -> ToolResult | None:
        """The probe's call as a result that says nothing."""
        return tool_result(self.probe.call, Observation("")) if self.probe and self.probe.call else None

    @cached_property
    def looks_back(self) -> bool:
        """Whether the latest call looks at the diff, or at a file that an edit in place has changed."""
        latest = self.latest
        if latest is None or not self.edits or latest.kind == "edit":
            return False
        diff = is_validation(latest) and not is_test(latest)
        return diff or any(same_file(latest.file, self.results[k].file) for k in self.edits)


@dataclass(frozen=True)
class Candidate:
    """A proposed reminder. evidence quotes what is visible; confidence in 0..1."""

    category: str
    text: str
    evidence: str
    confidence: float


class Judge(Protocol):
    def decide(self, case: Case) -> list[Candidate]:
        """Candidates for the latest observation, in any order; empty when nothing is wrong."""


class NoJudge:
    """Decides nothing: hard rules only."""

    def decide(self, case: Case) -> list[Candidate]:
        return []
