"""One SGLang server: its calls, each in a bounded time, and what this version of it offers, found by asking."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from typing import Any, Callable, Mapping, Sequence
from urllib.parse import urlsplit

from oprd.rollout.engine import Sampling
from oprd.rollout.http import Exchange, Reply
from oprd.rollout.wire import Piece, generate_body, read_piece, read_scores, score_body
from oprd.sandbox.box import Broke

MOST = 2**28  # bytes read of one reply
SERVING, UNUSABLE, DEAD = "serving", "unusable", "dead"  # unusable: alive, but its weights are not what we think


class Lost(Broke):
    """The server did not answer, or not in time."""


class Refused(Exception):
    """The server answered with an error status; the message is its own."""

    def __init__(self, status: int, text: str):
        super().__init__(f"{text} (status {status})")
        self.status = status


class Server:
    """Safe for many threads. `state` and `label` (the weights every reply must name) belong to the engine."""

    def __init__(self, url: str, call_s: float = 30.0):
        """Raises ValueError for a URL that cannot be one."""
        at = urlsplit(url if "//" in url else f"http://{url}")
        try:
            port = at.port
        except ValueError:
            port = None
        if at.scheme != "http" or not at.hostname or not port or at.path.strip("/") or at.query:
            raise ValueError(f"sglang.servers: {url!r} must look like http://host:30000")
        self.url, self._host, self.port, self._call_s = f"http://{at.hostname}:{port}", at.hostname, port, call_s
        self.state, self.why, self.label = UNUSABLE, "it has no weights of this run yet", ""
        self.tensor_parallel, self.dtype, self.most_tokens, self.sessions = 1, "", None, False
        self._lock, self._running = threading.Lock(), {}  # rid -> Exchange

    def __str__(self) -> str:
        return self.url

    # --- what it is

    def learn(self) -> None:
        """Ask the server what it is. Raises Lost, Refused, or ValueError for one that cannot serve a run."""
        info = self._info("server_info")
        self.tensor_parallel, self.dtype = int(info.get("tp_size") or 1), str(info.get("dtype") or "")
        if int(info.get("dp_size") or 1) > 1 or int(info.get("pp_size") or 1) > 1:
            raise ValueError(f"{self}: has dp_size = {info.get('dp_size')}, pp_size = {info.get('pp_size')}; weights can "
                             "be sent to tensor-parallel servers only: start one server for each replica")
        limits = (info.get("max_req_input_len"), info.get("max_total_num_tokens"), info.get("context_length"))
        self.most_tokens = min((int(n) for n in limits if n), default=None)
        # Since 0.5.21 updates stand between two calls, which older servers do not have. A stray end changes nothing:
        # the new ones refuse it, the old ones do not know the path.
        self.sessions = self._exchange("POST", "/end_weight_update", {}, self._call_s).status not in (404, 405)

    def alive(self, seconds: float) -> bool:
        """Whether the server answers at all, paused or not (whatever the status: it answers)."""
        try:
            self._exchange("GET", "/model_info", None, seconds)
            return True
        except Lost:
            return False

    def healthy(self, seconds: float) -> bool:
        """Whether it can serve: /health samples a token, so a paused server is not."""
        try:
            return self._exchange("GET", "/health", None, seconds).status == 200
        except Lost:
            return False

    def address_seen(self) -> str:
        """This machine's address on the way to the server: where the server finds the trainer."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((self._host, self.port))
            return probe.getsockname()[0]

    def _info(self, name: str) -> Mapping[str, Any]:
        reply = self._exchange("GET", f"/{name}", None, self._call_s)
        if reply.status == 404:  # the name before 0.5.10
            reply = self._exchange("GET", f"/get_{name}", None, self._call_s)
        return _object(_checked(reply))

    # --- tokens

    def generate(self, request_id: str, ids: Sequence[int], sampling: Sampling, new_tokens: int, seed: int, vocab: int,
                 seconds: float) -> Piece:
        """Raises Lost, Refused or Strange."""
        body = generate_body(request_id, ids, sampling, new_tokens, seed)
        return read_piece(_checked(self._exchange("POST", "/generate", body, seconds, request_id)), sampling,
                          new_tokens, vocab)

    def score(self, ids: Sequence[int], vocab: int, seconds: float) -> tuple[list[float], str]:
        """(log p(ids[i] | ids[:i]) for i >= 1, label). Raises Lost, Refused or Strange."""
        return read_scores(_checked(self._exchange("POST", "/generate", score_body(ids), seconds)), ids, vocab)

    def abort(self, request_id: str) -> None:
        """End a request; its reply then comes with what was sampled. Nothing is raised: the reply has its own limit."""
        try:
            self._exchange("POST", "/abort_request", {"rid": request_id, "abort_all": False}, self._call_s)
        except Lost:
            pass

    def hang_up(self) -> None:
        """Let every running generate() raise Lost."""
        with self._lock:
            running = list(self._running.values())
        for exchange in running:
            exchange.end()

    # --- control

    def call(self, path: str, body: Mapping[str, Any], seconds: float | None = None) -> dict[str, Any]:
        """One control call; its JSON reply. Raises Lost or Refused."""
        found = _object(_checked(self._exchange("POST", path, body, seconds or self._call_s)))
        if found.get("success") is False:
            raise Refused(200, str(found.get("message")))
        return found

    def flush(self, seconds: float) -> None:
        """Empty the prefix cache, confirmed. A server that is not idle yet refuses: asked again until `seconds` are
        over. Raises Lost or Refused."""
        until = time.monotonic() + seconds
        while True:
            reply = self._exchange("POST", "/flush_cache", {}, max(0.1, until - time.monotonic()))
            if reply.status == 200 or time.monotonic() + 0.1 > until:
                _checked(reply)
                return
            time.sleep(0.05)

    def _exchange(self, method: str, path: str, body: Mapping[str, Any] | None, seconds: float,
                  request_id: str = "") -> Reply:
        exchange = Exchange(self._host, self.port, None, MOST)
        with self._lock:
            if request_id:
                self._running[request_id] = exchange
        try:
            payload = None if body is None else json.dumps(body).encode()
            return exchange.run(method, path, payload, {"Content-Type": "application/json", "Connection": "close"},
                                seconds)
        except TimeoutError:
            raise Lost(f"{self}{path}: no answer within {seconds:.1f} s") from None
        except (OSError, http.client.HTTPException) as problem:
            raise Lost(f"{self}{path}: {problem or type(problem).__name__}") from None
        finally:
            with self._lock:
                self._running.pop(request_id, None)


def wait_for(servers: Sequence[Server], seconds: float, gone: Callable[[], str | None],
             report: Callable[[int], None]) -> None:
    """Wait until all are ready; gone() tells why waiting is vain. `report` hears how many are. Raises Lost."""
    until, waiting = time.monotonic() + seconds, list(servers)
    while waiting:
        waiting = [s for s in waiting if not s.healthy(30.0)]
        report(len(servers) - len(waiting))
        if waiting and (why := gone()):
            raise Lost(why)
        if waiting and time.monotonic() > until:
            raise Lost(f"{waiting[0]}: not ready within {seconds:g} s")
        if waiting:
            time.sleep(0.5)


def _checked(reply: Reply) -> bytes:
    if reply.status != 200:
        raise Refused(reply.status, _message(reply.body))
    return reply.body


def _message(body: bytes) -> str:
    """What a refusal says, in one line."""
    try:
        found = json.loads(body)
        while isinstance(found, dict):
            found = found.get("message") or found.get("error") or str(found)
    except (ValueError, RecursionError):
        found = body.decode("utf-8", "replace")
    return " ".join(str(found).split())[:300]


def _object(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body or b"{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
