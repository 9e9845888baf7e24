"""The Global Reminder: only for attempts that ran and failed, root causes first, five at most, nothing leaked."""

import json

import pytest

from oprd.rollout.ask import Asker
from oprd.rollout.endpoint import Counts, NoAnswer
from oprd.rollout.evidence_judge import EvidenceJudge
from oprd.rollout.global_reminder import MAX_SIGNALS, find_signals, global_reminder, rank
from oprd.rollout.leaks import Secrets
from oprd.sandbox.microswe import generate
from oprd.sandbox.task import Task
from oprd.sandbox.verify import Verdict

ASSERTION = """\
test_bolo (test_zuvo.Test.test_bolo) ... ok
test_kemi (test_zuvo.Test.test_kemi) ... FAIL

======================================================================
FAIL: test_kemi (test_zuvo.Test.test_kemi)
----------------------------------------------------------------------
Traceback (most recent call last):
  File "/tmp/box7/repo/tests/test_zuvo.py", line 8, in test_kemi
    self.assertEqual(m.kemi(), "lami")
AssertionError: 'zuvo' != 'lami'
- zuvo
+ lami


----------------------------------------------------------------------
Ran 2 tests in 0.001s

FAILED (failures=1)
"""


def task(patch="", test_patch="", targets=("test_kemi (test_zuvo.Test.test_kemi)",),
         keep=("test_bolo (test_zuvo.Test.test_bolo)",)):
    return Task("t", "r", "0", "s", patch, test_patch, targets, keep, {})


def verdict(**changed):
    whole = dict(resolved=False, patch_applied=True, touched=("src/zuvo.py", "tests/test_zuvo.py"), log=ASSERTION,
                 reverted=("tests/test_zuvo.py",), failed_f2p=("test_kemi (test_zuvo.Test.test_kemi)",))
    return Verdict(**{**whole, **changed})


def block(test, raised):
    return f"{'=' * 70}\nERROR: {test} (test_x.T.{test})\n{'-' * 70}\nTraceback (most recent call last):\n" \
           f'  File "/b/tests/test_x.py", line 3, in {test}\n    m.f()\n{raised}\n\n'


def test_a_hand_worked_failure_gives_this_text():
    reminder = global_reminder(task(), verdict())
    assert reminder.text == ("Rejected: 1 passed, 1 failed. Changed src/zuvo.py.\n"
                             "tests/test_zuvo.py:8 test_kemi: AssertionError: 'zuvo' != 'lami'\n"
                             "Read the task again and make one consistent fix.")
    assert (reminder.class_, reminder.turn, reminder.confidence) == ("G", -1, 1.0)


@pytest.mark.parametrize("gate", [{"resolved": True}, {"valid": False}, {"patch_empty": True},
                                  {"patch_applied": False}, {"failed_f2p": ()}])
def test_an_attempt_that_was_accepted_or_did_not_really_run_gets_no_reminder(gate):
    assert global_reminder(task(), verdict(**gate)) is None


def test_root_causes_stand_before_assertions_commands_and_the_rest():
    raised = {"test_a": "KeyError: 'k'", "test_b": "subprocess.X: exit code 3", "test_c": "AssertionError: 1 != 2",
              "test_d": "TypeError: f() missing 1 required positional argument: 'y'", "test_e": "NameError: name 'q' "
              "is not defined"}
    log = "".join(block(test, line) for test, line in raised.items())
    assert [s.kind for s in rank(find_signals(log, list(raised)))][:3] == ["argument", "reference", "assertion"]
    assert [s.kind for s in rank(find_signals(log, list(raised)))][-1] == "generic"


def test_failures_with_one_root_cause_are_one_signal_and_different_assertions_are_not():
    log = block("test_a", "NameError: name 'q' is not defined") + block("test_b", "NameError: name 'q' is not defined")
    [signal] = rank(find_signals(log, ["test_a", "test_b"]))
    assert signal.tests == ("test_a", "test_b")
    log = block("test_a", "AssertionError: 1 != 2") + block("test_b", "AssertionError: 2 != 1")
    assert len(rank(find_signals(log, ["test_a", "test_b"]))) == 2


def test_at_most_five_signals_are_shown():
    names = [f"test_{i}" for i in "abcdefgh"]
    log = "".join(block(name, f"AssertionError: {name} != 1") for name in names)
    text = global_reminder(task(targets=tuple(names), keep=()), verdict(failed_f2p=tuple(names), log=log)).text
    assert text.count("test_x.py") == MAX_SIGNALS and text.startswith("Rejected: 0 passed, 8 failed.")


