"""Attempts on the disk, one JSON line each: what people read, and what `--stage annotate` reads back.

    {"id", "group", "origin", "task_id", "statement", "ending", "resolved", "trouble", "mode", "fate", "reward",
     "notes", "turns": [...], "start", "given": [...], "dropped": [...], "probes",
     "teacher": {"local": [...], "global", "dropped": [...], "read"} or null, "patch"}

A turn is {"context": text before it, "reminder": text that it alone saw, "reply": what was sampled, "content",
"reasoning", "call", "problem", "observation": {"output", "exit_code", "is_error"}, "replayed", "probe": text of a reply
that was thrown away for this one}. Reminders are {"category", "class", "text", "evidence", "turn", "confidence"}: `start`
is the Global Reminder of a retry, `given` were chosen while the agent ran; the teacher's have a "utility" where it was
measured, and "read" is what it read instead, under a control. `dropped` are candidates {"category", "turn", "gate",
"reason"}. mode: how the agent was reminded: free, passive or active. With ids also "context_ids", "sampled_ids",
"logprobs" and "version" of every turn, and "spans" of [version, start, end] where new weights came into a turn.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any, Iterator, Mapping, Sequence

from oprd.core.chat import Chat
from oprd.core.types import Ending, Observation, Reminder, ToolCall, Trajectory, Turn
from oprd.rollout.attempts import Outcome
from oprd.core.disk import write_jsonl
from oprd.rollout.teach import Lesson, Reminded
from oprd.sandbox.jsonl import read_jsonl


def record(outcome: Outcome, chat: Chat, lesson: Lesson | None = None, ids: bool = False) -> dict[str, Any]:
    """One attempt as a JSON object; `lesson`: what it taught."""
    task, trajectory, verdict = outcome.attempt.task, outcome.trajectory, outcome.verdict
    reminders = lesson.reminders if lesson else None
    return {
        "id": outcome.attempt.id, "group": outcome.attempt.group, "origin": outcome.attempt.origin,
        "task_id": task.instance_id, "statement": task.problem_statement,
        "ending": trajectory.ending.value if trajectory else None,
        "resolved": verdict.resolved if verdict and not outcome.trouble else None, "trouble": outcome.trouble,
        "mode": outcome.mode, "fate": lesson.fate if lesson else None, "reward": lesson.reward if lesson else None,
        "notes": dict(lesson.notes) if lesson else {},
        "turns": [_turn(turn, chat, ids) for turn in trajectory.turns] if trajectory else [],
        "start": _reminder(outcome.attempt.start) if outcome.attempt.start else None,
        "given": [_reminder(r) for r in outcome.given], "dropped": [asdict(d) for d in outcome.dropped],
        "probes": outcome.probes, "teacher": _teacher(reminders) if reminders else None,
        "patch": outcome.patch.decode("utf-8", "replace"),
    }


class Keeper:
    """Writes the attempts of a step or an evaluation as one file, in the order of their ids."""

    def __init__(self, what: str, chat: Chat):
        """what: `text`, `ids` (text and ids) or `none`."""
        self.what, self.chat = what, chat

    def __call__(self, path: Path, outcomes: Sequence[Outcome], lessons: Sequence[Lesson | None] = ()) -> None:
        if self.what == "none":
            return
        pairs = list(zip(outcomes, lessons or [None] * len(outcomes), strict=True))
        pairs.sort(key=lambda pair: pair[0].attempt.id)
        write_jsonl(path, [record(outcome, self.chat, lesson, self.what == "ids") for outcome, lesson in pairs])
        write_verdicts(path.parent / "verdicts" / f"{path.name}.gz", [outcome for outcome, _ in pairs])


def write_verdicts(path: Path, outcomes: Sequence[Outcome]) -> None:
    """The evidence of every grading, one JSON line each: the Verdict's fields, its whole test log among them, but not
    its seconds (a resumed run writes the same bytes)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file, gzip.GzipFile(filename="", fileobj=file, mode="wb", mtime=0) as packed:
        for outcome in outcomes:
            if outcome.verdict:
                line = {"id": outcome.attempt.id, "task_id": outcome.attempt.task.instance_id}
                line |= {name: value for name, value in asdict(outcome.verdict).items() if name != "seconds"}
                packed.write(json.dumps(line, ensure_ascii=True).encode() + b"\n")


def reminder_free(row: Mapping[str, Any]) -> bool:
    """Whether a recorded attempt is one of the policy alone."""
    return row.get("mode", "free") == "free" and not row.get("start") and not row["given"]


def read_reminder(row: Mapping[str, Any]) -> Reminder:
    return Reminder(row["category"], row["class"], row["text"], row["evidence"], row["turn"], row["confidence"])


def read_records(path: str | Path) -> Iterator[tuple[dict[str, Any], Trajectory]]:
    """The attempts of a file that have a conversation, one at a time. FileNotFoundError; ValueError names the line."""
    for where, row in read_jsonl(path):
        try:
            trajectory = _trajectory(row) if row["turns"] else None
        except (KeyError, TypeError, ValueError) as problem:
            raise ValueError(f"{where}: is no recorded attempt ({type(problem).__name__}: {problem})") from None
        if trajectory:
            yield row, trajectory


def _turn(turn: Turn, chat: Chat, ids: bool) -> dict[str, Any]:
    text, seen, reply = chat.tokenizer.decode, turn.observation, chat.parse(turn.sampled_ids)
    made = {
        "context": text(turn.context_ids), "reminder": text(turn.reminder_ids) or None, "reply": turn.text,
        "content": reply.content, "reasoning": reply.reasoning,
        "call": {"name": turn.call.name, "arguments": dict(turn.call.arguments)} if turn.call else None,
        "problem": turn.problem, "observation": asdict(seen) if seen else None,
        "replayed": turn.replayed, "probe": turn.probe or None,
    }
    if ids:
        made |= {"context_ids": list(turn.context_ids), "sampled_ids": list(turn.sampled_ids),
                 "logprobs": list(turn.logprobs), "version": turn.version,
                 "spans": [astuple(span) for span in turn.spans]}
    return made


def _reminder(r: Reminder) -> dict[str, Any]:
    return {"category": r.category, "class": r.class_, "text": r.text, "evidence": r.evidence, "turn": r.turn,
            "confidence": r.confidence}


def _teacher(reminded: Reminded) -> dict[str, Any]:
    local = [_reminder(r) | ({"utility": reminded.utility[k]} if k in reminded.utility else {})
             for k, r in reminded.local.items()]
    return {"local": local, "global": _reminder(reminded.global_) if reminded.global_ else None,
            "dropped": [asdict(d) for d in reminded.dropped],
            "read": _teacher(reminded.control) if reminded.control else None}


def _trajectory(row: Mapping[str, Any]) -> Trajectory:
    """A recorded conversation without its ids: what reminders and annotation look at."""
    turns = tuple(
        Turn((), (), text=t["reply"], problem=t["problem"],
             call=ToolCall(t["call"]["name"], t["call"]["arguments"]) if t["call"] else None,
             observation=Observation(**t["observation"]) if t["observation"] else None,
             replayed=t.get("replayed", False), probe=t.get("probe") or "")
        for t in row["turns"])
    return Trajectory(row["id"], row["task_id"], turns, (), Ending(row["ending"]))
