"""The Qwen chat frame at the level of token ids: what a conversation is made of, and what a reply says.

A conversation only grows. Its ids are, in order (`gen` is `generation_ids`; what the model samples is in brackets):

    open(system, user)  gen [assistant(...)]  tool_results([...])  gen [assistant(...)]  user(...)  gen [...]

Rendering a finished row (`render`) walks the same methods, so training and rollout read the same ids by
construction. Text from outside (tasks, tool output, schemas, replies of an expert) is encoded by
`Tokenizer.encode`, which knows no control token; control ids come from this file alone.

Where it differs from Qwen's own templates, on purpose: an earlier turn is never rewritten (the templates drop the
thinking, even the empty think block, of turns before the last user message); there need be no user message; arguments
given as JSON text are re-spelt; the generation prompt ends at a token boundary even where a reply begins with a
newline. Otherwise the ids equal the template's text encoded with its control tokens. FORMS lists the families.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Mapping, Sequence

from oprd.core.calls import DIALECTS, Malformed, read_call, write_call
from oprd.core.messages import FieldError, Message, read_messages, read_tools
from oprd.core.tokenizer import MARKS, SPECIAL, Tokenizer
from oprd.core.types import ToolCall

GENERATION = {  # generation prompts by name
    "plain": "<|im_start|>assistant\n",
    "no_think": "<|im_start|>assistant\n<think>\n\n</think>\n\n",  # the thinking is over before it began
    "think": "<|im_start|>assistant\n<think>\n",  # the reply begins inside the think block
}


@dataclass(frozen=True)
class Form:
    """How a family of models writes a conversation.

    dialect: of tool calls. thinking, silent: its generation prompts (GENERATION) with thinking, if it can, and without.
    system: the system message of a conversation that has none. trims: contents are stripped. json_scalars: write_call.
    """

    dialect: str
    thinking: str | None
    silent: str
    system: str | None = None
    trims: bool = False
    json_scalars: bool = False


_QWEN = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
FORMS = {
    "qwen3_5": Form("xml", "think", "no_think", trims=True),
    "qwen3_6": Form("xml", "think", "no_think", trims=True, json_scalars=True),
    "qwen3": Form("json", "plain", "no_think"),
    "qwen3_instruct": Form("json", None, "plain"),
    "qwen2_5": Form("json", None, "plain", system=_QWEN),
    "bare": Form("xml", None, "plain"),  # Qwen3.5's calls and nothing more: MicroSWE's tiny models
}

# The tool block the models were trained on: what stands before and after the schemas (JSON, one a line).
_TOOLS = {
    "xml": (
        "# Tools\n\nYou have access to the following functions:\n\n<tools>",
        "\n</tools>\n\nIf you choose to call a function ONLY reply in the following format with NO suffix:\n\n"
        "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>\n"
        "<parameter=example_parameter_2>\nThis is the value for the second parameter\nthat can span\nmultiple lines\n"
        "</parameter>\n</function>\n</tool_call>\n\n<IMPORTANT>\nReminder:\n"
        "- Function calls MUST follow the specified format: an inner <function=...></function> block must be nested "
        "within <tool_call></tool_call> XML tags\n- Required parameters MUST be specified\n"
        "- You may provide optional reasoning for your function call in natural language BEFORE the function call, "
        "but NOT after\n- If there is no function call available, answer the question like normal with your current "
        "knowledge and do not tell the user about function calls\n</IMPORTANT>",
    ),
    "json": (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n<tools>",
        "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
        '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
        "</tool_call>",
    ),
}
_SEPARATOR = {"xml": "\n\n", "json": "\n"}  # between content and the first call


@dataclass(frozen=True)
class Reply:
    """A sampled turn, read. With a `problem` there are no calls, and `content` is the whole text as it came."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    problem: str | None = None
    reasoning: str = ""


