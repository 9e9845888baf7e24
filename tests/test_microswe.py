"""MicroSWE: endless, seeded, disjoint families; the expert solves every task; a relabelled recording is a real one."""

import json
import random

import pytest

from oprd.rollout import recordings
from oprd.rollout.expert import CHECK, chat_row, hasty, mistake, perform, solution
from oprd.sandbox.box import Limits
from oprd.sandbox.microswe import FAMILIES, KINDS, Difficulty, generate, relabel, relabelling
from oprd.sandbox.opener import opener
from oprd.sandbox.repo import extract_patch
from oprd.sandbox.sweep import run_label
from oprd.sandbox.task import Task, read_tasks, task_from_row
from oprd.sandbox.verify import verify


@pytest.fixture(scope="module")
def open_box(tmp_path_factory):
    return opener("local", Limits(command_s=20), run_label(tmp_path_factory.mktemp("run")))


def test_a_task_is_a_pure_function_of_seed_index_and_family():
    assert generate(1, 2, "train") == generate(1, 2, "train")
    assert generate(1, 2, "train") != generate(1, 3, "train") != generate(2, 3, "train")


def test_the_families_share_no_word():
    assert not set(FAMILIES["train"]) & set(FAMILIES["validation"])
    assert min(map(len, FAMILIES.values())) > 1000


