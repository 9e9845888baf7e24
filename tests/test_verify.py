"""Grading: what resolves a task, what only looks like it, and what is no verdict at all."""

import base64
from dataclasses import replace
from shutil import which

import pytest

from oprd.sandbox.box import Broke
from oprd.sandbox.microswe import KINDS, generate
from oprd.sandbox.patches import FileChange, added_files, file_changes, unsafe
from oprd.sandbox.repo import MAX_PATCH, extract_patch
from oprd.sandbox.verify import Verdict, gold_check, verify
from sandbox_help import PATCH, SOURCE, TASK, TEST, open_local, with_files

FIX = "sed -i 's/a - b/a + b/' src/words.py"


def worked(command: str, task=TASK) -> bytes:
    """The patch an agent leaves that ran `command`."""
    with open_local(task) as box:
        ran = box.run(command)
        assert ran.code == 0, ran.output
        return extract_patch(box)


def graded(command: str, task=TASK) -> Verdict:
    return verify(task, worked(command, task), open_local)


def test_the_fix_resolves_and_the_verdict_says_all_of_it():
    verdict = verify(TASK, PATCH.encode(), open_local)
    assert verdict.resolved and verdict.valid and verdict.reason == "" and verdict.exit_code == 0
    assert verdict.status == {"test_add (test_words.Test.test_add)": "PASSED",
                              "test_keep (test_words.Test.test_keep)": "PASSED"}
    assert verdict.touched == ("src/words.py",) and verdict.reverted == () and verdict.patch_applied
    assert "Ran 2 tests" in verdict.log and verdict.seconds > 0
    assert gold_check(TASK, open_local) == ""


def test_a_change_that_misses_or_breaks_something_fails_by_name():
    miss = graded("echo '# nothing' >> src/words.py")
    assert (miss.resolved, miss.valid) == (False, True)
    assert miss.failed_f2p == TASK.fail_to_pass and miss.failed_p2p == ()
    broke = graded(FIX + " && sed -i 's/return a$/return a + 1/' src/words.py")
    assert not broke.resolved and broke.failed_f2p == () and broke.failed_p2p == TASK.pass_to_pass
    syntax = graded("echo 'def (' >> src/words.py")
    assert syntax.valid and not syntax.resolved and syntax.failed_f2p + syntax.failed_p2p == (
        TASK.fail_to_pass + TASK.pass_to_pass)


def refuse(task):
    raise AssertionError("no sandbox must be opened")


@pytest.mark.parametrize("patch, reason", [
    (b"", "empty"), (b" \n", "empty"), (b"not a diff", "git patch"), (b"x" * (MAX_PATCH + 1), "bytes"),
    (b"diff --git a/../x b/../x\nnew file mode 100644\n--- /dev/null\n+++ b/../x\n@@ -0,0 +1 @@\n+1\n", "inside"),
    (b"diff --git a/.git/hooks/x b/.git/hooks/x\nnew file mode 100644\n--- /dev/null\n+++ b/.git/hooks/x\n"
     b"@@ -0,0 +1 @@\n+1\n", ".git"),
    (b"diff --git a/l b/l\nnew file mode 120000\n--- /dev/null\n+++ b/l\n@@ -0,0 +1 @@\n+/etc\n"
     b"\\ No newline at end of file\n", "symbolic link"),
])
def test_these_patches_fail_without_a_sandbox(patch, reason):
    verdict = verify(TASK, patch, refuse)
    assert not verdict.resolved and verdict.valid and reason in verdict.reason
    assert verdict.patch_empty == (not patch.strip()) and verdict.failed_f2p == TASK.fail_to_pass


def test_a_patch_that_does_not_apply_fails_and_says_why():
    verdict = verify(TASK, PATCH.replace("a - b", "a * b").encode(), open_local)
    assert not verdict.resolved and verdict.valid and "does not apply" in verdict.reason and not verdict.patch_applied


@pytest.mark.parametrize("command", [
    "printf 'import unittest\\n' > tests/test_words.py",
    "rm tests/test_words.py",
    "echo 'collect_ignore = []' > conftest.py",
    "echo 'import os; os._exit(0)' > sitecustomize.py",
    "mkdir unittest && echo 'print(1)' > unittest/__init__.py",
])
def test_changing_only_tests_or_the_test_runner_is_no_solution(command):
    verdict = verify(TASK, worked(command), refuse)
    assert not verdict.resolved and verdict.valid and "only tests" in verdict.reason
    assert verdict.reverted == verdict.touched


