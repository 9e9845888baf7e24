"""A chat client for any OpenAI-compatible endpoint, with every wait bounded and every trouble counted.

A question is one `complete()`. It may take several requests: what may pass (429, 5xx, a lost connection, a time-out)
is tried again after a pause that doubles, or longer where the server asks so in Retry-After, until `total_s` is spent.
Then, and at once for what will not pass (401, 404, 422 ...), there is no answer: `NoAnswer`, never anything else.

A server that stays away must not slow a run down: after PATIENCE questions in a row without an answer the next ones
are skipped for RESTS * total_s; then one is tried again.

The key comes from an environment variable, goes into one header and nowhere else: redirects are not followed, bodies
of errors are not logged, and should an answer repeat the key, it is blotted out.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import random
import ssl
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any, Mapping, Protocol, Sequence
from urllib.parse import urlsplit

from oprd.rollout.http import Exchange

PATIENCE = 3  # questions in a row without an answer, then a rest
RESTS = 5  # a rest's length in total_s
MAX_REPLY = 4 * 2**20  # bytes read of one reply
MAY_PASS = (408, 409, 425, 429)  # and every 5xx

Messages = Sequence[Mapping[str, str]]  # {"role": "system" | "user" | "assistant", "content": text}


class NoAnswer(Exception):
    """The question stays unanswered; the message is why: timed_out, rate_limited, failed, refused, skipped,
    or too_long (for the engine's context)."""


class Malformed(ValueError):
    """There is an answer, but not of the form asked for; the message says what is wrong with it."""


class Counts:
    """Named counts that many threads add to."""

    def __init__(self):
        self._lock, self._counts = threading.Lock(), Counter()

    def add(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1

    def take(self) -> dict[str, int]:
        """The counts since the last take."""
        with self._lock:
            taken, self._counts = dict(self._counts), Counter()
        return taken


class Completer(Protocol):
    identity: str  # what decides the answer beside the messages, for the cache; "" if answers must not be kept

    def complete(self, messages: Messages) -> str:
        """The assistant's text. Raises NoAnswer, or Malformed for a reply that holds none."""


@dataclass(frozen=True)
class EndpointSettings:
    """url: the part before `/chat/completions`. key_variable: name of the environment variable that holds the key;
    empty: no key is sent. body: what every request holds beside model and messages. Seconds: request_s of one request,
    total_s of one question with all its requests, pauses and the wait for a free place; backoff_s of the first pause.
    concurrency: requests under way at once."""

    url: str
    model: str
    key_variable: str = ""
    body: Mapping[str, Any] = field(default_factory=dict)
    request_s: float = 60.0
    total_s: float = 150.0
    backoff_s: float = 1.0
    concurrency: int = 4


class Endpoint:
    """Safe for many threads. Raises ValueError for a URL or a key that cannot work."""

    def __init__(self, settings: EndpointSettings, counts: Counts):
        s, at = settings, urlsplit(settings.url)
        if at.scheme not in ("http", "https") or not at.hostname:
            raise ValueError(f"judge url = {s.url!r} must look like http://host:8000/v1")
        if at.username or at.password or at.query:
            raise ValueError("judge url must hold no user, password or query; keys come from an environment variable")
        if not s.model:
            raise ValueError("the judge needs the name of the model that answers (reminders.judge_model)")
        self._settings, self._counts = s, counts
        self._host, self._port = at.hostname, at.port
        self._tls = ssl.create_default_context() if at.scheme == "https" else None
        self._path = at.path.rstrip("/") + "/chat/completions"
        self._key = _key(s.key_variable)
        self.identity = json.dumps({"model": s.model, **s.body}, sort_keys=True)
        self._places = threading.BoundedSemaphore(s.concurrency)
        self._lock = threading.Lock()  # guards what follows
        self._pause_until, self._missed, self._rest_until, self._warned = 0.0, 0, 0.0, False

    def complete(self, messages: Messages) -> str:
        with self._lock:
            now = time.monotonic()
            if now < self._rest_until:
                raise NoAnswer("skipped")
            if self._missed >= PATIENCE:  # this question tries whether the server is back; the others wait for that
                self._rest_until = now + self._settings.total_s
        payload = json.dumps({**self._settings.body, "model": self._settings.model, "messages": list(messages)})
        try:
            reply = self._reply(payload.encode(), time.monotonic() + self._settings.total_s)
        except NoAnswer as why:
            self._note_missed(str(why))
            raise
        with self._lock:
            self._missed, self._rest_until = 0, 0.0
        text = _text(reply)
        return text.replace(self._key, "[key]") if self._key else text

    def _reply(self, payload: bytes, deadline: float) -> bytes:
        """The body of a reply with status 200."""
        pause = self._settings.backoff_s
        while True:
            status, retry_after, body = self._request(payload, deadline)
            if status == 200:
                return body
            trouble = "rate_limited" if status == 429 else "timed_out" if status is None else "failed"
            passes = status in (None, 0, *MAY_PASS) or status >= 500
            self._counts.add(trouble if passes else "refused")
            if not passes:
                self._warn(f"the judge refuses questions with status {status}; they count as no decision")
                raise NoAnswer("refused")
            wait = max(pause * random.uniform(0.75, 1.25), retry_after or 0.0)  # a server may ask for 0 s, for ever
            pause *= 2
            now = time.monotonic()
            if now + wait >= deadline:
                raise NoAnswer(trouble)
            if status == 429:
                with self._lock:  # what one question is told holds for all
                    self._pause_until = max(self._pause_until, now + wait)
            time.sleep(wait)

    def _request(self, payload: bytes, deadline: float) -> tuple[int | None, float | None, bytes]:
        """(status, seconds of Retry-After, body) of one request; status None: timed out, 0: the connection failed."""
        with self._lock:
            pause = self._pause_until - time.monotonic()
        if pause > 0:
            time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
        if not self._places.acquire(timeout=max(0.0, deadline - time.monotonic())):
            return None, None, b""
        try:
            seconds = min(self._settings.request_s, deadline - time.monotonic())
            return self._post(payload, seconds) if seconds > 0 else (None, None, b"")
        except TimeoutError:
            return None, None, b""
        except (OSError, http.client.HTTPException):
            return 0, None, b""
        finally:
            self._places.release()

    def _post(self, payload: bytes, seconds: float) -> tuple[int, float | None, bytes]:
        reply = Exchange(self._host, self._port, self._tls, MAX_REPLY).run("POST", self._path, payload, self._headers(),
                                                                           seconds)
        return reply.status, _seconds(reply.headers.get("Retry-After")), reply.body

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "Accept": "application/json", "Connection": "close"}
        return {**headers, "Authorization": f"Bearer {self._key}"} if self._key else headers

    def _note_missed(self, why: str) -> None:
        if why == "refused":  # answered at once: costs no time
            return
        with self._lock:
            self._missed += 1
            rest = self._missed >= PATIENCE
            if rest:
                self._rest_until = time.monotonic() + RESTS * self._settings.total_s
        if rest:
            self._warn(f"the judge has not answered {PATIENCE} questions in a row ({why}); the run goes on without it "
                       f"and tries again every {RESTS * self._settings.total_s:g} s")

    def _warn(self, text: str) -> None:
        """Once in a run; the counts tell the rest."""
        with self._lock:
            first, self._warned = not self._warned, True
        if first:
            logging.getLogger(__name__).warning(text)


def _key(variable: str) -> str:
    if not variable:
        return ""
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ValueError(f"the judge's key is to come from the environment variable {variable}, which is not set")
    if not (key.isascii() and key.isprintable()):  # http.client's own error would show it
        raise ValueError(f"the environment variable {variable} holds characters that no key can have")
    return key


def _seconds(retry_after: str | None) -> float | None:
    """Retry-After as seconds from now: a number or a date; None when absent or neither."""
    if retry_after is None:
        return None
    try:
        return max(0.0, float(retry_after)) if retry_after.strip()[:1].isdigit() else max(
            0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return None


def _text(body: bytes) -> str:
    """The assistant's text in a reply. Raises Malformed."""
    try:
        text = json.loads(body)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError):
        raise Malformed("the reply is no chat completion") from None
    if not isinstance(text, str) or not text.strip():
        raise Malformed("the reply holds no text")
    return text
