"""Test runner output -> {test id: status}, by the name of a parser. Statuses: PASSED FAILED ERROR SKIPPED XFAIL XPASS.

A name is one of ours (`pytest`, `go`, `jest` ...: strict, sandbox/log_*.py) or one that a published set's rows give
(`parse_log_pytest` ...). A set's parser is a contract: the ids in its rows are whatever that parser made, so those are
the ids we make, too. But output is text that the code under test can write into, and those parsers take any line that
looks like a result. So each has a second opinion, `opinion`: the same parser over only what the runner wrote itself,
with a failure never outvoted, and the number of passes in the runner's own summary.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Mapping

from oprd.sandbox import log_js, log_js_sets, log_jvm, log_native, log_other, log_python, log_scripts
from oprd.sandbox.log_lines import (ERROR, FAILED, PASSED, SKIPPED, XFAIL, XPASS, Parser, Runner, clean, counting,
                                    ends_with, settled, telling, whole, worst)
from oprd.sandbox.log_python import UNITTEST_TEST, unittest_id

__all__ = ["ERROR", "FAILED", "PASSED", "SKIPPED", "XFAIL", "XPASS", "Opinion", "canonical_id", "check_parser",
           "opinion", "parse_log"]

RUNNERS: Mapping[str, Runner] = {
    "pytest": log_python.PYTEST, "unittest": log_python.UNITTEST,
    "django": log_python.UNITTEST._replace(parse=lambda log: worst(log_python.django_log(log)),
                                           passes=ends_with(r"^Ran \d+ tests? in ")),
    "sympy": Runner(lambda log: worst(log_python.sympy_log(log)), whole,
                    counting(r"^=+ tests finished: (?:(\d+) passed)?"),
                    telling(r"^=+ tests finished: .*(?:failed|exceptions)|^DO \*NOT\* COMMIT")),
    "go": log_native.GO, "go-json": log_native.GO_JSON, "cargo": log_native.CARGO, "ctest": log_native.CTEST,
    "googletest": log_native.GTEST, "automake": log_native.AUTOMAKE,
    "jest": log_js.JEST, "mocha": log_js.MOCHA, "vitest": log_js.VITEST, "node-test": log_js.NODE, "tap": log_js.TAP,
    "jest-json": log_js.JEST_JSON, "mocha-json": log_js.MOCHA_JSON,
    "surefire": log_jvm.SUREFIRE, "gradle": log_jvm.GRADLE, "junit": log_jvm.JUNIT,
    "phpunit": log_scripts.PHPUNIT, "rspec": log_scripts.RSPEC, "minitest": log_scripts.MINITEST,
    "test-unit": log_scripts.TESTUNIT}
_ANY = {"js": log_js.ANY_JS}  # a summary of some runner of a language

NAMED: Mapping[str, tuple[Parser, tuple[str, ...]]] = {  # a set's name: its parser, and the runners behind its logs
    **{name: (parser, ("pytest",)) for name, parser in log_python.NAMED.items()},
    "parse_log_django": (log_python.django_log, ("django",)), "parse_log_sympy": (log_python.sympy_log, ("sympy",)),
    "parse_combined_test_reports": (log_python.pytest_reports, ()), "swe-bench-pro": (log_python.pro_results, ()),
    **log_js_sets.NAMED, **log_native.NAMED, **log_jvm.NAMED, **log_scripts.NAMED,
    **{name: (parser, ()) for name, parser in log_other.NAMED.items()}}
NAMES = (*RUNNERS, *NAMED)

_TIMING = re.compile(r"\s*(?:\[\s*\d+(?:\.\d+)?\s*m?s\s*\]|\(\s*\d+(?:\.\d+)?\s*m?s\s*\)|"
                     r"\s+in\s+\d+(?:\.\d+)?\s+(?:msec|sec))\s*$")


@dataclass(frozen=True)
class Opinion:
    """The stricter reading of a log. status: test -> status, by the parser's ids. passes: how many tests the runner's
    summary says passed (inf: it says the run is over, but no number); None when it has none. failed: whether the
    runner says that something failed. runner: whose log it is; "" when that cannot be told."""

    status: Mapping[str, str]
    passes: float | None
    failed: bool
    runner: str = ""


def parse_log(name: str, log: str) -> dict[str, str]:
    """Test -> status. Raises ValueError, with the nearest name, for a parser that does not exist."""
    log = clean(log)
    return RUNNERS[name].parse(log) if check_parser(name) in RUNNERS else settled(NAMED[name][0](log))


def opinion(name: str, log: str, runs: int = 1) -> Opinion | None:
    """The stricter reading by the runner behind `name` (the first whose summary is there, if several may be);
    None for a parser that has no such runner. runs: how many commands made the log."""
    log = clean(log)
    if check_parser(name) in RUNNERS:
        runner = RUNNERS[name]
        return Opinion(runner.parse(log), runner.passes(log, runs), runner.failed(log), name)
    parser, runners = NAMED[name]
    for one in runners:
        runner = RUNNERS.get(one) or _ANY[one]
        passes = runner.passes(log, runs)
        if passes is not None:
            status: dict[str, str] = {}
            for text in runner.own(log, runs):
                status |= worst(parser(text))
            return Opinion(status, passes, runner.failed(log), one)
    return Opinion(settled(parser(log)), None, False) if runners else None


def canonical_id(name: str, test: str) -> str:
    """A task's test name as `parse_log` spells it, up to a timing at its end (see `timeless`)."""
    return unittest_id(test) if name == "unittest" and re.fullmatch(UNITTEST_TEST, test) else test


def timeless(test: str) -> str:
    """A test's name without the time it took: `adds (3 ms)`, `adds [1.3 ms]`, `group ran in 3 sec`."""
    return _TIMING.sub("", test)


def check_parser(name: str) -> str:
    """The name, if it is a parser's. Raises ValueError with the nearest one."""
    if name not in RUNNERS and name not in NAMED:
        near = difflib.get_close_matches(name, NAMES, n=1, cutoff=0)[0]
        raise ValueError(f"log parser {name!r} does not exist; did you mean {near}? (ours: {', '.join(RUNNERS)}; the "
                         "names published sets give are known too)")
    return name
