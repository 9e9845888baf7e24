"""How rewards ask a model: a fixed number of readable answers to one question, or none at all.

A reward must not depend on the mood of a server. So a question has exactly `votes` readable answers or it is
unanswered: an answer that hangs, is garbage or is refused is asked for again (`retries` more questions in all, each
with the endpoint's own repetitions), and then the whole question is given up, which its caller counts and masks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Callable, Sequence, TypeVar

from oprd.core.chat import Chat
from oprd.core.settings import Config
from oprd.rollout.ask import Asker, EngineChat
from oprd.rollout.endpoint import Counts, Endpoint, EndpointSettings, Messages
from oprd.rollout.judge_cache import Cache

T = TypeVar("T")


def collect(asker: Asker, messages: Callable[[int], Messages], read: Callable[[str], T], votes: int,
            retries: int) -> list[T] | None:
    """`votes` answers read, or None. messages(i): the i-th reading of the question; readings differ in their number, so
    that the cache keeps each of them."""
    found: list[T] = []
    for i in range(votes + retries):
        answer = asker.ask(messages(i), read)
        found += [] if answer is None else [answer]
        if len(found) == votes:
            return found
        if votes + retries - i - 1 < votes - len(found):
            return None
    return None


def majority(answers: Sequence[bool]) -> bool:
    """More than half say yes: a tie is a no."""
    return 2 * sum(answers) > len(answers)


def verifier_asker(config: Config, chat: Chat | None) -> Asker:
    """Whom the rewards' questions go to (verifier.*). Raises ValueError for settings that cannot work."""
    v, counts = config.verifier, Counts()
    try:
        body = json.loads(v.body)
    except ValueError:
        body = None
    if not isinstance(body, dict) or body.keys() & {"model", "messages", "stream"}:
        raise ValueError(f"verifier.body = {v.body!r} must be a JSON object without model, messages and stream")
    if v.kind == "policy":
        return Asker(EngineChat(chat, config.rollout.max_context_tokens, v.max_tokens), None, counts)
    settings = EndpointSettings(v.url, v.model, v.key_variable, body, v.request_s, v.total_s, concurrency=v.concurrency)
    return Asker(Endpoint(settings, counts), Cache(v.cache or Path(config.run.folder) / "verifier"), counts)
