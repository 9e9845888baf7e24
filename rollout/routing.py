"""Which server serves a turn: the one that has read the conversation before, unless it is much busier than another."""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from typing import Hashable, Sequence

from oprd.rollout.engine import Unserved
from oprd.rollout.server import SERVING, Server

SLACK = 4  # requests a server may have more than the idlest and keep its conversations
REMEMBERED = 100_000  # conversations and beginnings


class Router:
    """Least loaded, with prefix affinity; closed while weights change. Safe for many threads."""

    def __init__(self, servers: Sequence[Server]):
        self.servers = list(servers)
        self._changed = threading.Condition()  # guards what follows
        self._load: Counter[Server] = Counter()
        self._homes: OrderedDict[Hashable, Server] = OrderedDict()
        self._open, self._ended = False, False

    def take(self, session: str, context: Sequence[int], until: float) -> tuple[Server, str]:
        """(a server with a place counted as taken, the label its replies must have); waits while the router is closed,
        at most until `until` (monotonic). Raises Unserved when no server serves or it stayed closed."""
        beginning = hash(tuple(context))  # attempts at one task begin alike: the second finds the first one's cache
        with self._changed:
            while not self._open and not self._ended:
                if not self._changed.wait(max(0.0, until - time.monotonic())) and time.monotonic() >= until:
                    raise Unserved("the rollout servers were being updated all the time that a turn had")
            serving = [s for s in self.servers if s.state == SERVING]
            if self._ended or not serving:
                raise Unserved("no rollout server is left: " + "; ".join(f"{s}: {s.why}" for s in self.servers))
            idlest = min(serving, key=lambda s: self._load[s])
            home = self._homes.get(session) or self._homes.get(beginning)
            chosen = home if home in serving and self._load[home] <= self._load[idlest] + SLACK else idlest
            self._load[chosen] += 1
            for key in (session, beginning):
                self._homes[key] = chosen
                self._homes.move_to_end(key)
            while len(self._homes) > REMEMBERED:
                self._homes.popitem(last=False)
            return chosen, chosen.label

    def give(self, server: Server) -> None:
        with self._changed:
            self._load[server] -= 1
            self._changed.notify_all()

    def forget(self, session: str) -> None:
        with self._changed:
            self._homes.pop(session, None)

    def close(self) -> None:
        """Let nothing new through."""
        with self._changed:
            self._open = False

    @property
    def is_open(self) -> bool:
        return self._open

    def wait_idle(self, seconds: float) -> bool:
        """Whether every place was given back within `seconds`."""
        with self._changed:
            return self._changed.wait_for(lambda: not any(self._load.values()), seconds)

    def open(self) -> None:
        with self._changed:
            self._open = True
            self._homes.clear()  # no cache outlives the weights
            self._changed.notify_all()

    def end(self) -> None:
        """Nothing goes through any more: whoever waits gets Unserved."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
