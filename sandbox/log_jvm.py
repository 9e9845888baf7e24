"""The JVM's runners: Maven's surefire, Gradle, JUnit XML in the log; and the parsers that published sets name."""

from __future__ import annotations

import re
from typing import Iterator
from xml.etree import ElementTree

from oprd.sandbox.log_lines import (ERROR, FAILED, PASSED, SKIPPED, Parser, Runner, Seen, ends_with, rule, table,
                                    telling, whole, worst)

_COUNTS = r"Tests run:\s*(\d+),\s*Failures:\s*(\d+),\s*Errors:\s*(\d+),\s*Skipped:\s*(\d+)"
_S_CLASS = re.compile(rf"(?:\[\w+\] )?{_COUNTS}, Time elapsed: .*?(?:-+ in|-+) (?:in )?(?P<name>[\w$.]+)$")
_S_TEST = re.compile(r"\[ERROR\] +(?P<test>[\w$]+\([\w$.]+\)|[\w$.]+\.[\w$]+)(?:\[.*?\])? +(?:--)? *"
                     r"Time elapsed: .*<<< (?P<said>FAILURE|ERROR)!")


def _status(run: int, failures: int, errors: int, skipped: int) -> str:
    return FAILED if failures + errors else SKIPPED if skipped and skipped == run else PASSED


def surefire_log(log: str) -> Iterator[Seen]:
    """Test classes by their counts, failed methods as `class.method`: surefire never names a method that passed."""
    for line in log.split("\n"):
        if match := _S_CLASS.match(line):
            yield Seen(match["name"], _status(*map(int, match.groups()[:4])))
        elif match := _S_TEST.match(line):
            name = re.sub(r"([\w$]+)\(([\w$.]+)\)", r"\2.\1", match["test"])
            yield Seen(name, FAILED if match["said"] == "FAILURE" else ERROR)


gradle_log = table(rule(r"(?P<test>[^>\s].* > .+?) (?P<said>PASSED|FAILED|SKIPPED)(?: \(.*\))?$"), strip=False)

_CASE = re.compile(r"<testcase\b((?:[^>\"]|\"[^\"]*\")*?)(/?)>(?:(.*?)</testcase>)?", re.S)
_CASE_CHARS = 4096  # of a case whose end is missing


def junit_cases(log: str, name=lambda suite, test: f"{suite} {test}") -> Iterator[Seen]:
    """Test cases of JUnit XML anywhere in the log, broken documents included. name(classname, name): the id."""
    at = 0
    while match := _CASE.search(log, at):
        at = match.end() if not match[2] else match.end(2) + 1
        attributes = dict(re.findall(r'(\w+)="([^"]*)"', match[1]))
        inside = "" if match[2] else log[at:at + _CASE_CHARS] if match[3] is None else match[3]
        status = next((status for tag, status in (("<failure", FAILED), ("<error", ERROR), ("<skipped", SKIPPED))
                       if tag in inside), PASSED)
        if test := attributes.get("name"):
            suite = attributes.get("classname")
            yield Seen(name(suite, test).strip() if suite else test, status)


SUREFIRE = Runner(lambda log: worst(surefire_log(log)), whole, ends_with(r"\bBUILD (?:SUCCESS|FAILURE)$"),
                  telling(r"\bBUILD FAILURE$|^\[ERROR\] "))
GRADLE = Runner(lambda log: worst(gradle_log(log)), whole, ends_with(r"^BUILD (?:SUCCESSFUL|FAILED)"),
                telling(r"^BUILD FAILED|^FAILURE: "))
JUNIT = Runner(lambda log: worst(junit_cases(log)), whole, ends_with("</testsuite>"),
               telling(r"<(?:failure|error)\b|BUILD FAIL"))


# the sets' parsers -----------------------------------------------------------------------------------------------

def _maven(log: str) -> Iterator[Seen]:
    """One test a command: each `-Dtest=name` in the shell's trace gets the next BUILD result, in order."""
    waiting, results = [], []
    for line in map(str.strip, log.split("\n")):
        if match := re.match(r".*-Dtest=(\S+)", line):
            waiting.append(match[1])
        if match := re.match(r".*BUILD (SUCCESS|FAILURE)$", line):
            results.append(PASSED if match[1] == "SUCCESS" else FAILED)
    return map(Seen, waiting, results)


def _gradle_custom(log: str) -> Iterator[Seen]:
    """`class > test PASSED`, also with other output between the two."""
    waiting = ""
    for line in map(str.strip, log.split("\n")):
        if match := re.match(r"([^>].+?)\s+(PASSED|FAILED)(?:\s+\(\d+(?:\.\d+)?s\))?$", line):
            yield Seen(match[1], match[2])
            waiting = ""
        elif re.match(r"[^>]\S*\s+>\s+\S+$", line):
            waiting = line
        elif waiting and line in (PASSED, FAILED):
            yield Seen(waiting, line)
            waiting = ""


def _java_mvn(log: str) -> Iterator[Seen]:
    """Classes by their counts and failures as `Class.method`; then JUnit XML; then -Dtest commands."""
    running = None
    for line in map(str.strip, log.split("\n")):
        if match := re.match(r"(?:\[INFO\]\s+)?Running\s+([A-Za-z0-9_$.]+)$", line):
            running = match[1]
        elif match := re.match(r"\[ERROR\]\s+([A-Za-z0-9_$.]+)\.([A-Za-z0-9_$.]+?)(?::(\d+))?\b", line):
            broke = "Exception" in line and "AssertionError" not in line
            yield Seen(f"{match[1]}.{match[2]}", ERROR if broke else FAILED)
            yield Seen(match[1], FAILED, weak=True)
        elif match := re.search(_COUNTS, line):
            name = line.rsplit(" in ", 1)[-1].strip().rstrip(".:;") if " in " in line else running
            _, failures, errors, skipped = map(int, match.groups())
            if name:
                yield Seen(name, FAILED if failures + errors else SKIPPED if skipped else PASSED, weak=True)
            running = None
    for seen in (*junit_cases(log), *_maven(log)):
        yield seen._replace(weak=True)


