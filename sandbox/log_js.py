"""JavaScript's and TypeScript's runners: jest, mocha, vitest, node:test, TAP. Our ids are paths, `file > suite > test`."""

from __future__ import annotations

import json
import re
from typing import Any, Iterator

from oprd.sandbox.log_lines import (FAILED, PASSED, SKIPPED, Runner, Seen, counting, ends_with, telling, whole, without,
                                    worst)

_TIME = re.compile(r"\s*\(\d+(?:\.\d+)? ?m?s\)$")
MARKS = {"✓": PASSED, "✔": PASSED, "✕": FAILED, "✖": FAILED, "×": FAILED, "○": SKIPPED, "✎": SKIPPED, "↓": SKIPPED,
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
            if mark in MARKS:
                name = re.sub(r"^(?:skipped|todo) ", "", name) if MARKS[mark] == SKIPPED else _TIME.sub("", name)
                yield Seen(tree.path(_indent(line), name), MARKS[mark])
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
            yield Seen(path, MARKS[match["mark"]])


_vitest_own = without(r"^⎯+ (?:Failed|Unhandled).*?(?=^ Test Files |\Z)")

_N_RESULT = re.compile(r"(?P<mark>[✔✖﹣]) (?P<name>.*?) \(\d+(?:\.\d+)?ms\)(?P<why> # .*)?$")


def node_log(log: str) -> Iterator[Seen]:
    """node --test, spec reporter: a group opens with ▶ and closes with its own result."""
    tree = _Tree()
    for line in _node_own(log)[0].split("\n"):
        indent, text = _indent(line), line.strip()
        if match := _N_RESULT.match(text):
            skipped = "# SKIP" in (match["why"] or "") or "# TODO" in (match["why"] or "")
            yield Seen(tree.path(indent, match["name"]), SKIPPED if skipped else MARKS[match["mark"]])
        elif text.startswith("▶ "):
            tree.suite(indent, _TIME.sub("", text[2:]))


_node_own = without(r"^✖ failing tests:.*")

# TAP -------------------------------------------------------------------------------------------------------------

_T_RESULT = re.compile(r"(?P<said>ok|not ok)\b(?: \d+)?(?: -)?(?: (?P<name>.*?))?(?P<mark> # (?:SKIP|TODO)\b.*)?$",
                       re.I)


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
VITEST = Runner(lambda log: worst(vitest_log(log)), _vitest_own, ends_with(r"^\s*Tests\s+\d+ "),  # files pass, too
                telling(r"^ *(?:Tests|Test Files)\s+\d+ failed|^ *Errors\s+\d+ error"))
NODE = Runner(lambda log: worst(node_log(log)), _node_own, ends_with(r"^ℹ pass \d+"),
              telling(r"^ℹ (?:fail|cancelled) [1-9]"))
TAP = Runner(lambda log: worst(tap_log(log)), _tap_own, ends_with(r"^1\.\.\d+$|^# pass +\d+"),
             telling(r"^# fail +[1-9]|^Bail out!"))
JEST_JSON = Runner(lambda log: worst(jest_json_log(log)), whole, counting(r'"numPassedTests": ?(\d+)'),
                   telling(r'"numFailedTests": ?[1-9]'))
MOCHA_JSON = Runner(lambda log: worst(mocha_json_log(log)), whole, counting(r'"passes": ?(\d+)'),
                    telling(r'"failures": ?[1-9]'))
ANY_JS = Runner(lambda log: {}, without(r"^ +\d+ passing\b.*?(?:^(?=\S)|\Z)"),
                ends_with(_ANY_SUMMARY), telling(r"\b[1-9]\d* (?:failing|failed|failures?)\b|^# fail +[1-9]"))
