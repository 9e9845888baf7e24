"""What all log parsers are made of: sightings of tests in a log, and tables of line patterns that yield them.

A parser is a function log -> sightings, in the log's order. What a log says of a test that it names twice is decided
once, by `settled` (as the published parsers do: the last line counts) or by `worst` (ours: a failure counts).
"""

from __future__ import annotations

import re
from typing import Callable, Iterable, Iterator, Mapping, NamedTuple

PASSED, FAILED, ERROR, SKIPPED, XFAIL, XPASS = "PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL", "XPASS"

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")

STATUS_WORDS: Mapping[str, str] = {
    **dict.fromkeys(("ok", "pass", "passed", "success", "✓", "✔", "."), PASSED),
    **dict.fromkeys(("fail", "failed", "failure", "not ok", "err", "timeout", "✕", "✖", "✘", "✗", "×", "⨯", "f"),
                    FAILED),
    **dict.fromkeys(("error", "errors", "e"), ERROR),
    **dict.fromkeys(("skip", "skipped", "ignore", "ignored", "pending", "todo", "disabled", "○", "↓", "↩", "◌", "◦",
                     "□", "﹣", "s", "o"), SKIPPED),
    "xfail": XFAIL, "xpass": XPASS}


class Seen(NamedTuple):
    """A test with a status. weak: it does not replace what was said of the test before."""

    test: str
    status: str
    weak: bool = False


Parser = Callable[[str], Iterable[Seen]]


class Rule(NamedTuple):
    """A line pattern. Its groups: `test`, and perhaps `said`, a word of STATUS_WORDS or of `words`.

    status: the status where the pattern has no `said`. weak: see Seen. A match without a test's name takes the line
    out of the game for the rules that follow.
    """

    pattern: re.Pattern
    status: str = ""
    weak: bool = False
    words: Mapping[str, str] = {}


def rule(pattern: str, status: str = "", weak: bool = False, words: Mapping[str, str] | None = None,
         flags: int = 0) -> Rule:
    return Rule(re.compile(pattern, flags), status, weak, words or {})


def table(*rules: Rule, strip: bool = True, tidy: Callable[[str], str] = str.strip) -> Parser:
    """A parser that gives every line to the first rule that matches it. strip: of the line's outer blanks."""
    def parse(log: str) -> Iterator[Seen]:
        for line in log.split("\n"):
            line = line.strip() if strip else line.rstrip()
            for one in rules:
                if line and (match := one.pattern.match(line)):
                    if seen := _seen(one, match, tidy):
                        yield seen
                    break
    return parse


def _seen(one: Rule, match: re.Match, tidy: Callable[[str], str]) -> Seen | None:
    groups = match.groupdict()
    test = tidy(groups.get("test") or "")
    status = one.status
    if said := groups.get("said"):
        status = one.words.get(said) or STATUS_WORDS.get(said.lower()) or one.status
    return Seen(test, status, one.weak) if test and status else None


def settled(seen: Iterable[Seen]) -> dict[str, str]:
    """Test -> status as the published parsers settle it: the last sighting that is not weak counts."""
    found: dict[str, str] = {}
    for test, status, weak in seen:
        if not weak or test not in found:
            found[test] = status
    return found


def worst(seen: Iterable[Seen]) -> dict[str, str]:
    """Test -> status; one that was once seen to fail has failed."""
    seen = list(seen)
    failed = {test: status for test, status, _ in reversed(seen) if status in (FAILED, ERROR)}
    return settled(seen) | failed


class Statuses(dict):
    """Test -> status, filled one by one; two different ones make FAILED."""

    def see(self, test: str, status: str) -> None:
        self[test] = status if self.get(test, status) == status else FAILED


def clean(log: str) -> str:
    """Without colours, and with line feeds for line ends (a lone carriage return redraws a line: it ends one)."""
    return _ANSI.sub("", log).replace("\r\n", "\n").replace("\r", "\n")


def total(pattern: re.Pattern, log: str, last: int = 0) -> int | None:
    """The sum of a pattern's one group (0 where it took no part) over its `last` matches (0: all); None without any."""
    found = pattern.findall(log)
    return sum(int(n or 0) for n in found[-last:]) if found else None


class Runner(NamedTuple):
    """How we read the output of one test runner; all are functions of a log that went through `clean`.

    parse: test -> status, strict, by our own ids. own(log, runs): the texts the runner wrote itself, without what
    tests printed or failures quote, one for each place in which a name is one test (a package, a file); `runs` is how
    often the runner ran in this log at most. passes(log, runs): how many tests the runner's own summary says passed
    (`inf` where it says that all is said, but no number), None without a summary. failed: whether the summary speaks
    of a failure.
    """

    parse: Callable[[str], dict[str, str]]
    own: Callable[[str, int], list[str]]
    passes: Callable[[str, int], float | None]
    failed: Callable[[str], bool]


def whole(log: str, runs: int = 1) -> list[str]:
    return [log]


def without(pattern: str, flags: int = re.M | re.S) -> Callable[[str, int], list[str]]:
    """The log without what the pattern matches (quoted failures, captured output)."""
    compiled = re.compile(pattern, flags)
    return lambda log, runs=1: [compiled.sub("", log)]


def counting(pattern: str) -> Callable[[str, int], float | None]:
    """Passes from the pattern's one group, added up over the runs' last lines."""
    compiled = re.compile(pattern, re.M)
    return lambda log, runs: total(compiled, log, runs)


def ends_with(pattern: str) -> Callable[[str, int], float | None]:
    compiled = re.compile(pattern, re.M)
    return lambda log, runs: float("inf") if compiled.search(log) else None


def telling(pattern: str) -> Callable[[str], bool]:
    compiled = re.compile(pattern, re.M)
    return lambda log: compiled.search(log) is not None
