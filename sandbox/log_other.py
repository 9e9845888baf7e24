"""The parsers SWE-rebench V2 names for its other languages: Elixir, Lua, Swift, C#, Haskell, Scala, OCaml, R, Julia,
Clojure, Dart. For these we have no runner of our own, so no second opinion."""

from __future__ import annotations

import json
import re
from typing import Iterator

from oprd.sandbox.log_lines import ERROR, FAILED, PASSED, SKIPPED, Parser, Seen, rule, table

_ELIXIR = table(rule(r"\*\s+test\s+(?P<test>.*?)\s+\(skipped\)\s+\[L#\d+\]$", SKIPPED),
                rule(r"\d+\)\s+test\s+(?P<test>.*?)\s+\([^)]+\)$", FAILED),
                rule(r"\*\s+test\s+(?P<test>.*?)(?:\s+\([0-9]+(?:\.[0-9]+)?ms\))?\s+\[L#\d+\]$", PASSED, weak=True))
_LUA = table(rule(r"Fail(?:ed)?\s*\|\|\s*(?P<test>.+?)$", FAILED),
             rule(r"[Ss]kip(?:ped)?\s*\|\|\s*(?P<test>.+?)$", SKIPPED, weak=True),
             rule(r"Success\s*\|\|\s*(?P<test>.+?)$", PASSED, weak=True), strip=False)
_SWIFT = table(rule(r"Test Case '(?P<test>[^']+)'\s+(?P<said>passed|failed)\s+\([0-9.]+\s+seconds\)$"))
_CSHARP = table(rule(r"\[xUnit\.net\s+[\d:.]+\]\s+(?P<test>.+?)\s+\[FAIL\]$", FAILED),
                rule(r"\s+Failed\s+(?P<test>.+?)\s+\[.+?\]$", FAILED),
                rule(r"\s+Skipped\s+(?P<test>.+?)(?:\s+\[.+?\])?$", SKIPPED),
                rule(r"\s+Passed\s+(?P<test>.+?)\s+\[.+?\]$", PASSED, weak=True), strip=False)
_HASKELL = table(
    rule(r".*(?:Test suite |Linking |Building |Running  )"),
    rule(r"\s*(?P<test>.+?)\s*:\s*(?P<said>OK|PASS|FAIL|ERROR|SKIP|PENDING)(?:\b|\s|$)"),
    rule(r"\s+(?P<test>.+?)\s+\[[✓✔]\]\s*$", PASSED, weak=True),
    rule(r"\s+(?P<test>.+?)\s+\[[✗✘]\]\s*$", FAILED),
    rule(r"\s*[✓✔]\s+(?P<test>.+?)(?:\s+\(.*?\))?\s*$", PASSED, weak=True),
    rule(r"\s*[✗✘]\s+(?P<test>.+?)\s*$", FAILED),
    rule(r"\s*\d+\)\s+(?P<test>.+?)\s*$", FAILED), rule(r"###\s+Failure\s+in:\s+(?P<test>.+)$", FAILED),
    rule(r"###\s+Error\s+in:\s+(?P<test>.+)$", ERROR), strip=False)
_SCALA = table(rule(r"\[info\]\s+-\s+(?P<test>.*?)\s+\*\*\*\s+FAILED\s+\*\*\*\s+\([^)]+\)$", FAILED),
               rule(r"\[info\]\s+-\s+(?P<test>.*?)\s+!!!\s+CANCELED\s+!!!\s+\([^)]+\)$", SKIPPED),
               rule(r"\[info\]\s+-\s+(?P<test>.*?)\s+!!!\s+IGNORED\s+!!!", SKIPPED),
               rule(r"\[info\]\s+-\s+(?P<test>.*?)\s+\([^)]+\)$", PASSED, weak=True))
_SCALA_2 = table(rule(r"x\s+(?P<test>.*?)\s+[\d.]+[mμn]?s\s*$", FAILED),
                 rule(r"\+\s+(?P<test>.*?)\s+[\d.]+[mμn]?s\s*$", PASSED))
_SCALA_NOISE = ("Run completed", "Total number", "Suites:", "Tests:", "All tests", "compiling", "done compiling",
                "loading", "welcome to", "set current")


