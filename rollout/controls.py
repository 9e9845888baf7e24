"""Controls: reminders that ought not to help, to find out what of an effect is the reminders'.

    placebo    in a reminder's place stands one that was made for another task, of the same scope and with other words
    withheld   reminders are made and counted and shown to nobody: the reminder-free teacher over the same failures, and
               at run time the rate at which agents do unasked what a reminder would have asked

Global-only, local-only and one class only are settings of what is made (reminders.local, reminders.global,
reminders.classes).
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from typing import Iterable, Sequence

from oprd.core.types import Reminder
from oprd.rollout.select import Dropped
from oprd.rollout.teach import Reminded

CONTROLS = ("none", "placebo", "withheld")
NO_OTHER = "no reminder of another task with another text"


@dataclass(frozen=True)
class Placebo:
    """pool: (task, reminder) of everything that may stand in. Which one does is decided by task and turn alone, so
    that a run repeats to the bit."""

    pool: tuple[tuple[str, Reminder], ...]

    def instead(self, task_id: str, reminder: Reminder) -> Reminder | None:
        """What stands in for a task's reminder; None: there is nothing."""
        others = [other for task, other in self.pool if task != task_id and other.text != reminder.text
                  and (other.class_ == "G") == (reminder.class_ == "G")]
        if not others:
            return None
        return replace(others[zlib.crc32(f"{task_id}/{reminder.turn}".encode()) % len(others)], turn=reminder.turn)


def pool_of(reminded: Iterable[tuple[str, Reminded]]) -> Placebo:
    """All reminders of many attempts, by task."""
    return Placebo(tuple((task, reminder) for task, found in reminded
                         for reminder in (*found.local.values(), *([found.global_] if found.global_ else ()))))


def controlled(control: str, tasks: Sequence[str], found: Sequence[Reminded]) -> list[Reminded]:
    """The same attempts' reminders with what the teacher reads in their stead (`Reminded.control`)."""
    if control == "none":
        return list(found)
    if control == "withheld":
        return [replace(reminded, control=Reminded(None, {})) for reminded in found]
    placebo = pool_of(zip(tasks, found))
    return [_placebo(placebo, task, reminded) for task, reminded in zip(tasks, found, strict=True)]


def _placebo(placebo: Placebo, task: str, reminded: Reminded) -> Reminded:
    local = {k: placebo.instead(task, reminder) for k, reminder in reminded.local.items()}
    whole = placebo.instead(task, reminded.global_) if reminded.global_ else None
    missing = [reminder for k, reminder in reminded.local.items() if local[k] is None]
    missing += [reminded.global_] if reminded.global_ and not whole else []
    dropped = tuple(Dropped(r.category, r.turn, NO_OTHER, "placebo") for r in missing)
    stand_in = Reminded(whole, {k: r for k, r in local.items() if r})
    if whole is None and not stand_in.local:  # nothing to read in its stead: as if nothing had been found
        return replace(reminded, global_=None, local={}, dropped=reminded.dropped + dropped)
    return replace(reminded, dropped=reminded.dropped + dropped, control=stand_in)
