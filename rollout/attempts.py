"""Many attempts at once: conversations on a pool of workers, verification of each in a fresh sandbox.

Every attempt asked for comes back as exactly one Outcome, in the order asked for. A machine's failure is retried,
then the attempt is dropped and counted; it is never a reward of 0.
"""

from __future__ import annotations

import logging
import threading
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Callable, Sequence

from oprd.core.chat import Chat
from oprd.core.types import Reminder, Trajectory, Turn
from oprd.rollout.agent import AgentLimits, Diverged, Reminding, converse
from oprd.rollout.engine import Completion, Engine, Sampling, Unserved
from oprd.rollout.select import Dropped
from oprd.sandbox.box import Broke, Sandbox, Unusable
from oprd.sandbox.repo import extract_patch
from oprd.sandbox.task import Task
from oprd.sandbox.verify import Verdict, verify

KILLED = 137  # exit status of tests that were ended by SIGKILL
log = logging.getLogger(__name__)
OpenBox = Callable[[Task], AbstractContextManager[Sandbox]]


@dataclass(frozen=True)
class Attempt:
    """One try at a task. `id` is unique in the run and names the conversation; `seed` decides its samples.

    group: attempts that are compared with each other (the same task and beginning); origin: why it was asked for
    (`task`, or what `rollout/prefix.py` adds); prefix: turns of an earlier attempt that it begins with; start: a retry
    that sees this Global Reminder all along.
    """

    id: str
    task: Task
    seed: int
    group: str = ""
    origin: str = "task"
    prefix: tuple[Turn, ...] = ()
    start: Reminder | None = None


@dataclass(frozen=True)
class Outcome:
    """How an attempt went. `trouble` is None when it was judged: then trajectory and verdict are there. Else it names
    why it was not (`infra_sandbox`, `infra_engine`, `infra_verifier`: the machine failed; `invalid_verdict`: the
    grading cannot be trusted; `replay_diverged`: its prefix led elsewhere; `unusable_task`: its image does not exist or shows
    the solution), and the attempt must not train; `why` is the last failure's own words. given, dropped, probes: see
    agent.Talk. mode: how the agent was reminded while it ran (free, passive, active)."""

    attempt: Attempt
    trajectory: Trajectory | None = None
    given: tuple[Reminder, ...] = ()
    patch: bytes = b""
    verdict: Verdict | None = None
    trouble: str | None = None
    dropped: tuple[Dropped, ...] = ()
    probes: int = 0
    mode: str = "free"
    why: str = ""


def attempt_seed(*parts: int) -> int:
    """One number from run seed, step and places: the same in every process."""
    return zlib.crc32("/".join(map(str, parts)).encode())


class _Stopped(Exception):
    """Ends a conversation whose run has ended."""


class _Until:
    """The engine as a conversation sees it: once `stop` is set, the next turn ends it."""

    def __init__(self, stop: threading.Event, engine: Engine):
        self._stop, self._engine, self.forget = stop, engine, engine.forget

    def generate(self, *request) -> Completion:
        if self._stop.is_set():
            raise _Stopped
        return self._engine.generate(*request)


