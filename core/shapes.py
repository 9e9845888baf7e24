"""The row shapes of published trajectory sets, each brought to one chat row.

| shape | field with the conversation | told by | sets |
|---|---|---|---|
| mini-swe-agent | messages | trajectory_format | mini-swe-agent's own files (`exit` ends them: not a message) |
| SWE-smith | messages | traj_id | SWE-smith-trajectories: contents may be a JSON string of blocks |
| chat | messages | role | SWE-Gym, R2EGym-SFT, Nemotron-SWE, CoderForge, mini_swe_agent_plus; this program's own |
| SWE-agent | trajectory | text, system_prompt | nebius/SWE-agent-trajectories: `mask` marks what is trained |
| OpenHands | trajectory | role | nebius/SWE-rebench-openhands-trajectories, SWE-Zero-openhands-trajectories |
| ShareGPT | conversations | from | {from, value}; `function_call` turns; a `system` text beside it |
| chat in conversations | conversations | role | |
| R2E-Gym steps | trajectory_steps | action, observation | R2E-Gym's Trajectory objects |

The first field of the table that a row has (not null) decides, then the first message. The conversation, each message
in it, and `tools` may be JSON text. Calls that a set keeps as text (```bash blocks, <function=...> tags) stay text:
that is what such a model says. What a message is beyond that, core/messages.py reads.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, Callable

from oprd.core.messages import FieldError

ROLES = {"human": "user", "gpt": "assistant", "ai": "assistant", "observation": "tool", "function": "tool",
         "developer": "system"}
_OWN_IDS = ("id", "trajectory_id", "traj_id", "uuid")  # one row's alone; an instance has many trajectories


@dataclass(frozen=True)
class ChatRow:
    """messages, tools: for core/messages.py. shape, field: how the row was read, and where its conversation stood."""

    messages: list[dict]
    tools: Any
    shape: str
    field: str


@dataclass(frozen=True)
class Shape:
    """One line of the table. fits: (row, first message); read: (row, its messages) -> chat messages. Both are pure."""

    name: str
    field: str
    fits: Callable[[dict, dict], bool]
    read: Callable[[dict, list[dict]], list[dict]]


def read_row(row: dict) -> ChatRow:
    """The row as a chat row. Raises FieldError."""
    field = next((shape.field for shape in SHAPES if row.get(shape.field) is not None), None)
    if field is None:
        raise FieldError("row", _unknown(row, _nearest(row)), "shape")
    items = _conversation(row[field], field)
    shape = next((s for s in SHAPES if s.field == field and s.fits(row, items[0])), None)
    if shape is None:
        raise FieldError(f"{field}[0]", _unknown(items[0], field), "shape")
    return ChatRow(shape.read(row, items), _tools(row.get("tools")), shape.name, field)


def own_id(row: dict) -> str | None:
    """The id that no other row shares, if the row has one."""
    return next((str(row[name]) for name in _OWN_IDS if row.get(name) is not None), None)


def shown_id(row: dict) -> str | None:
    """The id by which a person finds the row."""
    instance = row.get("instance_id")
    return own_id(row) or (None if instance is None else str(instance))


def resolved(row: dict) -> bool:
    """Whether the row's own mark (`resolved`, `target` or `reward`) says the task was solved. Raises FieldError."""
    for name in ("resolved", "target", "reward"):
        value = row.get(name)
        if value is None:
            continue
        if not isinstance(value, (bool, int, float)):
            raise FieldError(name, f"must be true, false or a number, got {value!r}", "no_mark")
        return value == 1
    raise FieldError("resolved", "is missing, and so are target and reward; data.only_resolved needs one of them",
                     "no_mark")


# --- one function a shape -------------------------------------------------------------------------------------------

def _chat(row: dict, items: list[dict]) -> list[dict]:
    return [_spoken(item, at) for at, item in enumerate(items)]


def _mini_swe(row: dict, items: list[dict]) -> list[dict]:
    return _chat(row, items[:-1] if items[-1].get("role") == "exit" else items)


def _swe_smith(row: dict, items: list[dict]) -> list[dict]:
    return [{**message, "content": _blocks(message.get("content"))} for message in _chat(row, items)]


def _swe_agent(row: dict, items: list[dict]) -> list[dict]:
    def content(item: dict) -> Any:
        return item["text"] if item.get("text") is not None else item.get("system_prompt")

    return [_spoken({"role": item.get("role"), "content": content(item), "weight": item.get("mask")}, at)
            for at, item in enumerate(items)]


