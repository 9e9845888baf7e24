"""The parsers that published sets name for JavaScript and TypeScript. Their ids are mostly bare test names, so that
equal names in two suites are one test to them."""

from __future__ import annotations

import re
from typing import Iterator

from oprd.sandbox.log_js import MARKS
from oprd.sandbox.log_lines import FAILED, PASSED, SKIPPED, Parser, Seen, rule, table

_DURATION = re.compile(r"\s*(?:\(\s*)?\d+(?:\.\d+)?\s*m?s\s*(?:\))?\s*$", re.I)


def _timeless(name: str) -> str:
    return _DURATION.sub("", name).strip()


def _calypso(log: str) -> Iterator[Seen]:
    """`suite - suite - test` of every jest the shell's trace shows; suites outlive a jest."""
    suites: list[tuple[str, int]] = []
    for chunk in log.split(" ./node_modules/.bin/jest ")[1:]:
        for line in chunk.split("\n"):
            text = line.strip()
            if line.startswith(("Test Suites", "  ● ")):
                break
            if text.startswith(("✓", "✕")):
                name = re.sub(r"\(\d+ms\)$", "", text[2:])
                yield Seen(f"{' - '.join(suite for suite, _ in suites)} - {name}".strip(), MARKS[text[0]])
            elif line[:1].isspace():
                while suites and suites[-1][1] >= len(line) - len(line.lstrip()):
                    suites.pop()
                suites.append((text, len(line) - len(line.lstrip())))


def _karma(log: str) -> Iterator[Seen]:
    """karma's spec tree between `Starting browser` and `SUMMARY:`."""
    suites: list[str] = []
    depth, started = -1, False
    for line in log.split("\n"):
        if line.startswith("SUMMARY:"):
            return
        if "Starting browser" in line:
            started = True
            continue
        match = re.match(r"(\s*)?([✔✖])?\s(.*)$", line) if started else None
        if not match:
            continue
        blanks, mark, name = match.groups()
        if blanks and not mark:
            if len(blanks) > depth:
                suites.append(name)
            elif len(blanks) < depth:
                del suites[-1:]
            depth = len(blanks)
        elif mark:
            yield Seen(" > ".join([*suites, name]), MARKS[mark])


def _js_3(log: str) -> Iterator[Seen]:
    """TAP in which a result line that ends with `{` holds what follows up to `}`."""
    open_: list[str] = []
    for line in map(str.strip, log.split("\n")):
        if line and not line.replace("}", ""):
            del open_[max(0, len(open_) - len(line)):]
            continue
        opens = line.endswith("{")
        match = re.match(r"(not ok|ok)\s+\d+\s+-\s+(.*?)(?:\s+#.*)?$", line[:-1].rstrip() if opens else line)
        name = _timeless(re.split(r"\s+#", match[2], maxsplit=1)[0]) if match else ""
        if name:
            yield Seen(" :: ".join([*open_, name]), PASSED if match[1] == "ok" else FAILED, weak=match[1] == "ok")
            if opens:
                open_.append(name)


_SKIP_MARKS = ("(skipped)", "[skip]", "[skipped]", "[pending]", "[todo]")


def _js_4(log: str) -> Iterator[Seen]:
    """Any runner that marks its lines; a `[tag]:` before the name is dropped."""
    marks = {**dict.fromkeys("✔✓", PASSED), **dict.fromkeys("✘✖×", FAILED), **dict.fromkeys("○◌◦⚪", SKIPPED)}
    for line in map(str.strip, log.split("\n")):
        if line[:1] in marks:
            name = line[1:].strip()
            if name.startswith("[") and "]:" in name:
                name = name.split("]:", 1)[1].strip()
            name, status = _timeless(name.removeprefix(":")), marks[line[0]]
        elif any(mark in line.lower() for mark in _SKIP_MARKS):
            for mark in _SKIP_MARKS:
                line = line.replace(mark, "")
            name, status = _timeless(line), SKIPPED
        else:
            continue
        if name:
            yield Seen(name, status, weak=status == PASSED)