def test_a_failure_that_was_not_required_to_pass_is_not_reported():
    log = block("test_other", "AssertionError: 1 != 2") + ASSERTION
    assert "test_other" not in global_reminder(task(), verdict(log=log)).text


def test_a_file_that_does_not_load_explains_all_its_tests_once():
    log = (f"{'=' * 70}\nERROR: test_zuvo (unittest.loader._FailedTest.test_zuvo)\n{'-' * 70}\nImportError: Failed to "
           "import test module: test_zuvo\nTraceback (most recent call last):\n  File \"/b/src/zuvo.py\", line 3\n"
           "    return \"x\n           ^\nSyntaxError: unterminated string literal\n\n")
    failed = ["test_kemi (test_zuvo.Test.test_kemi)", "test_bolo (test_zuvo.Test.test_bolo)"]
    [signal] = find_signals(log, failed)
    assert (signal.kind, signal.place) == ("syntax", "src/zuvo.py:3")


def test_a_required_test_the_log_is_silent_about_is_still_named():
    assert "test_kemi: did not pass" in global_reminder(task(), verdict(log="Killed")).text


def test_pytest_and_go_logs_are_read_too():
    pytest_log = ("____ test_a[x y] ____\n\n    def test_a():\n>       assert f() == 2\nE       assert 1 == 2\n"
                  "E        +  where 1 = f()\n\ntests/test_p.py:5: AssertionError\n")
    [signal] = find_signals(pytest_log, ["tests/test_p.py::test_a[x y]"])
    assert (signal.place, signal.message) == ("tests/test_p.py:5", "assert 1 == 2")
    summary = "FAILED tests/test_p.py::test_b - ValueError: no\n"
    [signal] = find_signals(summary, ["tests/test_p.py::test_b"])
    assert signal.message == "ValueError: no"
    go = ("# m/undef\nundef/u.go:4:9: undefined: helper\nFAIL\tm/undef [build failed]\n--- FAIL: TestA (0.00s)\n"
          "    --- FAIL: TestA/sum (0.00s)\n        f_test.go:11: got 2, want 3\nFAIL\n")
    kinds = [(s.kind, s.place) for s in rank(find_signals(go, ["TestA/sum", "TestA"]))]
    assert kinds == [("reference", "undef/u.go:4"), ("assertion", "f_test.go:11")]


def test_a_message_that_shows_a_line_of_the_reference_patch_or_of_a_hidden_test_is_withheld():
    gold = "--- a/f\n+++ b/f\n+    return compute(total, rate)\n"
    leaky = block("test_a", "AssertionError: expected return  compute(total, rate)") + block("test_b", "KeyError: 'k'")
    asked = task(gold, "", ("test_a", "test_b"), ())
    text = global_reminder(asked, verdict(failed_f2p=("test_a", "test_b"), log=leaky)).text
    assert "compute" not in text and "test_a: failed" in text and "test_b: KeyError: 'k'" in text
    secrets = Secrets.of(task("", "+++ b/t\n+    self.assertEqual(f(1), 22)\n"))
    assert secrets.shown_in("see self.assertEqual(f(1), 22)") and not secrets.shown_in("AssertionError: 1 != 22")


@pytest.mark.parametrize("index", range(8))
def test_on_microswe_the_reminder_never_holds_the_reference_line(index):
    micro = generate(3, index)
    wrong, right, name = micro.meta["wrong"], micro.meta["right"], micro.fail_to_pass[0].split(" ")[0]
    log = ASSERTION.replace("test_kemi", name).replace("'zuvo'", repr(wrong)).replace("lami", right)
    reminder = global_reminder(micro, verdict(failed_f2p=micro.fail_to_pass, log=log))
    assert f'return "{right}"' not in reminder.text and f"{wrong!r} != {right!r}" in reminder.text


# --- the evidence judge that is a model

LOG = ASSERTION + "error[E0061]: this function takes 1 argument\n  --> src/lib.rs:7:9\n"


class Says:
    identity = "model"

    def __init__(self, *answers):
        self.answers, self.asked = list(answers), []

    def complete(self, messages):
        self.asked.append(messages)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


RUST = {"kind": "argument", "tests": ["test_kemi (test_zuvo.Test.test_kemi)"], "place": "src/lib.rs:7:9",
        "message": "error[E0061]: this function takes 1 argument"}
