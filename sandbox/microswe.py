"""MicroSWE: an endless, seeded generator of small Python repositories with one bug each, as SWE-rebench V2 rows.

A repository is a few files of functions that return words; names and words are made of syllables and come from two
disjoint families, `train` and `validation`, so a model that solves validation tasks has learnt to copy and to choose,
not to remember. Four kinds of bug make the four reminder classes occur by themselves:

    ambiguous  (R1)  the wrong line stands in several functions; an edit must be anchored to be unique
    scope      (R2)  a neighbour file holds a function of the same name; only the named file is wrong
    scenario   (R3)  one branch of several is wrong; its siblings must keep their answers
    validate   (R4)  the statement does not say the right word, a failing test does; edit, validate, stop

The agent's own validation is `python check.py`; grading runs `python -m unittest` on test files that cover more
(`test_patch`). `relabel` renames every word of a recording consistently: the same run of the same program with other
names (tests/test_microswe.py executes both and compares).
"""

from __future__ import annotations

import difflib
import random
import re
import zlib
from dataclasses import dataclass
from typing import Any, Iterator, Mapping

from oprd.sandbox.task import Task

KINDS = ("ambiguous", "scope", "scenario", "validate")
CLASS_OF_KIND = {"ambiguous": "R1", "scope": "R2", "scenario": "R3", "validate": "R4"}

# Words that stand in the frames, in Python or in tool texts: never used as names.
_TAKEN = frozenset("file line code mode name none done note made move same type size self call case base rule role "
                   "path time more live tune here repo meta data".split())
_WORDS = tuple(w for a in "bdfgklmnprstvz" for b in "aeiou" for c in "bdfgklmnprstvz" for d in "aeiou"
               if (w := a + b + c + d) not in _TAKEN)
FAMILIES: dict[str, tuple[str, ...]] = {
    "train": tuple(w for w in _WORDS if zlib.crc32(w.encode()) % 4),
    "validation": tuple(w for w in _WORDS if zlib.crc32(w.encode()) % 4 == 0),
}

CHECK = '''\
import sys, unittest

result = unittest.TestResult()
unittest.defaultTestLoader.discover("tests").run(result)
failed = sorted(result.failures + result.errors, key=lambda pair: str(pair[0]))
for test, trace in failed:
    lines = [l for l in trace.splitlines() if "Error: " in l]
    print("FAIL", str(test).split()[0] + ":", lines[0].split("Error: ", 1)[1])
print("failed" if failed else "ok", len(failed) or result.testsRun)
sys.exit(bool(failed))
'''


@dataclass(frozen=True)
class Difficulty:
    """How hard tasks are. functions: functions in the wrong file, at most; branches: branches of a scenario
    function, at most; both at least 2."""

    functions: int = 3
    branches: int = 3


@dataclass(frozen=True)
class _Function:
    name: str
    answers: tuple[tuple[str | None, str], ...]  # (mode or None for the unconditional return, word)

    def source(self) -> str:
        modes = [mode for mode, _ in self.answers if mode is not None]
        lines = [f"def {self.name}({'mode' if modes else ''}):"]
        for mode, word in self.answers:
            if mode is not None:
                lines += [f'    if mode == "{mode}":', f'        return "{word}"']
            else:
                lines += [f'    return "{word}"']
        return "\n".join(lines) + "\n"

    def with_answer(self, index: int, word: str) -> "_Function":
        answers = tuple((m, word if i == index else w) for i, (m, w) in enumerate(self.answers))
        return _Function(self.name, answers)

    def call(self, index: int) -> str:
        """Source of a call that reaches answer `index`."""
        mode = self.answers[index][0]
        has_modes = any(m is not None for m, _ in self.answers)
        return f'{self.name}("{mode}")' if mode is not None else f'{self.name}({chr(34) * 2 if has_modes else ""})'

    def test_name(self, index: int) -> str:
        mode = self.answers[index][0]
        has_modes = any(m is not None for m, _ in self.answers)
        return f"test_{self.name}" + (f"_{mode or 'other'}" if has_modes else "")


