"""Did a patch solve its task? The hidden tests, run in a fresh sandbox, decide.

Order: the agent's patch without test files and test infrastructure -> the official test patch -> the test command
-> its log read (sandbox/results.py): FAIL_TO_PASS and PASS_TO_PASS looked up by exact name, by the task's own parser
and by a stricter reading; the log held against the runner's own summary and exit status -> a test that must fail
(sandbox/canary.py). A verdict that cannot be trusted is `valid=False`: it is no reward of 0 and must not train.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Callable, Mapping

from oprd.sandbox.box import Ran, Sandbox
from oprd.sandbox.canary import survives
from oprd.sandbox.patches import file_changes, unsafe
from oprd.sandbox.protected import protected, reaches_inside, restore_settings, settings
from oprd.sandbox.repo import MAX_PATCH, apply_patch
from oprd.sandbox.results import read_results
from oprd.sandbox.task import Task

LOG_BYTES = 16 * 2**20  # kept of the test log

OpenBox = Callable[[Task], AbstractContextManager[Sandbox]]  # a fresh box at the task's base


@dataclass(frozen=True)
class Verdict:
    """The outcome of grading one patch.

    resolved: every FAIL_TO_PASS and PASS_TO_PASS test passed and nothing contradicts it. valid: False when the
    evaluation itself failed. reason: one line, "" when resolved. status: test id -> PASSED, FAILED, ERROR, SKIPPED,
    XFAIL, XPASS. failed_f2p, failed_p2p: the expected tests that did not pass (missing ones too). disputed: those
    that passed by the task's own parser and not by the stricter reading. log: the test command's whole output.
    touched: the paths in the patch; reverted: those of them that were left out (tests and test infrastructure).
    exit_code: the test command's; None when it did not run. timed_out: it ran into the time limit. seconds: wall clock.
    """

    resolved: bool
    valid: bool = True
    reason: str = ""
    status: Mapping[str, str] = field(default_factory=dict)
    failed_f2p: tuple[str, ...] = ()
    failed_p2p: tuple[str, ...] = ()
    disputed: tuple[str, ...] = ()
    log: str = field(default="", repr=False)
    touched: tuple[str, ...] = ()
    reverted: tuple[str, ...] = ()
    patch_applied: bool = False
    patch_empty: bool = False
    exit_code: int | None = None
    timed_out: bool = False
    seconds: float = 0.0


def verify(task: Task, patch: bytes, open_box: OpenBox, seconds: float | None = None) -> Verdict:
    """Grade `patch` in a fresh box. `seconds` limits the test command (default: the box's limit). Raises Broke."""
    start = time.monotonic()
    verdict = _unplayable(task, patch) or _grade(task, patch, open_box, seconds)
    return replace(verdict, seconds=time.monotonic() - start)


def without_patch(task: Task, open_box: OpenBox, seconds: float | None = None) -> Verdict:
    """The task's base under the hidden tests, as verify() would grade a patch that changes nothing. Raises Broke."""
    start = time.monotonic()
    return replace(_grade(task, b"", open_box, seconds), seconds=time.monotonic() - start)


def gold_check(task: Task, open_box: OpenBox, seconds: float | None = None) -> str:
    """Can the task be graded? "" when its own patch resolves it and no patch does not; else what is wrong."""
    gold = verify(task, task.patch.encode(), open_box, seconds)
    if not gold.resolved:
        return f"{task.instance_id}: the gold patch does not resolve the task: {gold.reason}"
    base = _grade(task, b"", open_box, seconds)
    if not base.valid:
        return f"{task.instance_id}: the tests cannot be graded without a patch: {base.reason}"
    still = [t for t in task.fail_to_pass if t not in base.failed_f2p]
    return f"{task.instance_id}: FAIL_TO_PASS test {still[0]} passes without a patch" if still else ""


def _unplayable(task: Task, patch: bytes) -> Verdict | None:
    """The verdict on a patch that need not run, or None."""
    no = Verdict(False, failed_f2p=task.fail_to_pass)
    if not task.fail_to_pass:
        return replace(no, valid=False, reason="the task has no FAIL_TO_PASS test")
    if not patch.strip():
        return replace(no, patch_empty=True, reason="the patch is empty")
    if len(patch) > MAX_PATCH:
        return replace(no, reason=f"the patch has {len(patch)} bytes, more than {MAX_PATCH}")
    try:
        changes = file_changes(patch)
    except ValueError as problem:
        return replace(no, reason=str(problem))
    touched = tuple(c.path for c in changes)
    bad = next(filter(None, map(unsafe, changes)), "")
    if bad:
        return replace(no, reason=bad, touched=touched)
    reverted = protected(task, changes, _command(task))
    no = replace(no, touched=touched, reverted=reverted)
    if set(reverted) == set(touched):
        return replace(no, reason="the patch changes only tests and test infrastructure")
    if meddling := reaches_inside(task, patch, reverted):
        return replace(no, reason=f"the patch reaches into the test runner: {meddling}")
    return None


def _grade(task: Task, patch: bytes, open_box: OpenBox, seconds: float | None) -> Verdict:
    changes = file_changes(patch)
    reverted = protected(task, changes, _command(task))
    verdict = Verdict(False, touched=tuple(c.path for c in changes), patch_empty=not patch, reverted=reverted,
                      failed_f2p=task.fail_to_pass, failed_p2p=task.pass_to_pass)
    with open_box(task) as box:
        if patch:
            before = settings(task, changes, box)
            trouble = apply_patch(box, patch, reverted)
            if trouble:
                return replace(verdict, reason=f"the patch does not apply: {trouble}")
            verdict = replace(verdict, patch_applied=True, reverted=reverted + restore_settings(box, before))
        trouble = apply_patch(box, task.test_patch.encode()) if task.test_patch.strip() else ""
        if trouble:
            return replace(verdict, valid=False, reason=f"the test patch does not apply: {trouble}")
        ran = box.run(_command(task), seconds, output_bytes=LOG_BYTES)
        verdict, runner = _judge(task, verdict, ran)
        source = [path for path in verdict.touched if path not in verdict.reverted]
        trouble = verdict.resolved and patch and survives(task, source, runner, box)
    return replace(verdict, resolved=False, reason=trouble) if trouble else verdict


def _judge(task: Task, verdict: Verdict, ran: Ran) -> tuple[Verdict, str]:
    """The verdict on a log, and the runner that wrote it."""
    found = read_results(task.install_config.get("log_parser", "pytest"), ran.output, ran.code, _command(task),
                         task.fail_to_pass, task.pass_to_pass)
    f2p, p2p = found.failed_f2p, found.failed_p2p
    verdict = replace(verdict, status=found.status, failed_f2p=f2p, failed_p2p=p2p, disputed=found.disputed,
                      log=ran.output, exit_code=ran.code)
    if ran.timed_out:
        return replace(verdict, timed_out=True, reason="the tests ran into the time limit"), ""
    if not found.status:
        return replace(verdict, valid=False, reason=f"no test result in the log (exit status {ran.code})"), ""
    if failed := f2p + p2p:
        first = "disputed" if failed[0] in found.disputed else found.of(failed[0])
        what = (f"{len(f2p)} of {len(task.fail_to_pass)} FAIL_TO_PASS and {len(p2p)} of {len(task.pass_to_pass)} "
                f"PASS_TO_PASS tests did not pass, first {failed[0]}: {first}")
        return replace(verdict, reason=what), found.runner
    return replace(verdict, resolved=not found.doubt, reason=found.doubt), found.runner


def _command(task: Task) -> str:
    command = task.install_config.get("test_cmd")
    if not command:
        raise ValueError(f"{task.instance_id}: install_config.test_cmd is empty; it must hold the test command")
    return command if isinstance(command, str) else " && ".join(command)
