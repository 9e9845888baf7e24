"""MicroIF: constraints by hand, tasks that can be solved, answers that break what they are told to."""

import json
import random

import pytest

from oprd.core.settings import MicroIF
from oprd.rollout import microif_files
from oprd.rollout.checklist import checklists, problems
from oprd.rollout.prompt_report import check_known
from oprd.sandbox.microif import Constraint, answer, constraints_of, generate, read_prompts, task_row
from oprd.sandbox.microswe import FAMILIES


@pytest.mark.parametrize("constraint,response,holds", [
    (Constraint("count", n=3), "a b c", True), (Constraint("count", n=3), "a b", False), (Constraint("count", n=0), "", True),
    (Constraint("use", "b"), "a b", True), (Constraint("use", "b"), "ab", False), (Constraint("avoid", "b"), "ab", True),
    (Constraint("avoid", "b"), "a b", False), (Constraint("begin", "a"), " a b", True), (Constraint("begin", "a"), "", False),
    (Constraint("end", "b"), "a b\n", True), (Constraint("end", "b"), "b a", False), (Constraint("twice", "b"), "b a b", True),
    (Constraint("twice", "b"), "b b b", False), (Constraint("twice", "b"), "b", False)])
def test_the_truth_by_hand(constraint, response, holds):
    assert constraint.holds(response) is holds


@pytest.mark.parametrize("items", range(2, 7))
def test_every_task_can_be_solved_and_every_constraint_broken_alone(items):
    for i in range(60):
        task, rng = generate(0, i, items=items), random.Random(i)
        constraints = constraints_of(task)
        assert len(constraints) == items == len({c.kind for c in constraints})
        assert all(c.holds(answer(task, rng)) for c in constraints), task
        for k, c in enumerate(constraints):
            got = [d.holds(answer(task, random.Random(9 * i + k), broken=(k,))) for d in constraints]
            assert not got[k] and sum(got) >= items - 2, (task.problem_statement, c)


def test_canaries_are_known_to_be_wrong_and_words_are_held_out():
    for i in range(40):
        task = generate(1, i)
        assert task.meta["canaries"]
        for canary in task.meta["canaries"]:
            assert not constraints_of(task)[canary["item"]].holds(canary["response"])
        held_out = generate(1, i, "validation")
        assert not {c.word for c in constraints_of(held_out)} & set(FAMILIES["train"])
    assert generate(1, 3) == generate(1, 3) and generate(1, 3) != generate(2, 3)


def test_its_checklists_are_valid_and_know_the_truth():
    task = generate(0, 0)
    (items,) = checklists([task]).values()
    assert problems(items) == [] and [i.truth(answer(task, random.Random(0))) for i in items] == [True] * 4


def test_files_are_written_once_and_read_back(tmp_path):
    size = MicroIF(sft_rows=30, tasks=5, validation_tasks=2)
    microif_files.make(tmp_path, size, 0, "s")
    tasks = read_prompts(tmp_path / "microif_tasks.jsonl")
    assert tasks == [generate(2, i) for i in range(5)] and task_row(tasks[0])["instance_id"] == tasks[0].instance_id
    rows = [json.loads(line) for line in (tmp_path / "microif_sft.jsonl").read_text().splitlines()]
    assert len(rows) == 60 and {r["messages"][2]["content"] for r in rows[1::2]} == {"yes", "no"}
    with pytest.raises(ValueError, match="microif_sft.jsonl exists"):
        microif_files.make(tmp_path, size, 0, "s")


def test_a_prompt_of_unknown_truth_cannot_be_evaluated():
    task = generate(0, 0)
    check_known([task])
    with pytest.raises(ValueError, match="microif__train-0-0 has no constraints"):
        check_known([task, type(task)(**{**vars(task), "meta": {}})])


@pytest.mark.parametrize("row,message", [
    ([1], "JSON array"), ({"instance_id": "a"}, "problem_statement must be"),
    ({"instance_id": "a", "problem_statement": "x", "constraints": [{"kind": "odd"}]}, r"constraints\[0\]")])
def test_a_prompt_files_mistakes_name_the_line(tmp_path, row, message):
    file = tmp_path / "p.jsonl"
    file.write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=f"p.jsonl:1: .*{message}"):
        read_prompts(file)
    file.write_text(2 * (json.dumps({"instance_id": "a", "problem_statement": "x"}) + "\n"))
    with pytest.raises(ValueError, match="p.jsonl:2: instance_id 'a' is taken"):
        read_prompts(file)
