"""Chat templates as programs: read from a model folder, run in a sandbox, and proved to append only.

A folder's `chat_template` (chat_template.jinja, or the field of tokenizer_config.json) is a Jinja2 program that turns
all messages into one text. What a policy has sampled is never tokenised again, so a template is of use only if the text
of n messages still stands when message n + 1 comes. `prove_append_only` tries that on PROBE.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any, Mapping, Sequence

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock
from jinja2.sandbox import ImmutableSandboxedEnvironment

TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {
    "type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}}}


def tool_call(name: str, arguments: Mapping[str, Any], number: int = 0) -> dict[str, Any]:
    """A tool call as templates expect it."""
    return {"id": f"call{number:05d}", "type": "function", "function": {"name": name, "arguments": dict(arguments)}}


def _calling(content: str, **arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": [tool_call("look", arguments)]}


# What every template is tried on. The last user message is where the Qwen templates begin to rewrite.
PROBE: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Question one"},
    _calling("Let me look.", at="a.py", n=True), {"role": "tool", "content": "text of a"},
    _calling("And there.", at="b.py"), {"role": "tool", "content": "text of b"},
    {"role": "assistant", "content": "Answer one"}, {"role": "user", "content": "Question two"},
    {"role": "assistant", "content": "Answer two"},
]


class _Generation(Extension):
    """`{% generation %} .. {% endgeneration %}`: marks that some templates put around what is trained; no text."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return CallBlock(self.call_method("_inside"), [], [], body).set_lineno(line)

    def _inside(self, caller):
        return caller()


class Template:
    """A chat template in the environment that transformers gives it: sandbox, raise_exception, strftime_now, tojson."""

    def __init__(self, source: str, where: str = "template", switches: Mapping[str, Any] | None = None):
        """where: names it in errors. switches: variables it is rendered with (enable_thinking, bos_token, ...)."""
        self.where, self.switches = where, dict(switches or {})
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                    extensions=[_Generation, loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except TemplateError as problem:
            raise ValueError(f"{where}: the chat template is not valid Jinja2: {problem}") from None

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None,
               prompt: bool = False, **switches: Any) -> str:
        """The text of the messages, with the generation prompt after them if asked for. ValueError: it refuses them."""
        try:
            return self._template.render(messages=messages, tools=list(tools) if tools else None,
                                         add_generation_prompt=prompt, **{**self.switches, **switches})
        except Exception as problem:  # somebody else's program: it may fail in any way
            why = " ".join(str(problem).split()) or type(problem).__name__
            raise ValueError(f"{self.where}: the chat template refuses this conversation: {why}") from None

    def prompt(self, messages: Sequence[Mapping[str, Any]], **switches: Any) -> str:
        """The generation prompt after these messages."""
        return self.render(messages, prompt=True, **switches).removeprefix(self.render(messages, **switches))


def folder_template(folder: str | Path, **switches: Any) -> Template | None:
    """The chat template of a model folder, or None. ValueError: a file that cannot be read as what it should be."""
    folder = Path(folder)
    config, alone = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    try:
        found = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
        marks = {name: found.get(name) or "" for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    except (ValueError, AttributeError) as problem:
        raise ValueError(f"{config}: not a JSON object ({problem})") from None
    marks = {name: mark["content"] if isinstance(mark, dict) else mark for name, mark in marks.items()}
    source = alone.read_text(encoding="utf-8") if alone.is_file() else found.get("chat_template")
    try:
        if isinstance(source, list):  # several, by name
            source = {item["name"]: item["template"] for item in source}.get("default")
        if source and not isinstance(source, str):
            raise TypeError
    except (KeyError, TypeError):
        raise ValueError(f"{config}: chat_template must be a text, or a list of objects with name and template") from None
    return Template(source, str(folder), {**marks, **switches}) if source else None


def prove_append_only(template: Template) -> list[str]:
    """texts[k]: what the template writes for PROBE's first k messages, each the beginning of the next.

    Tried with and without a system message and tools. ValueError names the message that is rewritten, the one that
    makes the template do so, and how.
    """
    for tools in (None, [TOOL]):
        for first in (1, 0):
            texts = _proved(template, first, tools)
            if not tools and not first:
                plain = texts
    return plain


def _proved(template: Template, first: int, tools: Sequence[Mapping[str, Any]] | None) -> list[str]:
    """The texts of PROBE[first:k]; from the user's message on, for some templates refuse a system message alone."""
    where = f"{template.where}: the chat template" + (", given tools," if tools else "")
    texts = ["", ""]
    prompts: dict[str, int] = {}
    prompted = ""
    for k in range(2, len(PROBE) + 1):
        text = template.render(PROBE[first:k], tools)
        if not text.startswith(texts[-1]):
            same = next(i for i, (a, b) in enumerate(zip(texts[-1] + "\0", text + "\1")) if a != b)
            rewritten = next(m for m in range(k - 1) if len(texts[m + 1]) > same or m == k - 2)
            old, new = (t[same : same + 30] for t in (texts[-1], text))
            raise ValueError(f"{where} rewrites message {rewritten} ({PROBE[rewritten]['role']}) when message {k - 1} "
                             f"({PROBE[k - 1]['role']}) comes: {old!r} becomes {new!r}; a conversation must only grow, "
                             "so name a chat.form or mend the template")
        if PROBE[k - 1]["role"] == "assistant":
            prompt = prompted[len(texts[-1]) :]
            if not text.startswith(prompted):
                raise ValueError(f"{where} does not begin message {k - 1} (assistant) with its generation prompt "
                                 f"{prompt!r}")
            prompts.setdefault(prompt, k - 1)
            if len(prompts) > 1:
                (one, there), (other, here) = prompts.items()
                raise ValueError(f"{where} writes the generation prompt {one!r} before message {there}, {other!r} "
                                 f"before message {here}; it must always be the same")
        prompted = template.render(PROBE[first:k], tools, prompt=True)
        if not prompted.startswith(text):
            raise ValueError(f"{where} rewrites message {k - 1} when it is asked to go on")
        texts.append(text)
    return texts


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None,
             separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    """Jinja's own filter escapes for HTML; templates are written for this one."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(text: str) -> None:
    raise TemplateError(text)
