"""What a patch may not decide: the tests, and what steers their runner. Grading leaves those files at base.

Whatever the task's own fix changes is source, by definition. For the rest: paths of the official tests; tests that were
there from the start (by folder or name), and new files that are tests by name (a Go or Rust test file is compiled into
the package it lies in, a spec helper is loaded by all); configuration of test runners; files the test command names;
modules that would be imported in a runner's place. Of settings files that a project shares with its test runner only
the part that speaks of tests counts, and when that part differs from the base's the whole file is put back.
"""

from __future__ import annotations

import fnmatch
import posixpath
import re
import shlex
import sys
from typing import Mapping

from oprd.sandbox.box import Sandbox
from oprd.sandbox.patches import FileChange, added_lines, file_changes
from oprd.sandbox.task import Task

INFRASTRUCTURE = (
    "conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "sitecustomize.py", "usercustomize.py",
    "*.pth", "noxfile.py", "jest.config.*", "jest.setup.*", "jest-*.config.*", "vitest.config.*", "vitest.workspace.*",
    "vitest.setup.*", ".mocharc*", "mocha.opts", "karma.conf.*", ".taprc", "ava.config.*", "playwright.config.*",
    "phpunit.xml*", "phpunit.*.xml*", "Pest.php", ".rspec", "spec_helper.rb", "rails_helper.rb", "test_helper.rb",
    "CTestConfig.cmake", "CTestCustom.cmake*", "CTestTestfile.cmake", "nextest.toml", "surefire*.properties",
    "junit-platform.properties")
FOLDERS = frozenset({"node_modules", "site-packages", "dist-packages", ".cargo", ".mvn", "__mocks__"})
SECTIONS = ("setup.cfg", "tox.ini", "pyproject.toml")  # sections
LINES = ("package.json", "Cargo.toml", "pom.xml", "build.gradle", "build.gradle.kts", "gradle.properties", "Makefile",
         "GNUmakefile", "CMakeLists.txt", "Rakefile", "composer.json", "meson.build")  # lines that speak of tests
RUNNERS = frozenset(sys.stdlib_module_names) | {"pytest", "_pytest", "pluggy", "iniconfig", "xdist", "py", "nose"}
_TEST_FOLDERS = frozenset({"test", "tests", "testing", "__tests__", "spec", "specs", "testdata", "__snapshots__"})
_TEST_NAME = re.compile(
    r"test_.*\.(?:py|rb|c|cc|cpp)|.*_test\.(?:py|go|rb|rs|c|cc|cpp|cxx|exs|dart)|tests\.py|.*_spec\.rb|"
    r".*\.(?:test|spec)\.[cm]?[jt]sx?|.*(?:Test|Tests|TestCase|IT|Spec)\.(?:java|kt|groovy|scala|php|cs)|"
    r".*_unittest\.(?:c|cc|cpp)|.*\.snap")
_TEST_SECTION = re.compile(
    r"^\[(?:tool:pytest|pytest|tool\.pytest[^\]]*|unittest|testenv[^\]]*)\][^\n]*\n(?:(?!\[).*\n)*", re.M)
_TEST_LINE = re.compile(r"test|jest|mocha|vitest|karma|\bspec|surefire|failsafe|junit|rspec|harness", re.I)
# What only a test runner prints, and ways into a runner's inside; in source, where the fix has none of it.
_CODE = re.compile(r".*\.(?:py|pyx|pyi|go|rs|[cm]?[jt]sx?|java|kt|scala|c|cc|cpp|cxx|h|hpp|rb|php|sh|vue|svelte)")
_FORGERY = re.compile(
    r"test result: (?:ok|FAILED)|--- PASS: |short test summary info|\d\S* passed[,;]? (?:in |;)|\d passing\b|"
    r"Ran (?:\d+|%d|\{\w*\}) tests? in|Tests: +\S+ passed|\bFAILED \(failures=")
_INSIDE = re.compile(
    r"\b_pytest\b|\bpluggy\b|\bpytest_(?:runtest|pyfunc|collection|sessionfinish|report)\w*|\bPYTEST_CURRENT_TEST\b|"
    r"\b(?:unittest|pytest|TestCase|TestResult|TextTestResult|TestLoader|TestReport|CallInfo)(?:\.\w+)+\s*=(?!=)|"
    r"setattr\(\s*(?:unittest|pytest|TestCase|TestResult)\b|"
    r"\b(?:global|globalThis)\.(?:expect|it|test|describe)\s*=(?!=)|"
    r"process\.env\.JEST_WORKER_ID|\bjest-(?:circus|jasmine2|runner)\b|require\(['\"]mocha/lib")


