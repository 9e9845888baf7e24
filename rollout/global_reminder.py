"""The Global Reminder: what the hidden tests said about a finished, rejected attempt.

Made from verifier evidence alone (test status and log), for attempts whose patch really ran and failed. Failures with
one root cause are one signal, root causes stand before their consequences, five signals at most, and nothing of the
reference patch or of the hidden tests' bodies gets through (`leaks.py`). The signals are read off the log by the
patterns below, or picked by a model (`evidence_judge.py`); text, order, number and filter are the same for both.

    Rejected: 3 passed, 1 failed. Changed src/zuvo.py.
    tests/test_zuvo.py:8 test_kemi: AssertionError: 'zuvo' != 'lami'
    Read the task again and make one consistent fix.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Callable, Iterable, Sequence

from oprd.core.types import Reminder
from oprd.rollout.leaks import Secrets
from oprd.sandbox.task import Task
from oprd.sandbox.verify import Verdict

CATEGORY = "test_outcome_feedback"
MAX_SIGNALS = 5
MAX_MESSAGE = 160  # characters of one failure's message
MAX_NAMED = 2  # tests or files named in one list; the rest are counted
WITHHELD = "failed"  # instead of a message that shows a secret
ADVICE = "Read the task again and make one consistent fix."

KINDS: tuple[tuple[str, int, str], ...] = (  # (kind, rank, what its message looks like), the first that fits
    ("syntax", 0, r"SyntaxError|IndentationError|TabError|syntax error|[Uu]nexpected token"),
    ("interface", 0, r"AttributeError|has no attribute|does not (implement|satisfy)|abstract (class|method)"),
    ("argument", 0, r"TypeError.*argument|(not enough|too many) arguments|unexpected keyword"),
    ("reference", 0, r"NameError|ReferenceError|UnboundLocalError|is not defined|undefined: |undeclared"),
    ("path", 0, r"ModuleNotFoundError|FileNotFoundError|No such file|[Cc]annot find (module|package)"),
    ("symbol", 0, r"ImportError|cannot import name|cannot find symbol|unresolved (import|external)|no field or method"),
    ("signature", 0, r"TypeError|assignment mismatch|mismatched types|return values|incompatible types"),
    ("assertion", 1, r"Assert|assert|!=|\bexpected\b|\bwant\b|panic"),
    ("command", 2, r"[Ee]xit (code|status)|command not found|timed out|Timeout|Killed"),
    ("generic", 3, r""),
)
BLOCK = re.compile(r"^(?:(?:FAIL|ERROR): (?P<unittest>\S+)(?: \((?P<place>[\w.]+)\))?"
                   r"|_{3,} (?:ERROR (?:at \w+ of |collecting ))?(?P<pytest>[\w./:-]+(?:\[.*?\])?)(?: \S.*?)? _{3,}$"
                   r"|\s*--- FAIL: (?P<go>\S+))", re.M)
END = re.compile(r"^(={10,}|Ran \d+ tests?|FAILED \(|ok\s+\S+|FAIL\s+\S+\s+[\d.]+s)", re.M)
SUMMARY = re.compile(r"^(?:FAILED|ERROR) (?P<test>\S+::.+?) - (?P<message>.+)$", re.M)
RAISED = re.compile(r"^((?:\w+\.)*\w*(?:Error|Exception|Failure|panic)\b.*)$", re.M)
QUOTED = re.compile(r"^(?:E\s+|\s*\S+\.go:\d+: )(.+)$", re.M)
PLACE = re.compile(r"(?:File \"(?P<py>[^\"]+)\", line (?P<pyline>\d+))|^\s*(?P<file>[\w./-]+\.\w+):(?P<line>\d+)", re.M)
COMPILER = re.compile(r"^(?P<file>(?:\./)?[\w./-]+\.\w+):(?P<line>\d+):\d+: (?:error: )?(?P<message>.+)$", re.M)


@dataclass(frozen=True)
class Signal:
    """One root cause: its kind and rank, the tests it failed, where, and the message."""

    kind: str
    rank: int
    tests: tuple[str, ...]
    place: str
    message: str

    def line(self) -> str:
        message = self.message.strip()[:MAX_MESSAGE]
        return " ".join(part for part in (self.place, _named(self.tests) + ":", message) if part)


Evidence = Callable[[Task, Verdict], "list[Signal] | None"]  # a model's signals; None: no decision


def global_reminder(task: Task, verdict: Verdict, evidence: Evidence = lambda task, verdict: None) -> Reminder | None:
    """The Global Reminder of one finished attempt, or None when it is not eligible (see `ineligible`). Where
    `evidence` decides nothing, the signals are those of `find_signals`."""
    if ineligible(verdict):
        return None
    failed = verdict.failed_f2p + verdict.failed_p2p
    signals = evidence(task, verdict) or find_signals(verdict.log, failed)
    return Reminder(CATEGORY, "G", verification_feedback(task, verdict, signals),
                    evidence=", ".join(failed[:MAX_SIGNALS]))


def verification_feedback(task: Task, verdict: Verdict, signals: Iterable[Signal]) -> str:
    """What failed and where. A message that shows a piece of a secret is withheld; the failure is still named."""
    secrets = Secrets.of(task)
    shown = [replace(s, message=WITHHELD) if secrets.shown_in(s.message) else s for s in rank(signals)]
    lines = [s.line() for s in shown if not secrets.shown_in(s.line())][:MAX_SIGNALS]
    failed = len(verdict.failed_f2p) + len(verdict.failed_p2p)
    passed = len(task.fail_to_pass) + len(task.pass_to_pass) - failed
    head = f"Rejected: {passed} passed, {failed} failed. Changed {_named(touched(verdict))}."
    text = "\n".join([head, *lines, ADVICE])
    return "\n".join([head, ADVICE]) if secrets.shown_in(text) else text  # a secret that only two lines make whole


def touched(verdict: Verdict) -> tuple[str, ...]:
    """The files whose change was graded."""
    return tuple(path for path in verdict.touched if path not in verdict.reverted)


def ineligible(verdict: Verdict) -> str | None:
    """Why an attempt gets no Global Reminder, or None when it may have one. The paper's gates: a non-empty patch, zero
    reward, not accepted, applied where it was verified, and a verdict that a retry would not change (`valid`)."""
    if not verdict.valid:
        return "the verdict is not valid"
    if verdict.resolved:
        return "the attempt was accepted"
    if verdict.patch_empty:
        return "the patch is empty"
    if not verdict.patch_applied:
        return "the patch did not apply"
    return None if verdict.failed_f2p or verdict.failed_p2p else "no required test failed"


def find_signals(log: str, failed: Sequence[str]) -> list[Signal]:
    """One signal per failure in the log (compiler diagnostics, then test blocks), and one for every failed test that
    the log says nothing about. `failed`: the tests that should have passed; other tests' failures are left out."""
    names = {short(test) for test in failed}
    found = [_signal((), f"{m['file'].removeprefix('./')}:{m['line']}", m["message"])
             for m in COMPILER.finditer(log) if not m["file"].endswith("_test.go") or "undefined" in m["message"]]
    explained = set()
    for name, block in _blocks(log):
        shown = short(name)
        tests = {shown} & names
        if "_FailedTest" in block or "ERROR collecting" in block:  # a whole file did not load: it explains its tests
            shown = name.rsplit("/", 1)[-1].removesuffix(".py")
            tests = {short(test) for test in failed if shown in test}
        if tests:
            explained |= tests
            found.append(_signal((shown,), *_what(block)))
    for m in SUMMARY.finditer(log):
        if short(m["test"]) in names - explained:
            explained.add(short(m["test"]))
            found.append(_signal((short(m["test"]),), m["test"].split("::")[0], m["message"]))
    if any(signal.rank == 0 and not signal.tests for signal in found):
        return found
    return found + [_signal((name,), "", "did not pass") for name in sorted(names - explained)]


