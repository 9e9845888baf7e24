"""Recorded attempts and their annotation: what is written reads back, and errors are counted by class and category."""

import gzip
import json
from dataclasses import replace

import pytest
from test_chat import TOKENIZERS
from test_events import AMBIGUOUS, FAILED, RUBRIC, STATEMENT, read

from oprd.core.chat import Chat
from oprd.core.types import Ending, Reminder, Trajectory, Turn
from oprd.rollout.annotate import annotate, inputs, name_of, table
from oprd.rollout.attempts import Attempt, Outcome
from oprd.rollout.audit import each_boundary
from oprd.rollout.records import Keeper, read_records
from oprd.rollout.scripted import ScriptedJudge
from oprd.rollout.select import Dropped
from oprd.rollout.teach import Lesson, Reminded
from oprd.sandbox.task import Task
from oprd.sandbox.verify import Verdict

TASK = Task("t", "r", "0", STATEMENT, "", "", ("a",), (), {})
CHAT = Chat(TOKENIZERS["micro"])
LOCAL = Reminder("hard_ambiguous_edit_old_string", "R1", "Retry with more lines.", "Found 2 matches", 0)


def outcome(name, *turns, resolved=False, trouble=None, given=(), mode="free"):
    if trouble:
        return Outcome(Attempt(name, TASK, 0), trouble=trouble)
    said = tuple(Turn(CHAT.open("s", "u"), CHAT.assistant("x"), (-1.0,), 3, text="x", call=call, observation=seen)
                 for call, seen in turns)
    talk = Trajectory(name, "t", said, CHAT.generation_ids, Ending.TURN_LIMIT)
    return Outcome(Attempt(name, TASK, 0), talk, given, b"--- a\xff", Verdict(resolved), mode=mode)


MANY = [outcome("b", AMBIGUOUS, FAILED), outcome("a", read("src/zuvo.py"), resolved=True),
        outcome("c", AMBIGUOUS, AMBIGUOUS), outcome("d", trouble="infra_sandbox")]
REMINDED = [outcome("b/reminded", AMBIGUOUS, AMBIGUOUS, given=(LOCAL,), mode="passive"),
            outcome("c/reminded", AMBIGUOUS, AMBIGUOUS, mode="active")]


