"""Test logs -> statuses, on the real runners' output and on lines nobody likes."""

import glob
import re
import subprocess
from pathlib import Path

import pytest

from oprd.sandbox.logs import NAMES, canonical_id, opinion, parse_log

RECORDED = Path(__file__).parent / "logs"

CASES = '''
import sys, unittest

class A(unittest.TestCase):
    def test_ok(self): pass
    def test_doc(self):
        """Doc (with) ... ok inside?
        second line"""
    def test_noise(self): print("hello ok", file=sys.stderr)
    def test_lying(self):
        sys.stderr.write("ok\\n")
        self.fail()
    def test_fail(self): self.fail("x")
    def test_err(self): raise KeyError
    @unittest.skip("why")
    def test_skip(self): pass
    @unittest.expectedFailure
    def test_xfail(self): self.fail()
    @unittest.expectedFailure
    def test_xpass(self): pass
    def test_sub(self):
        for i in range(3):
            with self.subTest(i=i): self.assertEqual(i, 1)
    def test_sub_ok(self):
        with self.subTest("m", i=1): pass
    def test_tell(self): sys.stderr.write("no newline")

class B(unittest.TestCase):
    @classmethod
    def setUpClass(cls): raise ValueError
    def test_b(self): pass
'''
EXPECTED = {"ok": "PASSED", "doc": "PASSED", "noise": "PASSED", "lying": "FAILED", "fail": "FAILED", "err": "ERROR",
            "skip": "SKIPPED", "xfail": "XFAIL", "xpass": "XPASS", "sub": "FAILED", "sub_ok": "PASSED",
            "tell": "PASSED"}


def pythons() -> list[str]:
    """Every Python 3 on this machine: their unittest output differs."""
    found = glob.glob("/root/.pyenv/versions/3.*/bin/python3") + ["/usr/bin/python3"]
    return [path for path in found if Path(path).exists()] or ["python3"]


@pytest.mark.parametrize("python", pythons())
def test_unittest_of_every_python_here_gives_the_same_ids_and_statuses(python, tmp_path):
    (tmp_path / "test_u.py").write_text(CASES)
    done = subprocess.run([python, "-m", "unittest", "-v", "test_u"], cwd=tmp_path, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True)
    got = parse_log("unittest", done.stdout)
    assert {k: v for k, v in got.items() if "setUpClass" not in k} == {
        f"test_{name} (test_u.A.test_{name})": status for name, status in EXPECTED.items()}
    assert got["setUpClass (test_u.B.setUpClass)"] == "ERROR"


@pytest.mark.parametrize("line, expected", [
    ("test_a (m.C.test_a) ... ok", {"test_a (m.C.test_a)": "PASSED"}),
    ("test_a (m.C) ... ok", {"test_a (m.C.test_a)": "PASSED"}),
    ("test_a (m.C.test_a)\nWhat it does. ... FAIL", {"test_a (m.C.test_a)": "FAILED"}),
    ("test_a (m.C.test_a) ... log line\nok", {"test_a (m.C.test_a)": "PASSED"}),
    ("test_a (m.C.test_a) ... \x1b[32mok\x1b[0m", {"test_a (m.C.test_a)": "PASSED"}),
    ("test_a (m.C.test_a) ... oktest_b (m.C.test_b) ... ERROR",
     {"test_a (m.C.test_a)": "PASSED", "test_b (m.C.test_b)": "ERROR"}),
    ("test_a (m.C.test_a) ... ok\ntest_a (m.C.test_a) ... FAIL", {"test_a (m.C.test_a)": "FAILED"}),
    ("test_a (m.C.test_a) ... skipped 'ok'", {"test_a (m.C.test_a)": "SKIPPED"}),
    ("test_a (m.C.test_a) ... Segmentation fault", {}),
    ("test_a (m.C.test_a) ... ok\r\n", {"test_a (m.C.test_a)": "PASSED"}),
    ("everything ok\n... ok\n(x) ... ok", {}),
    ("", {}),
])
def test_unittest_lines(line, expected):
    assert parse_log("unittest", line) == expected


def test_a_name_of_old_pythons_means_the_same_test():
    assert canonical_id("unittest", "test_a (m.C)") == "test_a (m.C.test_a)" == canonical_id(
        "unittest", "test_a (m.C.test_a)")
    assert canonical_id("pytest", "t.py::test_a (m.C)") == "t.py::test_a (m.C)"


SHORT = "=========================== short test summary info ============================\n"


