"""Test runner output -> {test id: status}. Statuses: PASSED FAILED ERROR SKIPPED XFAIL XPASS.

Output is text that the code under test can write into. So a parser takes result lines only from where its runner
puts them, a test that has two different results has FAILED, and `counted_passes` gives the number of passes in the
runner's own last summary, for the caller to hold against the parsed ones.
"""

from __future__ import annotations

import re
from typing import Callable, Mapping

PASSED, FAILED, ERROR, SKIPPED, XFAIL, XPASS = "PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL", "XPASS"

_ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")


class _Statuses(dict):
    def see(self, test: str, status: str) -> None:
        self[test] = status if self.get(test, status) == status else FAILED


# unittest ------------------------------------------------------------------------------------------------------

_U_TEST = r"\w+ \([\w<>]+(?:\.[\w<>]+)+\)"
_U_HEAD = re.compile(rf"(?P<test>{_U_TEST})(?: [\[(][^\n]*?[\])])?"  # a test, perhaps one subtest of it
                     rf"(?:\n(?!{_U_TEST})[^\n]*?)? \.\.\. ")  # perhaps the first line of its docstring
_U_STATUS = {"ok": PASSED, "FAIL": FAILED, "ERROR": ERROR, "expected failure": XFAIL, "unexpected success": XPASS}
_U_SECTION = re.compile(rf"^={{70}}\n(FAIL|ERROR|UNEXPECTED SUCCESS): ({_U_TEST})", re.M)
_U_RAN = re.compile(r"^Ran (\d+) tests? in [\d.]+s$", re.M)
_U_SKIPPED = re.compile(r"^(?:OK|FAILED) \(.*?\bskipped=(\d+)", re.M)


def _unittest_id(test: str) -> str:
    """One id for both spellings: Python 3.11 prints `test_x (mod.Case.test_x)`, before it was `test_x (mod.Case)`."""
    name, _, where = test[:-1].partition(" (")
    if name.endswith(where.rpartition(".")[2]):  # longer: other output, without a line end, is glued to the name
        return f"{where.rpartition('.')[2]} ({where})"
    return f"{name} ({where}.{name})"


def parse_unittest(log: str) -> dict[str, str]:
    """Results of `python -m unittest -v` (and what the FAIL and ERROR sections of a quiet run name)."""
    log = _clean(log)
    seen = _Statuses()
    heads = list(_U_HEAD.finditer(log))
    tests = [_unittest_id(head["test"]) for head in heads]
    # what is glued in front of a test's name belongs to the test before
    glued = [max(0, head["test"].index(" (") - test.index(" (")) for head, test in zip(heads, tests)]
    ends = [head.start() + n for head, n in zip(heads, glued)][1:] + [len(log)]
    for head, test, end in zip(heads, tests, ends):
        if status := _unittest_status(log[head.end():end]):
            seen.see(test, status)
    for kind, test in _U_SECTION.findall(log):
        seen.see(_unittest_id(test), XPASS if kind[0] == "U" else {"FAIL": FAILED}.get(kind, ERROR))
    return dict(seen)


def _unittest_status(segment: str) -> str | None:
    """The status in the text between a test's name and the next test's.

    It comes at once, or, after other output, on a line of its own, or glued to the end of output without a line end.
    """
    lines = re.split(r"^(?:-{70}|={70})$", segment, maxsplit=1, flags=re.M)[0].strip().split("\n")
    for line in lines:
        if line in _U_STATUS:
            return _U_STATUS[line]
        if line.startswith(("skipped '", 'skipped "')):
            return SKIPPED
    return next((status for word, status in _U_STATUS.items() if lines[-1].endswith(word)), None)


def _unittest_passes(log: str) -> int | None:
    ran = _U_RAN.findall(log)
    return sum(map(int, ran)) - sum(map(int, _U_SKIPPED.findall(log))) if ran else None


# pytest --------------------------------------------------------------------------------------------------------

_WORD = "PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS"
_P_PROGRESS = re.compile(rf"^(\S.*?) ({_WORD})(?: \(.*\))?(?: +\[ *\d+%\])?$")
_P_XDIST = re.compile(rf"^\[gw\d+\] \[ *\d+%\] ({_WORD}) (\S.*?) *$")
_P_SHORT = re.compile(rf"^({_WORD}|SUBFAILED\(.*?\)|SUBFAILED\[.*?\]) (\S.*)$")
_P_HEADER = re.compile(r"^=+ (?:ERRORS|FAILURES|PASSES|XFAILURES|XPASSES|warnings summary.*|"
                       r"short test summary info) =+$")
_P_SUMMARY = re.compile(r"^(?:=+ )?((?:\d+ [a-z]+(?:, )?)+) in [\d.]+s.*?(?: =+)?$", re.M)


def parse_pytest(log: str) -> dict[str, str]:
    """Results of pytest, from the short summary (-rA) and from the progress lines (-v, also under xdist)."""
    lines = _clean(log).split("\n")
    headers = [i for i, line in enumerate(lines) if _P_HEADER.match(line)]
    seen = _Statuses()
    for line in lines[:headers[0] if headers else len(lines)]:
        if match := _P_XDIST.match(line):
            seen.see(match[2], match[1])
        elif (match := _P_PROGRESS.match(line)) and "::" in match[1]:
            seen.see(match[1], match[2])
    summaries = [i for i in headers if "short test summary info" in lines[i]]
    for line in lines[summaries[-1] + 1:] if summaries else ():
        match = _P_SHORT.match(line)
        if match and match[1] != SKIPPED:  # `SKIPPED [1] file:line: reason` names no test
            status = FAILED if match[1].startswith("SUBFAILED") else match[1]
            seen.see(match[2] if status == PASSED else _without_reason(match[2]), status)
    return dict(seen)


def _without_reason(text: str) -> str:
    """`id - reason` -> `id`; a dash inside the parameter brackets belongs to the id."""
    at = text.find(" - ")
    while at >= 0:
        if "[" not in text[:at] or text[:at].endswith("]"):
            return text[:at]
        at = text.find(" - ", at + 1)
    return text


def _pytest_passes(log: str) -> int | None:
    found = _P_SUMMARY.findall(log)
    if not found:
        return None
    return sum(int(n) for n, word in re.findall(r"(\d+) ([a-z]+)", found[-1]) if word == "passed")


def _clean(log: str) -> str:
    return _ANSI.sub("", log).replace("\r\n", "\n")


PARSERS: Mapping[str, tuple[Callable[[str], dict[str, str]], Callable[[str], int | None]]] = {
    "unittest": (parse_unittest, _unittest_passes),
    "pytest": (parse_pytest, _pytest_passes),
}


def parse_log(parser: str, log: str) -> dict[str, str]:
    """Raises ValueError for a parser that does not exist."""
    return _parser(parser)[0](log)


def canonical_id(parser: str, test: str) -> str:
    """A task's test name as `parse_log` spells it."""
    return _unittest_id(test) if parser == "unittest" and re.fullmatch(_U_TEST, test) else test


def counted_passes(parser: str, log: str) -> int | None:
    """How many tests the runner's last summary says passed, at most; None when there is no summary."""
    return _parser(parser)[1](_clean(log))


def _parser(name: str):
    if name not in PARSERS:
        raise ValueError(f"install_config.log_parser = {name!r} must be one of {', '.join(PARSERS)}")
    return PARSERS[name]