def generate(seed: int, index: int, family: str = "train", kind: str | None = None,
             difficulty: Difficulty = Difficulty()) -> Task:
    """Task number `index` of the endless sequence `seed` of a family; a pure function of its arguments.

    Raises ValueError for an unknown family or kind, or a difficulty below 2.
    """
    if family not in FAMILIES:
        raise ValueError(f"family = {family!r} is not one of {', '.join(FAMILIES)}")
    if kind is not None and kind not in KINDS:
        raise ValueError(f"kind = {kind!r} is not one of {', '.join(KINDS)}")
    if min(difficulty.functions, difficulty.branches) < 2:
        raise ValueError(f"functions = {difficulty.functions} and branches = {difficulty.branches} must be 2 or more")
    rng = random.Random(f"microswe/{seed}/{family}/{index}")
    kind = kind or rng.choice(KINDS)
    words = iter(pick(rng, family, 24))
    module, neighbour, name, wrong, right = (next(words) for _ in range(5))

    target, position = _target(kind, rng, words, name, wrong, difficulty)
    others = [_Function(next(words), ((None, next(words)),)) for _ in range(rng.randint(1, difficulty.functions - 1))]
    if kind == "ambiguous":  # at least one look-alike of the wrong line
        others[0] = _Function(others[0].name, ((None, wrong),))
    functions = [target, *others]
    rng.shuffle(functions)
    fixed = [f.with_answer(position, right) if f is target else f for f in functions]

    repo = _Repo(module, functions, fixed, neighbour if kind == "scope" else None)
    if kind == "scope":
        twin, other = _Function(name, ((None, next(words)),)), _Function(next(words), ((None, next(words)),))
        repo.neighbour_functions = [twin, other]
        rng.shuffle(repo.neighbour_functions)
    hidden_only = rng.choice(others).test_name(0)
    statement = _statement(kind, rng, target.call(position) if kind == "scenario" else name, module, neighbour, right)
    meta = {"kind": kind, "class": CLASS_OF_KIND[kind], "path": f"src/{module}.py", "function": name,
            "neighbour": f"src/{neighbour}.py" if kind == "scope" else None, "wrong": wrong, "right": right,
            "anchor": _anchor(target, position)}
    return repo.task(f"microswe__{family}-{seed}-{index}", statement, target.test_name(position), hidden_only, meta)


def pick(rng: random.Random, family: str, count: int) -> list[str]:
    """`count` words of a family that share no syllable: a name is told by any part of it. At most 26."""
    if count > 26:
        raise ValueError(f"count = {count} words that share no syllable: at most 26 can be found")
    chosen: list[str] = []
    used: set[str] = set()
    while len(chosen) < count:
        word = rng.choice(FAMILIES[family])
        if not used & {word[:2], word[2:]} and word[:2] != word[2:]:
            chosen.append(word)
            used |= {word[:2], word[2:]}
    return chosen


def _target(kind: str, rng: random.Random, words, name: str, wrong: str, difficulty: Difficulty):
    """The function that is wrong, and which of its answers."""
    if kind != "scenario":
        return _Function(name, ((None, wrong),)), 0
    count = rng.randint(2, difficulty.branches)
    answers = [(next(words), next(words)) for _ in range(count)] + [(None, next(words))]
    position = rng.randrange(count)
    answers[position] = (answers[position][0], wrong)
    twin = rng.randrange(count)
    if twin != position:  # a sibling branch gives the same word: the line alone does not tell which
        answers[twin] = (answers[twin][0], wrong)
    return _Function(name, tuple(answers)), position


def _anchor(function: _Function, position: int) -> str:
    """The source line above the wrong return: what makes an edit unique."""
    mode = function.answers[position][0]
    return f'if mode == "{mode}":' if mode is not None else function.source().splitlines()[0]


def _statement(kind: str, rng: random.Random, what: str, module: str, neighbour: str, right: str) -> str:
    here, there = f"`src/{module}.py`", f"`src/{neighbour}.py`"
    if kind == "validate":
        return f"`{what}` in {here} returns a wrong word, the tests tell the right one."
    if kind == "scope":
        return rng.choice((f'`{what}` in {here} must return "{right}", {there} is right.',
                           f'{there} is right, but `{what}` in {here} must return "{right}".'))
    return rng.choice((f'`{what}` in {here} must return "{right}".', f'In {here}, `{what}` must return "{right}".'))


