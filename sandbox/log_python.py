"""Python's runners: unittest, Django's, pytest; and the parsers that published sets name for them.

Ours take result lines only from where the runner puts them. The sets' take any line that looks like one; their ids
are a contract, blemishes included (an id is cut at its first blank).
"""

from __future__ import annotations

import json
import re
from typing import Iterator
from xml.etree import ElementTree

from oprd.sandbox.log_lines import (ERROR, FAILED, PASSED, SKIPPED, XFAIL, XPASS, Parser, Runner, Seen, Statuses, clean,
                                    rule, table, telling, whole)

# unittest ------------------------------------------------------------------------------------------------------

UNITTEST_TEST = r"\w+ \([\w<>]+(?:\.[\w<>]+)+\)"
_U_HEAD = re.compile(rf"(?P<test>{UNITTEST_TEST})(?: [\[(][^\n]*?[\])])?"  # a test, perhaps one subtest of it
                     rf"(?:\n(?!{UNITTEST_TEST})[^\n]*?)? \.\.\. ")  # perhaps the first line of its docstring
_U_STATUS = {"ok": PASSED, "FAIL": FAILED, "ERROR": ERROR, "expected failure": XFAIL, "unexpected success": XPASS}
_U_SECTION = re.compile(rf"^={{70}}\n(FAIL|ERROR|UNEXPECTED SUCCESS): ({UNITTEST_TEST})", re.M)
_U_RAN = re.compile(r"^Ran (\d+) tests? in [\d.]+s$", re.M)
_U_SKIPPED = re.compile(r"^(?:OK|FAILED) \(.*?\bskipped=(\d+)", re.M)


def unittest_id(test: str) -> str:
    """One id for both spellings: Python 3.11 prints `test_x (mod.Case.test_x)`, before it was `test_x (mod.Case)`."""
    name, _, where = test[:-1].partition(" (")
    if name.endswith(where.rpartition(".")[2]):  # longer: other output, without a line end, is glued to the name
        return f"{where.rpartition('.')[2]} ({where})"
    return f"{name} ({where}.{name})"


def parse_unittest(log: str) -> dict[str, str]:
    """Results of `python -m unittest -v` (and what the FAIL and ERROR sections of a quiet run name)."""
    log = clean(log)
    seen = Statuses()
    heads = list(_U_HEAD.finditer(log))
    tests = [unittest_id(head["test"]) for head in heads]
    # what is glued in front of a test's name belongs to the test before
    glued = [max(0, head["test"].index(" (") - test.index(" (")) for head, test in zip(heads, tests)]
    ends = [head.start() + n for head, n in zip(heads, glued)][1:] + [len(log)]
    for head, test, end in zip(heads, tests, ends):
        if status := _unittest_status(log[head.end():end]):
            seen.see(test, status)
    for kind, test in _U_SECTION.findall(log):
        seen.see(unittest_id(test), XPASS if kind[0] == "U" else {"FAIL": FAILED}.get(kind, ERROR))
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


def _unittest_passes(log: str, runs: int = 0) -> int | None:
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
    lines = clean(log).split("\n")
    headers = [i for i, line in enumerate(lines) if _P_HEADER.match(line)]
    seen = Statuses()
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


def _pytest_passes(log: str, runs: int = 1) -> int | None:
    found = _P_SUMMARY.findall(log)
    if not found:
        return None
    return sum(int(n) for n, word in re.findall(r"(\d+) ([a-z]+)", " ".join(found[-runs:])) if word == "passed")


def _pytest_own(log: str, runs: int = 1) -> list[str]:
    """Progress lines and the last short summary; of every other text that looks like a summary, the failures (what
    is printed at exit comes after the true summary). A failed subtest is its test's failure."""
    sessions = re.split(r"(?m)^(?==+ test session starts =+$)", log) if runs > 1 else [log]
    own = []
    for session in sessions:
        lines = session.split("\n")
        headers = [i for i, line in enumerate(lines) if _P_HEADER.match(line)]
        kept = lines[:headers[0]] if headers else lines
        summaries = [i for i in headers if "short test summary info" in lines[i]]
        for i in summaries:
            block = lines[i + 1: next((j for j in headers if j > i), len(lines))]
            kept += block if i == summaries[-1] else [line for line in block if line.startswith((FAILED, ERROR, "SUB"))]
        own += [re.sub(r"^SUBFAILED(?:\(.*?\)|\[.*?\]) ", "FAILED ", line) for line in kept]
    return ["\n".join(own)]


