"""JavaScript's and TypeScript's runners: jest, mocha, vitest, node:test, TAP; and the parsers published sets name.

Our ids are paths, `file > suite > test`. The sets' are mostly bare test names, so that equal names in two suites
are one test to them.
"""

from __future__ import annotations

import json
import re
from typing import Any, Iterator

from oprd.sandbox.log_lines import (FAILED, PASSED, SKIPPED, Parser, Runner, Seen, clean, counting, ends_with, rule, table,
                                    telling, whole, without, worst)

_TIME = re.compile(r"\s*\(\d+(?:\.\d+)? ?m?s\)$")
_MARKS = {"✓": PASSED, "✔": PASSED, "✕": FAILED, "✖": FAILED, "×": FAILED, "○": SKIPPED, "✎": SKIPPED, "↓": SKIPPED,
          "□": SKIPPED, "﹣": SKIPPED}


class _Tree:
    """The open suites of an indented report."""

    def __init__(self) -> None:
        self.open: list[tuple[int, str]] = []

    def suite(self, indent: int, name: str) -> None:
        self.close(indent)
        self.open.append((indent, name))

    def close(self, indent: int) -> None:
        while self.open and self.open[-1][0] >= indent:
            self.open.pop()

    def path(self, indent: int, name: str) -> str:
        self.close(indent)
        return " > ".join([*(suite for _, suite in self.open), name])


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


# jest ------------------------------------------------------------------------------------------------------------

_J_FILE = re.compile(r"(?:PASS|FAIL) (?P<file>\S.*?)(?: \(\d+(?:\.\d+)? m?s\))?$")


def _jest_files(log: str, runs: int = 1) -> list[str]:
    """What jest --verbose prints of each test file: its line and the list up to the next empty line."""
    blocks: list[list[str]] = []
    inside = False
    for line in log.split("\n"):
        if _J_FILE.match(line):
            blocks.append([])
            inside = True
        inside = inside and bool(line.strip())
        if inside:
            blocks[-1].append(line)
    return ["\n".join(block) for block in blocks]


def jest_log(log: str) -> Iterator[Seen]:
    for block in _jest_files(log):
        head, *lines = block.split("\n")
        tree = _Tree()
        tree.suite(-1, _J_FILE.match(head)["file"])
        for line in lines:
            mark, _, name = line.strip().partition(" ")
            if mark in _MARKS:
                name = re.sub(r"^(?:skipped|todo) ", "", name) if _MARKS[mark] == SKIPPED else _TIME.sub("", name)
                yield Seen(tree.path(_indent(line), name), _MARKS[mark])
            else:
                tree.suite(_indent(line), line.strip())


def _objects(log: str) -> Iterator[Any]:
    """The JSON objects that begin a line."""
    decoder, at = json.JSONDecoder(), 0
    for match in re.finditer(r"^\{", log, re.M):
        if match.start() >= at:
            try:
                value, at = decoder.raw_decode(log, match.start())
                yield value
            except (ValueError, RecursionError):
                pass


def _walk(value: Any, file: str = "") -> Iterator[tuple[str, dict]]:
    """Every object inside a value, with the `name` of the nearest one around it that has testResults' shape."""
    if isinstance(value, dict):
        file = value["name"] if isinstance(value.get("assertionResults"), list) and value.get("name") else file
        yield file, value
        value = list(value.values())
    for item in value if isinstance(value, list) else ():
        yield from _walk(item, file)


_J_STATUS = {"passed": PASSED, "failed": FAILED, "pending": SKIPPED, "skipped": SKIPPED, "todo": SKIPPED,
             "disabled": SKIPPED}


def jest_json_log(log: str) -> Iterator[Seen]:
    """jest --json (vitest's json reporter has the same shape)."""
    for document in _objects(log):
        for file, one in _walk(document):
            if isinstance(one.get("ancestorTitles"), list) and one.get("status") in _J_STATUS:
                path = [*filter(None, [file]), *one["ancestorTitles"], one.get("title", "")]
                yield Seen(" > ".join(map(str, path)), _J_STATUS[one["status"]])


def mocha_json_log(log: str) -> Iterator[Seen]:
    for document in _objects(log):
        if isinstance(document, dict) and "stats" in document:
            for key, status in (("passes", PASSED), ("pending", SKIPPED), ("failures", FAILED)):
                for test in document.get(key) or ():
                    name = test.get("fullTitle") if isinstance(test, dict) else test
                    if isinstance(name, str):
                        yield Seen(name, status)


