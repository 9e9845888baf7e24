"""The scripted expert of MicroSWE: solves every task, and makes the mistakes from which IF SFT learns to recover.

A script is a list of tool calls that is really executed in a sandbox; what is recorded is what the tools answered.
Coding SFT rows are clean solutions, of an expert who seldom looks at the failing test first and seldom validates
(`hasty`): what recorded agents are like, and what reminders are for. IF SFT rows (ours; the paper gives only their
filter) are, for a scripted mistake:

    followed      the conversation up to a reminder and the one turn that follows it; only that turn is trained
    continued     the same conversation without the reminder; the turns after the recovery are trained, in one task
                  of eight the recovering turn too
    global        a careful solution that begins with the Global Reminder of a really failed attempt

so a model that reads the plain conversation looks, validates and recovers now and then: OPRD has to make it a habit.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass
from typing import Any, Sequence

from oprd.core.types import Observation, Reminder, ToolCall
from oprd.rollout.agent import Remind
from oprd.sandbox.box import Sandbox
from oprd.sandbox.microswe import FAMILIES
from oprd.sandbox.task import Task
from oprd.sandbox.tools import call_tool

CHECK = ToolCall("bash", {"command": "python check.py"})
LIST = ToolCall("bash", {"command": "ls src"})
RESTORE = ToolCall("bash", {"command": "git checkout ."})
SUBMIT = ToolCall("submit", {})


@dataclass(frozen=True)
class Step:
    """One executed call. `reminder` is what the call's own observation fired: the next call follows it."""

    call: ToolCall
    observation: Observation
    reminder: Reminder | None = None


def read(path: str) -> ToolCall:
    return ToolCall("read", {"path": path})


def edit(path: str, old: str, new: str) -> ToolCall:
    return ToolCall("edit", {"path": path, "old_string": old, "new_string": new})


def _repair(task: Task, text: str, word: str | None = None) -> ToolCall:
    """The edit in `text` that makes the wrong return give `word` (default: the right one), anchored at the line above:
    unique wherever it stands, and a model that has written the anchor finds the line below by copying on."""
    m = task.meta
    lines = text.splitlines()
    at = next(i for i, l in enumerate(lines) if l.strip() == m["anchor"])
    indent = lines[at + 1][: len(lines[at + 1]) - len(lines[at + 1].lstrip())]
    old, new = (f'{m["anchor"]}\n{indent}return "{w}"' for w in (m["wrong"], word or m["right"]))
    return edit(m["path"], old, new)


def solution(task: Task, look: bool = True, validate: bool = True) -> list[ToolCall]:
    """The expert's calls: read what is named, see the failure (`look`), make the smallest edit, validate once, stop."""
    return [read(task.meta["path"]), *[CHECK] * look, _repair(task, task.files[task.meta["path"]]), *[CHECK] * validate,
            SUBMIT]


def hasty(task: Task, careful: float) -> list[ToolCall]:
    """The expert's calls when it looks and validates each in a share `careful` of the tasks only; it always looks
    where nothing else tells the right word."""
    rng = random.Random(f"hasty/{task.instance_id}")
    look, validate = rng.random() < careful, rng.random() < careful
    return solution(task, look or told_by_tests(task), validate)


def taught(task: Task, steps: Sequence[Step], first: int = 0) -> list[bool]:
    """Which steps a conversation without reminders trains: from `first` on, but for a look at the test that alone tells
    the right word. That is left to its reminder, as a habit that recordings lack."""
    edit = next((j for j, step in enumerate(steps) if step.call.name == "edit"), len(steps))
    return [j >= first and not (told_by_tests(task) and step.call == CHECK and j < edit) for j, step in enumerate(steps)]


def told_by_tests(task: Task) -> bool:
    """Whether only a failing test tells the right word."""
    return task.meta["kind"] == "validate"


def mistake(task: Task, rng: random.Random, careful: float = 1.0) -> tuple[list[ToolCall], list[ToolCall]]:
    """A plausible wrong beginning, and the recovery that the reminder asks for up to the submission; what comes after
    the recovery is as careful as `hasty`.

    The mistakes are those of an undertrained model: a path that does not exist, the short edit of an ambiguous line,
    the neighbour's file, a sibling's answer, a wrong word.
    """
    m, text, clean = task.meta, task.files[task.meta["path"]], hasty(task, careful)
    line = f'return "{m["wrong"]}"'
    redo = [RESTORE, _repair(task, text), CHECK, SUBMIT]
    if rng.random() < 0.35:
        path = f"src/{_foreign_word(rng, task)}.py"
        if rng.random() < 0.3:
            return [read(path)], [LIST, *clean]
        lost = ToolCall("edit", {**_repair(task, text).arguments, "path": path})
        return [read(m["path"]), CHECK, lost], [LIST, _repair(task, text), CHECK, SUBMIT]
    if m["kind"] == "scope" and rng.random() < 0.5:
        return [read(m["neighbour"])], clean
    if m["kind"] == "scope":
        other = task.files[m["neighbour"]]
        word = _answer_of(other, m["function"])
        wrong = edit(m["neighbour"], f'return "{word}"', f'return "{m["right"]}"')
        return [read(m["neighbour"]), wrong, CHECK], [RESTORE, *clean]
    look = [CHECK] if rng.random() < 0.7 else []
    start = [read(m["path"]), *look]
    if text.count(line) > 1 and rng.random() < 0.5:
        return [*start, edit(m["path"], line, f'return "{m["right"]}"')], [_repair(task, text), CHECK, SUBMIT]
    siblings = _sibling_edits(task, text)
    if siblings and rng.random() < 0.6:
        return [*start, rng.choice(siblings), CHECK], redo
    return [*start, _repair(task, text, _foreign_word(rng, task)), CHECK], redo


