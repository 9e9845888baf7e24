"""IF SFT data from recorded attempts: conversations in which a reminder is followed by the behaviour it asks for.

| source | from | trained |
|---|---|---|
| given | attempts that ran with reminders: one that was shown, and the action after it did as asked | that action |
| unaided | reminder-free attempts: a reminder found post hoc, and the next action did as it asks | that action |
| retry | attempts made afresh under a Global Reminder that passed the hidden tests | every action |
| plain | reminder-free attempts that passed the hidden tests, without any reminder | every action |

A row holds the one reminder its trained action follows and no other: earlier ones were seen once and are gone. What the
paper's filter drops is dropped with its reason: an action that did otherwise (not_followed) or does not tell
(ambiguous), a wish nobody can check (unverifiable), a trigger that is not in the visible result (unsupported), a text
that shows a piece of the patch or the tests (leak), the same again (redundant). Whether the attempt succeeded decides
nothing for the first two sources, unless that is asked for.
"""

from __future__ import annotations

import zlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Iterable, Iterator, Mapping, Sequence

from oprd.core.types import Reminder, Trajectory
from oprd.rollout.expert import reminder_message
from oprd.rollout.follow import CHECKS, COMMAND, check_turn, result
from oprd.rollout.leaks import Secrets
from oprd.rollout.records import read_reminder, reminder_free
from oprd.rollout.rubric import CLASSES, Rubric
from oprd.rollout.select import Annotation
from oprd.rollout.tables import columns
from oprd.sandbox.task import Task

SOURCES = ("given", "unaided", "retry", "plain")
RecordRow = Mapping[str, Any]


@dataclass(frozen=True)
class Left:
    """A candidate that was left out. turn: of the observation that fired it; -1: a whole conversation."""

    id: str
    source: str
    category: str
    turn: int
    gate: str
    reason: str


@dataclass
class Maker:
    """Turns recorded attempts into rows. tasks: by id, for the leak filter. system, tools: of the rows' first message.

    rows, left: what has been made and left out so far."""

    rubric: Rubric
    tasks: Mapping[str, Task]
    sources: Sequence[str]
    system: str
    tools: Sequence[Mapping[str, Any]] | None = None
    only_resolved: bool = False
    rows: list[dict[str, Any]] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    _seen: set[tuple] = field(default_factory=set)

    def take(self, row: RecordRow, trajectory: Trajectory, found: Annotation | None) -> None:
        """One recorded attempt; found: its post-hoc reminders, where it is reminder-free and `unaided` is a source."""
        if found is not None:
            self.left += [Left(row["id"], "unaided", d.category, d.turn, d.gate, d.reason) for d in found.dropped]
        for source, reminder in self._candidates(row, found):
            problem = self._problem(source, reminder, row, trajectory)
            k = reminder.turn if reminder else -1
            if problem:
                name = reminder.category if reminder else source
                self.left.append(Left(row["id"], source, name, k, *problem))
            else:
                self.rows.append(self._row(source, reminder, row))

    def _candidates(self, row: RecordRow, found: Annotation | None) -> Iterator[tuple[str, Reminder | None]]:
        free = reminder_free(row)
        if "given" in self.sources:
            yield from (("given", read_reminder(given)) for given in row["given"])
        if "unaided" in self.sources and found is not None:
            yield from (("unaided", reminder) for reminder in found.reminders.values())
        if "retry" in self.sources and row.get("start"):
            yield "retry", read_reminder(row["start"])
        if "plain" in self.sources and free:
            yield "plain", None

    def _problem(self, source: str, reminder: Reminder | None, row: RecordRow,
                 trajectory: Trajectory) -> tuple[str, str] | None:
        """(gate, reason) of a candidate to be left out."""
        task, turns = self.tasks.get(row["task_id"]), trajectory.turns
        whole = source in ("retry", "plain")
        k = len(turns) - 1 if whole else reminder.turn + 1
        if task is None:
            return "no_task", f"data.tasks holds no {row['task_id']}: its secrets are unknown"
        if not row["resolved"] and (whole or self.only_resolved):
            return "not_resolved", "the attempt did not pass the hidden tests"
        if k >= len(turns):
            return "unread", "no action follows"
        if not all("content" in turn for turn in row["turns"]):
            return "old_record", "recorded before replies were kept in their parts; make the attempts anew"
        if bad := [i for i in range(k + 1) if turns[i].call is None]:
            return "malformed", f"turn {bad[0]} holds no well-formed call"
        if reminder and Secrets.of(task).shown_in(reminder.text):
            return "leak", "the text shows a piece of the reference patch or of the hidden tests"
        return None if whole else self._local_problem(source, reminder, row, trajectory)

    def _local_problem(self, source: str, reminder: Reminder, row: RecordRow,
                       trajectory: Trajectory) -> tuple[str, str] | None:
        turns, k = trajectory.turns, reminder.turn + 1
        if source == "given" and reminder.text not in (row["turns"][k]["reminder"] or ""):
            return "not_shown", "another text, or none, was shown in its place"
        known = self.rubric[reminder.category] if reminder.category in self.rubric else None
        if known and known.hard and not known.match(result(turns[k - 1])):
            return "unsupported", "the rule does not fire on the recorded result"
        if reminder.category not in CHECKS and not COMMAND.search(reminder.text):
            return "unverifiable", "no check knows what following it would be"
        does = check_turn(reminder, turns[:k], turns[k])
        if does.followed is None:
            return "ambiguous", "the next action neither does nor denies what it asks"
        if not does.followed:
            failed = ", ".join(aspect for aspect, good in does.aspects.items() if not good)
            return "not_followed", f"the next action is not as asked: {failed}"
        call = turns[k].call
        key = (row["task_id"], reminder.category, reminder.text, call.name, tuple(call.arguments.items()))
        if key in self._seen:
            return "redundant", "a row of this task has the same reminder and action"
        self._seen.add(key)
        return None

    def _row(self, source: str, reminder: Reminder | None, row: RecordRow) -> dict[str, Any]:
        whole = source in ("retry", "plain")
        turns = row["turns"] if whole else row["turns"][: reminder.turn + 2]
        messages = [{"role": "system", "content": self.system}, {"role": "user", "content": row["statement"]}]
        start = read_reminder(row["start"]) if row.get("start") else None
        messages += [reminder_message(start.text)] if start else []
        for i, turn in enumerate(turns):
            last = i == len(turns) - 1
            messages += [reminder_message(reminder.text)] if last and not whole else []
            messages.append(_said(turn, trained=whole or last))
            messages += [] if last else [{"role": "tool", "content": turn["observation"]["output"]}]
        name = "" if whole else f"-{reminder.turn}"
        made = {"id": f"{row['id']}/{source}{name}", "task_id": row["task_id"], "source": source,
                "category": reminder.category if reminder else None, "class": reminder.class_ if reminder else None,
                "messages": messages}
        return made | ({"tools": list(self.tools)} if self.tools else {})


