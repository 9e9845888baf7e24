"""Generation that runs ahead of training by a bounded number of versions.

    take(s, make) gives make(s). With n = 0 it is made now, under the weights of version s. With n > 0 the making of up
    to n steps to come goes on in the background while step s is trained; what step s trains on was begun at version
    s - n or later, so no token of it is older than that. The counting starts anew with a resume: the bound does not depend on
    what ran before.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Callable


class Ahead:
    """n: versions to run ahead at most; steps: how many there are in all."""

    def __init__(self, n: int = 0, steps: int = 0):
        if n < 0:
            raise ValueError(f"rollout.max_staleness = {n} must be 0 or above")
        self._n, self._steps = n, steps
        self._made: dict[int, Future] = {}
        self._maker = ThreadPoolExecutor(1, thread_name_prefix="ahead") if n else None  # one: steps are made in order

    def take(self, step: int, make: Callable[[int], Any]) -> Any:
        """make(step), and let what comes after it be made. An exception of the making is raised here, at its step."""
        if self._maker is None:
            return make(step)
        for coming in range(step, min(step + self._n + 1, self._steps)):
            if coming not in self._made:
                self._made[coming] = self._maker.submit(make, coming)
        return self._made.pop(step).result()

    def close(self) -> None:
        """Forget what is not begun and wait for what is; close the engine first, or this waits for whole attempts."""
        if self._maker is not None:
            self._maker.shutdown(wait=True, cancel_futures=True)
