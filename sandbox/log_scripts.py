"""PHP's and Ruby's runners: phpunit, rspec, minitest, test-unit; and the parsers that published sets name."""

from __future__ import annotations

import json
import re
from typing import Iterator

from oprd.sandbox.log_lines import (ERROR, FAILED, PASSED, SKIPPED, Parser, Runner, Seen, ends_with, rule, table,
                                    telling, whole, without, worst)

# phpunit ---------------------------------------------------------------------------------------------------------

_P_MARKS = {"✔": PASSED, "✘": FAILED, "↩": SKIPPED, "∅": SKIPPED, "☢": PASSED, "⚠": PASSED}
_P_TEST = re.compile(r" (?P<mark>[✔✘↩∅☢⚠]) (?P<test>.*?)(?: \[\d+(?:\.\d+)? m?s\])?$")


def phpunit_log(log: str) -> Iterator[Seen]:
    """phpunit --testdox: `Suite > test`; a suite's line stands unindented before its tests. A default run names only
    what did not pass, as `1) Class::method`, under a heading."""
    suite = "None"
    for line in re.split(r"(?m)^Time: ", log)[0].split("\n"):
        if match := _P_TEST.match(line):
            yield Seen(f"{suite} > {match['test']}", _P_MARKS[match["mark"]])
        elif re.match(r"\S", line):
            suite = re.sub(r" \(.*\)$", "", line)
    heading = ""
    for line in log.split("\n"):
        if match := re.match(r"There (?:was|were) \d+ (\w+)", line):
            heading = match[1].rstrip("s")
        elif heading in ("error", "failure") and (match := re.match(r"\d+\) (\S+::.+)$", line)):
            yield Seen(match[1], ERROR if heading == "error" else FAILED)


PHPUNIT = Runner(lambda log: worst(phpunit_log(log)), without(r"^Time: .*\Z"), ends_with(r"^OK\b|^\s*Tests: +\d+"),
                 telling(r"^(?:ERRORS|FAILURES)!|Tests: +[1-9]\d* failed"))

# rspec, minitest, test-unit --------------------------------------------------------------------------------------

_R_SUFFIX = re.compile(r"(?P<test>.*?)(?: \((?P<said>FAILED|ERROR|PENDING|SKIPPED)\b.*\))?$")


def rspec_log(log: str) -> Iterator[Seen]:
    """rspec -f doc: `Group nested example` (rspec's own full description). Groups and examples look alike: an
    example is a line without deeper ones below."""
    lines = [line for line in _rspec_own(log)[0].split("\n") if line.strip()]
    path: list[tuple[int, str]] = []
    for line, after in zip(lines, [*lines[1:], ""]):
        indent = len(line) - len(line.lstrip())
        while path and path[-1][0] >= indent:
            path.pop()
        if len(after) - len(after.lstrip()) > indent and after:
            path.append((indent, line.strip()))
        elif path:
            match = _R_SUFFIX.match(line.strip())
            status = {None: PASSED, "FAILED": FAILED, "ERROR": ERROR}.get(match["said"], SKIPPED)
            yield Seen(" ".join([*(name for _, name in path), match["test"]]), status)


_rspec_own = without(r"^(?:Pending|Failures):.*|^Finished in .*")


def rspec_json_log(log: str) -> Iterator[Seen]:
    """rspec -f json: full descriptions."""
    kinds = {"passed": PASSED, "failed": FAILED, "pending": SKIPPED}
    for line in log.split("\n"):
        at = line.find('{"version"')
        try:
            examples = json.JSONDecoder().raw_decode(line, at)[0].get("examples", ()) if at >= 0 else ()
        except ValueError:
            continue
        for example in examples:
            if example.get("status") in kinds:
                yield Seen(str(example.get("full_description")), kinds[example["status"]])