UNITTEST = Runner(parse_unittest, whole, _unittest_passes, telling(r"^FAILED \("))
PYTEST = Runner(parse_pytest, _pytest_own, _pytest_passes,
                telling(r"^(?:=+ )?(?:\d+ [a-z]+, )*\d+ (?:failed|errors?)\b.* in [\d.]+s"))


PRO_MARK = "swe-bench-pro results: "


# the sets' parsers -----------------------------------------------------------------------------------------------

_STARTS = re.compile(r"(PASSED|FAILED|ERROR|SKIPPED|XFAIL)")


def _pytest_ids(whole: bool = False, tidy=lambda test: test, ends: bool = False) -> Parser:
    """Lines that start with a status: PASSED id, FAILED id - why. whole: ids keep their blanks. ends: lines that end
    with a status, too (pytest before 2.8 and -v)."""
    def parse(log: str) -> Iterator[Seen]:
        for line in log.split("\n"):
            if ends:  # control characters are no part of an id
                line = re.sub(r"[\x01-\x1f]", "", line)
            words = line.split()
            if len(words) < 2:
                continue
            if _STARTS.match(line) and _STARTS.fullmatch(words[0]):
                if words[0] == FAILED:
                    words = (line.split(" - ")[0] if whole else line.replace(" - ", " ")).split()
                if len(words) > 1 and not (words[0] == SKIPPED and re.fullmatch(r"\[\d+\]", words[1])):
                    yield Seen(tidy(" ".join(words[1:]) if whole else words[1]), words[0])
            elif ends and _STARTS.fullmatch(words[-1]):
                yield Seen(tidy(" ".join(words[:-1])), words[-1])
    return parse


def _short_paths(test: str) -> str:
    """A parameter that is an absolute path counts by its last part: t.py::a[/tmp/x/y.txt] -> t.py::a[/y.txt]."""
    match = re.search(r"(.*?)\[(.*)\]", test)
    if not match:
        return test
    main, option = match.groups()
    if option.startswith("/") and not option.startswith("//") and "*" not in option:
        option = "/" + option.split("/")[-1]
    return f"{main}[{option}]"


def _matplotlib(log: str) -> Iterator[Seen]:
    return _pytest_ids()(log.replace("MouseButton.LEFT", "1").replace("MouseButton.RIGHT", "3"))


def _seaborn(log: str) -> Iterator[Seen]:
    for line in log.split("\n"):
        words = line.split()
        if len(words) > 1 and line.startswith(FAILED):
            yield Seen(words[1], FAILED)
        elif len(words) > 1 and f" {PASSED} " in line:
            if words[1] == PASSED:
                yield Seen(words[0], PASSED)
        elif len(words) > 1 and line.startswith(PASSED):
            yield Seen(words[1], PASSED)


def sympy_log(log: str) -> Iterator[Seen]:
    for _, path, name, _ in re.findall(r"(_*) (.*)\.py:(.*) (_*)", log):
        yield Seen(f"{path}.py:{name}", FAILED)
    ends = {"E": ERROR, "F": FAILED, "ok": PASSED}
    for line in map(str.strip, log.split("\n")):
        if line.startswith("test_"):
            words = re.sub(r"\[(?:FAIL|OK)\]$", "", line).split()
            if len(words) > 1 and words[-1] in ends:
                yield Seen(words[0], ends[words[-1]])


_D_GLUED = re.compile(r"^(.*?)\s\.\.\.\s(?:Testing against Django installed in (?s:.*?) silenced\)\.|"
                      r"Internal Server Error: /.*/|System check identified no issues \(0 silenced\))\nok$", re.M)