@pytest.mark.parametrize("meddling, path", [
    ("sed -i 's/3), 3/3), 4/' tests/test_words.py", "tests/test_words.py"),
    ("rm tests/test_words.py", "tests/test_words.py"),
    ("rm tests/test_words.py; mkdir tests/test_words.py; echo 1 > tests/test_words.py/x", "tests/test_words.py/x"),
    ("echo 'raise SystemExit(0)' > unittest.py", "unittest.py"),
    ("echo 'x' > evil.pth", "evil.pth"),
    ("printf '[pytest]\\naddopts = -x\\n' > pytest.ini", "pytest.ini"),
])
def test_what_steers_the_tests_is_put_back_and_recorded_while_the_fix_counts(meddling, path):
    verdict = graded(f"{FIX}; {meddling}")
    assert verdict.resolved, verdict.reason
    assert path in verdict.reverted and path in verdict.touched and "src/words.py" not in verdict.reverted


def test_a_visible_test_that_the_test_patch_does_not_touch_is_put_back_too():
    task = with_files(tests__test_other_dot_py=TEST.replace("class Test", "class Other"))
    task = replace(task, pass_to_pass=("test_keep (test_other.Other.test_keep)",))
    verdict = graded(FIX + "; sed -i 's/return a$/return a + 1/' src/words.py; rm tests/test_other.py", task)
    assert not verdict.resolved and verdict.reverted == ("tests/test_other.py",)
    assert verdict.failed_p2p == task.pass_to_pass


def test_files_the_test_patch_adds_are_replaced():
    added = "".join(f"+{line}\n" for line in (TEST + "\n    def test_add(self):\n        self.assertEqual(add(1, 2), 3)"
                                             ).splitlines())
    patch = ("diff --git a/tests/test_new.py b/tests/test_new.py\nnew file mode 100644\n--- /dev/null\n"
             f"+++ b/tests/test_new.py\n@@ -0,0 +1,{added.count(chr(10))} @@\n{added}")
    task = replace(TASK, test_patch=patch, fail_to_pass=("test_add (test_new.Test.test_add)",), pass_to_pass=())
    assert gold_check(task, open_local) == ""
    verdict = graded(FIX + "; echo 'import unittest' > tests/test_new.py", task)
    assert verdict.resolved and verdict.reverted == ("tests/test_new.py",)


@pytest.mark.parametrize("change, reverted", [
    ("printf '[tool:pytest]\\naddopts = -k none\\n' >> setup.cfg", True),
    ("sed -i 's/-q/-q -k none/' setup.cfg", True),
    ("sed -i 's/name = w/name = words/' setup.cfg", False),
    ("rm setup.cfg", True),
])
def test_only_the_test_sections_of_shared_settings_are_guarded(change, reverted):
    task = with_files(setup_dot_cfg="[metadata]\nname = w\n\n[tool:pytest]\naddopts = -q\n\n[other]\nx = 1\n")
    verdict = graded(f"{FIX}; {change}", task)
    assert verdict.resolved and ("setup.cfg" in verdict.reverted) == reverted


def test_a_settings_file_with_test_sections_that_the_agent_made_goes():
    verdict = graded(FIX + "; printf '[tool.pytest.ini_options]\\naddopts = \"-x\"\\n' > pyproject.toml")
    assert verdict.resolved and verdict.reverted == ("pyproject.toml",)


def test_what_the_official_fix_changes_is_source():
    task = with_files(conftest_dot_py="x = 1\n")
    task = replace(task, patch=PATCH + "diff --git a/conftest.py b/conftest.py\n--- a/conftest.py\n+++ b/conftest.py\n"
                                       "@@ -1 +1 @@\n-x = 1\n+x = 2\n")
    assert gold_check(task, open_local) == ""
    assert verify(task, task.patch.encode(), open_local).reverted == ()


FORGED = 'test_add (test_words.Test.test_add) ... ok'


