"""A checkpoint is whole or it is not there: kills, full disks and numbers of different length included."""

import json
import logging
import multiprocessing
import os
import random
import resource
import signal
import time

import numpy as np
import pytest
import torch

from oprd.core.checkpoint import incomplete, load, newest, random_state, restore_random, save

torch.set_num_threads(1)
FORK = multiprocessing.get_context("fork")


def weights(value, files=1):
    def write(path):
        for i in range(files):
            (path / f"part{i}.safetensors").write_bytes(bytes([value]) * 1000)

    return write


def put(folder, step, keep=10, **parts):
    return save(folder, step, **{"state": weights(step % 256), "position": {"at": step}, "keep": keep, **parts})


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def test_what_was_saved_is_loaded(tmp_path):
    path = put(tmp_path, 12, position={"task": 3, "refreshed_at": [1, 2], "note": "é"})
    found = load(path)
    assert (found.step, found.position) == (12, {"task": 3, "refreshed_at": [1, 2], "note": "é"})
    assert (found.state / "part0.safetensors").read_bytes() == bytes([12]) * 1000


def test_random_draws_go_on_where_they_were(tmp_path):
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    np.random.randn()  # leaves a second gaussian waiting
    path = put(tmp_path, 1)
    draw = lambda: (random.random(), np.random.randn(), np.random.rand(), torch.rand(3).tolist())
    expected = draw()
    draw()
    restore_random(load(path).random)
    assert draw() == expected


def test_saving_and_loading_draw_nothing(tmp_path):
    before = random_state()
    load(put(tmp_path, 1))
    after = random_state()
    assert before["python"] == after["python"] and torch.equal(before["torch"], after["torch"])
    assert torch.equal(before["numpy"][1], after["numpy"][1])


def test_the_newest_is_chosen_by_number(tmp_path):
    assert newest(tmp_path) is None and newest(tmp_path / "absent") is None
    for step in (9, 10, 8):
        put(tmp_path, step)
    assert newest(tmp_path).name == "step_10"


def test_the_last_n_are_kept(tmp_path):
    for step in (8, 9, 10, 11):
        put(tmp_path, step, keep=2)
    assert names(tmp_path) == ["step_10", "step_11"]


def test_an_incomplete_one_does_not_count_as_kept(tmp_path):
    put(tmp_path, 1)
    put(tmp_path, 2)
    (tmp_path / "step_2" / "COMPLETE").unlink()
    put(tmp_path, 3, keep=2)
    assert newest(tmp_path).name == "step_3" and "step_1" in names(tmp_path)


@pytest.mark.parametrize("damage, reason", [
    (lambda p: (p / "COMPLETE").unlink(), "COMPLETE"),
    (lambda p: (p / "COMPLETE").write_text('{"model/'), "COMPLETE"),
    (lambda p: (p / "COMPLETE").write_text("[]"), "COMPLETE does not list files"),
    (lambda p: (p / "COMPLETE").write_text("{}"), "COMPLETE does not list files"),
    (lambda p: (p / "COMPLETE").write_bytes(b"\xff{}"), "no readable COMPLETE"),
    (lambda p: (p / "state" / "part1.safetensors").unlink(), "state/part1.safetensors is missing"),
    (lambda p: (p / "random_0.pt").write_bytes(b"cut"), "random_0.pt has 3 bytes instead of"),
])
def test_a_damaged_one_is_skipped_with_the_reason_and_refused_when_asked_for(tmp_path, caplog, damage, reason):
    put(tmp_path, 9)
    bad = put(tmp_path, 10, state=weights(1, files=2))
    damage(bad)
    with caplog.at_level(logging.WARNING):
        assert newest(tmp_path).name == "step_9"
    assert "step_10" in caplog.text and reason in caplog.text
    with pytest.raises(ValueError, match=reason):
        load(bad)


def test_when_every_one_is_damaged_nothing_starts_anew_and_nothing_is_thrown_away(tmp_path):
    for step in (9, 10):
        put(tmp_path, step)
        (tmp_path / f"step_{step}" / "random_0.pt").unlink()
    with pytest.raises(ValueError, match="no checkpoint is complete .step_10: random_0.pt is missing; step_9: .*move"):
        newest(tmp_path)
    assert names(tmp_path) == ["step_10", "step_9"] and (tmp_path / "step_9" / "state" / "part0.safetensors").is_file()