def _multi_swe_jest(log: str) -> Iterator[Seen]:
    """Multi-SWE's for jest: the file, and `file:test`."""
    file = ""
    timed = r"(?:\s\(\d*\.?\d+\s*\w+\))?$"
    for line in map(str.strip, log.split("\n")):
        if match := re.match(rf"(PASS|FAIL) (.+?){timed}", line):
            file = match[2]
            yield Seen(file, PASSED if match[1] == "PASS" else FAILED)
        elif file and (match := re.match(rf"([✓✕]) (.+?){timed}", line)):
            yield Seen(f"{file}:{match[2]}", MARKS[match[1]])


_PASS_TICK = rule(r"✔\s+(?P<test>.*?)$", PASSED, weak=True)
_DASH = rule(r"-\s+(?P<test>.*?)$", SKIPPED)
_FAST = r"(?:\s(?:\d+\s*m?s?|\[skipped\]))?$"
_SUITES = table(rule(r"(?P<said>PASS|FAIL)\s(?P<test>.*?)(?:\s\([\d.]+\s*m?s\))?$"), strip=False)
_JEST = table(rule(r"(?P<said>[✓✕○])\s(?P<test>.+?)(?:\s\(\d+\s*m?s\))?$"))
_JEST_JSON = table(rule(r"\[(?P<said>PASSED|FAILED)\]\s(?P<test>.+)$"))
_MULTI_SWE_MARKED = table(rule(r"(?P<said>[✓×]) (?P<test>.+?)(?:\s*\d*\.?\d+\s*(?:ms|s|m))?$"),
                          rule(r"✔ (?P<test>.+?)(?:\s\(\d*\.?\d*\s*\w+\))?$", PASSED),
                          rule(r"\d+\) (?P<test>.+?)(?:\s\(\d*\.?\d*\s*\w+\))?$", FAILED))
NAMED: dict[str, tuple[Parser, tuple[str, ...]]] = {  # parser; the runners that may have made its logs
    "parse_log_jest": (_JEST, ("jest",)),
    "parse_log_jest_json": (_JEST_JSON, ()),
    "parse_log_immutable_js": (lambda log: [*_JEST(log), *_JEST_JSON(log)], ("jest",)),
    "parse_log_vitest": (table(rule(r"(?P<said>[✓×↓])\s(?P<test>.+?)" + _FAST)), ("vitest",)),
    "parse_log_tap": (table(rule(r"(?P<said>ok|not ok) \d+ (?P<test>.+)$")), ("tap",)),
    "parse_log_karma": (_karma, ("js",)),
    "parse_log_calypso": (_calypso, ("jest",)),
    "parse_log_react_pdf": (_SUITES, ("jest",)),
    "parse_log_js": (table(_DASH, rule(r"\d+\)\s+(?P<test>.*?):$", FAILED),
                           rule(r"\[W\]\s*\d+\)\s+(?P<test>.*?)$", FAILED), _PASS_TICK, tidy=_timeless),
                     ("mocha", "js")),
    "parse_log_js_2": (table(_DASH, rule(r"\d+\)\s+(?P<test>.*?)$", FAILED), _PASS_TICK, tidy=_timeless),
                       ("mocha", "js")),
    "parse_log_js_3": (_js_3, ("tap", "js")),
    "parse_log_js_4": (_js_4, ("jest", "mocha", "vitest", "node-test", "js")),
    "parse_log_npx": (table(rule(r"✔\s+(?P<test>.+?)(?:\s+\(\d+(?:ms)?\))?$", PASSED),
                            rule(r"\d+\)\s+(?P<test>.+?)(?:\s+\([^)]+\))?$", FAILED)), ("mocha", "js")),
    "multi-swe-js": (lambda log: [*_multi_swe_jest(log), *_MULTI_SWE_MARKED(log)], ("jest", "vitest", "mocha", "js")),
}