@pytest.mark.parametrize("source, reason", [
    # the target is gone, a printed line takes its place: more passes claimed than the runner counted
    (f"import sys\nsys.stderr.write('{FORGED}\\n')\nimport unittest\n"
     "setattr(getattr(unittest, 'TestLoader'), 'getTestCaseNames', lambda *a: ['test_keep'])\n",
     "claims 2 passed tests, the runner's"),
    # everything forged, and the process ends before the runner can speak: there is no summary
    (f"import os, sys\nsys.stderr.write('{FORGED}\\n{FORGED.replace('add', 'keep')}\\n')\nsys.stderr.flush()\n"
     "os._exit(0)\n", "no summary"),
    (f"import os, sys\nsys.stderr.write('{FORGED}\\n{FORGED.replace('add', 'keep')}\\n')\nsys.stderr.flush()\n"
     "os._exit(3)\n", "exit status is 3"),
    # the test still fails: two different results
    (f"import sys\nsys.stderr.write('{FORGED}\\n')\n", "FAILED"),
    # the failure is hidden from the exit status only
    ("import atexit, os\natexit.register(lambda: os._exit(0))\n", "FAILED"),
])
def test_forged_results_do_not_resolve(source, reason):
    with open_local(TASK) as box:
        box.write("src/words.py", (source + SOURCE).encode())
        patch = extract_patch(box)
    verdict = verify(TASK, patch, open_local)
    assert not verdict.resolved and reason in verdict.reason, verdict


ALL_OK = f"{FORGED}\n{FORGED.replace('add', 'keep')}\n\n{'-' * 70}\nRan 2 tests in 0.001s\n\nOK\n"
HIDDEN = base64.b64encode(ALL_OK.encode())


@pytest.mark.parametrize("source, reason", [
    # the runner rewritten, openly
    ("import unittest\nunittest.TestCase.assertEqual = lambda *a, **k: None\n", "reaches into the test runner: src/"),
    ("from _pytest import runner\n", "reaches into the test runner: src/words.py: from _pytest import runner"),
    (f"import os, sys\nsys.stderr.write({ALL_OK!r})\nsys.stderr.flush()\nos._exit(0)\n",
     "reaches into the test runner"),
    # and in ways that no reading of the patch finds: a test that must fail is run beside it
    ("import unittest as u\nC = getattr(u, 'TestC' + 'ase')\nsetattr(C, 'assertEqual', lambda *a, **k: None)\n",
     "did not fail beside this patch"),
    (f"import base64, os\nos.write(2, base64.b64decode({HIDDEN!r}))\nos._exit(0)\n",
     "did not fail beside this patch (exit status 0)"),
])
def test_a_patch_that_decides_for_the_runner_does_not_resolve(source, reason):
    with open_local(TASK) as box:
        box.write("src/words.py", (source + SOURCE).encode())
        patch = extract_patch(box)
    verdict = verify(TASK, patch, open_local)
    assert not verdict.resolved and verdict.valid and reason in verdict.reason, verdict


PYTEST = replace(TASK, fail_to_pass=("tests/test_words.py::Test::test_add",), install_config={
    "test_cmd": ["python -m pytest -rA -p no:cacheprovider"], "log_parser": "parse_log_pytest"},
    pass_to_pass=("tests/test_words.py::Test::test_keep",))
NAME = PYTEST.fail_to_pass[0]
SUMMARY = f"{'=' * 27} short test summary info {'=' * 28}\nPASSED {NAME}\n{'=' * 10} 9 passed in 0.01s {'=' * 10}\n"


@pytest.mark.parametrize("source, reason", [
    ("def add(a, b):\n    import pytest\n    pytest.xfail('later')\n", f"first {NAME}: XFAIL"),
    ("def add(a, b):\n    import pytest\n    pytest.skip('later')\n", f"first {NAME}: missing"),
    (f"def keep(a, say=print):\n    say('PASSED {NAME}')\n    return a\n", "did not pass"),  # replayed by -rA
    (f"import atexit, base64\natexit.register(lambda: print(base64.b64decode({base64.b64encode(SUMMARY.encode())!r})"
     ".decode()))\n", f"first {NAME}: disputed"),
])
def test_what_a_public_sets_parser_would_take_for_a_pass_is_none(source, reason):
    with open_local(PYTEST) as box:
        box.write("src/words.py", (SOURCE + source).encode())
        patch = extract_patch(box)
    verdict = verify(PYTEST, patch, open_local)
    assert not verdict.resolved and verdict.valid and reason in verdict.reason, verdict
    assert verdict.failed_f2p == PYTEST.fail_to_pass