def minitest_log(log: str) -> Iterator[Seen]:
    """minitest -v: `Class#test = 0.01 s = .`; what the test prints comes between the first ` = ` and the time."""
    waiting = None
    for line in log.split("\n"):
        if match := re.match(r"(\S[^#]*#.+?) = ", line):
            waiting, line = match[1], line[match.end():]
        result = re.fullmatch(r"\d+\.\d+ s = ([.FES])", line)
        if waiting and result:
            yield Seen(waiting, {".": PASSED, "F": FAILED, "E": ERROR, "S": SKIPPED}[result[1]])
            waiting = None


_U_TEST = re.compile(r"\s+(?P<test>test[\w: ].*?):\t+(?P<said>[.EFOPN])(?:: \(\d+\.\d+\))?$")


def testunit_log(log: str) -> Iterator[Seen]:
    """test-unit -v: `Class: ` and, indented, `test_x: .: (0.001)`; ids are `Class#test_x`."""
    kinds = {".": PASSED, "F": FAILED, "E": ERROR}
    suites: list[tuple[int, str]] = []
    for line in log.split("\n"):
        indent = len(line) - len(line.lstrip())
        if match := _U_TEST.match(line):
            suite = next((name for at, name in reversed(suites) if at < indent), "")
            yield Seen(f"{suite}#{match['test']}" if suite else match["test"], kinds.get(match["said"], SKIPPED))
        elif match := re.match(r"\s*([A-Z][\w:]*): *$", line):
            suites = [(at, name) for at, name in suites if at < indent] + [(indent, match[1])]


def _passes(pattern: str):
    """Passes of a summary with the groups `all` and `not`, each of the latter a number to take away."""
    compiled = re.compile(pattern, re.M)

    def passes(log: str, runs: int = 1) -> float | None:
        found = [match for match in compiled.finditer(log)][-runs:]
        return sum(int(m[1]) - sum(int(n or 0) for n in m.groups()[1:]) for m in found) if found else None
    return passes


RSPEC = Runner(lambda log: worst([*rspec_log(log), *rspec_json_log(log)]), _rspec_own,
               _passes(r'(?:^|"summary_line":")(\d+) examples?, (\d+) failures?(?:, (\d+) pending)?'),
               telling(r'(?:^|"summary_line":")\d+ examples?, [1-9]\d* failure|errors? occurred outside of examples'))
MINITEST = Runner(lambda log: worst(minitest_log(log)), whole,
                  _passes(r"^(\d+) (?:runs|tests), \d+ assertions, (\d+) failures, (\d+) errors, (\d+) skips"),
                  telling(r"^\d+ (?:runs|tests), \d+ assertions, (?:[1-9]\d* failures|\d+ failures, [1-9]\d* errors)"))
TESTUNIT = Runner(lambda log: worst(testunit_log(log)), whole,
                  _passes(r"^(\d+) tests, \d+ assertions, (\d+) failures, (\d+) errors, (\d+) pendings, "
                          r"(\d+) omissions"),
                  telling(r"^\d+ tests, \d+ assertions, (?:[1-9]\d* failures|\d+ failures, [1-9]\d* errors)"))


# the sets' parsers -----------------------------------------------------------------------------------------------

def _phpunit_named(log: str) -> Iterator[Seen]:
    """`suite > test`; only a line `Name (Namespace\\Class)` is a suite."""
    suite = "None"
    for line in log.split("\n"):
        if match := re.match(r"(\w.+) \(.+\)$", line):
            suite = match[1]
        elif match := re.match(r"\s*([✔✘↩])\s*(.*)$", line):
            name = re.sub(r"\s*\[\s*\d+(?:\.\d+)?\s*m?s\s*\]\s*$", "", match[2], flags=re.I)
            yield Seen(f"{suite} > {name.strip()}", _P_MARKS[match[1]])


