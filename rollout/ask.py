"""Asking a model: through the cache, a second time when the answer is malformed, and never for ever.

`Asker` stands before a Completer, which is an endpoint (`endpoint.py`) or the rollout engine (`EngineChat`, here).
The readers at the end are for answers in JSON.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Callable, Mapping, TypeVar

from oprd.core.chat import Chat
from oprd.core.settings import Config
from oprd.rollout.endpoint import Completer, Counts, Endpoint, EndpointSettings, Malformed, Messages, NoAnswer
from oprd.rollout.engine import Engine, Sampling
from oprd.rollout.judge_cache import Cache

MAX_ANSWER = 8000  # characters of a malformed answer that the model is shown again

T = TypeVar("T")


class Asker:
    """Asks one completer, through the cache: the one way in which any judge of ours asks a model.

    Counts `asked` questions as `cached`, `answered` or `no_decision`, which add up, and `malformed` answers.
    """

    def __init__(self, completer: Completer, cache: Cache | None, counts: Counts):
        self.completer, self.cache, self.counts = completer, cache, counts

    def ask(self, messages: Messages, read: Callable[[str], T]) -> T | None:
        """What `read` makes of the answer; None when there is no answer it can read. read raises Malformed."""
        self.counts.add("asked")
        keep = self.cache if self.completer.identity else None
        key = Cache.key([self.completer.identity, list(messages)])
        if keep and (kept := keep.get(key)) is not None:
            try:
                found = read(kept)
                self.counts.add("cached")
                return found
            except Malformed:
                pass  # damaged, and JSON all the same
        answer, found = self._twice(messages, read)
        self.counts.add("no_decision" if answer is None else "answered")
        if keep and answer is not None:
            keep.put(key, answer)
        return found

    def _twice(self, messages: Messages, read: Callable[[str], T]) -> tuple[str | None, T | None]:
        """(the answer that could be read, what was read)."""
        again: list[Mapping[str, str]] = []
        for _ in range(2):
            answer = ""
            try:
                answer = self.completer.complete([*messages, *again])
                return answer, read(answer)
            except NoAnswer as why:
                if str(why) in ("skipped", "too_long"):  # the others are counted where they come from
                    self.counts.add(str(why))
                return None, None
            except Malformed as problem:
                self.counts.add("malformed")
                said = [{"role": "assistant", "content": answer[:MAX_ANSWER]}] if answer else []
                told = f"That answer cannot be used: {problem}. Answer again, with the JSON object and nothing else."
                again = [*said, {"role": "user", "content": told}] if answer else []
        return None, None


def asker_of(config: Config, chat: Chat | None) -> Asker:
    """The asker of a run's settings (reminders.judge_*). Raises ValueError for settings that cannot work."""
    r, counts = config.reminders, Counts()
    try:
        body = json.loads(r.judge_body)
    except ValueError:
        body = None
    if not isinstance(body, dict) or body.keys() & {"model", "messages", "stream"}:
        raise ValueError(f"reminders.judge_body = {r.judge_body!r} must be a JSON object without model, "
                         "messages and stream")
    if r.judge_url == "engine":
        new_tokens = body.get("max_tokens", config.rollout.max_turn_tokens)
        return Asker(EngineChat(chat, config.rollout.max_context_tokens, new_tokens), None, counts)
    settings = EndpointSettings(r.judge_url, r.judge_model, r.judge_key_variable, body, r.judge_request_s,
                                r.judge_total_s, concurrency=r.judge_concurrency)
    return Asker(Endpoint(settings, counts), Cache(r.judge_cache or Path(config.run.folder) / "judge"), counts)


class EngineChat:
    """A Completer over the rollout engine: greedy, in the chat frame of the policy. Its answers are not kept, since
    the policy changes from step to step. `engine` may be set later; until then every question is refused."""

    identity = ""

    def __init__(self, chat: Chat | None, max_context_tokens: int, max_new_tokens: int, engine: Engine | None = None):
        self.engine, self._chat = engine, chat
        self._context, self._new = max_context_tokens, max_new_tokens

    def complete(self, messages: Messages) -> str:
        if self.engine is None:
            raise NoAnswer("refused")
        ids = self._prompt(messages)
        if len(ids) + self._new > self._context:
            raise NoAnswer("too_long")
        session = f"judge/{Cache.key(list(messages))}/{id(ids)}"  # a session takes one request at a time
        try:
            done = self.engine.generate(session, ids, Sampling(0.0, 1.0, self._new, tuple(self._chat.stop_ids)), 0)
        finally:
            self.engine.forget(session)
        text = self._chat.parse(done.ids).content
        if done.finish != "stop" or not text.strip():
            raise Malformed("the reply was cut off or holds no text")
        return text

    def _prompt(self, messages: Messages) -> list[int]:
        system, user, *rest = (message["content"] for message in messages)
        ids = [*self._chat.open(system, user), *self._chat.generation_ids]
        for said, told in zip(rest[::2], rest[1::2]):
            ids += [*self._chat.assistant(said), *self._chat.user(told), *self._chat.generation_ids]
        return ids


def object_in(answer: str) -> dict[str, Any]:
    """The JSON object that an answer is, one think block and one code fence taken off. Raises Malformed."""
    text = answer.split("</think>", 1)[-1].strip()
    fenced = re.fullmatch(r"```(?:json)?\s*\n(.*?)\n?\s*```", text, re.S)
    try:
        found = json.loads(fenced[1] if fenced else text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise Malformed("it is not one JSON object") from None
    if not isinstance(found, dict):
        raise Malformed("it is not one JSON object")
    return found


def list_in(answer: str, name: str) -> list[Any]:
    """The list in the answer {name: [...]}. Raises Malformed."""
    found = object_in(answer)
    if set(found) != {name} or not isinstance(found[name], list):
        raise Malformed(f'it must be an object with the one field "{name}", a list')
    return found[name]


def check_fields(entry: Any, required: tuple[str, ...], optional: tuple[str, ...], at: str) -> None:
    """Raises Malformed unless entry is an object with these fields."""
    if not isinstance(entry, dict):
        raise Malformed(f"{at} must be an object")
    if missing := [name for name in required if name not in entry]:
        raise Malformed(f"{at} has no field {missing[0]}")
    if unknown := [name for name in entry if name not in required + optional]:
        raise Malformed(f"{at} has an unknown field {unknown[0][:40]}")


def check_quote(text: Any, most: int, at: str) -> None:
    """Raises Malformed unless text is a text that says something and is not too long."""
    if not isinstance(text, str) or not text.strip() or len(text) > most:
        raise Malformed(f"{at} must be a quote of 1 to {most} characters")


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