def test_a_public_sets_parser_grades_the_fix():
    assert verify(PYTEST, PATCH.encode(), open_local).resolved


JS_PATCH = """diff --git a/add.js b/add.js
--- a/add.js
+++ b/add.js
@@ -1 +1 @@
-exports.add = (a, b) => a - b
+exports.add = (a, b) => a + b
"""
JS_TEST = """const test = require('node:test')
const assert = require('node:assert')
const { add } = require('../add.js')
test('adds', () => assert.strictEqual(add(1, 2), 3))
"""
JS_TASK = replace(TASK, files={"add.js": "exports.add = (a, b) => a - b\n", "package.json": '{"name": "add"}\n'},
                  patch=JS_PATCH, test_patch=added_files({"test/add.test.js": JS_TEST}), fail_to_pass=("adds",),
                  pass_to_pass=(), install_config={"test_cmd": "node --test --test-reporter=spec test",
                                                   "log_parser": "parse_log_js_4"})


@pytest.mark.skipif(not which("node"), reason="node is not here")
@pytest.mark.parametrize("work, reason", [
    ("", None),
    ("echo '\u2714 adds (1ms)' && false", "is empty"),
    ("echo \"require('node:assert')['strict' + 'Equal'] = () => {}\" >> add.js", "did not fail beside this patch"),
    ("echo \"console.log('\u2714 adds (1ms)'); process.exit(0)\" >> add.js", "did not fail beside this patch"),
    ("mkdir test; echo \"require('node:test')('adds', () => {})\" > test/add.test.js", "only tests"),
    ("echo \"global.test = () => {}\" >> add.js", "reaches into the test runner"),
])
def test_javascript_is_graded_too(work, reason):
    patch = JS_PATCH.encode()
    if work:
        with open_local(JS_TASK) as box:
            box.run(work)
            patch = extract_patch(box)
    verdict = verify(JS_TASK, patch, open_local)
    assert verdict.resolved if reason is None else not verdict.resolved and reason in verdict.reason, verdict


def test_exit_zero_although_an_unexpected_test_failed_is_a_contradiction():
    task = replace(TASK, fail_to_pass=TASK.pass_to_pass, pass_to_pass=())
    quiet = "import atexit, os\natexit.register(lambda: os._exit(0))\n"
    with open_local(task) as box:
        box.write("src/words.py", (quiet + SOURCE).encode())
        patch = extract_patch(box)
    verdict = verify(task, patch, open_local)
    assert not verdict.resolved and "exit status is 0" in verdict.reason
    assert verify(task, worked("echo '#' >> src/words.py"), open_local).resolved  # a failure outside the lists
    command = task.install_config["test_cmd"] + "; true"
    masked = replace(task, install_config=task.install_config | {"test_cmd": command})
    assert verify(masked, worked("echo '#' >> src/words.py"), open_local).resolved  # the command's status says nothing


@pytest.mark.parametrize("edit, status", [
    ("    @unittest.skip('x')\n", "SKIPPED"), ("    @unittest.expectedFailure\n", "XPASS"),
])
def test_a_skipped_or_expected_failure_never_counts_as_passed(edit, status):
    task = replace(TASK, test_patch=TASK.test_patch.replace("+5,6", "+5,7").replace(
        "+    def test_add", "+" + edit + "+    def test_add").replace("@@ -5,3 +5,6", "@@ -5,3 +5,7"))
    verdict = verify(task, PATCH.encode(), open_local)
    assert not verdict.resolved and verdict.failed_f2p == TASK.fail_to_pass
    assert verdict.status[TASK.fail_to_pass[0]] == status


def test_tests_that_run_into_the_limit_are_the_patchs_failure():
    patch = worked(FIX + "; echo 'import time; time.sleep(60)' >> src/words.py")
    verdict = verify(TASK, patch, open_local, seconds=1)
    assert not verdict.resolved and verdict.valid and "time limit" in verdict.reason