def _java_mvn_v2(log: str) -> Iterator[Seen]:
    """Modules of the reactor's summary; `__suite__` for the first counts."""
    kinds = {"SUCCESS": PASSED, "FAILURE": FAILED, "SKIPPED": SKIPPED}
    for line in map(str.strip, log.split("\n")):
        if match := re.match(r"\[INFO\]\s+(.+?)\s+\.\.+\s+(SUCCESS|FAILURE|SKIPPED)(?:\s|\[|$)", line):
            yield Seen(match[1], kinds[match[2]])
        elif match := re.search(_COUNTS, line):
            run, failures, errors, skipped = map(int, match.groups())
            status = FAILED if failures else ERROR if errors else SKIPPED if skipped == run else PASSED
            yield Seen("__suite__", status, weak=True)


def _gradlew_v1(log: str) -> Iterator[Seen]:
    """JUnit XML documents, each from a line `<?xml` to a line `</testsuite>`; ids are `name (classname)`."""
    for document in re.findall(r"(?ms)^[ \t]*(<\?xml(?:(?!^[ \t]*<\?xml).)*?^[ \t]*</testsuite>)", log):
        try:
            root = ElementTree.fromstring(document)
        except ElementTree.ParseError:
            continue
        for case in root.iterfind(".//testcase"):
            status = next((status for tag, status in (("skipped", SKIPPED), ("failure", FAILED), ("error", ERROR))
                           if case.find(tag) is not None), PASSED)
            name, suite = case.get("name", ""), case.get("classname", "")
            yield Seen(f"{name} ({suite})" if name and suite else name, status)


def _kotlin_junit(log: str) -> Iterator[Seen]:
    """`Running C` and the counts that follow."""
    running = None
    for line in map(str.strip, log.split("\n")):
        if match := re.match(r"Running\s+(.+)$", line):
            running = match[1]
        elif running and (match := re.match(_COUNTS, line)):
            _, failures, errors, skipped = map(int, match.groups())
            yield Seen(running, FAILED if failures + errors else SKIPPED if skipped else PASSED)
            running = None


def _r_junit(log: str) -> Iterator[Seen]:
    """The first JUnit XML document; ids are `classname::name`."""
    match = re.search(r"<\?xml.*?(?:</testsuites>|\Z)", log, re.S)
    try:
        root = ElementTree.fromstring(match[0]) if match else None
    except ElementTree.ParseError:
        root = None
    for case in root.iterfind(".//testcase") if root is not None else ():
        status = next((status for tag, status in (("failure", FAILED), ("error", ERROR), ("skipped", SKIPPED))
                       if case.find(tag) is not None), PASSED)
        suite, test = case.get("classname", ""), case.get("name", "")
        yield Seen(f"{suite}::{test}" if suite else test, status)


def _multi_swe_maven(log: str) -> Iterator[Seen]:
    for line in log.split("\n"):
        if match := re.search(rf"{_COUNTS}, Time elapsed: [\d.]+ .+? in (.+)", line):
            run, failures, errors, skipped = map(int, match.groups()[:4])
            if run and not failures + errors and skipped != run:
                yield Seen(match[5], PASSED)
            elif failures + errors:
                yield Seen(match[5], FAILED)
            elif run and skipped == run:
                yield Seen(match[5], SKIPPED)


_ANT = table(rule(r"\[junit\]\s+\[(?P<said>PASS|FAIL|ERR)\]\s+(?P<test>.*)$"))
NAMED: dict[str, tuple[Parser, tuple[str, ...]]] = {
    "parse_log_maven": (_maven, ("surefire",)), "parse_log_ant": (_ANT, ()),
    "parse_log_gradle_custom": (_gradle_custom, ("gradle",)),
    **dict.fromkeys(("parse_java_mvn", "parse_log_java_mvn"), (_java_mvn, ("surefire",))),
    **dict.fromkeys(("parse_java_mvn_v2", "parse_log_java_mvn_v2"), (_java_mvn_v2, ("surefire",))),
    **dict.fromkeys(("parse_log_sbt", "parse_log_junit"), (junit_cases, ())),
    "parse_log_gradlew_v1": (_gradlew_v1, ()),
    **dict.fromkeys(("parse_logs_kotlin_junit", "parse_log_kotlin_junit"), (_kotlin_junit, ())),
    **dict.fromkeys(("parse_logs_r_junit", "parse_log_r_junit"), (_r_junit, ())),
    "multi-swe-maven": (_multi_swe_maven, ("surefire",)),
    "multi-swe-gradle": (table(rule(r"> Task :(?P<test>\S+)(?P<said> FAILED| SKIPPED| NO-SOURCE| UP-TO-DATE|)$", PASSED,
                                    words={" FAILED": FAILED, " SKIPPED": SKIPPED, " NO-SOURCE": SKIPPED}),
                               rule(r"(?P<test>.+ > .+) (?P<said>PASSED|FAILED|SKIPPED)$"), strip=False), ("gradle",)),
}