def protected(task: Task, changes: list[FileChange], command: str) -> tuple[str, ...]:
    """The paths of a patch that grading leaves at base."""
    official = {c.path for c in file_changes(task.test_patch.encode())}
    source = {c.path for c in file_changes(task.patch.encode())} - official
    named = _named(command)
    return tuple(c.path for c in changes if c.path not in source and (
        any(_overlap(c.path, path) for path in official) or _is_infrastructure(c) or c.path in named or _is_test(c)))


def reaches_inside(task: Task, patch: bytes, left_out: tuple[str, ...]) -> str:
    """The first line of a patch's source that writes what only a test runner writes, or meddles with a runner, in a way
    that the task's own fix does not: `path: line`; or ""."""
    for pattern in (_FORGERY, _INSIDE):
        if any(pattern.search(line) for _, line in added_lines(task.patch.encode())):
            continue  # a project about tests
        for path, line in added_lines(patch):
            if path not in left_out and _CODE.fullmatch(path) and pattern.search(line):
                return f"{path}: {line.strip()[:120]}"
    return ""


def _named(command: str) -> set[str]:
    """Words of the test command, quoted scripts taken apart, as paths of the repository."""
    words, todo = set(), [command]
    while todo:
        try:
            parts = shlex.split(todo.pop(), comments=False)
        except ValueError:
            continue
        todo += [part for part in parts if " " in part or "\n" in part]
        words |= {posixpath.normpath(part) for part in parts if re.fullmatch(r"[\w./@+-]+", part)}
    return words


def _overlap(one: str, other: str) -> bool:
    """The same path, or one would be a folder above the other."""
    return one == other or one.startswith(other + "/") or other.startswith(one + "/")


def _is_infrastructure(change: FileChange) -> bool:
    *folders, name = change.path.split("/")
    if FOLDERS & set(folders) or any(fnmatch.fnmatchcase(name, pattern) for pattern in INFRASTRUCTURE):
        return True
    module = change.path.removesuffix("/__init__.py").removesuffix(".py")
    folder, _, module_name = module.rpartition("/")
    first = not folder or folder in ("src", "lib", "python") or bool(_TEST_FOLDERS & set(folder.split("/")))
    return change.added and change.path != module and first and module_name in RUNNERS  # imported in its place


def _is_test(change: FileChange) -> bool:
    *folders, name = change.path.split("/")
    return _TEST_NAME.fullmatch(name) is not None or not change.added and bool(_TEST_FOLDERS & set(folders))


# --- settings files --------------------------------------------------------------------------------------------------

def settings(task: Task, changes: list[FileChange], box: Sandbox) -> dict[str, bytes | None]:
    """The shared settings files the patch touches (the fix's own excepted), as they are at base; None: not there."""
    source = {c.path for c in file_changes(task.patch.encode())}
    found: dict[str, bytes | None] = {}
    for change in changes:
        if posixpath.basename(change.path) in SECTIONS + LINES and change.path not in source:
            try:
                found[change.path] = box.read(change.path)
            except OSError:
                found[change.path] = None
    return found


def restore_settings(box: Sandbox, before: Mapping[str, bytes | None]) -> tuple[str, ...]:
    """Put back the settings files whose part about tests changed. Their paths."""
    restored = []
    for path, old in before.items():
        try:
            new = box.read(path)
        except OSError:
            new = b""
        if _about_tests(path, old or b"") == _about_tests(path, new):
            continue
        if old is None:
            box.trusted(f"rm -f -- {shlex.quote(path)}")
        else:
            box.write(path, old)
        restored.append(path)
    return tuple(restored)


def _about_tests(path: str, data: bytes) -> list[str]:
    text = data.decode("utf-8", "replace") + "\n"
    if posixpath.basename(path) in SECTIONS:
        return _TEST_SECTION.findall(text)
    return [line.strip() for line in text.split("\n") if _TEST_LINE.search(line)]
