"""What stands between `<tool_call>` and `</tool_call>`, in both dialects: written from a call, read into a call.

xml (Qwen3.5, Qwen3-Coder):  <function=NAME>\\n<parameter=KEY>\\nVALUE\\n</parameter>\\n ... </function>
json (Qwen2.5, Qwen3):       {"name": NAME, "arguments": {KEY: VALUE, ...}}

Values of the xml form are raw text: nothing is escaped, so a value that itself looks like the end of a parameter
followed by the next tag cannot be written. `write_call` refuses it; what it does write always reads back the same.
"""

from __future__ import annotations

import json
import re
from typing import Any, Mapping

from oprd.core.tokenizer import to_unicode
from oprd.core.types import ToolCall

DIALECTS = ("xml", "json")
_FORM = {
    "xml": "<function=NAME> with one <parameter=KEY> for each argument, then </function>",
    "json": '{"name": NAME, "arguments": {...}}',
}
_NAME = r"([A-Za-z_][A-Za-z0-9_.\-]*)"
_FUNCTION = re.compile(rf"<function={_NAME}>")
_PARAMETER = re.compile(rf"\s*<parameter={_NAME}>")
_PARAMETER_END = re.compile(r"</parameter>(?=\s*(?:<parameter=|</function>|\Z))")
_PARAMETER_LINE = re.compile(rf"^<parameter={_NAME}>", re.MULTILINE)


class Malformed(Exception):
    """A reply that is not what was asked for; the message is a sentence to show to the model."""


def write_call(dialect: str, name: str, arguments: Mapping[str, Any], json_scalars: bool = False) -> str:
    """The text of one call, without the newline on either side. Raises ValueError where it would not read back.

    Values that are not strings are spelt as Qwen's templates do: the json form keeps them JSON; the xml form writes
    objects and lists as JSON and everything else as Python's str (True, None), or, with json_scalars (Qwen3.6), as JSON
    too (true, null).
    """
    if dialect == "json":
        text = json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)
        meant = {key: _json_text(value) for key, value in arguments.items()}
    else:
        meant = {key: _xml_text(value, json_scalars) for key, value in arguments.items()}
        lines = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in meant.items()]
        text = f"<function={name}>\n{''.join(lines)}</function>"
    try:
        back = read_call(dialect, text)
    except Malformed as problem:
        raise ValueError(f"the call of {name!r} cannot be written as {dialect}: {problem}") from None
    if back.name != name or dict(back.arguments) != meant:
        raise ValueError(f"the call of {name!r} cannot be written as {dialect}: its values look like tags")
    return text


def read_call(dialect: str, text: str) -> ToolCall:
    """The call written in `text`; arguments as raw strings. Raises Malformed, and nothing else."""
    text = text.strip()
    other = "json" if dialect == "xml" else "xml"
    if text.startswith("{" if other == "json" else "<function"):
        raise Malformed(f"The tool call is written in the {other} form. Write it as {_FORM[dialect]}.")
    return _read_xml(text) if dialect == "xml" else _read_json(text)


def _xml_text(value: Any, json_scalars: bool) -> str:
    as_json = isinstance(value, (dict, list)) or (json_scalars and not isinstance(value, str))
    return json.dumps(value, ensure_ascii=False) if as_json else str(value)


def _json_text(value: Any) -> str:
    return to_unicode(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _read_xml(text: str) -> ToolCall:
    head = _FUNCTION.match(text)
    if not head:
        raise Malformed(f"The tool call does not begin with <function=NAME>. Write it as {_FORM['xml']}.")
    name = head[1]
    if not text.endswith("</function>"):
        raise Malformed(f"The call of {name} is not closed with </function>.")
    inner = text[head.end() : -len("</function>")]
    arguments: dict[str, str] = {}
    at = 0
    while inner[at:].strip():
        begin = _PARAMETER.match(inner, at)
        if not begin:
            found = inner[at:].split()[0][:40]
            raise Malformed(f"The call of {name} has {found!r} where <parameter=KEY> or </function> must stand.")
        key = begin[1]
        end = _PARAMETER_END.search(inner, begin.end())
        value = inner[begin.end() : end.start()] if end else ""
        if not end or _PARAMETER_LINE.search(value):
            raise Malformed(f"Parameter {key} of {name} is not closed with </parameter>.")
        if key in arguments:
            raise Malformed(f"Parameter {key} of {name} is given twice.")
        arguments[key] = value.removeprefix("\n").removesuffix("\n")
        at = end.end()
    return ToolCall(name, arguments)


def _read_json(text: str) -> ToolCall:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError) as error:
        why = error.msg if isinstance(error, json.JSONDecodeError) else "it is too deep or has a number too long"
        raise Malformed(f"The tool call is not valid JSON ({why}). Write it as {_FORM['json']}.") from None
    if not isinstance(call, dict) or set(call) != {"name", "arguments"}:
        raise Malformed(f"The tool call must have exactly a name and arguments. Write it as {_FORM['json']}.")
    name, arguments = call["name"], call["arguments"]
    if not isinstance(name, str) or not re.fullmatch(_NAME, name):
        raise Malformed("The name in the tool call must be the name of a tool.")
    if not isinstance(arguments, dict):
        raise Malformed(f"The arguments of {name} must be a JSON object.")
    try:
        return ToolCall(name, {to_unicode(key): _json_text(value) for key, value in arguments.items()})
    except (ValueError, RecursionError):
        raise Malformed(f"The arguments of {name} are too deep or have a number too long.") from None
