"""Chat templates of model folders: which of our forms one is, and conversations in any other append-only template.

A folder's `chat_template` (chat_template.jinja, or the field of tokenizer_config.json) is a Jinja2 program that turns
all messages into one text. `frame` compares it with core/chat.py's FORMS on a probing conversation; a template that is
none of them is used itself (`TemplateChat`) if it only ever appends: what it has written for n messages must still stand
when message n + 1 comes, because what a policy has sampled is never tokenised again.
"""

from __future__ import annotations

import json
import re
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, Mapping, Sequence

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock
from jinja2.sandbox import ImmutableSandboxedEnvironment

from oprd.core.calls import DIALECTS, Malformed, read_call
from oprd.core.chat import FORMS, Chat
from oprd.core.messages import FieldError, Message, read_messages, read_tools
from oprd.core.tokenizer import Tokenizer
from oprd.core.types import ToolCall

BY_MODEL_TYPE = {"qwen2": "qwen2_5", "qwen3": "qwen3", "qwen3_moe": "qwen3", "qwen3_next": "qwen3_instruct"}

_TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {
    "type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}}}


def _calling(content: str, **arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": [_call("look", arguments)]}


def _call(name: str, arguments: Mapping[str, Any], number: int = 0) -> dict[str, Any]:
    """A tool call as templates expect it."""
    return {"id": f"call{number:05d}", "type": "function", "function": {"name": name, "arguments": dict(arguments)}}


# What every template is tried on. The last user message is where the Qwen templates begin to rewrite.
PROBE: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Question one"},
    _calling("Let me look.", at="a.py", n=True), {"role": "tool", "content": "text of a"},
    _calling("And there.", at="b.py"), {"role": "tool", "content": "text of b"},
    {"role": "assistant", "content": "Answer one"}, {"role": "user", "content": "Question two"},
    {"role": "assistant", "content": "Answer two"},
]


def folder_template(folder: str | Path) -> str | None:
    """The chat template of a model folder, or None. ValueError: a tokenizer_config.json that is not JSON."""
    folder = Path(folder)
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    file = folder / "tokenizer_config.json"
    if not file.is_file():
        return None
    try:
        found = json.loads(file.read_text(encoding="utf-8")).get("chat_template")
    except (ValueError, AttributeError) as problem:
        raise ValueError(f"{file}: not a JSON object ({problem})") from None
    if isinstance(found, list):  # several, by name
        found = {item["name"]: item["template"] for item in found}.get("default")
    return found


def _marks(folder: str | Path) -> dict[str, str]:
    """The spelling of bos_token, eos_token, ... that templates may ask for, from tokenizer_config.json."""
    file = Path(folder) / "tokenizer_config.json"
    found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    marks = {name: found.get(name) or "" for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    return {name: mark["content"] if isinstance(mark, dict) else mark for name, mark in marks.items()}


def frame(folder: str | Path, tokenizer: Tokenizer, form: str, thinking: bool, model_type: str) -> Chat:
    """The chat frame of a model folder. form: one of FORMS; `template`: the folder's own; `auto`: the form that the
    folder's template is, else the template itself; without a template, the family's form.

    ValueError: no template where one is asked for, or one that rewrites history.
    """
    if form in FORMS:
        return Chat.of(tokenizer, form, thinking)
    source = folder_template(folder)
    if source is None:
        if form == "template":
            raise ValueError(f"{folder}: has no chat template (chat_template.jinja, or in tokenizer_config.json); "
                             f"name a chat.form: {', '.join(FORMS)}")
        return Chat.of(tokenizer, BY_MODEL_TYPE.get(model_type, "qwen3_5"), thinking)
    template = Template(source, str(folder), {"enable_thinking": thinking, **_marks(folder)})
    if form == "auto":
        for name in FORMS:
            try:
                chat = Chat.of(tokenizer, name, thinking)
            except ValueError:  # the tokenizer has not the tokens of our forms
                break
            if _is_form(template, chat):
                return chat
    return TemplateChat(tokenizer, template)


def _is_form(template: "Template", chat: Chat) -> bool:
    """Whether a template writes tools, calls, results and the generation prompt exactly as the form does."""
    end = 6  # up to the last tool result: what comes after is where Qwen's templates differ from themselves
    messages = [{**m, "reasoning_content": "Hm."} if m["role"] == "assistant" and chat.generation != "no_think" and
                "think" in template.source else m for m in PROBE[:end]]
    for tools in (None, [_TOOL]):
        for first in (0, 1):
            try:
                theirs = template.render(messages[first:], tools, add_generation_prompt=True)
            except ValueError:
                return False
            try:
                ours = chat.render(messages[first:], tools)[0] + chat.generation_ids
            except ValueError:
                return False
            if chat.tokenizer.decode(ours) != theirs:
                return False
    return True


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

    def __init__(self, source: str, where: str = "template", switches: Mapping[str, Any] = MappingProxyType({})):
        """where: names it in errors. switches: variables it is rendered with (enable_thinking, bos_token, ...)."""
        self.source, self.where, self.switches = source, where, dict(switches)
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                    extensions=[_Generation, loopcontrols])
        environment.filters["tojson"] = lambda x, indent=None, **_: json.dumps(x, ensure_ascii=False, indent=indent)
        environment.globals["raise_exception"] = self._refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except TemplateError as problem:
            raise ValueError(f"{where}: the chat template is not valid Jinja2: {problem}") from None

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None,
               add_generation_prompt: bool = False) -> str:
        """The text of the messages. ValueError: the template refuses them."""
        try:
            return self._template.render(messages=messages, tools=list(tools) if tools else None,
                                         add_generation_prompt=add_generation_prompt, **self.switches)
        except (TemplateError, TypeError) as problem:
            raise ValueError(f"{self.where}: the chat template refuses this conversation: {problem}") from None

    @staticmethod
    def _refuse(text: str) -> None:
        raise TemplateError(text)