class Attempts:
    """Runs attempts. `workers` conversations are open at once, `verifiers` gradings beside them."""

    def __init__(self, engine: Engine, chat: Chat, open_box: OpenBox, limits: AgentLimits, sampling: Sampling,
                 workers: int, verifiers: int, retries: int = 1):
        self.engine, self.chat, self.open_box = engine, chat, open_box
        self.limits, self.sampling = limits, sampling
        self.workers, self.verifiers, self.retries = workers, verifiers, retries

    def run(self, attempts: Sequence[Attempt], reminding: Reminding | None = None,
            on_done: Callable[[Outcome], None] = lambda outcome: None) -> list[Outcome]:
        """Run all attempts; `on_done` hears of each as it is judged (from worker threads, one at a time).

        An exception that is not the machine's (an engine that broke, a bug) ends the run and is raised here; so does a
        machine on which not one attempt could be judged (Broke).
        """
        if len({a.id for a in attempts}) != len(attempts):
            raise ValueError("attempt ids must be unique")
        graded: list[Future[Outcome] | None] = [None] * len(attempts)
        lock, stop, queue = threading.Lock(), threading.Event(), iter(enumerate(attempts))
        announce, go = threading.Lock(), threading.Event()

        def grade(outcome: Outcome) -> Outcome:
            if stop.is_set():
                return outcome
            outcome = self._grade(outcome)
            with announce:
                on_done(outcome)
            return outcome

        def work(verifier: ThreadPoolExecutor, announced: ExitStack) -> None:
            with announced:
                go.wait()
                while not stop.is_set():
                    with lock:
                        item = next(queue, None)
                    if item is None:
                        return
                    try:
                        graded[item[0]] = verifier.submit(grade, self._attempt(item[1], reminding, stop))
                    except _Stopped:  # whoever set `stop` says why
                        return
                    except BaseException:
                        stop.set()
                        raise

        with ThreadPoolExecutor(self.verifiers) as verifier, ThreadPoolExecutor(self.workers) as pool:
            # All are announced before the first runs: a lock-step engine must know from the start whom to wait for.
            announced = [ExitStack() for _ in range(min(self.workers, len(attempts)))]
            for stack in announced:
                stack.enter_context(self.engine.worker())
            try:
                workers = [pool.submit(work, verifier, stack) for stack in announced]
                go.set()  # not before: a thread that was just starting when a signal came is not waited for by the pool
                for worker in workers:
                    worker.result()
                outcomes = [future.result() for future in graded]
            except BaseException:  # Ctrl-C too: the pool would else work through every attempt before it lets go
                stop.set()
                go.set()
                raise
        # Single failures are dropped and counted; a run in which nothing works must not look like one.
        if outcomes and all((o.trouble or "").startswith("infra") for o in outcomes):
            raise Broke(f"none of {len(outcomes)} attempts could be judged ({outcomes[0].trouble} first: "
                        f"{outcomes[0].why})")
        if len({a.task.instance_id for a in attempts}) > 1 and all(o.trouble == "unusable_task" for o in outcomes):
            raise ValueError(f"none of the tasks can be attempted: {outcomes[0].why}")
        return outcomes

    def _attempt(self, attempt: Attempt, reminding: Reminding | None, stop: threading.Event) -> Outcome:
        mode = "free" if reminding is None else "active" if reminding.active else "passive"
        engine, why = _Until(stop, self.engine), ""
        for _ in range(self.retries + 1):
            try:
                with self.open_box(attempt.task) as box:
                    talk = converse(attempt.id, attempt.task, engine, self.chat, box, self.limits, self.sampling,
                                    attempt.seed, reminding, attempt.prefix, attempt.start)
                    return Outcome(attempt, talk.trajectory, talk.given, extract_patch(box), dropped=talk.dropped,
                                   probes=talk.probes, mode=mode)
            except Broke as problem:
                log.warning("attempt %s: %s", attempt.id, why := str(problem))
                trouble = "infra_engine" if isinstance(problem, Unserved) else "infra_sandbox"
            except Diverged:
                return Outcome(attempt, trouble="replay_diverged", mode=mode)
            except Unusable as problem:
                log.warning("task left out: %s", problem)
                return Outcome(attempt, trouble="unusable_task", mode=mode, why=str(problem))
        return Outcome(attempt, trouble=trouble, mode=mode, why=why)

    def _grade(self, outcome: Outcome) -> Outcome:
        if outcome.trouble:
            return outcome
        o, why = outcome, ""
        for tries in range(self.retries + 1):
            try:
                verdict = verify(o.attempt.task, o.patch, self.open_box, self.limits.tests_s)
            except Broke as problem:
                log.warning("grading of %s: %s", o.attempt.id, why := str(problem))
                continue
            except Unusable as problem:
                return replace(o, trouble="unusable_task", why=str(problem))
            if verdict.exit_code == KILLED and not verdict.resolved and not verdict.timed_out and tries < self.retries:
                continue  # by the patch itself, or by somebody on this machine: time and again is the patch
            return replace(o, verdict=verdict, trouble=None if verdict.valid else "invalid_verdict",
                           why="" if verdict.valid else verdict.reason)
        return replace(o, trouble="infra_verifier", why=why)
