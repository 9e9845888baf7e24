"""How a run ends when it is told to: Ctrl-C, SIGTERM and a closed terminal all unwind it as an exception, so that
sandboxes are closed and half-written files go. (The trainer answers the first two at a step's end: core/trainer.py.)
"""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import Iterator

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP, unwinding like Ctrl-C. `code`: the exit status that shells give such an end."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.code = 128 + number


@contextmanager
def unwinding() -> Iterator[None]:
    """While inside, the first of SIGNALS raises Terminated (SIGINT too); any further one ends the process at once. A
    signal that the caller ignores (nohup) stays ignored."""
    def stop(number, frame):
        for s in before:
            signal.signal(s, signal.SIG_DFL)
        raise Terminated(number)

    before = {s: signal.getsignal(s) for s in SIGNALS if signal.getsignal(s) is not signal.SIG_IGN}
    for s in before:
        signal.signal(s, stop)
    try:
        yield
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