def _said(turn: RecordRow, trained: bool) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": turn["call"]["name"], "arguments": turn["call"]["arguments"]}}
    return {"role": "assistant", "content": turn["content"] or None, "tool_calls": [call],
            **({"reasoning_content": turn["reasoning"]} if turn["reasoning"] else {}),
            **({} if trained else {"weight": 0})}


def capped(rows: Iterable[dict[str, Any]], most: int) -> tuple[list[dict[str, Any]], list[Left]]:
    """At most so many rows of a category (0: all), which ones a hash of their ids decides; in the order given. Plain
    rows are not capped."""
    rows = list(rows)
    kept: Counter = Counter()
    chosen: set[str] = set()
    for row in sorted(rows, key=lambda r: zlib.crc32(r["id"].encode())):
        if not most or row["category"] is None or kept[row["category"]] < most:
            kept[row["category"]] += 1
            chosen.add(row["id"])
    left = [Left(r["id"], r["source"], r["category"], -1, "per_category", f"{most} rows of its category are enough")
            for r in rows if r["id"] not in chosen]
    return [row for row in rows if row["id"] in chosen], left


def table(rows: Sequence[Mapping[str, Any]], left: Sequence[Left]) -> str:
    """Rows by source and class, and what was left out by source and reason."""
    classes = (*CLASSES, "G")
    head = ["source", "rows", *classes, "tasks"]
    made = [[source, str(len(mine)), *(str(sum(r["class"] == c for r in mine)) for c in classes),
             str(len({r["task_id"] for r in mine}))]
            for source in SOURCES if (mine := [r for r in rows if r["source"] == source])]
    counts = Counter((item.source, item.gate) for item in left)
    out = [["left out", "candidates"]] + [[f"{source}: {gate}", str(n)] for (source, gate), n in sorted(counts.items())]
    return columns([head, *made]) + ("\n\n" + columns(out) if left else "")