ASSERTED = {**RUST, "kind": "assertion", "place": "", "message": "AssertionError: 'zuvo' != 'lami'"}


def signals(*entries):
    return json.dumps({"signals": list(entries)})


def judged(*answers, **changed):
    model = Says(*answers)
    asker = Asker(model, None, Counts())
    text = global_reminder(changed.pop("task", task()), verdict(log=LOG, **changed), EvidenceJudge(asker)).text
    return text, asker.counts.take(), model.asked


def test_a_model_finds_the_root_cause_in_a_log_the_patterns_do_not_know_and_code_orders_it():
    text, counts, _ = judged(signals(ASSERTED, RUST))
    assert text == ("Rejected: 1 passed, 1 failed. Changed src/zuvo.py.\n"
                    "src/lib.rs:7:9 test_kemi: error[E0061]: this function takes 1 argument\n"
                    "test_kemi: AssertionError: 'zuvo' != 'lami'\n"
                    "Read the task again and make one consistent fix.")
    assert counts == {"asked": 1, "answered": 1}


def test_the_question_holds_the_statement_the_tests_the_touched_files_and_the_log_but_no_diff():
    asked = task("+++ b/f\n+    SECRET_PATCH = 1\n", "+++ b/t\n+    SECRET_TEST = 1\n")
    status = {"test_kemi (test_zuvo.Test.test_kemi)": "FAILED", "test_bolo (test_zuvo.Test.test_bolo)": "PASSED"}
    _, _, [messages] = judged(signals(RUST), task=asked, status=status)
    shown = json.loads(messages[1]["content"])
    assert "SECRET" not in json.dumps(messages)
    assert shown == {"task": "s", "counts": {"passed": 1, "failed": 1, "never_ran": 0}, "exit_code": None,
                     "passed": ["test_bolo (test_zuvo.Test.test_bolo)"], "never_ran": [],
                     "failed": ["test_kemi (test_zuvo.Test.test_kemi)"], "touched": ["src/zuvo.py"], "log": LOG}
    _, _, [messages] = judged(signals(RUST))
    assert json.loads(messages[1]["content"])["counts"] == {"passed": 1, "failed": 0, "never_ran": 1}


@pytest.mark.parametrize("answer", [
    "garbage", "{}", signals("x"), signals({**RUST, "kind": "magic"}), signals({**RUST, "kind": []}),
    signals({**RUST, "tests": ["test_bolo (test_zuvo.Test.test_bolo)"]}), signals({**RUST, "tests": "test_kemi"}),
    signals({**RUST, "tests": [["x"]]}), signals({**RUST, "place": None}), signals({**RUST, "message": ""}),
    signals({**RUST, "message": "error[E0061]: this function takes 1 argument\n  -->"}),
    signals({**RUST, "fix": "return 1"}), signals(*[RUST] * 6), NoAnswer("timed_out"), NoAnswer("skipped"),
])
def test_without_a_decision_the_patterns_decide(answer):
    text, counts, asked = judged(answer)
    assert text == global_reminder(task(), verdict(log=LOG)).text and counts["no_decision"] == 1
    assert len(asked) == (1 if isinstance(answer, NoAnswer) else 2)


def test_a_quote_that_is_not_in_the_log_is_left_out_and_without_any_the_patterns_decide():
    invented = {**RUST, "message": "use compute() instead"}
    text, counts, _ = judged(signals(invented, RUST))
    assert "instead" not in text and "E0061" in text and counts["invented_quote"] == 1
    for answer in (signals(invented), signals({**RUST, "place": "src/made_up.rs:1"}), signals()):
        assert judged(answer)[0] == global_reminder(task(), verdict(log=LOG)).text


def test_what_a_model_quotes_of_a_hidden_test_is_withheld():
    hidden = task("", "+++ b/t\n+    self.assertEqual(m.kemi(), \"lami\")\n")
    text, _, _ = judged(signals({**RUST, "message": 'self.assertEqual(m.kemi(), "lami")'}), task=hidden)
    assert "assertEqual" not in text and "src/lib.rs:7:9 test_kemi: failed" in text


def test_an_ineligible_attempt_is_not_asked_about():
    model = Says(signals(RUST))
    assert global_reminder(task(), verdict(resolved=True), EvidenceJudge(Asker(model, None, Counts()))) is None
    assert model.asked == []