@pytest.mark.parametrize("change, reason", [
    ({"install_config": {"test_cmd": "echo nothing", "log_parser": "unittest"}}, "no test result"),
    ({"install_config": {"test_cmd": "nosuchrunner", "log_parser": "unittest"}}, "exit status 127"),
    ({"test_patch": TASK.test_patch.replace("keep(3), 3", "keep(4), 4")}, "test patch does not apply"),
    ({"fail_to_pass": ()}, "FAIL_TO_PASS"),
])
def test_an_evaluation_that_says_nothing_is_invalid_and_no_zero(change, reason):
    task = replace(TASK, **change)
    verdict = verify(task, PATCH.encode(), open_local)
    assert not verdict.valid and not verdict.resolved and reason in verdict.reason
    assert gold_check(task, open_local) != ""


def test_gold_check_names_a_fix_that_does_not_fix_and_a_test_that_needs_none():
    weak = replace(TASK, patch=PATCH.replace("a + b", "a * b"))
    assert "gold patch does not resolve" in gold_check(weak, open_local)
    easy = replace(TASK, fail_to_pass=TASK.fail_to_pass + TASK.pass_to_pass, pass_to_pass=())
    assert "test_keep (test_words.Test.test_keep) passes without a patch" in gold_check(easy, open_local)


def test_a_list_of_commands_old_names_and_pytest_work_as_well():
    listed = replace(TASK, install_config=TASK.install_config | {"test_cmd": ["cd .", TASK.install_config["test_cmd"]]},
                     fail_to_pass=("test_add (test_words.Test)",))
    assert verify(listed, PATCH.encode(), open_local).resolved
    name = "tests/test_words.py::Test::"
    task = replace(TASK, fail_to_pass=(name + "test_add",), pass_to_pass=(name + "test_keep",), install_config={
        "test_cmd": "python -m pytest -rA -p no:cacheprovider", "log_parser": "pytest"})
    assert gold_check(task, open_local) == ""
    with pytest.raises(ValueError, match="words-1: install_config.test_cmd is empty"):
        verify(replace(TASK, install_config={}), PATCH.encode(), open_local)


def test_a_machine_that_breaks_is_no_verdict():
    def broken(task):
        raise Broke("engine gone")

    with pytest.raises(Broke):
        verify(TASK, PATCH.encode(), broken)


@pytest.mark.parametrize("kind", KINDS)
def test_microswe_tasks_of_every_kind_can_be_graded(kind):
    assert gold_check(generate(11, 3, kind=kind), open_local) == ""


def test_a_patch_is_read_like_git_reads_it():
    patch = (b'diff --git "a/caf\\303\\251 \\"1\\"" "b/caf\\303\\251 \\"1\\""\nold mode 100644\nnew mode 100755\n'
             b"diff --git a/x y b/x y\ndeleted file mode 100644\n--- a/x y\t\n+++ /dev/null\n@@ -1,2 +0,0 @@\n"
             b"--- a/trap\n-diff --git a/t b/t\n"
             b"diff --git a/o b/n\nsimilarity index 100%\nrename from o\nrename to n\n"
             b"diff --git a/l b/l\nnew file mode 120000\n--- /dev/null\n+++ b/l\n@@ -0,0 +1 @@\n+../up\n"
             b"\\ No newline at end of file\n")
    assert file_changes(patch) == [
        FileChange('caf\u00e9 "1"'), FileChange("x y", deleted=True), FileChange("o", deleted=True),
        FileChange("n", added=True), FileChange("l", added=True, link="../up")]
    assert unsafe(FileChange("l", True, link="../up")) and not unsafe(FileChange("d/l", True, link="../up"))
    assert unsafe(FileChange("a/.GIT/x")) and not unsafe(FileChange(".github/x"))


def test_grading_sees_no_agent_process_or_folder():
    """A fresh box each time: whatever the agent's own box held is not there."""
    seen = []

    def open_and_list(task):
        cm = open_local(task)

        class Listing:
            def __enter__(self):
                box = cm.__enter__()
                seen.append(box.run("git status --porcelain; ls -A").output.split())
                return box

            def __exit__(self, *exc):
                return cm.__exit__(*exc)
        return Listing()

    verify(TASK, PATCH.encode(), open_and_list)
    assert seen == [[".git", "README.md", "src", "tests"]]
