"""Metrics add up over any split, and a resumed log is one curve per tag."""

import io
import json

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from oprd.core.metrics import Last, Log, Max, Mean, Min, Progress, Sum, merge, values


def test_a_mean_of_parts_is_the_mean_of_the_whole():
    first = {"a": Mean(6.0, 3), "b": Sum(2), "c": Max(5.0), "d": Min(5.0), "e": Last(1.0)}
    second = {"a": Mean(2.0, 1), "b": Sum(3), "c": Max(4.0), "d": Min(4.0), "e": Last(2.0)}
    assert values(merge(first, second)) == {"a": 2.0, "b": 5, "c": 5.0, "d": 4.0, "e": 2.0}
    assert first["a"] == Mean(6.0, 3)  # parts are left as they were


def test_what_only_one_part_measured_stays_and_what_nobody_measured_is_absent():
    assert values(merge({"a": Mean(1.0)}, {"b": Sum(2), "c": Mean(0.0, 0)})) == {"a": 1.0, "b": 2}


def test_one_name_for_two_kinds_is_refused():
    with pytest.raises(AssertionError, match="a is a Mean and a Sum"):
        merge({"a": Mean(1.0)}, {"a": Sum(1.0)})


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def curve(folder, tag):
    board = EventAccumulator(str(folder / "tensorboard"))
    board.Reload()
    return [(e.step, e.value) for e in board.Scalars(tag)]


def test_both_files_hold_the_same_numbers_at_explicit_steps(tmp_path):
    with Log(tmp_path / "run") as log:
        log.write(0, {"train/loss": Mean(3.0, 2), "none": Mean(0, 0)})
        log.write(5, {"train/loss": Mean(0.5), "eval/rate": Last(0.25)})
        log.write(5, {"late": Last(float("nan"))})
    assert lines(tmp_path / "run") == [
        {"step": 0, "train/loss": 1.5}, {"step": 5, "train/loss": 0.5, "eval/rate": 0.25}, {"step": 5, "late": None},
    ]
    assert curve(tmp_path / "run", "train/loss") == [(0, 1.5), (5, 0.5)]
    assert curve(tmp_path / "run", "eval/rate") == [(5, 0.25)]


def test_a_resumed_run_leaves_one_curve_per_tag(tmp_path):
    with Log(tmp_path) as log:
        for step in range(6):
            log.write(step, {"x": Last(step)})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "x"')  # a kill cut this line short
    with Log(tmp_path, first_step=3) as log:
        for step in range(3, 5):
            log.write(step, {"x": Last(step + 100.0)})
    expected = [(0, 0), (1, 1), (2, 2), (3, 103), (4, 104)]
    assert [(line["step"], line["x"]) for line in lines(tmp_path)] == expected
    assert curve(tmp_path, "x") == expected


def test_a_line_that_is_not_ours_does_not_stop_a_resume(tmp_path):
    with Log(tmp_path) as log:
        log.write(0, {"x": Last(1.0)})
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"loss": 1}\n[3]\n\xff\n{"step": "a"}\n')
    with Log(tmp_path, 1) as log:
        log.write(1, {"x": Last(2.0)})
    assert [(line["step"], line["x"]) for line in lines(tmp_path)] == [(0, 1.0), (1, 2.0)]


def test_a_step_that_goes_back_is_refused(tmp_path):
    with Log(tmp_path) as log:
        log.write(2, {})
        with pytest.raises(AssertionError, match="step 1 after step 2"):
            log.write(1, {})


def test_progress_away_from_a_terminal_is_a_few_plain_lines():
    out = io.StringIO()
    progress = Progress(total=50, done=10, name="oprd", out=out, seconds=3600)
    for step in range(10, 50):
        progress.advance({"loss": 1 / (step + 1)})
    progress.close()
    assert out.getvalue() == "oprd 11/50 loss=0.09091\noprd 50/50 loss=0.02\n"


def test_progress_on_a_terminal_is_a_bar():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    out = Terminal()
    progress = Progress(total=4, done=2, name="oprd", out=out)
    progress.advance({"loss": 0.5})
    progress.advance({"loss": 0.25})
    progress.close()
    assert "4/4" in out.getvalue() and "loss=0.25" in out.getvalue() and "\r" in out.getvalue()