# mocha, vitest, node:test ----------------------------------------------------------------------------------------

_M_RESULT = re.compile(r"(?P<mark>[✓✔]|\d+\)|-) (?P<name>.+)")


def mocha_log(log: str) -> Iterator[Seen]:
    """The spec reporter's tree, up to `n passing`; a failed hook is a test of its name."""
    tree = _Tree()
    for line in re.split(r"(?m)^ +\d+ passing\b", log)[0].split("\n"):
        indent, text = _indent(line), line.strip()
        if indent < 2 or not text:
            continue
        if match := _M_RESULT.fullmatch(text):
            status = {"✓": PASSED, "✔": PASSED, "-": SKIPPED}.get(match["mark"], FAILED)
            yield Seen(tree.path(indent, _TIME.sub("", match["name"])), status)
        else:
            tree.suite(indent, text)


_V_FILE = re.compile(r" [✓❯×↓] (?P<file>\S+) \(\d+ tests?\b.*\)(?: \d+m?s)?$")
_V_TEST = re.compile(r" +(?P<mark>[✓×↓□]) (?P<name>\S.*?)(?:\s+\d+m?s| \[skipped\])?$")


def vitest_log(log: str) -> Iterator[Seen]:
    """`file > suite > test` of the verbose reporter; `file > test` of the default one, which hides passing suites."""
    file = ""
    for line in _vitest_own(log)[0].split("\n"):
        if match := _V_FILE.match(line):
            file = match["file"]
        elif match := _V_TEST.match(line):
            name = match["name"]
            path = name if " > " in name else f"{file} > {name}"
            yield Seen(path, _MARKS[match["mark"]])


_vitest_own = without(r"^⎯+ (?:Failed|Unhandled).*?(?=^ Test Files |\Z)")

_N_RESULT = re.compile(r"(?P<mark>[✔✖﹣]) (?P<name>.*?) \(\d+(?:\.\d+)?ms\)(?P<why> # .*)?$")


def node_log(log: str) -> Iterator[Seen]:
    """node --test, spec reporter: a group opens with ▶ and closes with its own result."""
    tree = _Tree()
    for line in _node_own(log)[0].split("\n"):
        indent, text = _indent(line), line.strip()
        if match := _N_RESULT.match(text):
            skipped = "# SKIP" in (match["why"] or "") or "# TODO" in (match["why"] or "")
            yield Seen(tree.path(indent, match["name"]), SKIPPED if skipped else _MARKS[match["mark"]])
        elif text.startswith("▶ "):
            tree.suite(indent, _TIME.sub("", text[2:]))


_node_own = without(r"^✖ failing tests:.*")

# TAP -------------------------------------------------------------------------------------------------------------

_T_RESULT = re.compile(r"(?P<said>ok|not ok)\b(?: \d+)?(?: -)?(?: (?P<name>.*?))?(?P<mark> # (?:SKIP|TODO)\b.*)?$", re.I)


def tap_log(log: str) -> Iterator[Seen]:
    """TAP 12 to 14; subtests (4 blanks deeper, after `# Subtest: name`) by path."""
    tree = _Tree()
    for line in _tap_own(log)[0].split("\n"):
        indent, text = _indent(line), line.strip()
        if indent % 4 or indent and all(indent != at for at, _ in tree.open):
            continue  # a diagnostic
        if text.startswith("# Subtest: "):
            tree.suite(indent, text[len("# Subtest: "):])
            tree.open.append((indent + 4, ""))
        elif match := _T_RESULT.match(text):
            tree.close(indent)
            path = " > ".join([*(name for _, name in tree.open if name), match["name"] or "(no name)"])
            tree.open += [(indent, "")] if indent else []
            status = SKIPPED if match["mark"] else PASSED if match["said"].lower() == "ok" else FAILED
            yield Seen(path, status)


_tap_own = without(r"^( *)---\n.*?^\1\.\.\.$\n?")

_ANY_SUMMARY = (r"^Tests: +|^ +\d+ passing\b|^\s*Tests\s+\d+ |^(?:ℹ|#) pass +\d+|^1\.\.\d+|Executed \d+ of \d+|"
                r"\d+ specs?, \d+ failures?|^(?:ok|not ok|FAILED) \| \d+ passed|^ *\d+ passed\b|^ *\d+ pass$|"
                r"^ *\d+ tests? (?:passed|failed)|^# tests \d+|All tests passed|^✨|\d+ tests? complete")