def test_attempts_are_written_by_id_and_read_back_as_conversations(tmp_path):
    lessons = [Lesson("trained_failure", None, Reminded(None, {0: LOCAL})), None, None, Lesson("dropped_infra_sandbox")]
    Keeper("text", CHAT)(tmp_path / "x" / "step_00000.jsonl", MANY, lessons)
    rows = [json.loads(line) for line in (tmp_path / "x" / "step_00000.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == ["a", "b", "c", "d"]
    assert [row["resolved"] for row in rows] == [True, False, False, None]
    assert rows[1]["fate"] == "trained_failure" and rows[1]["teacher"]["local"][0]["category"] == LOCAL.category
    assert rows[1]["turns"][0]["context"] == CHAT.tokenizer.decode(CHAT.open("s", "u"))
    assert "sampled_ids" not in rows[1]["turns"][0] and rows[3]["turns"] == []
    back = [trajectory for _, trajectory in read_records(tmp_path / "x" / "step_00000.jsonl")]
    assert [(t.call, t.observation) for t in back[1].turns] == [AMBIGUOUS, FAILED] and back[1].ending is Ending.TURN_LIMIT
    Keeper("ids", CHAT)(tmp_path / "ids.jsonl", MANY)
    turn = json.loads((tmp_path / "ids.jsonl").read_text().splitlines()[1])["turns"][0]
    assert turn["sampled_ids"] == list(CHAT.assistant("x")) and turn["version"] == 3
    Keeper("none", CHAT)(tmp_path / "none.jsonl", MANY)
    assert not (tmp_path / "none.jsonl").exists()


def test_annotation_counts_each_category_once_an_attempt_and_fixes_its_class(tmp_path):
    Keeper("text", CHAT)(tmp_path / "later.jsonl", MANY + REMINDED)  # of which the policy's own are counted
    Keeper("text", CHAT)(tmp_path / "base.jsonl", MANY[:1])
    assert [f.name for f in inputs(tmp_path)] == ["base.jsonl", "later.jsonl"]
    found = []
    for file in inputs(tmp_path):
        *_, (line, seen) = annotate(file, RUBRIC, each_boundary(ScriptedJudge(RUBRIC)))
        found.append(seen)
    assert (seen.attempts, seen.judged, seen.resolved) == (3, 3, 1)
    assert seen.events == {"hard_ambiguous_edit_old_string": 2}
    assert line["id"] == "c" and [e["category"] for e in line["events"]] == ["hard_ambiguous_edit_old_string"]
    assert seen.scalars()["annotate/events_R1"] == pytest.approx(2 / 3)
    lines = table(found, RUBRIC).splitlines()
    assert lines[2].split() == ["base", "1", "0/1", "100.0", "0.0", "0.0", "0.0"]
    assert lines[3].split() == ["later", "3", "1/3", "66.7", "0.0", "0.0", "0.0"]
    assert lines[-1].split() == ["hard_ambiguous_edit_old_string", "R1", "100.0", "66.7"]


@pytest.mark.parametrize("text, words", [
    ('{"id": "a"', "x.jsonl:2: not JSON"), ('{"id": "a"}', "x.jsonl:2: is no recorded attempt (KeyError: 'turns')"),
    ('{"turns": [{"reply": 1}], "id": 1}', "x.jsonl:2: is no recorded attempt"), ("[1]", "x.jsonl:2: is no recorded")])
def test_a_line_that_is_no_attempt_is_named(tmp_path, text, words):
    Keeper("text", CHAT)(tmp_path / "x.jsonl", MANY[:1])
    with (tmp_path / "x.jsonl").open("a") as file:
        file.write(text + "\n")
    with pytest.raises(ValueError) as error:
        list(read_records(tmp_path / "x.jsonl"))
    assert words in str(error.value)


def test_a_line_that_is_not_utf8_is_named(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b'{"turns": []}\n{"id": "\xff"}\n')
    with pytest.raises(ValueError, match="x.jsonl:2: not UTF-8"):
        list(read_records(tmp_path / "x.jsonl"))


def test_no_file_and_an_empty_folder_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere: no such file or folder"):
        inputs(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="holds no .jsonl file"):
        inputs(tmp_path)


def test_a_run_s_folder_means_the_newest_evaluation_of_every_checkpoint_in_the_recipe_s_order(tmp_path):
    for stage, number in (("oprd", 0), ("base", 0), ("coding-sft", 0), ("coding-sft", 1)):
        Keeper("text", CHAT)(tmp_path / stage / "eval" / "attempts" / f"eval_{number:05d}.jsonl", MANY[:1])
    assert [name_of(f) for f in inputs(tmp_path)] == ["base/eval_00000", "coding-sft/eval_00001", "oprd/eval_00000"]


def test_candidates_that_a_gate_dropped_are_recorded_with_their_reason(tmp_path):
    late = Dropped("c", 3, "confidence 0.50 below 0.90", "confidence")
    teacher = Reminded(None, {0: LOCAL}, (Dropped("test_outcome_feedback", -1, "the patch is empty", "ineligible"),),
                       {0: 1.5}, control=Reminded(None, {}))
    Keeper("text", CHAT)(tmp_path / "x.jsonl", [replace(MANY[0], dropped=(late,))], [Lesson("trained_failure", None, teacher)])
    row = json.loads((tmp_path / "x.jsonl").read_text())
    assert row["dropped"] == [{"category": "c", "turn": 3, "reason": "confidence 0.50 below 0.90", "gate": "confidence"}]
    assert row["teacher"]["dropped"][0]["gate"] == "ineligible" and row["teacher"]["local"][0]["utility"] == 1.5
    assert row["teacher"]["read"] == {"local": [], "global": None, "dropped": [], "read": None}


def test_the_evidence_of_a_grading_is_kept_whole(tmp_path):
    log = "ok\n" * 200_000
    graded = replace(MANY[0], verdict=replace(MANY[0].verdict, log=log, disputed=("t",), seconds=1.5))
    for _ in range(2):
        Keeper("text", CHAT)(tmp_path / "attempts" / "step_00001.jsonl", [graded])
    with gzip.open(tmp_path / "attempts" / "verdicts" / "step_00001.jsonl.gz") as lines:
        [line] = map(json.loads, lines)
    assert line["log"] == log and line["disputed"] == ["t"] and line["id"] == graded.attempt.id
    assert {"status", "touched", "reverted", "patch_applied", "exit_code", "reason"} <= set(line)
    assert "seconds" not in line