@pytest.mark.parametrize("log, expected", [
    (SHORT + "PASSED t.py::a[x - y]\nFAILED t.py::b[x - y] - assert 'a - b'\nXFAIL t.py::c - bug - known",
     {"t.py::a[x - y]": "PASSED", "t.py::b[x - y]": "FAILED", "t.py::c": "XFAIL"}),
    (SHORT + "SKIPPED [1] t.py:3: why\nERROR t.py - ImportError: no", {"t.py": "ERROR"}),
    (SHORT + "PASSED t.py::a\nERROR t.py::a - teardown", {"t.py::a": "FAILED"}),
    (SHORT + "PASSED t.py::a\nSUBFAILED(i=1) t.py::a - assert", {"t.py::a": "FAILED"}),
    ("t.py::a PASSED [ 50%]\nt.py::b with space SKIPPED (why) [100%]",
     {"t.py::a": "PASSED", "t.py::b with space": "SKIPPED"}),
    ("[gw1] [ 50%] \x1b[32mPASSED\x1b[0m t.py::a ", {"t.py::a": "PASSED"}),
    ("PASSED t.py::a\nERROR    root:x.py:1 boom\nt.py:3: PASSED", {}),  # printed lines, outside any summary
    ("== PASSES ==\nPASSED t.py::forged\n" + SHORT + "PASSED t.py::a", {"t.py::a": "PASSED"}),
])
def test_pytest_lines(log, expected):
    assert parse_log("pytest", log) == expected


def counted_passes(parser: str, log: str) -> float | None:
    return opinion(parser, log).passes


def test_the_runners_own_count_of_passes():
    assert counted_passes("unittest", "Ran 5 tests in 0.1s\n\nOK (skipped=2)") == 3
    assert counted_passes("unittest", "test_a (m.C.test_a) ... ok") is None
    assert counted_passes("pytest", "=== 1 failed, 7 passed, 2 skipped in 0.10s ===") == 7
    assert counted_passes("pytest", "7 passed in 61.20s (0:01:01)") == 7
    assert counted_passes("pytest", "=== 3 deselected in 0.01s ===") == 0
    assert counted_passes("pytest", "it passed in time") is None


def test_an_unknown_parser_is_refused_by_name():
    with pytest.raises(ValueError, match="'carg' does not exist; did you mean cargo?"):
        parse_log("carg", "")
    with pytest.raises(ValueError, match="did you mean parse_log_gotest?"):
        parse_log("parse_log_go_test", "")


@pytest.mark.parametrize("name", ["pytest_rA", "pytest_rA_tb_no_header"])
def test_recorded_summaries_agree_with_pytests_own_counts(name):
    log = (RECORDED / f"{name}.txt").read_text()
    got = parse_log("pytest", log)
    # pytest counts 4 failed, 15 passed, 1 xfailed, 1 xpassed, 2 errors; a test with a failed subtest and one whose
    # teardown broke are among its 15 passes and are FAILED here
    counts = {status: list(got.values()).count(status) for status in set(got.values())}
    assert counts == {"PASSED": 13, "FAILED": 5, "ERROR": 1, "XFAIL": 1, "XPASS": 1}
    assert counted_passes("pytest", log) == 15
    assert got["tests/test_all.py::test_param[line\\nbreak]"] == got["tests/test_all.py::test_param[]"] == "PASSED"
    assert got["tests/test_all.py::test_ids[one two]"] == got["tests/test_all.py::TestU::test_u"] == "FAILED"


def test_recorded_progress_lines_give_the_same_as_the_summary_where_both_name_a_test():
    verbose = parse_log("pytest", (RECORDED / "pytest_v.txt").read_text())
    short = parse_log("pytest", (RECORDED / "pytest_rA.txt").read_text())
    assert short.items() <= verbose.items() and verbose["tests/test_all.py::test_skip"] == "SKIPPED"


def test_recorded_runs_that_broke_off_or_ran_nothing():
    crash = (RECORDED / "pytest_crash.txt").read_text()
    assert parse_log("pytest", crash) == {"crash_test.py::test_a": "PASSED"} and counted_passes("pytest", crash) is None
    assert parse_log("pytest", (RECORDED / "pytest_no_tests.txt").read_text()) == {}
    xdist = parse_log("pytest", (RECORDED / "pytest_vv_xdist.txt").read_text())
    assert xdist == {"tests/test_all.py::TestK::test_m": "PASSED", "tests/test_all.py::test_fail": "FAILED",
                     "tests/test_all.py::TestK::TestInner::test_n": "PASSED"}
    quiet = parse_log("unittest", (RECORDED / "unittest_quiet.txt").read_text())
    assert quiet == {"test_err (ut.test_u.A.test_err)": "ERROR", "test_fail (ut.test_u.A.test_fail)": "FAILED",
                     "test_sub (ut.test_u.A.test_sub)": "FAILED"}


def test_no_parser_crashes_on_another_runners_output():
    for path in sorted(RECORDED.glob("*.txt")):
        text = path.read_text(errors="replace")
        for parser in NAMES:
            assert all(re.fullmatch("PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS", s)
                       for s in parse_log(parser, text).values())
