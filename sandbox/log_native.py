"""Runners of compiled languages: go test, cargo test, ctest, googletest, automake's; and the parsers sets name."""

from __future__ import annotations

import json
import re
from typing import Iterator
from xml.etree import ElementTree

from oprd.sandbox.log_lines import (ERROR, FAILED, PASSED, SKIPPED, Parser, Runner, Seen, counting, ends_with, rule,
                                    table, telling, whole, worst)

# go --------------------------------------------------------------------------------------------------------------

_G_RESULT = re.compile(r" *--- (?P<said>PASS|FAIL|SKIP): (?P<test>.+) \(\d+(?:\.\d+)?s\)$")
_G_PACKAGE = re.compile(r"(?P<said>ok|FAIL|---|\?) *\t(?P<package>\S+)(?:\t| \[|$)")


def _go_packages(log: str, runs: int = 1) -> list[str]:
    """The log cut behind every package's line: a name is one test in its package."""
    parts, at = [], 0
    for match in re.finditer(r"^(?:ok|FAIL|\?) *\t.*$", log, re.M):
        parts.append(log[at:match.end()])
        at = match.end()
    return [*parts, log[at:]]


def go_log(log: str) -> Iterator[Seen]:
    """go test -v; a package that failed without a failed test (a build error, a panic) is itself a failure. Equal
    names in two packages are one test, as in every parser of this format; only -json tells them apart."""
    for part in _go_packages(log):
        lines = part.split("\n")
        package = next((m for line in reversed(lines) if (m := _G_PACKAGE.match(line))), None)
        seen = [Seen(m["test"], {"PASS": PASSED, "FAIL": FAILED, "SKIP": SKIPPED}[m["said"]])
                for line in lines if (m := _G_RESULT.match(line))]
        yield from seen
        if package and package["said"] == "FAIL" and not any(s.status == FAILED for s in seen):
            yield Seen(package["package"], ERROR)


def go_json_log(log: str) -> Iterator[Seen]:
    """go test -json; ids are `package.Test`, packages that did not build are errors."""
    kinds = {"pass": PASSED, "fail": FAILED, "skip": SKIPPED}
    for line in log.split("\n"):
        try:
            event = json.loads(line) if line.startswith("{") else {}
        except ValueError:
            continue
        status = kinds.get(event.get("Action"))
        if status and event.get("Test"):
            yield Seen(f"{event.get('Package', '')}.{event['Test']}", status)
        elif status == FAILED and event.get("FailedBuild"):
            yield Seen(str(event.get("Package")), ERROR)


def _multi_swe_go(log: str) -> Iterator[Seen]:
    """Multi-SWE's: a subtest counts for its parent, and the word after FAIL for a test."""
    for line in map(str.strip, log.split("\n")):
        for pattern in (r"--- (PASS|FAIL): (\S+)", r"(FAIL):?\s?(.+?)\s"):
            if match := re.match(pattern, line):
                yield Seen(match[2].rpartition("/")[0] or match[2], PASSED if match[1] == "PASS" else FAILED)


GO = Runner(lambda log: worst(go_log(log)), _go_packages, ends_with(r"^(?:ok|FAIL|\?) *\t"),
            telling(r"^FAIL\b|^panic: |^--- FAIL"))
GO_JSON = Runner(lambda log: worst(go_json_log(log)), whole, ends_with(r'^\{.*"Action":"(?:pass|fail|skip)"'),
                 telling(r'"Action":"fail"'))

# cargo -----------------------------------------------------------------------------------------------------------

_C_RESULT = rule(r"test (?P<test>.+?)(?: - should panic| - compile fail| - compile)? \.\.\. "
                 r"(?P<said>ok|FAILED|ignored)(?:, .*)?(?: <[\d.]+s>)?$")
_cargo_lines = table(_C_RESULT, strip=False)


def _cargo_binaries(log: str, runs: int = 1) -> list[str]:
    """The results of each test binary, without what failing tests printed."""
    parts = re.split(r"(?m)^(?=running \d+ tests?$)", log)[1:]
    return [re.sub(r"(?ms)^(?:failures|successes):$.*?(?=^test result: |\Z)", "", part) for part in parts]