def _scala_3(log: str) -> Iterator[Seen]:
    """`suite: test`; the suite is the last [info] line that is neither a test nor sbt's own talk."""
    words = {"FAILED": FAILED, "PASSED": PASSED, "ERROR": ERROR, "ABORTED": ERROR}
    suite = ""
    for line in map(str.strip, log.split("\n")):
        if line.startswith("[info] -"):
            match = re.match(r"\[info\]\s+-\s+(.*?)(?:\s+\*{3}\s+([A-Z]+)\s+\*{3})?$", line)
            if match:
                name = re.sub(r"\s*\(\d+\s+\w+\)$", "", match[1].strip())
                yield Seen(f"{suite}: {name}" if suite else name, words.get(match[2] or "PASSED", SKIPPED),
                           weak=not match[2])
        elif (match := re.match(r"\[info\]\s+([^\-].*)$", line)) and not any(word in match[1] for word in _SCALA_NOISE):
            suite = match[1].strip() or suite


_OCAML = table(rule(r"\s*\[(?P<said>OK|PASS)\]\s+(?P<test>.*?\s+\d+\s+.+)$", weak=True),
               rule(r"\s*\[(?P<said>[A-Z]+)\]\s+(?P<test>.*?\s+\d+\s+.+)$", ERROR), strip=False,
               tidy=lambda test: re.sub(r"^(.*?)\s+(\d+)\s+(.+)$", r"\1 \2 \3", test).strip())
_RANK = {PASSED: 0, SKIPPED: 1, FAILED: 2, ERROR: 3}


def _ranked(seen) -> Iterator[Seen]:
    """Only what is no better than what was seen before."""
    found: dict[str, str] = {}
    for one in seen:
        if _RANK[one.status] >= _RANK.get(found.get(one.test), -1):
            found[one.test] = one.status
            yield one


_OCAML_WORDS = {**dict.fromkeys("ERROR EXCEPTION CRASH FATAL KO PANIC".split(), FAILED)}
_OCAML_3 = table(rule(r"\[(?P<said>OK|PASS|PASSED|SUCCESS|SKIP|SKIPPED|TODO|PENDING|DISABLED|FAIL|FAILED|ERROR|"
                      r"EXCEPTION|CRASH|FATAL|KO|PANIC)\]\s+(?P<test>.+)$", FAILED, words=_OCAML_WORDS, flags=re.I),
                 tidy=lambda test: re.sub(r"\s+", " ", test).strip())
_OCAML_4 = table(rule(r"(?P<said>PASSED|FAILED|SKIPPED|ERROR)\s+(?P<test>.*?)(?:\s{2,}.*)?$"))


def _r(log: str) -> Iterator[Seen]:
    """testthat's table of contexts; then the section of failed tests."""
    def timeless(name: str) -> str:
        return re.sub(r"\s*\[\s*\d+(?:\.\d+)?\s*[a-zA-Z]+\]$", "", name.strip()).strip()

    lines = [line.strip() for line in log.split("\n")]
    for line in lines:
        if match := re.match(r"([✔✖])\s+\|[^|]+\|\s+(.+)$", line):
            yield Seen(timeless(match[2]), PASSED if match[1] == "✔" else FAILED)
    inside = False
    for line in lines:
        inside = inside or line.startswith(("── Failed tests ──", "== Failed tests =="))
        if inside and line.startswith(("[ FAIL", "══ Results ══")):
            return
        if inside and (match := re.match(r"(Failure|Error)\s+\([^)]+\):\s+(.+)$", line)):
            yield Seen(timeless(match[2]), FAILED if match[1] == "Failure" else ERROR)


def _r_check(log: str) -> Iterator[Seen]:
    """R CMD check: `* checking x ... OK`, or the status on a later line."""
    words = {"OK": PASSED, "NOTE": PASSED, "NOTES": PASSED, "WARNING": FAILED, "WARNINGS": FAILED, "ERROR": ERROR,
             "ERRORS": ERROR, "FAIL": FAILED, "FAILED": FAILED, "SKIPPED": SKIPPED}
    waiting = None
    for line in filter(None, map(str.strip, log.split("\n"))):
        word = (line.strip(".:!").split() or [""])[0].upper()
        if waiting:
            if word in words:
                yield Seen(waiting, words[word])
                waiting = None
        elif match := re.match(r"\* checking (.+?) \.\.\.(?: ([A-Z]+))?$", line):
            if match[2]:
                yield Seen(match[1], words.get(match[2], PASSED))
            else:
                waiting = match[1]
    if waiting:
        yield Seen(waiting, PASSED, weak=True)


def _lein(log: str) -> Iterator[Seen]:
    """Namespaces; FAIL and ERROR belong to the last one begun."""
    current = None
    for line in map(str.strip, log.split("\n")):
        if match := re.match(r"lein test (.+)$", line):
            words = match[1].split()
            names = [" ".join(words[1:]).split("/", 1)[0].strip()] if words[:1] == [":only"] else words
            for name in filter(None, names):
                yield Seen(name, PASSED, weak=True)
            current = names[-1] or None if names else None
        elif current and line.startswith(("FAIL in", "ERROR in")):
            yield Seen(current, FAILED if line[0] == "F" else ERROR)