def _sharegpt(row: dict, items: list[dict]) -> list[dict]:
    system = row.get("system")
    messages = [{"role": "system", "content": system}] if system else []
    for at, item in enumerate(items):
        if item.get("from") == "function_call":
            calls = _decoded(item.get("value"), f"conversations[{at}].value")
            said = {"role": "assistant", "tool_calls": calls if isinstance(calls, list) else [calls]}
        else:
            said = {"role": item.get("from"), "content": item.get("value")}
        messages.append(_spoken({**said, "weight": item.get("weight")}, at))
    return messages


def _r2e_steps(row: dict, items: list[dict]) -> list[dict]:
    messages = [{"role": "user", "content": _text(row, "problem_statement", "")}]
    for at, step in enumerate(items):
        said = [_text(step, name, f"trajectory_steps[{at}].") for name in ("thought", "action")]
        messages += [{"role": "assistant", "content": "\n\n".join(filter(None, said))},
                     {"role": "user", "content": _text(step, "observation", f"trajectory_steps[{at}].")}]
    return messages


def _has(*names: str) -> Callable[[dict, dict], bool]:
    return lambda row, first: all(name in first for name in names)


def _row_has(name: str) -> Callable[[dict, dict], bool]:
    return lambda row, first: row.get(name) is not None and "role" in first


SHAPES = (
    Shape("mini-swe-agent", "messages", _row_has("trajectory_format"), _mini_swe),
    Shape("SWE-smith", "messages", _row_has("traj_id"), _swe_smith),
    Shape("chat", "messages", _has("role"), _chat),
    Shape("SWE-agent", "trajectory", lambda row, first: "text" in first or "system_prompt" in first, _swe_agent),
    Shape("OpenHands", "trajectory", _has("role"), _chat),
    Shape("ShareGPT", "conversations", _has("from"), _sharegpt),
    Shape("chat in conversations", "conversations", _has("role"), _chat),
    Shape("R2E-Gym steps", "trajectory_steps", lambda row, first: "action" in first, _r2e_steps),
)


# --- what several of them need --------------------------------------------------------------------------------------

def _spoken(item: dict, at: int) -> dict:
    """A message under the usual role name, its one old-style `function_call` as a tool call."""
    role = item.get("role")
    message = {**item, "role": ROLES.get(role, role) if isinstance(role, str) else role}
    if call := message.pop("function_call", None):
        if message.get("tool_calls"):
            raise FieldError(f"messages[{at}]", "has both tool_calls and function_call; keep one", "tool_calls")
        message["tool_calls"] = [call]
    return message


def _conversation(value: Any, field: str) -> list[dict]:
    """A non-empty list of objects; itself and each of them may be JSON text."""
    value = _decoded(value, field)
    if not isinstance(value, list) or not value:
        got = "an empty one" if value == [] else type(value).__name__
        raise FieldError(field, f"must be a non-empty list, got {got}", "messages")
    items = [_decoded(item, f"{field}[{at}]") for at, item in enumerate(value)]
    for at, item in enumerate(items):
        if not isinstance(item, dict):
            raise FieldError(f"{field}[{at}]", f"must be an object, got {type(item).__name__}", "messages")
    return items


def _tools(value: Any) -> Any:
    """Schemas that are each a JSON text become objects; core/messages.py reads the rest."""
    if not isinstance(value, list):
        return value
    return [_decoded(tool, f"tools[{at}]", "tools") for at, tool in enumerate(value)]


def _blocks(content: Any) -> Any:
    """The list of text blocks that a content spells as JSON text, or the content as it is."""
    if not isinstance(content, str) or not content.startswith("["):
        return content
    try:
        blocks = json.loads(content)
    except (ValueError, RecursionError):
        return content
    told = bool(blocks) and all(isinstance(block, dict) and block.get("type") == "text" for block in blocks)
    return blocks if told else content


def _text(holder: dict, name: str, at: str) -> str:
    value = holder.get(name)
    if value is not None and not isinstance(value, str):
        raise FieldError(f"{at}{name}", f"must be text, got {type(value).__name__}", "content")
    return value or ""


def _decoded(value: Any, at: str, reason: str = "messages") -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise FieldError(at, f"is text but not valid JSON ({error})", reason) from None


def _unknown(item: dict, field: str) -> str:
    has = ", ".join(sorted(map(str, item))) or "no field"
    near = " or ".join(shape.name for shape in SHAPES if shape.field == field)
    return f"fits no known shape: it has {has}; the nearest is {near}, with {field}"


def _nearest(row: dict) -> str:
    """The conversation's field that one of the row's fields is spelt most like."""
    def likeness(field: str) -> float:
        return max((SequenceMatcher(None, field, str(name)).ratio() for name in row), default=0)

    return max(dict.fromkeys(shape.field for shape in SHAPES), key=likeness)
