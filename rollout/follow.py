"""Whether the turn after a reminder did what the reminder asks: behaviour, not outcome.

Checks look at the next tool call alone, per category; a category without a check of its own counts as followed when
the next call runs the command that the text puts in backticks.
"""

from __future__ import annotations

import re
from typing import Callable, Sequence

from oprd.core.types import Reminder, ToolCall, Turn

_COMMAND = re.compile(r"`((?:git|python|pytest|go|gofmt|rg|find|ls)\b[^`]*)`")
_PATH = re.compile(r"[\w.-]+(?:/[\w.-]+)+")


def followed(reminder: Reminder, before: Sequence[Turn], turn: Turn) -> bool:
    """`before`: the turns up to the observation that fired the reminder; `turn`: the one that read it."""
    if turn.call is None:
        return False
    return _CHECKS.get(reminder.category, _runs_named_command)(reminder, before, turn)


def _runs_named_command(reminder: Reminder, before: Sequence[Turn], turn: Turn) -> bool:
    named = _COMMAND.search(reminder.text)
    return named is not None and named[1].split() == _command(turn.call).split()


def _longer_anchor(reminder: Reminder, before: Sequence[Turn], turn: Turn) -> bool:
    """The same file, an old_string with more lines of context, and no second ambiguity."""
    last, now = before[-1].call, turn.call
    if last is None or now.name != last.name or now.arguments.get("path") != last.arguments.get("path"):
        return False
    old, new = last.arguments.get("old_string", ""), now.arguments.get("old_string", "")
    return len(new) > len(old) and not (turn.observation and turn.observation.is_error)


def _another_path(reminder: Reminder, before: Sequence[Turn], turn: Turn) -> bool:
    """Neither the same call again nor another path that does not exist."""
    return turn.call != before[-1].call and not (turn.observation and turn.observation.is_error)


def _goes_to_named_path(reminder: Reminder, before: Sequence[Turn], turn: Turn) -> bool:
    named = _PATH.search(reminder.text)
    return named is not None and turn.call.arguments.get("path") == named[0].rstrip(".")


def _stops(reminder: Reminder, before: Sequence[Turn], turn: Turn) -> bool:
    """Takes the surplus edit back, or stops."""
    if turn.call.name == "submit" or "git checkout" in _command(turn.call):
        return True
    surplus = next((t.call.arguments for t in reversed(before) if t.call and t.call.name == "edit"), None)
    back = turn.call.arguments
    return (turn.call.name == "edit" and surplus is not None and back.get("old_string") == surplus.get("new_string")
            and back.get("new_string") == surplus.get("old_string"))


def _command(call: ToolCall) -> str:
    return call.arguments.get("command", "")


_CHECKS: dict[str, Callable[[Reminder, Sequence[Turn], Turn], bool]] = {
    "hard_ambiguous_edit_old_string": _longer_anchor,
    "hard_missing_file_path_narrow": _another_path,
    "named_path_over_neighbor": _goes_to_named_path,
    "named_path_source_guard": _goes_to_named_path,
    "change_surface_budget_guard": _stops,
}