JEST = Runner(lambda log: worst(jest_log(log)), _jest_files, counting(r"^Tests: +(?:.*?(\d+) passed)?"),
              telling(r"^Test(?:s| Suites): .*\d+ failed|^● Test suite failed to run"))
MOCHA = Runner(lambda log: worst(mocha_log(log)), without(r"^ +\d+ passing\b.*\Z"), counting(r"^ +(\d+) passing\b"),
               telling(r"^ +\d+ failing\b"))
VITEST = Runner(lambda log: worst(vitest_log(log)), _vitest_own, counting(r"^\s*Tests\s+(?:.*?(\d+) passed)?"),
                telling(r"^ *(?:Tests|Test Files)\s+\d+ failed|^ *Errors\s+\d+ error"))
NODE = Runner(lambda log: worst(node_log(log)), _node_own, ends_with(r"^ℹ pass \d+"), telling(r"^ℹ (?:fail|cancelled) [1-9]"))
TAP = Runner(lambda log: worst(tap_log(log)), _tap_own, ends_with(r"^1\.\.\d+$|^# pass +\d+"),
             telling(r"^# fail +[1-9]|^Bail out!"))
JEST_JSON = Runner(lambda log: worst(jest_json_log(log)), whole, counting(r'"numPassedTests": ?(\d+)'),
                   telling(r'"numFailedTests": ?[1-9]'))
MOCHA_JSON = Runner(lambda log: worst(mocha_json_log(log)), whole, counting(r'"passes": ?(\d+)'),
                    telling(r'"failures": ?[1-9]'))
ANY_JS = Runner(lambda log: {}, without(r"^ +\d+ passing\b.*?(?:^(?=\S)|\Z)"),
                ends_with(_ANY_SUMMARY), telling(r"\b[1-9]\d* (?:failing|failed|failures?)\b|^# fail +[1-9]"))


# the sets' parsers -----------------------------------------------------------------------------------------------

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
                yield Seen(f"{' - '.join(suite for suite, _ in suites)} - {name}".strip(), _MARKS[text[0]])
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
            yield Seen(" > ".join([*suites, name]), _MARKS[mark])


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
            yield Seen(f"{file}:{match[2]}", _MARKS[match[1]])


_PASS_TICK = rule(r"✔\s+(?P<test>.*?)$", PASSED, weak=True)
_DASH = rule(r"-\s+(?P<test>.*?)$", SKIPPED)
_FAST = r"(?:\s(?:\d+\s*m?s?|\[skipped\]))?$"
_SUITES = table(rule(r"(?P<said>PASS|FAIL)\s(?P<test>.*?)(?:\s\([\d.]+\s*m?s\))?$"), strip=False)
_JEST = table(rule(r"(?P<said>[✓✕○])\s(?P<test>.+?)(?:\s\(\d+\s*m?s\))?$"))
_JEST_JSON = table(rule(r"\[(?P<said>PASSED|FAILED)\]\s(?P<test>.+)$"))
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
                           rule(r"\[W\]\s*\d+\)\s+(?P<test>.*?)$", FAILED), _PASS_TICK, tidy=_timeless), ("mocha", "js")),
    "parse_log_js_2": (table(_DASH, rule(r"\d+\)\s+(?P<test>.*?)$", FAILED), _PASS_TICK, tidy=_timeless),
                       ("mocha", "js")),
    "parse_log_js_3": (_js_3, ("tap", "js")),
    "parse_log_js_4": (_js_4, ("jest", "mocha", "vitest", "node-test", "js")),
    "parse_log_npx": (table(rule(r"✔\s+(?P<test>.+?)(?:\s+\(\d+(?:ms)?\))?$", PASSED),
                            rule(r"\d+\)\s+(?P<test>.+?)(?:\s+\([^)]+\))?$", FAILED)), ("mocha", "js")),
    "multi-swe-jest": (_multi_swe_jest, ("jest",)),
    "multi-swe-vitest": (table(rule(r"(?P<said>[✓×]) (?P<test>.+?)(?:\s*\d*\.?\d+\s*(?:ms|s|m))?$")), ("vitest",)),
    "multi-swe-mocha": (table(rule(r"✔ (?P<test>.+?)(?:\s\(\d*\.?\d*\s*\w+\))?$", PASSED),
                              rule(r"\d+\) (?P<test>.+?)(?:\s\(\d*\.?\d*\s*\w+\))?$", FAILED)), ("mocha", "js")),
}