def rank(signals: Iterable[Signal]) -> list[Signal]:
    """Signals with one root cause merged, root-cause-bearing kinds first, otherwise in the order of the log."""
    merged: dict[tuple[str, str], Signal] = {}
    for s in signals:
        key = (s.kind, re.sub(r"0x[0-9a-f]+|\d+", "#", s.message) if s.rank == 0 else s.message)
        first = merged.get(key)
        tests = (first.tests + tuple(t for t in s.tests if t not in first.tests)) if first else s.tests
        merged[key] = Signal(s.kind, s.rank, tests, (first or s).place, (first or s).message)
    return sorted(merged.values(), key=lambda signal: signal.rank)


def _signal(tests: tuple[str, ...], place: str, message: str) -> Signal:
    kind, order = next((kind, order) for kind, order, looks in KINDS if re.search(looks, message))
    return Signal(kind, order, tests, place, message.strip())


def _blocks(log: str) -> list[tuple[str, str]]:
    """(test name, what the runner printed about its failure)."""
    starts = list(BLOCK.finditer(log))
    blocks = []
    for start, following in zip(starts, [*starts[1:], None]):
        body = log[start.start(): following.start() if following else len(log)]
        end = END.search(body, len(start[0]))
        blocks.append((start["unittest"] or start["pytest"] or start["go"], body[: end.start() if end else None]))
    return [(name, body) for name, body in blocks if not any(other.startswith(f"{name}/") for other, _ in blocks)]


def _what(block: str) -> tuple[str, str]:
    """(place, message) of a failure: the line the runner marks as its reason, else the last exception raised."""
    quoted = QUOTED.findall(block)
    raised = [line for line in quoted if RAISED.match(line)][:1] or quoted[:1] or RAISED.findall(block)
    places = [f"{near(m['py'] or m['file'])}:{m['pyline'] or m['line']}" for m in PLACE.finditer(block)]
    return places[-1] if places else "", raised[-1] if raised else "failed"


def near(path: str) -> str:
    """A path without the sandbox's folders: its last two parts."""
    return "/".join(path.split("/")[-2:])


def short(test: str) -> str:
    """A test's own name: `test_a (test_x.Test.test_a)`, `tests/x.py::Test::test_a` and `Test.test_a` are `test_a`."""
    name, bracket, parameters = test.partition("[")
    return re.split(r"::|\.(?=\w+$)", name.split(" ")[0])[-1] + bracket + parameters


def _named(names: tuple[str, ...]) -> str:
    more = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "") or "build"