class TemplateChat(Chat):
    """A frame that asks a template. It has Chat's methods; a conversation is the template's, piece by piece."""

    def __init__(self, tokenizer: Tokenizer, template: Template):
        """Proves on PROBE that the template appends. ValueError: the message that it rewrites, and when."""
        self.template = template
        texts = prove_append_only(template)
        prompt = self._prompt(PROBE[:2])
        controls = {tokenizer.token(i): i for i in tokenizer.control_ids}
        self._set_up(tokenizer, _dialect(texts[2][len(texts[1]) :]),
                     "think" if prompt.rstrip().endswith("<think>") else "plain", controls)
        self._tail = _after(texts[6], "Answer one")  # what follows the words of an assistant
        ends = [part for part in self._control_pattern.split(self._tail) if part in self._controls]
        if not ends:
            raise ValueError(f"{template.where}: the chat template ends an assistant's turn with {self._tail!r}, which "
                             "holds no control token of the tokenizer; a model could not end its turn")
        self.end_id = self._controls[ends[0]]
        self._separator = self._tail.split(ends[0], 1)[1]
        self.generation_ids = self._ids(*self._trusted(prompt))
        self.stop_ids = (self.end_id,)

    def open(self, system, user, tools=None):
        first = [{"role": "system", "content": system}] if system is not None else []
        return self._written([], [*first, {"role": "user", "content": user}], tools)

    def user(self, text, ended=True):
        return self._after_reply(ended) + self._written(PROBE[:7], [{"role": "user", "content": text}])

    def tool_results(self, outputs, ended=True):
        return self._after_reply(ended) + self._written(PROBE[:3], [{"role": "tool", "content": o} for o in outputs])

    def reminder(self, text):
        said = {"role": "user", "content": f"<system-reminder>\n{text}\n</system-reminder>"}
        return self._written(PROBE[:2], [said])

    def assistant(self, content, calls=(), reasoning=""):
        message = {"role": "assistant", "content": content, **({"reasoning_content": reasoning} if reasoning else {}),
                   **({"tool_calls": [_call(c.name, c.arguments, i) for i, c in enumerate(calls)]} if calls else {})}
        return self._sampled(PROBE[:2], message)

    def render(self, messages, tools=None):
        rows, schemas = read_messages(messages), read_tools(tools)
        plain = [_plain(message) for message in rows]
        ids: list[int] = []
        trained: list[bool] = []
        written = 0
        for i, message in enumerate(rows):
            if message.role != "assistant":
                continue
            before = self._written(plain[:written], plain[written:i], schemas)
            sampled = self._sampled(plain[:i], plain[i], schemas)
            separator = self._after_reply(ended=True) if written else ()
            for more, mask in ((separator + before + self.generation_ids, False), (sampled, message.trained)):
                ids.extend(more)
                trained.extend([mask] * len(more))
            written = i + 1
        if written < len(rows):
            more = (self._after_reply(ended=True) if written else ()) + self._written(plain[:written], plain[written:],
                                                                                    schemas)
            ids.extend(more)
            trained.extend([False] * len(more))
        return tuple(ids), tuple(trained)

    # ---- pieces of the template's text ----------------------------------------------------------------------------

    def _prompt(self, messages, tools=None) -> str:
        """The generation prompt after these messages."""
        without = self.template.render(messages, tools)
        return _after(self.template.render(messages, tools, add_generation_prompt=True), without, start=True)

    def _written(self, before, new, tools=None) -> tuple[int, ...]:
        """Ids of what the template adds for `new` messages of the environment; their contents make no control token."""
        if not new:
            return ()
        hidden, values = _hide(new)
        try:
            text = _after(self.template.render([*before, *hidden], tools),
                          self.template.render(before, tools) if before else "", start=True)
        except ValueError as problem:
            raise FieldError("messages", str(problem), "template") from None
        return self._ids(*self._restored(text, values))

    def _sampled(self, before, message, tools=None) -> tuple[int, ...]:
        """Ids of an assistant's message after the generation prompt, up to its end-of-turn token."""
        hidden, values = _hide([message])
        try:
            text = self.template.render([*before, *hidden], tools)
            prompt = self.template.render(before, tools, add_generation_prompt=True)
            text = _after(text, prompt, start=True)
        except ValueError as problem:
            raise FieldError("messages", str(problem), "template") from None
        if not text.endswith(self._tail):
            raise FieldError("messages", f"the template ends this assistant's turn with {text[-20:]!r} instead of "
                             f"{self._tail!r}", "template")
        return self._ids(*self._restored(text.removesuffix(self._tail), values), self.end_id)

    def _restored(self, text: str, values: Mapping[str, str]) -> list[int | str]:
        """The template's text, control tokens as ids, with the hidden contents back as plain text."""
        parts: list[int | str] = []
        for i, part in enumerate(_HIDDEN.split(text)):
            parts += [values[part]] if i % 2 else self._trusted(part)
        return parts

    def _after_reply(self, ended: bool) -> tuple[int, ...]:
        separator = self._trusted(self._separator)
        return self._ids(*separator) if ended else self._ids(self.end_id, *separator)


