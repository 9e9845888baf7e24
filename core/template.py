"""The chat frame of a model folder: the form that its template is, or any other append-only template as it is.

`frame` compares the folder's template (core/jinja.py) with core/chat.py's FORMS on a probing conversation. A template
that is none of them is asked itself (`TemplateChat`), message by message, if it is proved to append only.

Text from outside must not become a control token (`<|im_end|>` in a file that the agent prints), though the template
puts it between control tokens of its own. So it goes through the template veiled: the first characters of all control
tokens are replaced by lone surrogates, which no text has, and every string begins with one more, so that no control
token can begin in the template's words and end in it. The template's text is cut at its control tokens, then unveiled.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Mapping, Sequence

from oprd.core.calls import DIALECTS, Malformed, read_call
from oprd.core.chat import FORMS, Chat
from oprd.core.jinja import PROBE, TOOL, Template, folder_template, prove_append_only, tool_call
from oprd.core.messages import FieldError, Message, read_messages, read_tools
from oprd.core.tokenizer import Tokenizer, to_unicode

BY_MODEL_TYPE = {"qwen2": "qwen2_5", "qwen3": "qwen3", "qwen3_moe": "qwen3", "qwen3_next": "qwen3_instruct"}


def frame(folder: str | Path, tokenizer: Tokenizer, form: str, thinking: bool, model_type: str) -> Chat:
    """The chat frame of a model folder. form: one of FORMS; `template`: the folder's own; `auto`: the form that the
    folder's template is, else the template itself; without a template, the family's form.

    ValueError: no template where one is asked for, one that rewrites history, or thinking where there is none.
    """
    chat, how = _frame(folder, tokenizer, form, thinking, model_type)
    chat.form = how
    return chat


def _frame(folder: str | Path, tokenizer: Tokenizer, form: str, thinking: bool, model_type: str) -> tuple[Chat, str]:
    """The frame, and in words which it is and why."""
    if form in FORMS:
        return Chat.of(tokenizer, form, thinking), f"{form}, as chat.form says"
    template = folder_template(folder, enable_thinking=thinking)
    if template is None:
        if form == "template":
            raise ValueError(f"{folder}: has no chat template (chat_template.jinja, or in tokenizer_config.json); "
                             f"name a chat.form: {', '.join(FORMS)}")
        family = BY_MODEL_TYPE.get(model_type, "qwen3_5")
        return Chat.of(tokenizer, family, thinking), f"{family}, for the model_type {model_type} (no chat template)"
    found = _form_of(template, tokenizer, thinking) if form == "auto" else None
    if found:
        return Chat.of(tokenizer, found, thinking), f"{found}, which the folder's chat template is"
    chat = TemplateChat(tokenizer, template)
    if thinking and "reasoning" in chat.leaves_out:
        raise ValueError(f"{folder}: chat.thinking = true, but its chat template writes no reasoning; set it to false")
    return chat, "the folder's chat template"


def _form_of(template: Template, tokenizer: Tokenizer, thinking: bool) -> str | None:
    """The name in FORMS of what a template writes, or None."""
    for name, form in FORMS.items():
        try:
            chat = Chat.of(tokenizer, name, thinking and bool(form.thinking))
            # Qwen3 without thinking shows the empty think block in the last turn alone, where our form keeps it in
            # every turn: such a template is known by how it writes with thinking, and by both its prompts.
            modes = {thinking, True} if form.thinking else {thinking}
            if _prompt_is(template, chat) and any(_writes_as(template, tokenizer, name, mode) for mode in modes):
                return name
        except ValueError:  # the template refuses the probe, or the tokenizer has not the tokens of our forms
            return None
    return None


def _prompt_is(template: Template, chat: Chat) -> bool:
    return template.prompt(PROBE[:2]) == chat.tokenizer.decode(chat.generation_ids)


def _writes_as(template: Template, tokenizer: Tokenizer, name: str, thinking: bool) -> bool:
    """Whether a template writes tools, calls, results and the generation prompt exactly as the form does."""
    thinks = thinking and bool(FORMS[name].thinking)
    chat = Chat.of(tokenizer, name, thinks)
    messages = PROBE[:6]  # a later user message is where Qwen's templates begin to differ from themselves
    if thinks:
        messages = [{**m, "reasoning_content": "Hm."} if m["role"] == "assistant" else m for m in messages]
    for tools in (None, [TOOL]):
        for first in (0, 1):
            ours = chat.render(messages[first:], tools)[0] + chat.generation_ids
            theirs = template.render(messages[first:], tools, prompt=True, enable_thinking=thinking)
            if tokenizer.decode(ours) != theirs:
                return False
    return True


class TemplateChat(Chat):
    """A frame that asks a template. It has Chat's methods; a conversation is the template's, piece by piece.

    leaves_out: what the template does not write; a conversation that needs it is refused rather than cut short.
    """

    def __init__(self, tokenizer: Tokenizer, template: Template):
        """Proves on PROBE that the template appends. ValueError: the message that it rewrites, and when."""
        self.template = template
        texts = prove_append_only(template)
        prompt = template.prompt(PROBE[:2])
        controls = {name: i for i in tokenizer.control_ids if _can_be_veiled(name := tokenizer.token(i))}
        self._set_up(tokenizer, _dialect(texts[3][len(texts[2]) :]),
                     "think" if prompt.rstrip().endswith("<think>") else "plain", controls)
        self._veil = {ord(c): chr(0xDC01 + i) for i, c in enumerate(sorted({name[0] for name in controls}))}
        self._unveil = {ord(_MARK): None, **{ord(veiled): chr(c) for c, veiled in self._veil.items()}}
        _, words, tail = texts[7].rpartition("Answer one")
        if not words:
            raise ValueError(f"{template.where}: the chat template leaves the words of an assistant out")
        ends = [part for part in self._control_pattern.split(tail) if part in controls] if controls else []
        if not ends:
            raise ValueError(f"{template.where}: the chat template ends an assistant's turn with {tail[-40:]!r}, which "
                             "holds no control token of the tokenizer; a model could not end its turn")
        self._tail, self.end_id = tail, controls[ends[0]]
        self._separator_ids = self._ids(*self._trusted(tail.split(ends[0], 1)[1]))
        self._prompt, self.generation_ids = prompt, self._ids(*self._trusted(prompt))
        self.stop_ids = (self.end_id,)
        self.leaves_out = frozenset()
        self.leaves_out = self._left_out()
        self.cannot_act = self._unfit(texts)

    def _left_out(self) -> frozenset[str]:
        probe = [self._plain(message) for message in read_messages(PROBE)]
        called = self._render(probe[:4])
        reasoned = self._render([*probe[:2], {**probe[2], "reasoning_content": "Hm, hm."}])
        listed = self._render(probe[:2], self._veiled([TOOL], mark=False))
        written = {"a system message": "Be brief." in called, "tool calls": f"{_MARK}a.py" in called,
                   "tool results": "text of a" in called, "reasoning": "Hm, hm." in reasoned,
                   "tools": "Looks." in listed}
        return frozenset(what for what, there in written.items() if not there)

    def _unfit(self, texts: Sequence[str]) -> str | None:
        """See Chat.cannot_act."""
        if self.dialect is None or "tool results" in self.leaves_out:
            return ("its chat template writes no tool calls and results that this program can read; it reads Qwen's "
                    "calls, in XML or JSON between <tool_call> and </tool_call>")
        if not texts[3].endswith(self._tail):
            return f"its chat template ends a turn that calls a tool otherwise than one that does not ({self._tail!r})"
        try:
            if self.reminder("x") != self._after(PROBE[:4], [self._reminder("x")]):
                return "its chat template writes a user's message after a tool's otherwise than after a user's"
        except FieldError as problem:
            return f"a reminder cannot stand after a tool result ({problem})"
        return None

    # ---- Chat's methods -------------------------------------------------------------------------------------------

    def open(self, system, user, tools=None):
        said = [Message("system", system)] if system is not None else []
        return self._added([], [self._plain(m) for m in (*said, Message("user", user))], "", tools)[1]

    def user(self, text, ended=True):
        return self._after_reply(ended) + self._after(PROBE[:7], [self._plain(Message("user", text))])

    def tool_results(self, outputs, ended=True):
        results = [self._plain(Message("tool", output)) for output in outputs]
        return self._after_reply(ended) + self._after(PROBE[:3], results)

    def reminder(self, text):
        return self._after(PROBE[:2], [self._reminder(text)])

    def assistant(self, content, calls=(), reasoning=""):
        message = Message("assistant", content, reasoning, tuple((c.name, c.arguments) for c in calls))
        return self._sampled([*PROBE[:2], self._plain(message)], self._render(PROBE[:2]), None, "messages")[1]

    def render(self, messages, tools=None):
        rows, schemas = read_messages(messages), read_tools(tools)
        plain = [self._plain(message) for message in rows]
        ids: list[int] = []
        trained: list[bool] = []

        def put(more: Sequence[int], mask: bool = False) -> None:
            ids.extend(more)
            trained.extend([mask] * len(more))

        written, text = 0, ""  # the messages whose ids are there, and what the template writes for them
        for i, message in enumerate(rows):
            if message.role != "assistant" and i + 1 < len(rows):
                continue
            end = i if message.role == "assistant" else i + 1
            if written < end:
                text, more = self._added(plain[:written], plain[written:end], text, schemas)
                put(more)
            if message.role == "assistant":
                put(self.generation_ids)
                text, sampled = self._sampled(plain[: i + 1], text, schemas, f"messages[{i}]")
                put(sampled, message.trained)
                put(self._separator_ids if i + 1 < len(rows) else ())
            written = i + 1
        return tuple(ids), tuple(trained)

    # ---- pieces of the template's text ----------------------------------------------------------------------------

    def _after(self, before, new) -> tuple[int, ...]:
        """Ids of what the template adds for `new` messages of the environment, after a piece of PROBE."""
        return self._added(before, new, self._render(before), None)[1]

    def _added(self, before, new, text: str, tools) -> tuple[str, tuple[int, ...]]:
        """The text of all messages, and the ids of what the template adds for the `new` ones, which the environment
        wrote. text: of the messages before."""
        self._check(new, tools)
        whole = self._render([*before, *new], tools)
        return whole, self._ids(*self._read_text(_rest(whole, text, "messages")))

    def _sampled(self, messages, text: str, tools, at: str) -> tuple[str, tuple[int, ...]]:
        """The text of all messages, and the ids of the last, an assistant's, after the generation prompt and up to its
        end-of-turn token. text: of the messages before it. at: its place, for errors."""
        self._check(messages[-1:], tools)
        whole = self._render(messages, tools)
        said = _rest(_rest(whole, text, at), self._prompt, at)
        if not said.endswith(self._tail):
            found = said[-20:].translate(self._unveil)
            raise FieldError(at, f"the template ends this turn with {found!r} instead of {self._tail!r}", "template")
        return whole, self._ids(*self._read_text(said.removesuffix(self._tail)), self.end_id)

    def _check(self, new, tools) -> None:
        """FieldError where the template would leave something of these messages out."""
        needed = {"a system message": any(m["role"] == "system" and m["content"] for m in new),
                  "tool results": any(m["role"] == "tool" for m in new), "tools": bool(tools),
                  "tool calls": any("tool_calls" in m for m in new),
                  "reasoning": any("reasoning_content" in m for m in new)}
        if left := [what for what in sorted(self.leaves_out) if needed[what]]:
            raise FieldError("messages", f"the template of {self.template.where} leaves {left[0]} out", "template")

    def _render(self, messages, tools=None) -> str:
        """The template's text of veiled messages. FieldError: it refuses them."""
        try:
            return self.template.render(messages, self._veiled(tools, mark=False))
        except ValueError as problem:
            raise FieldError("messages", str(problem), "template") from None

    def _read_text(self, text: str) -> list[int | str]:
        """The template's text, its own control tokens as ids, what came from outside unveiled."""
        return [part.translate(self._unveil) if isinstance(part, str) else part for part in self._trusted(text)]

    def _after_reply(self, ended: bool) -> tuple[int, ...]:
        return self._separator_ids if ended else (self.end_id,) + self._separator_ids

    # ---- text from outside ----------------------------------------------------------------------------------------

    def _plain(self, message: Message) -> dict[str, Any]:
        """A checked message as templates expect it, veiled."""
        calls = [tool_call(self._veiled(name), self._veiled(arguments), i)
                 for i, (name, arguments) in enumerate(message.calls)]
        return {"role": message.role, "content": self._veiled(message.text), **({"tool_calls": calls} if calls else {}),
                **({"reasoning_content": self._veiled(message.reasoning)} if message.reasoning else {})}

    def _reminder(self, text: str) -> dict[str, Any]:
        return self._plain(Message("user", f"<system-reminder>\n{text}\n</system-reminder>"))

    def _veiled(self, value: Any, mark: bool = True) -> Any:
        """A JSON value, its texts veiled. mark=False for schemas: templates look at their words."""
        if isinstance(value, Mapping):
            return {self._veiled(key, mark): self._veiled(v, mark) for key, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._veiled(v, mark) for v in value]
        if not isinstance(value, str):
            return value
        text = to_unicode(value).translate(self._veil)
        head = len(text) - len(text.lstrip())  # the mark stands where trimming does not see it
        return text[:head] + _MARK + text[head:] if mark and head < len(text) else text


_MARK = "\udc00"


def _can_be_veiled(name: str) -> bool:
    """Whether a control token's first character can be hidden without changing what a template does with a text."""
    first = name[0]
    return not first.isalnum() and not first.isspace() and json.dumps(first, ensure_ascii=False) == f'"{first}"'


def _rest(text: str, beginning: str, at: str) -> str:
    """What follows the beginning. FieldError: it does not stand there."""
    if not text.startswith(beginning):
        raise FieldError(at, "the chat template rewrites what it has written for the messages before, or leaves its "
                         "generation prompt out", "template")
    return text[len(beginning) :]


def _dialect(turn: str) -> str | None:
    """The dialect of the call in an assistant's turn, None if it is none of ours."""
    found = re.search(r"<tool_call>(.*?)</tool_call>", turn, re.DOTALL)
    for dialect in DIALECTS if found else ():
        try:
            call = read_call(dialect, found[1])
        except Malformed:
            continue
        if call.name == "look" and call.arguments.get("at") == "a.py":
            return dialect
    return None