def _php_v1(log: str) -> Iterator[Seen]:
    """Pest and artisan test: ✓, ⨯ and - lines with or without a time at the end, and FAIL suites."""
    def timeless(name: str) -> str:
        return re.sub(r"\s+\d+(?:\.\d+)?s\s*$", "", name.rstrip()).strip()

    name = r"\s+(?P<test>.+?)(?:\s{2,}\d+\.?\d*s\b.*)?\s*$"
    marked = ((r"FAIL(?:ED)?\s+(?P<test>\S.+)$", FAILED), (r"[\u2a2fx]" + name, FAILED), ("-" + name, SKIPPED),
              ("[✓✔]" + name, PASSED))
    for line in map(str.strip, log.split("\n")):
        if not line or line.startswith(("___", "---", "Tests:", "Duration:")):
            continue
        for pattern, status in marked:
            if match := re.match(pattern, line, re.I):
                if test := timeless(match["test"]):
                    yield Seen(test, status, weak=status == PASSED)
                break
        else:
            if re.search(r"\(skipped\)|\bSKIPPED\b", line, re.I):
                yield Seen(timeless(line), SKIPPED, weak=True)


def _ruby_v1(log: str) -> Iterator[Seen]:
    """minitest-reporters: a suite's name on its own line, `test_x PASS (0.02s)`; the worse of two statuses counts."""
    suite, rank, found = "", {PASSED: 0, SKIPPED: 0, FAILED: 1, ERROR: 2}, {}
    words = r"PASS(?:ED)?|FAIL(?:URE)?|ERROR|SKIP(?:PED)?"
    for line in map(str.rstrip, log.split("\n")):
        if re.match(r"[A-Z][A-Za-z0-9_]*$", line):
            suite = line
        elif match := re.match(rf"\s*(test[^A-Z\n]+?)\s+({words})\b(?:\s*\([0-9.]+s\))?$", line):
            name = f"{suite}::{match[1].strip()}" if suite else match[1].strip()
            status = {"P": PASSED, "F": FAILED, "E": ERROR, "S": SKIPPED}[match[2][0]]
            if name not in found or rank[status] > rank[found[name]]:
                found[name] = status
                yield Seen(name, status)


_MINITEST = table(rule(r"(?P<test>.+)\. .*=.*(?P<said>[.FE]).*$", words={"E": FAILED}))
_CUCUMBER = table(rule(r"(?P<test>.*) \.+(?P<said>[.F])"))
_REPORT = (r"(?P<test>.+?)\s+=?\s*[\d.]+\s*(?:s\s*)?=\s*", r"\s*(?P<test>.+?):\s+")
NAMED: dict[str, tuple[Parser, tuple[str, ...]]] = {
    "parse_log_phpunit": (_phpunit_named, ("phpunit",)), "parse_log_php_v1": (_php_v1, ("phpunit",)),
    "parse_log_minitest": (_MINITEST, ("minitest",)), "parse_log_cucumber": (_CUCUMBER, ()),
    "parse_log_jekyll": (lambda log: list(_MINITEST(log)) or _CUCUMBER(log), ()),  # by pull request, one of the two
    "parse_log_ruby_unit": (table(rule(r"(?:test: )?(?P<test>.+):\s+(?P<said>\.|E\b|F\b|O\b)", words={"E": FAILED})),
                            ("test-unit",)),
    "parse_log_rspec_transformed_json": (table(rule(r"(?P<test>.+) - (?P<said>passed|failed)")), ()),
    "parse_log_ruby_v1": (_ruby_v1, ("minitest",)),
    "parse_log_ruby_v2": (table(rule(r"(?P<test>.+?#.+?)\s+=\s+[\d.]+\s+s\s+=\s+(?P<said>[.FES])$",
                                     words={"E": FAILED})), ("minitest",)),
    "multi-swe-ruby": (table(rule(_REPORT[0] + r"\.$", PASSED), rule(_REPORT[1] + r"\.: \([\d.]+\)$", PASSED),
                             rule(_REPORT[0] + r"[FE]$", FAILED), rule(_REPORT[1] + r"[.FE]$", FAILED)), ()),
}