def cargo_log(log: str) -> Iterator[Seen]:
    """cargo test; doctests too (`src/lib.rs - add (line 3)`); `- should panic` is no part of a name."""
    for part in _cargo_binaries(log):
        yield from _cargo_lines(part)


CARGO = Runner(lambda log: worst(cargo_log(log)), _cargo_binaries, lambda log, runs: _CARGO_COUNT(log, 0),
               telling(r"^test result: FAILED|^error(?:\[E\d+\])?: |could not compile"))
_CARGO_COUNT = counting(r"^test result: .*?(\d+) passed;")

# C, C++ ----------------------------------------------------------------------------------------------------------

_CTEST_SAYS = {"Passed": PASSED, "***Failed": FAILED, "***Timeout": FAILED, "***Skipped": SKIPPED, "***Not Run": FAILED,
               "***Exception": ERROR}
ctest_log = table(rule(r"\d+/\d+ +Test +#\d+: (?P<test>.+?) \.*\s*"
                       r"(?P<said>Passed|\*\*\*(?:Failed|Timeout|Skipped|Not Run|Exception))\b", words=_CTEST_SAYS),
                  rule(r"\d+/\d+ +Test +#\d+: (?P<test>.+?) \.*\s*\*\*\*", FAILED))
gtest_log = table(rule(r"\[ +(?P<said>OK|FAILED|SKIPPED) +\] (?P<test>\S+?)(?:, where .*)? \(\d+ ms\)$"), strip=False)
automake_log = table(rule(r"(?P<said>PASS|FAIL|SKIP|XFAIL|XPASS|ERROR): (?P<test>.+)$"), strip=False)

CTEST = Runner(lambda log: worst(ctest_log(log)), whole, lambda log, runs: _ctest_passes(log),
               telling(r"\b[1-9]\d* tests failed out of|^Errors while running CTest"))
GTEST = Runner(lambda log: worst(gtest_log(log)), whole, lambda log, runs: _GTEST_COUNT(log, 0),
               telling(r"^(?:\d+: )?\[ +FAILED +\] [1-9]\d* test"))
AUTOMAKE = Runner(lambda log: worst(automake_log(log)), whole, counting(r"^# PASS: +(\d+)$"),
                  telling(r"^# (?:FAIL|XPASS|ERROR): +[1-9]"))
_GTEST_COUNT = counting(r"^(?:\d+: )?\[ +PASSED +\] (\d+) tests?\.")  # ctest -V numbers the lines


def _ctest_passes(log: str) -> float | None:
    found = re.findall(r"(\d+) tests? failed out of (\d+)", log)
    return sum(int(of) - int(failed) for failed, of in found) if found else None


# the sets' parsers -----------------------------------------------------------------------------------------------

def _redis(log: str) -> Iterator[Seen]:
    for line in map(str.strip, log.split("\n")):
        if match := re.match(r"\[(ok|err|skip|ignore)\]:\s(.+?)(?:\s\((\d+\s*m?s)\))?$", line):
            failed = match[1] == "err"
            yield Seen(re.sub(r"\s+in\s+\S+$", "", match[2]) if failed else match[2],
                       FAILED if failed else PASSED if match[1] == "ok" else SKIPPED)


def _doctest(log: str) -> Iterator[Seen]:
    """doctest -s -r=xml: `test case > subcase`."""
    match = re.search(r"<doctest.*?</doctest>", log, re.S)
    try:
        root = ElementTree.fromstring(match[0]) if match else None
    except ElementTree.ParseError:
        root = None
    for case in root.iterfind(".//TestCase") if root is not None else ():
        for sub in case.iterfind(".//SubCase"):
            good = all(e.get("success") == "true" for e in sub.iterfind(".//Expression"))
            yield Seen(f"{case.get('name')} > {sub.get('name')}", PASSED if good else FAILED)