@dataclass
class _Repo:
    """A repository before and after the fix, while its row is put together."""

    module: str
    functions: list[_Function]
    fixed: list[_Function]
    neighbour: str | None
    neighbour_functions: list[_Function] | None = None

    def task(self, instance_id: str, statement: str, failing: str, hidden_only: str,
             meta: Mapping[str, object]) -> Task:
        """`hidden_only` names the test that only the test patch adds."""
        path, tests = f"src/{self.module}.py", f"tests/test_{self.module}.py"
        visible, hidden = self._tests(self.fixed, skip=hidden_only), self._tests(self.fixed)
        source = "\n\n".join(f.source() for f in self.functions)
        files = {path: source, tests: visible, "check.py": CHECK}
        names = [f"{n} (test_{self.module}.Test.{n})" for f in self.fixed for n in _test_names(f)]
        if self.neighbour:
            files[f"src/{self.neighbour}.py"] = "\n\n".join(f.source() for f in self.neighbour_functions)
            files[f"tests/test_{self.neighbour}.py"] = self._tests(self.neighbour_functions, module=self.neighbour)
            names += [f"{n} (test_{self.neighbour}.Test.{n})" for f in self.neighbour_functions for n in _test_names(f)]
        failing = f"{failing} (test_{self.module}.Test.{failing})"
        return Task(
            instance_id, f"microswe/{self.module}", "0" * 40, statement,
            patch=_diff(path, source, "\n\n".join(f.source() for f in self.fixed)),
            test_patch=_diff(tests, visible, hidden),
            fail_to_pass=(failing,), pass_to_pass=tuple(n for n in names if n != failing),
            install_config={"test_cmd": "python -m unittest discover -v -s tests", "log_parser": "unittest",
                            "install": []},
            files=files, meta=meta)

    def _tests(self, functions: list[_Function], skip: str | None = None, module: str | None = None) -> str:
        lines = ["import unittest", "", f"from src import {module or self.module} as m", "", "",
                 "class Test(unittest.TestCase):"]
        for function in functions:
            for index, (_, word) in enumerate(function.answers):
                if (name := function.test_name(index)) != skip:
                    check = f'self.assertEqual(m.{function.call(index)}, "{word}")'
                    lines += [f"    def {name}(self):", f"        {check}", ""]
        return "\n".join(lines).rstrip("\n") + "\n"


def fixed_source(task: Task) -> str:
    """The wrong file after the fix."""
    m, lines = task.meta, task.files[task.meta["path"]].splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if line.strip() == m["anchor"]) + 1
    lines[at] = lines[at].replace(m["wrong"], m["right"])
    return "".join(lines)


def _test_names(function: _Function) -> list[str]:
    return [function.test_name(i) for i in range(len(function.answers))]


def _diff(path: str, before: str, after: str) -> str:
    """A git diff of one text file."""
    body = "".join(difflib.unified_diff(before.splitlines(True), after.splitlines(True), f"a/{path}", f"b/{path}"))
    return f"diff --git a/{path} b/{path}\n{body}"


_POOL = frozenset(_WORDS)
_LETTERS = re.compile(r"[a-z]+")


def relabelling(value: Any, rng: random.Random, family: str = "train") -> dict[str, str]:
    """A random one-to-one renaming of all MicroSWE words in a JSON-like value, into words of `family`."""
    used = sorted({w for text in _strings(value) for w in _LETTERS.findall(text) if w in _POOL})
    return dict(zip(used, pick(rng, family, len(used))))


def relabel(value: Any, names: Mapping[str, str]) -> Any:
    """The JSON-like value with every word renamed in all its strings (values and keys); all else stays."""
    if isinstance(value, str):
        return _LETTERS.sub(lambda match: names.get(match.group(), match.group()), value)
    if isinstance(value, Mapping):
        return {relabel(k, names): relabel(v, names) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [relabel(v, names) for v in value]
    return value


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (text for pair in value.items() for part in pair for text in _strings(part))
    elif isinstance(value, (list, tuple)):
        yield from (text for part in value for text in _strings(part))