def prove_append_only(template: Template) -> list[str]:
    """The texts of PROBE's first 1, 2, ... messages, each the beginning of the next. ValueError names the message that
    the template rewrites, and the one that makes it do so."""
    texts: list[str] = []
    for n in range(1, len(PROBE) + 1):
        if n == 1:  # some templates refuse a system message alone: what counts begins with the user's
            texts.append("")
            continue
        text = template.render(PROBE[:n])
        if not text.startswith(texts[-1]):
            same = next(i for i, (a, b) in enumerate(zip(texts[-1] + "\0", text + "\1")) if a != b)
            rewritten = next(k for k in range(1, n) if len(texts[k]) > same or k == n - 1)
            old, new = (t[same : same + 30] for t in (texts[-1], text))
            raise ValueError(f"{template.where}: the chat template rewrites message {rewritten} "
                             f"({PROBE[rewritten]['role']}) when message {n - 1} ({PROBE[n - 1]['role']}) comes: "
                             f"{old!r} becomes {new!r}; a conversation must only grow, so name a chat.form or mend the "
                             "template")
        prompted = template.render(PROBE[:n], add_generation_prompt=True)
        if not prompted.startswith(text):
            raise ValueError(f"{template.where}: the chat template rewrites message {n - 1} when it is asked to go on")
        texts.append(text)
    for n, message in enumerate(PROBE):
        prompt = template.render(PROBE[:n], add_generation_prompt=True) if message["role"] == "assistant" else ""
        if not texts[n].startswith(prompt):
            raise ValueError(f"{template.where}: what the chat template writes for message {n} (assistant) does not "
                             f"begin with its generation prompt {prompt[len(texts[n - 1]) :]!r}")
    return texts


_HIDDEN = re.compile("\ue000(\\d+)\ue001")  # private-use characters: no template knows them


def _hide(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The messages with numbered marks in place of their contents, and the contents by number."""
    hidden, values = [], {}

    def mark(text: str) -> str:
        values[str(len(values))] = text
        return f"\ue000{len(values) - 1}\ue001"

    for message in messages:
        message = dict(message)
        for key in ("content", "reasoning_content"):
            if message.get(key):
                message[key] = mark(message[key])
        hidden.append(message)
    return hidden, values


def _plain(message: Message) -> dict[str, Any]:
    """A checked message as templates expect it."""
    calls = [_call(name, arguments, i) for i, (name, arguments) in enumerate(message.calls)]
    return {"role": message.role, "content": message.text, **({"tool_calls": calls} if calls else {}),
            **({"reasoning_content": message.reasoning} if message.reasoning else {})}


def _after(text: str, part: str, start: bool = False) -> str:
    """What follows `part`: at the start of the text (ValueError if it does not stand there), or its last occurrence."""
    if start and not text.startswith(part):
        raise ValueError("the chat template rewrites what it had written before")
    return text[len(part) :] if start else text.rsplit(part, 1)[1]


def _dialect(turn: str) -> str | None:
    """The dialect of the call in an assistant's turn, None if it is none of ours."""
    found = re.search(r"<tool_call>(.*?)</tool_call>", turn, re.DOTALL)
    for dialect in DIALECTS if found else ():
        try:
            call: ToolCall = read_call(dialect, found[1])
        except Malformed:
            continue
        if call.name == "look" and call.arguments.get("at") == "a.py":
            return dialect
    return None