def test_train_and_validation_tasks_share_no_name():
    words = {family: set() for family in FAMILIES}
    for family in FAMILIES:
        for i in range(50):
            words[family] |= set(relabelling(generate(0, i, family).to_row(), random.Random(0), family))
    assert not words["train"] & words["validation"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_gold_patch_and_the_expert_solve_a_task_and_nothing_does_not(kind, open_box):
    task = generate(7, 0, "validation", kind)
    assert verify(task, task.patch.encode(), open_box).resolved
    with open_box(task) as box:
        steps = perform(task, box, solution(task))
        patch = extract_patch(box)
    assert not any(s.observation.is_error for s in steps[-2:])
    assert verify(task, patch, open_box).resolved
    assert not verify(task, b"", open_box).resolved


@pytest.mark.parametrize("kind", KINDS)
def test_a_scripted_mistake_fails_and_its_recovery_solves_the_task(kind, open_box):
    task = generate(8, 1, "train", kind)
    wrong, recovery = mistake(task, random.Random(0))
    with open_box(task) as box:
        perform(task, box, wrong)
        assert not verify(task, extract_patch(box), open_box).resolved
        perform(task, box, recovery)
        assert verify(task, extract_patch(box), open_box).resolved


def test_a_relabelled_recording_is_what_really_running_the_relabelled_task_records(open_box):
    for i in range(4):
        task = generate(9, i, "train", KINDS[i])
        names = relabelling(task.to_row(), random.Random(i))
        renamed = task_from_row(relabel(task.to_row(), names), "renamed")
        rows = []
        for one in (task, renamed):
            with open_box(one) as box:
                steps = perform(one, box, solution(one))
            rows.append(chat_row("r", "s", one, steps, [True] * len(steps))["messages"])
        assert relabel(rows[0], names) == rows[1]


def test_renaming_is_one_to_one_and_leaves_other_text_alone():
    text = 'def kemi():\n    return "zuvo"  # mode name'
    names = relabelling(text, random.Random(0))
    assert set(names) == {"kemi", "zuvo"} and len(set(names.values())) == 2
    assert relabel(text, {"kemi": "bado", "zuvo": "lipu"}) == 'def bado():\n    return "lipu"  # mode name'


def test_difficulty_bounds_the_number_of_functions_and_branches():
    for i in range(30):
        task = generate(3, i, "train", "scenario", Difficulty(functions=2, branches=2))
        source = task.files[task.meta["path"]]
        assert source.count("def ") == 2 and source.count("if mode") == 2


@pytest.mark.parametrize("arguments,message", [
    ((0, 0, "test"), "family = 'test' is not one of train, validation"),
    ((0, 0, "train", "hard"), "kind = 'hard' is not one of"),
    ((0, 0, "train", None, Difficulty(1, 3)), "functions = 1 and branches = 3 must be 2 or more"),
])
def test_what_does_not_exist_is_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        generate(*arguments)


def test_task_rows_survive_a_file_and_bad_rows_name_file_line_and_field(tmp_path):
    task = generate(0, 0)
    good, path = json.dumps(task.to_row()), tmp_path / "tasks.jsonl"
    other = generate(0, 1)
    path.write_text(good + "\n\n" + json.dumps(other.to_row()) + "\n")
    assert read_tasks(path) == [task, other]
    odd = {**task.to_row(), "problem_statement": "one\u2028two\x85three"}  # line ends to str.splitlines, not to JSON
    path.write_text(json.dumps(odd, ensure_ascii=False) + "\n", encoding="utf-8")
    assert read_tasks(path)[0].problem_statement == "one\u2028two\x85three"
    for text, message in [(good[:50], r"tasks.jsonl:2: not JSON"),
                          (json.dumps({**task.to_row(), "FAIL_TO_PASS": []}), f"tasks.jsonl:2: {task.instance_id}: FAIL_TO_PASS must be"),
                          (json.dumps({k: v for k, v in task.to_row().items() if k != "FAIL_TO_PASS"}),
                           f"tasks.jsonl:2: {task.instance_id}: task has no field FAIL_TO_PASS"),
                          (json.dumps({**task.to_row(), "PASS_TO_PASS": '["a"]'}), "PASS_TO_PASS must be a list, got str"),
                          (json.dumps({**task.to_row(), "install_config": None}), "install_config must be a JSON object"),
                          ("5", "tasks.jsonl:2: a task must be a JSON object, got int")]:
        path.write_text(good + "\n" + text + "\n")
        with pytest.raises(ValueError, match=message):
            read_tasks(path)


def test_following_rows_train_exactly_the_turn_after_the_reminder(open_box):
    from oprd.core.settings import Config
    from oprd.rollout.harness import Harness

    recorder = recordings.Recorder(open_box, Harness(Config(), chat=None).remind(), "s", 1, careful=0.25)
    tasks = [t for t in (generate(11, i) for i in range(20)) if t.meta["kind"] in ("ambiguous", "scenario")][:4]
    rows = recorder.following(tasks, lambda: None)
    followed = [r for r in rows if "/followed-" in r["id"]]
    assert len(followed) >= 3
    for row in followed:
        trained = [m for m in row["messages"] if m["role"] == "assistant" and m.get("weight", 1)]
        assert trained == row["messages"][-1:]
        assert row["messages"][-2]["content"].startswith("<system-reminder>")
    for row in rows:
        if row["id"].endswith("/continued"):
            assert not any(str(m["content"]).startswith("<system-reminder>") for m in row["messages"])


def test_a_hasty_expert_seldom_looks_and_seldom_validates_but_always_looks_where_only_a_test_tells():
    calls = {kind: [hasty(generate(4, i, kind=kind), careful=0.25) for i in range(200)] for kind in KINDS}
    looks = {kind: sum(script[1] == CHECK for script in scripts) for kind, scripts in calls.items()}
    assert looks.pop("validate") == 200
    assert all(30 < count < 75 for count in looks.values())
    assert 150 < sum(script[-2] == CHECK for scripts in calls.values() for script in scripts) < 250


def test_looking_at_the_test_that_alone_tells_the_word_is_trained_under_its_reminder_only(open_box):
    from oprd.core.settings import Config
    from oprd.rollout.harness import Harness

    recorder = recordings.Recorder(open_box, Harness(Config(), chat=None).remind(), "s", 1, careful=0.25)
    trained = []
    for i in range(8):
        for row in recorder._follow(generate(13, i, kind="validate")):
            messages, edited = row["messages"], False
            for before, message in zip(messages, messages[1:]):
                if message["role"] == "assistant":
                    call = message["tool_calls"][0]["function"]
                    edited |= call["name"] == "edit"
                    if call["arguments"] == CHECK.arguments and not edited and message.get("weight", 1):
                        trained.append((row["id"].rsplit("/", 1)[1], "system-reminder" in str(before["content"])))
    assert trained and all(reminded or kind == "global" for kind, reminded in trained)
