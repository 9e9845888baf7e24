"""Chat rows as data sets store them, checked and brought to one shape.

A row's `messages` follow OpenAI's chat form with the variations found in published agent data: content null, text or
a list of text blocks; tool calls nested under `function` or flat, as objects or JSON strings; arguments as an object
or a JSON string; keys present but null. Everything else is a FieldError that names the field.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Mapping, Sequence

ROLES = ("system", "user", "assistant", "tool")


class FieldError(ValueError):
    """One field of a row is wrong. `field`: its path, e.g. `messages[3].content`; `reason`: a word to count by."""

    def __init__(self, field: str, problem: str, reason: str):
        super().__init__(f"{field}: {problem}")
        self.field, self.reason = field, reason


@dataclass(frozen=True)
class Message:
    """One message. calls: (name, arguments) pairs, assistant only. trained: False for an assistant's weight 0."""

    role: str
    text: str
    reasoning: str = ""
    calls: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    trained: bool = True


def read_messages(value: Any) -> list[Message]:
    """Check a row's `messages` and their order: system only first, tool only after an assistant or another tool."""
    if not isinstance(value, list) or not value:
        raise FieldError("messages", f"must be a non-empty list, got {_kind(value)}", "messages")
    messages = [_message(item, f"messages[{i}]") for i, item in enumerate(value)]
    for i, message in enumerate(messages):
        if message.role == "system" and i > 0:
            raise FieldError(f"messages[{i}].role", "a system message must be the first", "role_order")
        if message.role == "tool" and (i == 0 or messages[i - 1].role not in ("assistant", "tool")):
            raise FieldError(f"messages[{i}].role", "a tool message must follow an assistant message", "role_order")
    return messages


def read_tools(value: Any) -> list[dict] | None:
    """A row's `tools`: a list of schemas, or that list as JSON text; null, "" and [] mean none. Never dropped."""
    if isinstance(value, str) and value:
        value = _decode(value, "tools", "tools")
    if value is None or value == "" or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise FieldError("tools", f"must be a list of objects, got {_kind(value)}", "tools")
    return value


def _message(item: Any, at: str) -> Message:
    if not isinstance(item, dict):
        raise FieldError(at, f"must be an object, got {_kind(item)}", "messages")
    role = item.get("role")
    if role not in ROLES:
        raise FieldError(f"{at}.role", f"must be one of {', '.join(ROLES)}, got {role!r}", "role")
    text = _text(item.get("content"), f"{at}.content")
    if role != "assistant":
        if item.get("tool_calls"):
            raise FieldError(f"{at}.tool_calls", f"a {role} message cannot call tools", "tool_calls")
        return Message(role, text)
    reasoning = item.get("reasoning_content")
    if reasoning is None:
        reasoning, text = _split_reasoning(text)
    elif not isinstance(reasoning, str):
        raise FieldError(f"{at}.reasoning_content", f"must be text, got {_kind(reasoning)}", "reasoning")
    weight = item.get("weight")
    if weight not in (None, 0, 1):
        raise FieldError(f"{at}.weight", f"must be 0 or 1, got {weight!r}", "weight")
    return Message(role, text, reasoning, _calls(item.get("tool_calls"), f"{at}.tool_calls"), weight != 0)


def _split_reasoning(text: str) -> tuple[str, str]:
    """(reasoning, content) of a content that carries its think block as text, as Qwen's templates split it.

    Only the closing tag decides: where the generation prompt opened the block, the opening one is not in the text.
    """
    if "</think>" not in text:
        return "", text
    before, after = text.split("</think>", 1)
    return before.split("<think>")[-1].strip("\n"), after.lstrip("\n")


def _text(content: Any, at: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise FieldError(at, f"must be text, null or a list of text blocks, got {_kind(content)}", "content")
    for i, block in enumerate(content):
        if not isinstance(block, dict) or not isinstance(block.get("text"), str) or block.get("type", "text") != "text":
            raise FieldError(f"{at}[{i}]", "must be a text block {'type': 'text', 'text': ...}", "content")
    return "".join(block["text"] for block in content)


def _calls(value: Any, at: str) -> tuple[tuple[str, Mapping[str, Any]], ...]:
    if isinstance(value, str) and value:
        value = _decode(value, at, "tool_calls")
    if not value:
        return ()
    if not isinstance(value, list):
        raise FieldError(at, f"must be a list, got {_kind(value)}", "tool_calls")
    return tuple(_call(item, f"{at}[{i}]") for i, item in enumerate(value))


def _call(item: Any, at: str) -> tuple[str, Mapping[str, Any]]:
    if isinstance(item, str):
        item = _decode(item, at, "tool_calls")
    if isinstance(item, dict) and item.get("function") is not None:
        item, at = item["function"], f"{at}.function"
    if not isinstance(item, dict):
        raise FieldError(at, f"must be an object, got {_kind(item)}", "tool_calls")
    name, arguments = item.get("name"), item.get("arguments")
    if not isinstance(name, str) or not name:
        raise FieldError(f"{at}.name", f"must be the name of a tool, got {name!r}", "tool_calls")
    if isinstance(arguments, str):
        arguments = _decode(arguments, f"{at}.arguments", "arguments") if arguments.strip() else {}
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise FieldError(f"{at}.arguments", f"must be an object, got {_kind(arguments)}", "arguments")
    return name, arguments


def _decode(text: str, at: str, reason: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FieldError(at, f"is text but not valid JSON ({error})", reason) from None


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names: Sequence[tuple[type, str]] = ((bool, "a boolean"), (str, "text"), (dict, "an object"), (list, "a list"))
    return next((name for kind, name in names if isinstance(value, kind)), "a number")