@pytest.mark.parametrize("name", ["random_0.pt", "position.json"])
@pytest.mark.parametrize("change", [lambda data: b"\0" * len(data), lambda data: data[: len(data) // 2] * 2])
def test_a_file_of_the_right_size_with_other_bytes_is_named_with_the_remedy(tmp_path, name, change):
    file = put(tmp_path, 3) / name
    file.write_bytes(change(file.read_bytes()).ljust(file.stat().st_size)[: file.stat().st_size])
    with pytest.raises(ValueError, match=f"{name} is damaged: .*move .*step_3 away") as problem:
        load(tmp_path / "step_3")
    assert "\n" not in str(problem.value)


def in_child(function, *arguments):
    child = FORK.Process(target=function, args=arguments)
    child.start()
    return child


def wait_for(condition, child, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert child.is_alive() and time.monotonic() < end
        time.sleep(0.002)


def test_a_kill_in_the_middle_of_a_save_loses_only_that_save(tmp_path):
    put(tmp_path, 1)

    def stuck(path):
        weights(2)(path)
        time.sleep(60)

    in_child(put, tmp_path, 2).join()
    assert newest(tmp_path).name == "step_2"  # a child that is left alone does save
    killed = in_child(lambda: put(tmp_path, 3, state=stuck))
    wait_for(lambda: (tmp_path / ".unfinished_step_3" / "state" / "part0.safetensors").exists(), killed)
    os.kill(killed.pid, signal.SIGKILL)
    killed.join()
    assert newest(tmp_path).name == "step_2" and load(newest(tmp_path)).position == {"at": 2}
    put(tmp_path, 3)
    assert newest(tmp_path).name == "step_3" and not list(tmp_path.glob(".unfinished*"))


def save_forever(folder):
    for step in range(2, 10**6):
        put(folder, step, keep=2)


@pytest.mark.parametrize("after_s", [0.05, 0.083, 0.121, 0.157, 0.2])
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path, after_s):
    put(tmp_path, 1)
    child = in_child(save_forever, tmp_path)
    wait_for(lambda: newest(tmp_path).name != "step_1", child)
    time.sleep(after_s)
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    found = load(newest(tmp_path))
    assert found.step >= 2 and found.position == {"at": found.step}
    assert (found.state / "part0.safetensors").read_bytes() == bytes([found.step % 256]) * 1000


def test_saving_a_step_again_replaces_it_and_a_kill_between_the_renames_loses_nothing(tmp_path):
    path = put(tmp_path, 4, position={"at": "old"})
    put(tmp_path, 4, position={"at": "new"})
    assert load(path).position == {"at": "new"} and names(tmp_path) == ["step_4"]
    path.rename(tmp_path / "step_4.replaced")  # where a kill between the two renames leaves the old one
    assert load(newest(tmp_path)).step == 4
    put(tmp_path, 5, keep=1)
    assert names(tmp_path) == ["step_5"]


def full_disk(folder, answers):
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))  # every file larger than 500 bytes fails
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        put(folder, 2)
    except Exception as error:
        answers.put((type(error).__name__, str(error)))


def test_a_disk_that_takes_no_more_is_one_line_and_leaves_the_old_checkpoint(tmp_path):
    put(tmp_path, 1)
    answers = FORK.Queue()
    child = in_child(full_disk, tmp_path, answers)
    kind, message = answers.get(timeout=20)
    child.join()
    assert kind == "OSError" and "step_2 was not written" in message and "\n" not in message
    assert names(tmp_path) == ["step_1"] and incomplete(tmp_path / "step_1") is None


def test_torchs_own_report_of_a_full_disk_is_one_line_too(tmp_path):
    def state(path):
        raise RuntimeError("[enforce fail at inline_container.cc] unexpected pos\nframe #0: trace")

    with pytest.raises(OSError, match="step_1 was not written: .*unexpected pos frame") as caught:
        put(tmp_path, 1, state=state)
    assert "\n" not in str(caught.value) and names(tmp_path) == []


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="checkpoint .*step_1 was not written: Not a directory"):
        put(tmp_path / "file", 1)


def test_a_position_that_is_not_json_is_our_mistake_and_leaves_nothing_published(tmp_path):
    with pytest.raises(TypeError):
        put(tmp_path, 1, position={"at": torch.tensor(1)})
    assert newest(tmp_path) is None


def test_the_marker_lists_every_file(tmp_path):
    path = put(tmp_path, 1, state=weights(2, 3))
    listed = json.loads((path / "COMPLETE").read_text())
    assert set(listed) == {str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()} - {"COMPLETE"}