def django_log(log: str) -> Iterator[Seen]:
    """Django's runner: `name (where) ... ok`; for a test with a docstring, what is before the dots is that."""
    last = None
    for line in map(str.strip, log.split("\n")):
        if "--version is equivalent to version" in line:  # its result stands lines away
            yield Seen("--version is equivalent to version", PASSED)
        if " ... " in line:
            last = line.split(" ... ")[0]
        for end in (" ... ok", " ... OK", " ...  OK"):
            if line.endswith(end):
                if line.startswith("Applying sites.0002_alter_domain_unique...test_no_migrations"):
                    line = line.split("...", 1)[-1].strip()
                yield Seen(line.rsplit(end, 1)[0], PASSED)
                break
        if " ... skipped" in line:
            yield Seen(line.split(" ... skipped")[0], SKIPPED)
        for word, status in (("FAIL", FAILED), ("ERROR", ERROR)):
            if line.endswith(f" ... {word}"):
                yield Seen(line.split(f" ... {word}")[0], status)
            if line.startswith(f"{word}:") and len(line.split()) > 1:
                yield Seen(line.split()[1], status)
        if line.startswith("ok") and last is not None:
            yield Seen(last, PASSED)
    for match in _D_GLUED.finditer(log):
        yield Seen(match[1], PASSED)


_NEBO = table(
    rule(rf"\[gw\d+\]\s+\[[^\]]*\]\s+(?P<said>{_WORD})\s+(?P<test>.*)$"),
    rule(r"(?P<test>\S.*?)\s+(?P<said>PASSED|FAILED|SKIPPED|ERROR)\s+\[[^\]]*\]\s+in\s+\d+(?:\.\d+)?s$"),
    rule(r"(?P<said>PASSED|FAILED|SKIPPED|ERROR)\s+(?P<test>.*)$"),
    tidy=lambda test: test.split(" in ")[0].strip())


def pytest_reports(log: str) -> Iterator[Seen]:
    """JUnit XML documents anywhere in the log; ids are `classname::name`."""
    for document in re.findall(r"<\?xml.*?</testsuites>", log, re.S):
        try:
            cases = ElementTree.fromstring(document).iterfind(".//testcase")
        except ElementTree.ParseError:
            continue
        for case in cases:
            status = next((status for tag, status in (("failure", FAILED), ("skipped", SKIPPED), ("error", ERROR))
                           if case.find(tag) is not None), PASSED)
            yield Seen(f"{case.get('classname')}::{case.get('name')}", status)


def pro_results(log: str) -> Iterator[Seen]:
    """SWE-bench Pro's own parser's file, which the test command prints last: {"tests": [{"name", "status"}]}."""
    for line in reversed(log.split("\n")):
        if line.startswith(PRO_MARK):
            try:
                tests = json.loads(line[len(PRO_MARK):])["tests"]
                return iter([Seen(str(test["name"]), str(test["status"])) for test in tests])
            except (ValueError, KeyError, TypeError):
                break
    return iter(())


def r2e_log(log: str) -> Iterator[Seen]:
    """R2E-Gym's: what follows the first short summary; `path::Class::test` is `Class.test`."""
    parts = log.split("short test summary info")
    for line in parts[1].strip().split("\n") if len(parts) > 1 else ():
        status = next((word for word in (PASSED, FAILED, ERROR) if word in line), None)
        test = ".".join(line.split("::")[1:])
        if status and test:
            yield Seen(test.split(" - ")[0], status)


NAMED: dict[str, Parser] = {
    **dict.fromkeys([f"parse_log_{name}" for name in (
        "pytest", "astroid", "flask", "marshmallow", "pvlib", "pyvista", "sqlfluff", "xarray", "dvc", "moto", "mypy",
        "conan", "modin", "monai", "dask", "bokeh", "mne", "hypothesis", "pandas", "hydra")], _pytest_ids()),
    **dict.fromkeys([f"parse_log_{name}" for name in ("pytest_options", "pydicom", "requests", "pylint")],
                    _pytest_ids(tidy=_short_paths)),
    **dict.fromkeys([f"parse_log_{name}" for name in ("pytest_v2", "astropy", "scikit", "sphinx")],
                    _pytest_ids(whole=True, ends=True)),
    "parse_log_pytest_pydantic": _pytest_ids(whole=True, ends=True, tidy=lambda test: re.sub(r"^\[.*?\] ?", "", test)),
    "parse_log_pytest_nebo": _NEBO, "parse_log_matplotlib": _matplotlib, "parse_log_seaborn": _seaborn, "r2e": r2e_log,
}
