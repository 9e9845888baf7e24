"""What a test log says of the tests a task expects: the set's own parser, and our second opinion beside it."""

from __future__ import annotations

import re
from bisect import bisect_left
from dataclasses import dataclass
from typing import Mapping

from oprd.sandbox.logs import ERROR, FAILED, PASSED, XPASS, Opinion, canonical_id, opinion, parse_log, timeless

START, END = ">>>>> Start Test Output", ">>>>> End Test Output"  # SWE-bench's scripts print them around the tests
# A command whose exit status is not that of its tests: pipes, `|| true`, several commands, a runner told to end well.
_MASKS = re.compile(r"\|(?!\|)|\|\||;|(?<!&)&(?!&)|\n|failure\.?ignore|--fail-never|(?:^| )-fn\b|ignoreFailures", re.I)


class Lookup:
    """Test -> status, found by a name that a data set may have cut or timed."""

    def __init__(self, status: Mapping[str, str]):
        self.status, self.names = status, sorted(status)
        self.timeless: dict[str, set[str]] = {}
        for name in status:
            self.timeless.setdefault(timeless(name), set()).add(status[name])

    def __call__(self, test: str) -> str | None:
        """The exact name decides. Else the name without its timing; else, for an id cut off inside its parameters
        (more `[` than `]`), all ids that begin so; both only if all candidates agree. None: no candidate, or a
        disagreement."""
        if test in self.status or test.strip() in self.status:
            return self.status.get(test) or self.status[test.strip()]
        found = self.timeless.get(timeless(test.strip()), set())
        if not found and test.count("[") > test.count("]"):
            at = bisect_left(self.names, test)
            while at < len(self.names) and self.names[at].startswith(test):
                found = found | {self.status[self.names[at]]}
                at += 1
        return next(iter(found)) if len(found) == 1 else None


@dataclass(frozen=True)
class Results:
    """status: test -> status by the named parser. failed_f2p, failed_p2p: expected tests that did not pass by either
    reading. disputed: expected tests that passed by the named parser and not by the second opinion. doubt: what
    speaks against the log as a whole, or "". runner: whose log it is; "" when that cannot be told."""

    status: Mapping[str, str]
    failed_f2p: tuple[str, ...]
    failed_p2p: tuple[str, ...]
    disputed: tuple[str, ...]
    doubt: str
    runner: str

    def of(self, test: str) -> str:
        return Lookup(self.status)(test) or "missing"


def read_results(parser: str, log: str, code: int, command: str, f2p: tuple[str, ...], p2p: tuple[str, ...]) -> Results:
    """code: the exit status of `command`, which made `log`. Raises ValueError for a parser that does not exist."""
    tests = _between_marks(log)
    status = parse_log(parser, tests)
    if not status and tests is not log:  # some runners write past the marks
        tests, status = log, parse_log(parser, log)
    runs = len(re.split(r"&&|;|\n", command))
    second = opinion(parser, tests, runs)
    one = Lookup(status)
    other = Lookup(second.status) if second and second.passes is not None else one
    passed = {test for test in (*f2p, *p2p) if one(canonical_id(parser, test)) == PASSED}
    disputed = {test for test in passed if other(canonical_id(parser, test)) != PASSED}
    good = passed - disputed
    return Results(status, tuple(t for t in f2p if t not in good), tuple(t for t in p2p if t not in good),
                   tuple(t for t in (*f2p, *p2p) if t in disputed), _doubt(status, second, code, command),
                   second.runner if second else "")


def _between_marks(log: str) -> str:
    at = log.rfind(START)
    return log[at + len(START):].partition(END)[0] if at >= 0 else log


def _doubt(status: Mapping[str, str], second: Opinion | None, code: int, command: str) -> str:
    """What speaks against a log in which all expected tests passed (was it printed by the code under test?), or ""."""
    strict = second.status if second else status
    bad = sorted(test for test, s in {**status, **strict}.items() if s in (FAILED, ERROR, XPASS))
    if code and not bad and not (second and second.failed):
        return f"all tests in the log passed, but the exit status is {code}"
    failures = [test for test in bad if strict.get(test) in (FAILED, ERROR)]  # only a strict XPASS fails a run
    if not code and failures and not _MASKS.search(command):
        return f"the exit status is 0, but the log says that {failures[0]} {strict[failures[0]]}"
    if second and second.passes is None:
        return "the log has no summary of the test runner"
    claimed = sum(s == PASSED for s in strict.values())
    if second and claimed > second.passes:
        return f"the log claims {claimed} passed tests, the runner's summary {second.passes:.0f}"
    return ""
