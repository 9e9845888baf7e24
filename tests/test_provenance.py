"""What results were made from is written beside them, and a resume that would mix two is refused with what differs."""

import json
import os
import re

import pytest

from oprd.core import plan, provenance
from oprd.core.disk import check_free, check_makeable
from oprd.core.settings import Config


def config(folder, **sections) -> Config:
    return Config.model_validate({"run": {"folder": str(folder)}, **sections})


@pytest.fixture
def run(tmp_path):
    """A stage that was started: two files of rows, a start with a tokenizer, a folder with what it was made from."""
    start, rows = tmp_path / "start", tmp_path / "rows"
    start.mkdir(), rows.mkdir()
    (start / "tokenizer.json").write_text("{}")
    for i in range(2):
        (rows / f"{i}.jsonl").write_text(f"{i}\n")
    settings = config(tmp_path, model={"path": str(start)}, data={"rows": str(rows)})
    plan.write_settings(settings, plan.stage_folder(settings, "if-sft"), "if-sft")
    return tmp_path, settings


def test_the_same_settings_and_files_are_no_difference(run):
    _, settings = run
    assert not plan.done(settings, "if-sft", True) and not plan.done(settings, "if-sft", False)


def test_what_decides_nothing_in_the_results_may_change(run):
    folder, settings = run
    changed = settings.model_dump(by_alias=True)
    changed["train"]["keep"], changed["eval"]["attempts"], changed["run"]["threads"] = 5, 3, 2
    assert not plan.done(Config.model_validate(changed), "if-sft", True)


@pytest.mark.parametrize("finished", [False, True])
def test_a_changed_setting_is_named_even_when_the_stage_is_finished(run, finished):
    folder, settings = run
    if finished:
        (folder / "if-sft" / "model").mkdir()
    changed = settings.model_dump(by_alias=True)
    changed["train"]["lr"] = 0.5
    assert not plan.done(Config.model_validate(changed), "if-sft", False)
    with pytest.raises(ValueError, match="if-sft was started with other settings than train.lr = 0.5; resume with the"):
        plan.done(Config.model_validate(changed), "if-sft", True)


@pytest.mark.parametrize("change,message", [
    (lambda f: (f / "rows/1.jsonl").write_text("2\n"), "rows/1.jsonl is no longer what it was when .*if-sft was started"),
    (lambda f: (f / "rows/9.jsonl").write_text("9\n"), "rows/9.jsonl was not there when .*if-sft was started"),
    (lambda f: (f / "rows/0.jsonl").unlink(), "data/0.jsonl is gone that was there when"),
    (lambda f: (f / "start/tokenizer.json").write_text("[]"), "start/tokenizer.json is no longer what it was"),
    (lambda f: (f / "if-sft/inputs.json").write_text("["), "inputs.json is damaged"),
    (lambda f: (f / "if-sft/inputs.json").write_text("[]"), "inputs.json is damaged: it must hold a JSON object"),
])
def test_a_file_that_changed_between_stop_and_resume_is_named_with_the_remedy(run, change, message):
    folder, settings = run
    change(folder)
    with pytest.raises(ValueError, match=message + ".*run.folder") as problem:
        plan.done(settings, "if-sft", True)
    assert "\n" not in str(problem.value)


def test_a_finished_stage_needs_its_rows_no_more(run):
    folder, settings = run
    (folder / "if-sft" / "model").mkdir()
    for file in (folder / "rows").iterdir():
        file.unlink()
    (folder / "rows").rmdir()
    assert plan.done(settings, "if-sft", True)
    (folder / "rows").mkdir()
    (folder / "rows" / "1.jsonl").write_text("other\n")
    with pytest.raises(ValueError, match="rows/1.jsonl is no longer"):
        plan.done(settings, "if-sft", True)


def test_a_run_folder_that_was_moved_is_still_the_same_run(run, tmp_path):
    folder, settings = run
    (folder / "if-sft").rename(folder / "moved")
    (folder / "there").mkdir()
    (folder / "moved").rename(folder / "there" / "if-sft")
    moved = settings.model_dump(by_alias=True)
    moved["run"]["folder"] = str(folder / "there")
    assert not plan.done(Config.model_validate(moved), "if-sft", True)


def test_an_evaluation_made_otherwise_is_told_by_setting_or_file():
    before = provenance.made_from(config("a"), {"data/tasks.jsonl": "1"})
    same = provenance.made_from(config("b", train={"lr": 1.0}, oprd={"top_k": 3}, run={"threads": 2}),
                                {"data/tasks.jsonl": "1"})
    assert provenance.evaluated_otherwise(before, same) == []
    assert before == json.loads(json.dumps(before))
    other = provenance.made_from(config("a", eval={"temperature": 0.5}, rollout={"max_turns": 3}),
                                 {"data/tasks.jsonl": "2"})
    assert provenance.evaluated_otherwise(before, other) == ["rollout.max_turns = 3", "eval.temperature = 0.5",
                                                              "data/tasks.jsonl"]


def test_a_place_that_cannot_be_made_is_named_before_it_is_needed(tmp_path):
    (tmp_path / "file").write_text("")
    check_makeable(tmp_path / "a" / "b")
    with pytest.raises(NotADirectoryError, match=re.escape(f"b cannot be made: this is no folder: '{tmp_path / 'file'}'")):
        check_makeable(tmp_path / "file" / "a" / "b")
    with pytest.raises(ValueError, match="file exists; name another --output"):
        check_free(str(tmp_path / "file"))
    if os.getuid():
        tmp_path.chmod(0o500)
        with pytest.raises(PermissionError):
            check_makeable(tmp_path / "a")