def _dart(log: str) -> Iterator[Seen]:
    """The JSON reporter's events."""
    names: dict[object, str] = {}
    kinds = {"success": PASSED, "failure": FAILED, "error": ERROR}
    for line in map(str.strip, log.split("\n")):
        try:
            value = json.loads(line) if line[:1] in ("{", "[") else []
        except (ValueError, RecursionError):
            continue
        for event in value if isinstance(value, list) else [value]:
            if not isinstance(event, dict):
                continue
            test = event.get("test") if isinstance(event.get("test"), dict) else {}
            name, number = test.get("name") or "", test.get("id")
            if event.get("type") == "testStart" and number is not None and name and not name.startswith("loading "):
                names[number] = name
            elif event.get("type") == "testDone" and event.get("testID") in names and not event.get("hidden"):
                status = kinds.get(event.get("result")) or (SKIPPED if event.get("skipped") else None)
                if status:
                    yield Seen(names[event["testID"]], status)


def _dart_2(log: str) -> Iterator[Seen]:
    """`[pkg]: 00:01 +4: /x_test.dart: name`; a test seen once began and did not end."""
    seen: dict[str, int] = {}
    for line in map(str.strip, log.split("\n")):
        match = re.match(r"\[\w+\]:\s+\d{2}:\d{2}\s+\+\d+:\s+(/[^:]+\.dart):\s+(.+)$", line)
        if match and "loading" not in line.lower():
            name = f"{match[1]}: {match[2]}"
            seen[name] = seen.get(name, 0) + 1
    return (Seen(name, PASSED if times > 1 else ERROR) for name, times in seen.items())


def _dart_3(log: str) -> Iterator[Seen]:
    """`00:02 +88 -1: /x_test.dart: name [E]`."""
    for line in map(str.strip, log.split("\n")):
        if match := re.match(r"\d+:\d+\s+\+\d+\s+-\d+:\s+loading\s+(/[^:]+\.dart)\s+\[E\]$", line):
            yield Seen(match[1], ERROR)
        elif match := re.match(r"\d+:\d+\s+\+\d+(?:\s+-\d+)?:\s+(/[^:]+\.dart):\s+(.+?)(?:\s+\[E\])?$", line):
            bad = "[E]" in line
            yield Seen(f"{match[1]}: {match[2].strip()}", FAILED if bad else PASSED, weak=not bad)


def _julia(log: str) -> Iterator[Seen]:
    """Rows of the test summary: the columns after the bar are Pass Fail Error Broken Total, without the empty ones."""
    summary = fails = errors = False
    for line in log.split("\n"):
        if "Test Summary:" in line:
            summary = True
            if "| Pass" in line:
                head = line.split("|")[1]
                fails, errors = "Fail" in head, "Error" in head
        elif summary and (match := re.match(r"(\s*)(.+?)\s+\|(.+)$", line)):
            numbers = [int(part) for part in match[3].split() if part.isdigit()]
            if len(numbers) < 2:
                continue
            status = PASSED
            if len(numbers) == 2:
                no_pass = len(match[3]) - len(match[3].lstrip()) >= 10  # the column Pass is empty
                status = ERROR if no_pass or numbers[0] != numbers[1] else PASSED
            elif len(numbers) == 3 and numbers[1]:
                status = FAILED if fails and not errors else ERROR
            elif len(numbers) > 3:
                status = ERROR if numbers[2] else FAILED if numbers[1] else PASSED
            yield Seen(match[2].strip(), status)


NAMED: dict[str, Parser] = {
    "parse_log_elixir": _ELIXIR, **dict.fromkeys(("parse_lue_nvim", "parse_lua_nvim", "parse_log_lua_nvim"), _LUA),
    "parse_log_swift": _SWIFT, "parse_log_csharp": _CSHARP, "parse_log_haskell": _HASKELL,
    "parse_log_scala": _SCALA, "parse_log_scala_v2": _SCALA_2, "parse_log_scala_v3": _scala_3,
    "parse_log_ocaml": _OCAML, "parse_log_ocaml_v3": lambda log: _ranked(_OCAML_3(log)),
    **dict.fromkeys(("parse_log_ocaml_v4", "parse_log_ocaml_v5"), lambda log: _ranked(_OCAML_4(log))),
    "parse_log_r": _r, "parse_log_r_v2": _r_check, "parse_log_julia": _julia, "parse_log_lein": _lein,
    "parse_log_dart": _dart, "parse_log_dart_v2": _dart_2, "parse_log_dart_v3": _dart_3,
}
