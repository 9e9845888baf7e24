"""The gold check: a task stays only if its own patch always scores 1 and no patch always 0."""

import json
import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest

import train
from oprd.sandbox import check_tasks
from oprd.sandbox.box import Broke, Unusable
from oprd.sandbox.check_tasks import check_all, check_task, read_report
from oprd.sandbox.microswe import generate
from oprd.sandbox.verify import Verdict
from sandbox_help import PATCH, TASK, TEST_PATCH, open_local

ADD, KEEP = TASK.fail_to_pass[0], TASK.pass_to_pass[0]


def check(task, open_box=open_local, times=2):
    return check_task(task, open_box, times, 60.0, "key")


def test_a_good_task_scores_one_with_its_patch_and_nought_without_every_time():
    checked = check(TASK, times=3)
    assert (checked.state, checked.reason, checked.gold, checked.empty) == ("ok", "", (1, 1, 1), (0, 0, 0))


def test_what_is_wrong_with_a_task_is_named():
    weak = check(replace(TASK, patch=PATCH.replace("a + b", "a * b")))
    assert weak.state == "broken" and "its own patch does not resolve it: 1 of 1 FAIL_TO_PASS" in weak.reason
    easy = check(replace(TASK, fail_to_pass=(ADD, KEEP), pass_to_pass=()))
    assert easy.state == "broken" and easy.reason == f"FAIL_TO_PASS test {KEEP} passes without a patch"
    silent = check(replace(TASK, install_config={"test_cmd": "true", "log_parser": "unittest"}))
    assert silent.state == "broken" and silent.gold[0] is None
    assert check(replace(TASK, test_patch=TEST_PATCH.replace("keep(3), 3", "keep(3), 4"))).state == "broken"


def test_a_test_that_passes_now_and_then_makes_a_task_unstable(monkeypatch):
    runs = iter([True, True, True, False])
    real = check_tasks.verify

    def verify(task, patch, open_box, seconds):
        verdict = real(task, patch, open_box, seconds)
        bad = replace(verdict, resolved=False, reason="1 test did not pass", failed_p2p=(KEEP,))
        return verdict if next(runs) else bad

    monkeypatch.setattr(check_tasks, "verify", verify)
    checked = check(TASK, times=4)
    assert checked.state == "unstable" and checked.gold == (1, 1, 1, 0)
    assert checked.reason == "its own patch resolved it 3 of 4 times: 1 test did not pass"


def test_a_pass_to_pass_test_that_fails_without_a_patch_now_and_then_is_unstable():
    good, bad = Verdict(False, failed_f2p=(ADD,)), Verdict(False, failed_f2p=(ADD,), failed_p2p=(KEEP,))
    solved = Verdict(True)
    assert check_tasks.judge(TASK, [solved] * 3, [good, bad, good]) == (
        "unstable", f"without a patch, {KEEP} passes now and then (1 such tests)")
    assert check_tasks.judge(TASK, [solved] * 2, [bad, bad]) == ("ok", "")
    assert check_tasks.judge(TASK, [solved] * 2, [good, Verdict(True)])[0] == "unstable"


def test_a_tree_that_does_not_build_without_the_fix_is_no_fault_of_the_task():
    unbuilt = Verdict(False, valid=False, reason="no test result", failed_f2p=(ADD,), failed_p2p=(KEEP,), exit_code=2)
    assert check_tasks.judge(TASK, [Verdict(True)], [unbuilt]) == ("ok", "")
    quiet = replace(unbuilt, exit_code=0)
    assert check_tasks.judge(TASK, [Verdict(True)], [quiet])[0] == "broken"


def test_the_machines_failure_and_a_task_that_cannot_be_opened_are_told_apart():
    def opening(problem, times):
        left = [times]

        @contextmanager
        def open_box(task):
            left[0] -= 1
            if left[0] >= 0:
                raise problem
            with open_local(task) as box:
                yield box

        return open_box

    assert check(TASK, opening(Broke("engine gone"), 1)).state == "ok"  # once: tried again
    checked = check(TASK, opening(Broke("engine gone"), 9))
    assert (checked.state, checked.reason) == ("infra", "engine gone")
    checked = check(TASK, opening(Unusable("no image x"), 9))
    assert (checked.state, checked.reason) == ("unusable", "no image x")


def test_a_check_goes_on_where_it_was_interrupted_and_checks_what_changed_anew(tmp_path):
    tasks = [replace(TASK, instance_id=f"t{i}") for i in range(4)]
    report, opened, lock, killed = tmp_path / "r.jsonl", [], threading.Lock(), []

    @contextmanager
    def counted(task):
        with lock:
            opened.append(task.instance_id)
            if task.instance_id == "t2" and not killed:
                killed.append(True)
                raise KeyboardInterrupt
        with open_local(task) as box:
            yield box

    with pytest.raises(KeyboardInterrupt):
        check_all(tasks, counted, report, 1, 60.0, 1, "here")
    assert {c.instance_id for c in read_report(report)} >= {"t0", "t1"}
    with open(report, "a") as out:
        out.write('{"instance_id": "t3", "dig')  # a kill in the middle of a line
    opened.clear()
    seen = []
    checked = check_all(tasks, counted, report, 1, 60.0, 2, "here", lambda c: seen.append(c.instance_id))
    assert [c.instance_id for c in checked] == ["t0", "t1", "t2", "t3"] and all(c.state == "ok" for c in checked)
    assert set(opened) <= {"t2", "t3"} and sorted(seen) == ["t0", "t1", "t2", "t3"]
    opened.clear()
    check_all([replace(tasks[0], problem_statement="other"), *tasks[1:]], counted, report, 1, 60.0, 2, "here")
    assert set(opened) == {"t0"}
    check_all(tasks[:1], counted, report, 1, 61.0, 2, "here")
    assert opened.count("t0") == 4  # another limit: all of it anew


def test_the_command_writes_the_good_tasks_and_names_the_others(tmp_path, capsys):
    rows = [task.to_row() for task in (*(generate(3, i) for i in range(3)), TASK,
                                       replace(TASK, instance_id="weak", patch=PATCH.replace("a + b", "a * b")))]
    source, output = tmp_path / "tasks.jsonl", tmp_path / "good.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["--stage", "check-tasks", "--input", str(source), "--output", str(output), "--check.times", "1",
               "--run.folder", str(tmp_path / "run")]
    assert train.main(command) == 0
    said = capsys.readouterr()
    assert "weak: broken: its own patch does not resolve it" in said.out
    assert "4 of 5 tasks kept" in said.out and "check-tasks 5/5" in said.err
    assert [json.loads(line) for line in output.read_text().splitlines()] == rows[:4]
    with pytest.raises(SystemExit) as stopped:
        train.main(command)
    assert stopped.value.code == 2 and "exists" in capsys.readouterr().err
    output.unlink()
    assert train.main([*command, "--resume"]) == 0 and len(output.read_text().splitlines()) == 4