class Chat:
    """The frame for one tokenizer, one call dialect (`xml` or `json`) and one generation prompt (GENERATION).

    cannot_act: why no agent can speak through it, or None. form: for people, how it was found (template.frame).
    """

    cannot_act: str | None = None

    def __init__(self, tokenizer: Tokenizer, dialect: str = "xml", generation: str = "plain", system: str | None = None,
                 trims: bool = False, json_scalars: bool = False):
        for name, value, known in (("dialect", dialect, DIALECTS), ("generation", generation, tuple(GENERATION))):
            if value not in known:
                raise ValueError(f"chat {name} = {value!r} must be one of {', '.join(known)}")
        self.default_system, self.trims, self.json_scalars = system, trims, json_scalars
        # Qwen2.5 spells the other marks as plain text; so does the frame where the tokenizer lacks the token.
        controls = {name: tokenizer.token_id(name) for name in SPECIAL + MARKS if tokenizer.has(name)}
        self._set_up(tokenizer, dialect, generation, controls)
        self.end_id, self._start = tokenizer.token_id("<|im_end|>"), tokenizer.token_id("<|im_start|>")
        for name in ("<tool_call>", "</tool_call>"):
            tokenizer.token_id(name)  # an agent must be able to call
        self.generation_ids = self._ids(*self._trusted(GENERATION[generation]))
        self.stop_ids = (self.end_id,) + tuple(self._controls[n] for n in ("<|endoftext|>",) if n in self._controls)

    def _set_up(self, tokenizer: Tokenizer, dialect: str | None, generation: str, controls: Mapping[str, int]) -> None:
        """dialect None: calls in a form that cannot be read. controls: the tokens our own text may turn into."""
        self.tokenizer, self.dialect, self.generation, self.form = tokenizer, dialect, generation, ""
        self._controls = dict(controls)
        self._control_pattern = re.compile("(" + "|".join(map(re.escape, self._controls)) + ")")
        self._call, self._call_end = (
            self._controls.get(name) if dialect else None for name in ("<tool_call>", "</tool_call>"))

    @classmethod
    def of(cls, tokenizer: Tokenizer, form: str, thinking: bool = False) -> "Chat":
        """The frame of a family (FORMS). ValueError: thinking where the family has none."""
        f = FORMS[form]
        if thinking and not f.thinking:
            raise ValueError(f"chat.thinking = true must be false for the form {form}, which has no thinking")
        return cls(tokenizer, f.dialect, f.thinking if thinking else f.silent, f.system, f.trims, f.json_scalars)

    # ---- what the environment writes ------------------------------------------------------------------------------

    def open(self, system: str | None, user: str, tools: Sequence[Mapping[str, Any]] | None = None) -> tuple[int, ...]:
        """Context of turn 0: the system message (with the tool block, if tools are given) and the user message."""
        return self._system(system, tools) + self._turn("user", self._outside(user))

    def user(self, text: str, ended: bool = True) -> tuple[int, ...]:
        """A user message after a sampled turn, from the separator on. ended: see tool_results."""
        return self._after_reply(ended) + self._turn("user", self._outside(text))

    def tool_results(self, outputs: Sequence[str], ended: bool = True) -> tuple[int, ...]:
        """All tool outputs after a sampled turn as one user turn, from the separator on.

        ended: whether the sampled turn closed itself with the end-of-turn token; if it was cut off, the frame closes
        it here, unsampled.
        """
        return self._after_reply(ended) + self._tool_turn(outputs)

    def reminder(self, text: str) -> tuple[int, ...]:
        """A reminder as a user message of its own, put between a context that is complete and the generation prompt."""
        return self._turn("user", f"<system-reminder>\n{text}\n</system-reminder>")

    # ---- what the model writes ------------------------------------------------------------------------------------

    def assistant(self, content: str, calls: Sequence[ToolCall] = (), reasoning: str = "") -> tuple[int, ...]:
        """The ids a model samples to say this, end-of-turn token included.

        parse() gives the same back. Raises ValueError for a call that its dialect cannot spell, and for reasoning
        after a generation prompt that has closed the think block.
        """
        if reasoning and self.generation == "no_think":
            raise ValueError("reasoning cannot follow a generation prompt that has ended the thinking; "
                             "set chat.thinking = true to train it")
        parts: list[int | str] = [] if self.generation == "think" else self._trusted("<think>\n")
        parts = parts + [reasoning] + self._trusted("\n</think>\n\n")
        parts = (parts if reasoning or self.generation == "think" else []) + [content]
        for i, call in enumerate(calls):
            parts.append("\n" if i else _SEPARATOR[self.dialect] if content else "")
            spelt = write_call(self.dialect, call.name, call.arguments, self.json_scalars)
            parts += [self._call, f"\n{spelt}\n", self._call_end]
        return self._ids(*parts, self.end_id)

    def parse(self, ids: Sequence[int]) -> Reply:
        """Read a sampled turn. Never raises; what is wrong is `problem`, a sentence to show to the model.

        Tags count only as control ids: a `<tool_call>` spelt in ordinary tokens is text.
        """
        ids = tuple(ids)
        try:
            return self._read(ids)
        except Malformed as problem:
            shown = [i for i in ids if i != self.end_id and self.tokenizer.token(i) is not None]
            return Reply(self.tokenizer.decode(shown), problem=str(problem))

    def _read(self, ids: tuple[int, ...]) -> Reply:
        if self.end_id not in ids:
            raise Malformed("The reply was cut off before its end, so nothing in it was done. Reply more briefly.")
        body = ids[: ids.index(self.end_id)]
        if len(body) + 1 != len(ids):
            raise Malformed("The reply goes on after its end.")
        own = {self._call, self._call_end, self._controls.get("<think>"), self._controls.get("</think>")}
        for i in body:
            if self.tokenizer.token(i) is None:
                raise Malformed("The reply contains a token that stands for no text.")
            if i in self.tokenizer.control_ids and i not in own:
                raise Malformed(f"The reply contains {self.tokenizer.token(i)}, which a reply must not contain.")
        thought, body = self._cut_thought(body)
        content, *blocks = _split(body, self._call)
        if self._call_end in content:
            raise Malformed("The reply contains </tool_call> without <tool_call> before it.")
        calls = tuple(self._read_block(block) for block in blocks)
        text = self.tokenizer.decode(content)
        text = text if thought is None else text.removeprefix("\n\n")
        text = text.removesuffix(_SEPARATOR[self.dialect]) if calls else text
        reasoning = self.tokenizer.decode(thought or ()).removeprefix("\n").removesuffix("\n")
        return Reply(text, calls, None, reasoning)

    def _cut_thought(self, body: tuple[int, ...]) -> tuple[tuple[int, ...] | None, tuple[int, ...]]:
        """(ids inside the think block or None, the rest). The closing token alone decides: the generation prompt of
        a thinking model may have opened the block."""
        begin, end = self._controls.get("<think>"), self._controls.get("</think>")
        if end not in body:
            if begin in body or self.generation == "think":
                raise Malformed("The reply opens <think> and never closes it.")
            return None, body
        cut = body.index(end)
        thought, rest = body[:cut], body[cut + 1 :]
        thought = thought[1:] if thought[:1] == (begin,) else thought
        if begin in thought or begin in rest or end in rest:
            raise Malformed("The reply has more than one think block, or text before it.")
        return thought, rest

    def _read_block(self, block: tuple[int, ...]) -> ToolCall:
        """The call in what follows one `<tool_call>`, up to the next or the end of the reply."""
        body, *rest = _split(block, self._call_end)
        if not rest:
            raise Malformed("A <tool_call> is not closed with </tool_call>.")
        if len(rest) > 1:
            raise Malformed("The reply contains </tool_call> without <tool_call> before it.")
        if self.tokenizer.decode(rest[0]).strip():
            raise Malformed("The reply has text after a tool call. Write the text first, then the calls.")
        return read_call(self.dialect, self.tokenizer.decode(body))

    # ---- whole rows -----------------------------------------------------------------------------------------------

    def render(self, messages: Any, tools: Any = None) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """Ids of a recorded conversation and, for each, whether it is trained: what an assistant sampled, no more.

        messages, tools: as data sets store them, see core/messages.py. Raises FieldError. The end-of-turn token of an
        assistant is trained; the newline after it, the generation prompt and a message of weight 0 are not.
        """
        rows = read_messages(messages)
        schemas = read_tools(tools)
        ids: list[int] = []
        trained: list[bool] = []

        def put(more: Sequence[int], mask: bool = False) -> None:
            ids.extend(more)
            trained.extend([mask] * len(more))

        system = rows[0].text if rows[0].role == "system" else None
        put(self._system(system, schemas))
        previous = "system"
        for i, message in enumerate(rows):
            if message.role == "system" or (message.role == "tool" and previous == "tool"):
                continue
            if previous == "assistant":
                put(self._after_reply(ended=True))
            if message.role == "user":
                put(self._turn("user", self._outside(message.text)))
            elif message.role == "tool":
                put(self._tool_turn([m.text for m in _run_of_tools(rows, i)]))
            else:
                put(self.generation_ids)
                put(self._recorded(message, f"messages[{i}]"), message.trained)
            previous = message.role
        return tuple(ids), tuple(trained)

    def _recorded(self, message: Message, at: str) -> tuple[int, ...]:
        calls = [ToolCall(name, arguments) for name, arguments in message.calls]
        try:
            if self.trims:
                return self.assistant(message.text.strip(), calls, message.reasoning.strip())
            text = message.text.lstrip("\n") if message.reasoning else message.text  # as Qwen3's template joins them
            return self.assistant(text, calls, message.reasoning.strip("\n"))
        except ValueError as error:
            raise FieldError(at, str(error), "unspeakable") from None

    # ---- the frame ------------------------------------------------------------------------------------------------

    def _system(self, system: str | None, tools: Sequence[Mapping[str, Any]] | None) -> tuple[int, ...]:
        system = self._outside(self.default_system if system is None else system)
        if not tools:
            return () if system is None else self._turn("system", system)
        before, after = (self._trusted(text) for text in _TOOLS[self.dialect])
        schemas = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
        block = before + [schemas] + after
        if system and self.dialect == "xml":
            block = block + ["\n\n" + system]
        elif system is not None and self.dialect == "json":
            block = [system + "\n\n"] + block
        return self._turn("system", *block)

    def _outside(self, text: str | None) -> str | None:
        """A text as the form lets it in."""
        return text.strip() if text is not None and self.trims else text

    def _turn(self, role: str, *content: int | str) -> tuple[int, ...]:
        return self._ids(self._start, f"{role}\n", *content, self.end_id, "\n")

    def _tool_turn(self, outputs: Sequence[str]) -> tuple[int, ...]:
        parts: list[int | str] = []
        for i, output in enumerate(outputs):
            parts += self._trusted("\n<tool_response>\n" if i else "<tool_response>\n")
            parts += [self._outside(output)] + self._trusted("\n</tool_response>")
        return self._turn("user", *parts)

    def _after_reply(self, ended: bool) -> tuple[int, ...]:
        return self._ids("\n") if ended else self._ids(self.end_id, "\n")

    def _trusted(self, text: str) -> list[int | str]:
        """Our own text with its control tokens as ids; the rest stays text."""
        return [self._controls.get(part, part) for part in self._control_pattern.split(text)]

    def _ids(self, *parts: int | str) -> tuple[int, ...]:
        """Ids of a sequence of control ids and texts. Texts between two control ids are encoded as one, because a
        merge may cross the seam (`user\\n` before a text that begins with a newline)."""
        ids: list[int] = []
        text = ""
        for part in parts:
            if isinstance(part, str):
                text += part
                continue
            ids += self.tokenizer.encode(text) + (part,) if text else (part,)
            text = ""
        return tuple(ids) + (self.tokenizer.encode(text) if text else ())


def _run_of_tools(rows: Sequence[Message], start: int) -> list[Message]:
    """The adjacent tool messages from `start` on."""
    end = start
    while end < len(rows) and rows[end].role == "tool":
        end += 1
    return list(rows[start:end])


def _split(ids: Sequence[int], at: int) -> list[tuple[int, ...]]:
    """`ids` cut at every occurrence of one id, which is dropped; like str.split."""
    pieces: list[list[int]] = [[]]
    for i in ids:
        if i == at:
            pieces.append([])
        else:
            pieces[-1].append(i)
    return [tuple(piece) for piece in pieces]