def _cpp(log: str) -> Iterator[Seen]:
    """pytest-like lines; the last part of an id counts; after FAILURES only the headings."""
    failures = False
    for line in map(str.strip, log.split("\n")):
        if line.startswith("=" * 35 + " FAILURES "):
            failures = True
        elif failures and (match := re.match(r"_{27} (.*?) _{27}$", line)):
            yield Seen(match[1], FAILED)
        elif not failures:
            for word in (PASSED, FAILED, SKIPPED, ERROR):
                if match := re.match(rf"(.*?)\s+{word}", line):
                    yield Seen(match[1].split("::")[-1], word, weak=word == PASSED)
                    break


_BOTAN = re.compile(r"(.*?)\s+ran\s+(\d+)\s+tests\s+in\s+[\d.]+\s+m?sec\s+(.+)$", re.I)
_KEYWORDS = ((SKIPPED, r"\bSKIPPED\b"), (FAILED, r"\bFAILED\b|\bFAIL\b|\bFailure\b"), (PASSED, r"\bOK\b|\bPASSED\b"))


def _cpp_v3(log: str) -> Iterator[Seen]:
    """`[1/9] name... OK`, Botan's sums, and any line that holds a status word, as its own name."""
    for line in map(str.strip, log.split("\n")):
        if match := _BOTAN.match(line):
            good = not re.search(r"\bfailed\b", match[3], re.I)
            yield Seen(f"{match[1].strip()} ran {match[2]} tests {match[3].strip()}", PASSED if good else FAILED)
            continue
        found = next((status for status, words in _KEYWORDS if re.search(words, line, re.I)), None)
        if match := re.match(r"(?:\[\d+/\d+\]\s*)?(.*?)\s*\.\.\.\s*(\w+)$", line):
            yield Seen(match[1].strip(), found or ERROR)
        elif found:
            yield Seen(line, found)


_CHECK = table(rule(r"(?P<said>PASS|FAIL):\s(?P<test>.+)$"))
NAMED: dict[str, tuple[Parser, tuple[str, ...]]] = {
    "parse_log_gotest": (table(rule(r"--- (?P<said>PASS|FAIL|SKIP): (?P<test>.+) \(.+\)$")), ("go",)),
    "parse_log_cargo": (table(rule(r"test\s+(?P<test>\S+)\s+\.\.\.\s+(?P<said>ok|FAILED)$")), ("cargo",)),
    "parse_log_redis": (_redis, ()), "parse_log_jq": (_CHECK, ()), "parse_log_doctest": (_doctest, ()),
    "parse_log_micropython_test": (table(rule(r"(?P<said>pass|FAIL|skip)\s+(?P<test>.+)$")), ()),
    "parse_log_googletest": (table(rule(r".*\[\s*(?P<said>OK|FAILED)\s*\]\s(?P<test>.*)\s\(.*\)$")), ("googletest",)),
    "parse_log_cpp": (_cpp, ()),
    "parse_log_cpp_v2": (table(rule(r"Test\s+(?P<test>.*?)\s+passed$", PASSED, weak=True),
                               rule(r"Test\s+(?P<test>.*?)\s+(?P<said>failed|skipped)$")), ()),
    "parse_log_cpp_v3": (_cpp_v3, ()),
    "parse_log_cpp_v4": (table(rule(r"\d+/\d+\s+Test\s+#\d+:\s+(?P<test>.+?)\s+\.+\s+(?P<said>Passed|Failed|Skipped|"
                                    r"Timeout)\b", flags=re.I)), ("ctest",)),
    "multi-swe-go": (_multi_swe_go, ("go",)),
    "multi-swe-rust": (table(rule(r"test (?P<test>\S+) \.\.\. (?P<said>ok|FAILED|ignored)")), ("cargo",)),
    "multi-swe-c": (table(rule(r"\d+/\d+\s*Test\s*#\d+:\s*(?P<test>.*?)\s*\.+\s*(?P<said>Passed|\*+Failed$)", FAILED),
                          rule(r"(?P<said>PASS|FAIL|SKIP): (?P<test>\S+)$")), ()),
}
