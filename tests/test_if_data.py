"""IF data from recorded attempts: which candidates become rows, what of a row is trained, and why the others do not."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from test_chat import TOKENIZERS

import train
from oprd.core.chat import Chat
from oprd.core.data import read_sft
from oprd.core.disk import write_jsonl
from oprd.core.types import Ending, Observation, Reminder, ToolCall, Trajectory, Turn
from oprd.rollout.attempts import Attempt, Outcome
from oprd.rollout.if_data import Maker, capped, table
from oprd.rollout.recordings import tasks_of
from oprd.rollout.records import Keeper, read_records
from oprd.rollout.rubric import MICRO, load_rubric
from oprd.rollout.scripted import ScriptedJudge
from oprd.rollout.select import Dropped, annotate_trajectory
from oprd.sandbox.microswe import Difficulty
from oprd.sandbox.task import Task
from oprd.sandbox.verify import Verdict

CHAT, RUBRIC = Chat(TOKENIZERS["micro"]), load_rubric(MICRO)
STATEMENT = '`kemi("dova")` in `src/zuvo.py` must return "lami".'
PATCH = 'diff --git a/src/zuvo.py b/src/zuvo.py\n--- a/src/zuvo.py\n+++ b/src/zuvo.py\n@@ -1 +1 @@\n-    return "rota"\n+    return secret_word(mode, table)\n'
TASK = Task("t", "r", "0" * 40, STATEMENT, PATCH, "", ("test_a",), (), {})
AMBIGUOUS = Observation("Found 2 matches of the string to replace, but replace_all is false.", None, True)
SHORT = ToolCall("edit", {"path": "src/zuvo.py", "old_string": "x", "new_string": "y"})
LONG = ToolCall("edit", {"path": "src/zuvo.py", "old_string": "w\nx", "new_string": "w\ny"})
DONE, SUBMIT = Observation("The file src/zuvo.py has been updated."), ToolCall("submit", {})
HARD = Reminder("hard_ambiguous_edit_old_string", "R1", RUBRIC["hard_ambiguous_edit_old_string"].action, "Found 2", 0)
START = Reminder("test_outcome_feedback", "G", "Rejected: 1 failed.")


def outcome(name, *steps, resolved=False, given=(), shown=None, mode="free", start=None, **more):
    """steps: (call or None, observation or None); shown: turn -> text that it read."""
    turns = []
    for k, (call, seen) in enumerate(steps):
        reply = CHAT.assistant("", [call]) if call else CHAT.assistant("hm")
        reminder = CHAT.reminder(shown[k]) if shown and k in shown else ()
        turns.append(Turn(CHAT.open("s", STATEMENT) if not k else CHAT.tool_results(["x"]), reply, (), 0, reminder, "",
                          call, None if call else "no call", seen))
    talk = Trajectory(name, "t", tuple(turns), CHAT.generation_ids, Ending.SUBMITTED)
    return Outcome(Attempt(name, TASK, 0, start=start), talk, given, verdict=Verdict(resolved), mode=mode, **more)


def reminded(name, after=LONG, reminder=HARD, **more):
    """An ambiguous edit, the reminder, then `after`."""
    return outcome(name, (SHORT, AMBIGUOUS), (after, DONE), (SUBMIT, None), given=(reminder,),
                   shown={1: reminder.text}, mode="passive", **more)


def made(tmp_path, *outcomes, sources=("given", "unaided", "retry", "plain"), tasks=(TASK,), **more):
    file = tmp_path / "attempts.jsonl"
    Keeper("text", CHAT)(file, outcomes)
    maker = Maker(RUBRIC, {t.instance_id: t for t in tasks}, sources, "s", **more)
    for row, trajectory in read_records(file):
        free = row["mode"] == "free" and not row["start"]
        found = annotate_trajectory(row["statement"], trajectory, RUBRIC, ScriptedJudge(RUBRIC), unread=False)
        maker.take(row, trajectory, found if free and "unaided" in sources else None)
    return maker


def gates(maker):
    return [left.gate for left in maker.left]


def test_a_followed_reminder_is_a_row_in_which_only_the_action_after_it_is_trained(tmp_path):
    maker = made(tmp_path, reminded("a"), sources=("given",))
    [row] = maker.rows
    roles = [(m["role"], m.get("weight")) for m in row["messages"]]
    assert roles == [("system", None), ("user", None), ("assistant", 0), ("tool", None), ("user", None),
                     ("assistant", None)]
    assert HARD.text in row["messages"][4]["content"] and row["messages"][3]["content"] == AMBIGUOUS.output
    assert (row["category"], row["class"], row["source"]) == (HARD.category, "R1", "given")
    # what if-sft trains is the action that was sampled, in the context it was sampled in
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    [example] = read_sft(tmp_path / "rows.jsonl", CHAT, 4000)
    assert tuple(example.row.ids[example.row.targets]) == CHAT.assistant("", [LONG])
    before = tuple(example.row.ids[: example.row.targets[0]])
    assert before[-len(CHAT.generation_ids):] == CHAT.generation_ids
    shown = CHAT.reminder(HARD.text) + CHAT.generation_ids
    assert before[-len(shown):] == shown


@pytest.mark.parametrize("attempt, gate", [
    (reminded("a", after=SHORT), "not_followed"),
    (reminded("a", reminder=Reminder("public_contract_before_edit", "R2", "Keep names.", turn=0), after=SUBMIT), "ambiguous"),
    (reminded("a", reminder=Reminder("mine", "R1", "Be careful.", turn=0)), "unverifiable"),
    (reminded("a", reminder=replace(HARD, text="return secret_word(mode, table)")), "leak"),
    (outcome("a", (SHORT, DONE), (LONG, DONE), given=(HARD,), shown={1: HARD.text}, mode="passive"), "unsupported"),
    (outcome("a", (SHORT, AMBIGUOUS), (LONG, DONE), given=(HARD,), mode="passive"), "not_shown"),
    (outcome("a", (SHORT, AMBIGUOUS), (LONG, DONE), given=(HARD,), shown={1: "Placebo."}, mode="passive"), "not_shown"),
    (outcome("a", (SHORT, AMBIGUOUS), given=(HARD,), mode="passive"), "unread"),
    (outcome("a", (None, DONE), (SHORT, AMBIGUOUS), (LONG, DONE), given=(replace(HARD, turn=1),),
             shown={2: HARD.text}, mode="passive"), "malformed"),
])
def test_what_the_filter_drops_is_dropped_with_its_reason(tmp_path, attempt, gate):
    maker = made(tmp_path, attempt, sources=("given",))
    assert maker.rows == [] and gates(maker) == [gate] and maker.left[0].reason and maker.left[0].id == "a"


def test_the_same_reminder_and_action_at_one_task_is_one_row(tmp_path):
    maker = made(tmp_path, reminded("a"), reminded("b"), sources=("given",))
    assert [row["id"] for row in maker.rows] == ["a/given-0"] and gates(maker) == ["redundant"]


def test_success_decides_nothing_for_behaviour_unless_it_is_asked_for(tmp_path):
    both = reminded("a"), reminded("b", after=replace(LONG, arguments={**LONG.arguments, "new_string": "z"}), resolved=True)
    assert len(made(tmp_path, *both, sources=("given",)).rows) == 2
    strict = made(tmp_path, *both, sources=("given",), only_resolved=True)
    assert [row["id"] for row in strict.rows] == ["b/given-0"] and gates(strict) == ["not_resolved"]


def test_a_recovery_nobody_asked_for_is_found_post_hoc_in_reminder_free_attempts_only(tmp_path):
    free = outcome("a", (SHORT, AMBIGUOUS), (LONG, DONE), (SUBMIT, None))
    maker = made(tmp_path, free, reminded("b", after=SHORT), sources=("unaided",))
    assert [(row["id"], row["source"]) for row in maker.rows] == [("a/unaided-0", "unaided")]
    assert HARD.text in maker.rows[0]["messages"][-2]["content"]
    stays = outcome("a", (SHORT, AMBIGUOUS), (SHORT, AMBIGUOUS), (SUBMIT, None))
    assert gates(made(tmp_path, stays, sources=("unaided",))) == ["same_error", "not_followed"]


def test_a_solved_retry_is_trained_whole_under_its_global_reminder_and_a_failed_one_is_not(tmp_path):
    good = outcome("a", (LONG, DONE), (SUBMIT, None), start=START, resolved=True)
    bad = outcome("b", (LONG, DONE), (SUBMIT, None), start=START)
    maker = made(tmp_path, good, bad, sources=("retry", "plain"))
    [row] = maker.rows
    assert START.text in row["messages"][2]["content"] and row["class"] == "G"
    assert [m.get("weight") for m in row["messages"] if m["role"] == "assistant"] == [None, None]
    assert gates(maker) == ["not_resolved"]


def test_plain_rows_are_solved_reminder_free_conversations(tmp_path):
    free = outcome("a", (LONG, DONE), (SUBMIT, None), resolved=True)
    maker = made(tmp_path, free, reminded("b", resolved=True), sources=("plain",))
    assert [(row["id"], row["category"]) for row in maker.rows] == [("a/plain", None)]
    assert not any("system-reminder" in str(m["content"]) for m in maker.rows[0]["messages"])


def test_an_attempt_at_an_unknown_task_gives_no_row_since_its_secrets_are_unknown(tmp_path):
    assert gates(made(tmp_path, reminded("a"), sources=("given",), tasks=())) == ["no_task"]


def test_a_category_can_be_capped_and_the_table_adds_up(tmp_path):
    many = [reminded(f"a{i}", after=replace(LONG, arguments={**LONG.arguments, "new_string": str(i)})) for i in range(9)]
    maker = made(tmp_path, *many, sources=("given",))
    kept, left = capped(maker.rows, 4)
    assert len(kept) == 4 and len(left) == 5 and kept == [row for row in maker.rows if row in kept]
    assert capped(maker.rows, 0) == (maker.rows, [])
    lines = table(kept, maker.left + left).splitlines()
    assert lines[2].split() == ["given", "4", "4", "0", "0", "0", "0", "1"] and lines[-1].split() == ["given:", "per_category", "5"]


def test_the_command_writes_rows_that_if_sft_reads_and_what_was_left_out_beside_them(tmp_path, capsys):
    Keeper("text", CHAT)(tmp_path / "attempts" / "x.jsonl", [reminded("a"), reminded("b", after=SHORT)])
    row = {**TASK.to_row(), "test_patch": PATCH, "install_config": {"test_cmd": "x", "log_parser": "unittest"}}
    (tmp_path / "tasks.jsonl").write_text(json.dumps(row))
    command = ["--stage", "if-data", "--input", str(tmp_path / "attempts"), "--output", str(tmp_path / "if.jsonl")]
    tasks = ["--data.tasks", str(tmp_path / "tasks.jsonl")]
    with pytest.raises(SystemExit):
        train.main(command)
    assert "--data.tasks" in capsys.readouterr().err
    assert train.main(command + tasks) == 0
    assert "not_followed" in capsys.readouterr().out
    assert len(read_sft(tmp_path / "if.jsonl", CHAT, 4000)) == 1
    [left] = map(json.loads, (tmp_path / "if.left_out.jsonl").read_text().splitlines())
    assert (left["id"], left["gate"], left["turn"]) == ("b", "not_followed", 0)
    with pytest.raises(SystemExit):
        train.main(command + tasks)
    assert "if.jsonl exists" in capsys.readouterr().err


SHIPPED = Path(__file__).resolve().parents[1] / "configs" / "micro" / "checkpoints" / "coding-sft"


@pytest.mark.skipif(not SHIPPED.is_dir(), reason=f"no shipped checkpoint at {SHIPPED}")
def test_the_road_from_a_checkpoint_over_its_own_attempts_to_if_sft(tmp_path, capsys):
    tasks = tmp_path / "tasks.jsonl"
    write_jsonl(tasks, [t.to_row() for t in tasks_of("oprd", 11, 8, Difficulty(2, 2))])
    recipe = str(SHIPPED.parents[1] / "recipe.toml")
    common = ["--config", recipe, "--run.threads", "1", "--data.tasks", str(tasks)]
    assert train.main(["--stage", "eval", *common, "--model.path", str(SHIPPED), "--run.folder", str(tmp_path / "made"),
                       "--rollout.workers", "8", "--eval.following", "true", "--eval.mode", "active", "--eval.retry",
                       "true"]) == 0
    out = capsys.readouterr().out
    assert "with reminders" in out and "failed attempts again" in out
    [report] = [json.loads((tmp_path / "made" / "eval" / "report.json").read_text())]
    assert report["reminded"]["asked"] == report["reminded"]["captured"] == 8 and report["reminded"]["probes"] > 8
    metrics = json.loads((tmp_path / "made" / "eval" / "metrics.jsonl").read_text())
    assert metrics["following/of_captured"] == 8 and metrics["following/n_verified"] == report["reminded"]["verified"]
    [file] = (tmp_path / "made" / "eval" / "attempts").glob("*.jsonl")
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert sorted({r["mode"] for r in records}) == ["active", "free"]
    assert sum(bool(t["probe"]) for r in records for t in r["turns"]) == report["reminded"]["discarded"] + sum(
        bool(t["probe"]) for r in records if r["start"] for t in r["turns"])
    rows = tmp_path / "if.jsonl"
    assert train.main(["--stage", "if-data", *common, "--input", str(file), "--output", str(rows), "--if_data.sources",
                       "given,unaided,retry,plain"]) == 0
    assert train.main(["--stage", "if-sft", "--config", recipe, "--run.threads", "1", "--model.path", str(SHIPPED),
                       "--data.rows", str(rows), "--run.folder", str(tmp_path / "trained"), "--train.steps", "2",
                       "--train.batch", "4"]) == 0
    assert (tmp_path / "trained" / "if-sft" / "model" / "config.json").is_file()
