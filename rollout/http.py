"""One HTTP exchange in a bounded time, which another thread may end."""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
import time
from dataclasses import dataclass
from email.message import Message
from typing import Mapping


@dataclass(frozen=True)
class Reply:
    status: int
    headers: Message
    body: bytes


class Exchange:
    """One request and its reply, once. tls: None for plain HTTP; most: bytes read of the body at most."""

    def __init__(self, host: str, port: int | None, tls: ssl.SSLContext | None, most: int):
        self._host, self._port, self._tls, self._most = host, port, tls, most
        self._ended = threading.Event()
        self._lock, self._socket = threading.Lock(), None

    def run(self, method: str, path: str, payload: bytes | None, headers: Mapping[str, str], seconds: float) -> Reply:
        """The reply, in `seconds` from connecting to the body's last byte. A socket's own timeout begins anew with
        every byte that drips in, so a timer shuts the socket as well. Raises TimeoutError (also after end()), OSError,
        or http.client.HTTPException for what is no HTTP."""
        connection = (http.client.HTTPSConnection(self._host, self._port, timeout=seconds, context=self._tls)
                      if self._tls else http.client.HTTPConnection(self._host, self._port, timeout=seconds))
        until, timer = time.monotonic() + seconds, None
        try:
            connection.connect()
            with self._lock:
                self._socket = connection.sock
            if self._ended.is_set():
                raise TimeoutError
            timer = threading.Timer(max(0.0, until - time.monotonic()), self.end)
            timer.daemon = True
            timer.start()
            connection.request(method, path, payload, dict(headers))
            reply = connection.getresponse()
            body = reply.read(self._most)
            if reply.length:  # read(n) is silent about a body that ends early
                raise http.client.IncompleteRead(body, reply.length)
            if self._ended.is_set():  # a shut socket looks like the end of a body
                raise TimeoutError
            return Reply(reply.status, reply.headers, body)
        except (OSError, http.client.HTTPException, ValueError) as problem:
            if self._ended.is_set():
                raise TimeoutError from problem
            if isinstance(problem, ValueError):  # a status line or header that is no HTTP
                raise http.client.HTTPException(str(problem)) from None
            raise
        finally:
            if timer:
                timer.cancel()
            with self._lock:
                self._socket = None
            connection.close()

    def end(self) -> None:
        """Let run() raise TimeoutError now."""
        self._ended.set()
        with self._lock:
            if self._socket is None:
                return
            try:
                # of the connection below TLS, which another thread is reading
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
            except OSError:
                pass  # closed in the meantime
