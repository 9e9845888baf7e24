"""A test that must fail, run after a patch's tests have passed: does this code still let a test fail?

Code under test shares a process with its runner. It can rewrite the runner (an assertion that never raises, a result
that is always a pass), or end the process with status 0 after it printed a log of its own; no reading of a log finds
that. But such code does not know a test whose name was drawn after it was written. So one is run, by the same runner
and beside the code of the patch, and the patch is refused if that test does not fail. Where it cannot be run (no such
runner for it, a package that does not build with it) nothing is concluded.
"""

from __future__ import annotations

import posixpath
import re
import secrets
import shlex
from dataclasses import dataclass
from typing import Sequence

from oprd.sandbox.box import Sandbox
from oprd.sandbox.logs import PASSED, parse_log
from oprd.sandbox.patches import file_changes
from oprd.sandbox.task import Task

SECONDS = 60.0
_PYTHON = """import importlib, sys, unittest
sys.path[:0] = [".", "src", "lib", *{folders!r}]
for name in {modules!r}:
    try:
        importlib.import_module(name)
    except BaseException:
        pass


class Case(unittest.TestCase):
    def test_{name}(self):
        self.assertEqual(1, 2)

    def test_{name}_true(self):
        self.assertTrue(False)

    def test_{name}_plainly(self):
        raise AssertionError
"""
_GO = """package {package}

import "testing"

func Test{name}(t *testing.T) {{ t.Fatal("must fail") }}
"""
_JS = """{first}
for (const name of {modules}) {{
  try {{ require(name) }} catch (error) {{}}
}}
const wrong = [() => {{ throw new Error('must fail') }}, {wrong}]
wrong.forEach((one, at) => {test}(`{name}${{at}}`, one))
"""
_ASSERT = ("() => require('assert').strictEqual(1, 2), () => require('assert').deepStrictEqual([1], [2]), "
           "() => require('assert').ok(false), () => require('chai').expect(1).to.equal(2)")  # no chai: an error, too
_EXPECT = "() => expect(1).toBe(2), () => expect([1]).toEqual([2])"
# runner: (file name, its first line, the function, what must not hold, the command)
_JS_RUNNERS = {
    "jest": ("{name}.test.js", "", "test", _EXPECT, "npx --no-install jest --ci --verbose {path}"),
    "mocha": ("{name}.spec.js", "", "it", _ASSERT, "npx --no-install mocha --exit {path}"),
    "vitest": ("{name}.test.js", "import {{ expect, test }} from 'vitest'; import {{ createRequire }} from "
                                 "'node:module'; const require = createRequire(import.meta.url)", "test", _EXPECT,
               "npx --no-install vitest run --reporter=verbose {path}"),
    "node-test": ("{name}.test.cjs", "const test = require('node:test')", "test", _ASSERT,
                  "node --test --test-reporter=spec {path}")}


@dataclass(frozen=True)
class Canary:
    """path: where in the repository the file goes. command: runs it. parser: reads its log. tests: by that parser."""

    path: str
    text: str
    command: str
    parser: str
    tests: tuple[str, ...]


def survives(task: Task, touched: Sequence[str], runner: str, box: Sandbox) -> str:
    """What is wrong with the world of this box, or "". `runner`: whose log the task's tests made."""
    name = f"Zz{secrets.token_hex(6)}"
    canary = _python(task, touched, runner, name) or _go(task, runner, box, name) or _js(task, touched, runner, name)
    if canary is None:
        return ""
    before = task.install_config.get("before", "")
    command = f"bash -c {shlex.quote(f'{before}{chr(10)}{canary.command}')}" if before else canary.command
    try:
        box.write(canary.path, canary.text.encode())
    except OSError:
        return ""
    ran = box.run(command, SECONDS, output_bytes=2**20)
    if ran.timed_out:
        return ""
    status = parse_log(canary.parser, ran.output)
    passed = [test for test in canary.tests if any(t.endswith(test) and s == PASSED for t, s in status.items())]
    if passed or ran.code == 0 and not re.search(r"no tests? (?:files? )?(?:found|to run)|0 passing", ran.output, re.I):
        return f"a test that must fail did not fail beside this patch (exit status {ran.code})"
    return ""


def _python(task: Task, touched: Sequence[str], runner: str, name: str) -> Canary | None:
    if runner not in ("pytest", "unittest", "django"):
        return None
    tests = [change.path for change in file_changes(task.test_patch.encode()) if change.path.endswith(".py")]
    modules = []
    for path in [*(path for path in touched if path.endswith(".py")), *tests]:
        module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        modules += [module, *(module.partition(".")[2] for top in ("src", "lib") if module.startswith(f"{top}."))]
        modules += [posixpath.basename(path).removesuffix(".py")] if path in tests else []
    folders = sorted({posixpath.dirname(path) or "." for path in tests})
    path = f"test_{name}.py"
    text = _PYTHON.format(folders=folders, modules=modules, name=name)
    python = "$(command -v python || command -v python3)"
    ours = runner == "pytest"
    command = (f"{python} -m pytest -rA -p no:cacheprovider -c /dev/null --rootdir . {path}" if ours else
               f"{python} -m unittest -v test_{name}")
    tests = (f"test_{name}", f"test_{name}_true", f"test_{name}_plainly")
    return Canary(path, text, command, "pytest" if ours else "unittest",
                  tests if ours else tuple(f"{test} (test_{name}.Case.{test})" for test in tests))


def _go(task: Task, runner: str, box: Sandbox, name: str) -> Canary | None:
    files = [change.path for change in file_changes(task.test_patch.encode()) if change.path.endswith("_test.go")]
    for path in files if runner in ("go", "go-json") else ():
        try:
            package = re.search(rb"(?m)^package (\w+)", box.read(path))
        except OSError:
            continue
        if package:
            folder = posixpath.dirname(path) or "."
            return Canary(posixpath.join(folder, f"zz_{name.lower()}_test.go"),
                          _GO.format(package=package[1].decode(), name=name),
                          f"go test -count=1 -v -run '^Test{name}$' ./{folder}", "go", (f"Test{name}",))
    return None


def _js(task: Task, touched: Sequence[str], runner: str, name: str) -> Canary | None:
    if runner not in _JS_RUNNERS:
        return None
    changes = file_changes(task.test_patch.encode())
    tests = [change.path for change in changes if re.search(r"\.[cm]?[jt]sx?$", change.path)]
    file, first, test, wrong, command = _JS_RUNNERS[runner]
    folder = posixpath.dirname(tests[0]) if tests else ""
    path = posixpath.join(folder, file.format(name=name))
    up = posixpath.relpath(".", folder or ".")
    modules = [f"{up}/{one}" for one in touched if re.search(r"\.[cm]?[jt]s$", one)]
    text = _JS.format(first=first.format(), modules=modules, test=test, name=name, wrong=wrong)
    return Canary(path, text, command.format(path=path), runner, tuple(f"{name}{at}" for at in range(5)))