def _foreign_word(rng: random.Random, task: Task) -> str:
    """A training word that shares no syllable with the task's statement and source."""
    known = task.problem_statement + task.files[task.meta["path"]]
    return rng.choice([w for w in FAMILIES["train"] if not any(w[i : i + 2] in known for i in (0, 2))])


def _answer_of(text: str, function: str) -> str:
    return text.split(f"def {function}(", 1)[1].split('return "', 1)[1].split('"', 1)[0]


def _sibling_edits(task: Task, text: str) -> list[ToolCall]:
    """Edits that give the right word to another answer of the file."""
    lines, edits = text.splitlines(), []
    for above, line in zip(lines, lines[1:]):
        if line.strip().startswith('return "') and above.strip() != task.meta["anchor"] and ":" in above:
            indent = line[: len(line) - len(line.lstrip())]
            edits.append(edit(task.meta["path"], f"{above.strip()}\n{line}",
                              f'{above.strip()}\n{indent}return "{task.meta["right"]}"'))
    return edits


def perform(task: Task, box: Sandbox, calls: Sequence[ToolCall], remind: Remind | None = None,
            earlier: Sequence[Step] = ()) -> list[Step]:
    """Execute calls in a sandbox that holds the task's repository, after the `earlier` steps. Raises Broke."""
    steps = list(earlier)
    for call in calls:
        answer = call_tool(box, call.name, call.arguments)
        seen = Observation(answer.output, answer.exit_code, answer.is_error)
        visible = [*((s.call, s.observation) for s in steps), (call, seen)]
        given = [s.reminder for s in steps if s.reminder]
        steps.append(Step(call, seen, remind(task, visible, given) if remind and not answer.ends else None))
    return steps


# --- rows ---------------------------------------------------------------------------------------------------------

def reminder_message(text: str) -> dict[str, str]:
    return {"role": "user", "content": f"<system-reminder>\n{text}\n</system-reminder>"}


def chat_row(row_id: str, system: str, task: Task, steps: Sequence[Step], trained: Sequence[bool],
             before_last: Reminder | None = None, start: Reminder | None = None) -> dict[str, Any]:
    """A chat row of executed steps: `trained[i]` is whether step i's call is learnt; `before_last` is shown right
    before the last call; `start` is a Global Reminder after the task."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": system},
                                      {"role": "user", "content": task.problem_statement}]
    if start:
        messages.append(reminder_message(start.text))
    for i, step in enumerate(steps):
        if before_last and i == len(steps) - 1:
            messages.append(reminder_message(before_last.text))
        call = {"type": "function", "function": {"name": step.call.name, "arguments": dict(step.call.arguments)}}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call],
                         **({} if trained[i] else {"weight": 0})})
        if i < len(steps) - 1:
            messages.append({"role": "tool", "content": step.observation.output})
    return {"id": row_id, "task_id": task.instance_id, "messages": messages}


def followed_rows(row_id: str, system: str, task: Task, steps: Sequence[Step], mistakes: int) -> list[dict[str, Any]]:
    """One row for every reminder that the next step follows: the conversation up to that step, which alone is trained.

    `mistakes` is the number of wrong steps the script began with: a reminder fired between two of them is followed by
    nothing and is left out.
    """
    rows = []
    for i, step in enumerate(steps[:-1]):
        if step.reminder and i + 1 >= mistakes:
            trained = [j == i + 1 for j in range(i + 2)]
            row = chat_row(f"{row_id}/followed-{i}", system, task, steps[: i + 2], trained, before_last=step.reminder)
            rows.append({**row, "category": step.reminder.category})
    return rows


def recovery_rows(row_id: str, system: str, task: Task, steps: Sequence[Step], mistakes: int) -> list[dict[str, Any]]:
    """The `followed` rows of a scripted mistake, and the `continued` row if there is any of them.

    In one task of eight the continued row also trains the recovering turn itself, without its reminder: a policy that
    never recovers unaided gives the reverse KL nothing to reinforce (its gradient is weighted by the student's own
    probabilities), and one that always does leaves nothing to distil.
    """
    rows = followed_rows(row_id, system, task, steps, mistakes)
    if rows:
        unaided = zlib.crc32(row_id.encode()) % 8 == 0
        rows.append(chat_row(f"{row_id}/continued", system, task, steps, taught(task, steps, mistakes + (not unaided))))
    return rows
