"""Files of rows, and the public sets' row shapes, to training examples."""

import copy
import gzip
import json
from collections import Counter

import numpy as np
import pytest
from types import SimpleNamespace

import train
from public_rows import BASH, ROWS, TICKS, U, call, done
from oprd.core import hf, sources
from oprd.core.chat import Chat
from oprd.core.settings import Config
from oprd.core.data import read_sft, read_text
from oprd.core.dry_run import describe
from oprd.core.plan import data_file, random_model
from oprd.core.shapes import read_row
from oprd.core.tokenizer import train_bpe

CHAT = Chat(train_bpe(["user assistant tool def f(x):\n    return x\n"] * 9, 300))
LIMIT = 10**5


def write(file, *rows):
    lines = b"".join(row if isinstance(row, bytes) else json.dumps(row).encode() + b"\n" for row in rows)
    file.write_bytes(gzip.compress(lines) if file.suffix == ".gz" else lines)
    return file


def read(tmp_path, *rows, **settings):
    return read_sft(write(tmp_path / "rows.jsonl", *rows), CHAT, LIMIT, **settings)


def taught(example):
    """Texts of the runs of neighbouring targets, without the end-of-turn token."""
    targets = example.row.targets
    runs = np.split(targets, np.flatnonzero(np.diff(targets) > 1) + 1)
    assert all(example.row.ids[run[-1]] == CHAT.end_id for run in runs)
    return [CHAT.tokenizer.decode(example.row.ids[run[:-1]]) for run in runs]


# --- shapes

@pytest.mark.parametrize("name", list(ROWS))
def test_every_public_shape_gives_the_ids_and_targets_of_the_same_conversation_in_our_own_form(tmp_path, name):
    public, ours, said = ROWS[name]
    theirs, own = read(tmp_path, public, ours)
    assert theirs.row.ids.tolist() == own.row.ids.tolist()
    assert theirs.row.targets.tolist() == own.row.targets.tolist()
    texts = taught(theirs)
    assert len(texts) == len(said)
    for text, start in zip(texts, said):
        if start == "finish":  # a call and nothing else
            assert text == ("<tool_call>\n<function=finish>\n<parameter=message>\nok\n</parameter>\n</function>\n"
                            "</tool_call>")
        else:
            assert text == start or text.startswith(start) and text[len(start):].lstrip("\n").startswith("<tool_call>")


def test_a_shape_reads_without_changing_the_row():
    for public, _, _ in ROWS.values():
        before = copy.deepcopy(public)
        read_row(public)
        assert public == before


def test_calls_written_as_text_are_said_as_text_without_a_control_token(tmp_path):
    said = "I look.\n<tool_call>\n<function=bash>\n</function>\n</tool_call>"
    [example] = read(tmp_path, {"messages": [U, {"role": "assistant", "content": said}]})
    assert taught(example) == [said]
    assert not set(example.row.ids[example.row.targets[:-1]]) & set(CHAT.tokenizer.control_ids)


def test_messages_and_schemas_may_each_be_json_text(tmp_path):
    row = {"messages": [U, done()], "tools": [BASH]}
    each = {"messages": [json.dumps(U), json.dumps(done())], "tools": [json.dumps(BASH)]}
    whole = {"messages": json.dumps([U, done()]), "tools": json.dumps([BASH])}
    ids = [example.row.ids.tolist() for example in read(tmp_path, row, each, whole)]
    assert ids[0] == ids[1] == ids[2]


def test_an_old_style_function_call_is_a_tool_call(tmp_path):
    told = {"name": "bash", "arguments": '{"command": "ls"}'}
    old = [U, {"role": "assistant", "content": None, "function_call": told}, done("function", name="bash"), done()]
    new = [U, {"role": "assistant", "tool_calls": [call("bash", command="ls")]}, done("tool"), done()]
    a, b = read(tmp_path, {"messages": old}, {"messages": new})
    assert a.row.ids.tolist() == b.row.ids.tolist()


def test_a_content_that_is_a_json_list_is_blocks_in_swe_smith_and_text_everywhere_else(tmp_path):
    blocks = json.dumps([{"type": "text", "text": "done"}])
    row = {"messages": [U, done(content=blocks)]}
    smith, other = read(tmp_path, {**row, "traj_id": "t"}, row)
    assert taught(smith) == ["done"] and taught(other) == [blocks]
    for text in ("[1, 2]", "[not json", "[]", '[{"a": 1}]'):
        [kept] = read(tmp_path, {"messages": [U, done(content=text)], "traj_id": "t"})
        assert taught(kept) == [text]


def test_nulls_and_keys_of_json_arguments_stay_as_the_row_has_them(tmp_path):
    edit = {"role": "assistant", "tool_calls": [call("edit", path=None, new="")]}
    [example] = read(tmp_path, {"messages": [U, edit]})
    assert "<parameter=path>\nNone\n</parameter>\n<parameter=new>\n\n</parameter>" in taught(example)[0]


def test_the_unit_of_an_example_is_an_id_that_no_other_attempt_at_its_task_has(tmp_path):
    row = {"messages": [U, done()], "instance_id": "o__r-1"}
    a, b, c = read(tmp_path, row, row, {**row, "trajectory_id": "t3"})
    assert a.unit != b.unit and c.unit == "t3"
    assert a.source.endswith("rows.jsonl:1 (id o__r-1)") and c.source.endswith(":3 (id t3)")


BAD = {  # what is wrong -> (row, what the message says after the place, reason)
    "near": ({"trajectories": []}, "row: fits no known shape: it has id, trajectories; the nearest is SWE-agent or "
             "OpenHands, with trajectory$", "shape"),
    "null": ({"messages": None}, "row: fits no known shape: it has id, messages; the nearest is .*chat, with messages",
             "shape"),
    "a step of another kind": ({"trajectory": [{"kind": "x"}]}, r"trajectory\[0\]: fits no known shape: it has kind",
                               "shape"),
    "cut text": ({"messages": '[{"role": "us'}, "messages: is text but not valid JSON", "messages"),
    "not a list": ({"conversations": {"from": "gpt"}}, "conversations: must be a non-empty list, got dict", "messages"),
    "not an object": ({"trajectory": [U, 7]}, r"trajectory\[1\]: must be an object, got int", "messages"),
    "unknown role": ({"trajectory": [U, done("robot")]}, r"messages\[1\].role: must be one of .*got 'robot' "
                     r"\(trajectory read as OpenHands\)", "role"),
    "a role that is no text": ({"messages": [U, done(["gpt"])]}, r"messages\[1\].role: must be one of", "role"),
    "exit in the middle": ({"trajectory_format": "m", "messages": [U, done("exit"), done()]}, r"messages\[1\].role",
                           "role"),
    "bad call": ({"conversations": [{"from": "human", "value": "q"}, {"from": "function_call", "value": "{"}]},
                 r"conversations\[1\].value: is text but not valid JSON", "messages"),
    "two calls": ({"messages": [U, done(function_call={"name": "f"}, tool_calls=[call("f")])]},
                  r"messages\[1\]: has both tool_calls and function_call", "tool_calls"),
    "bad tools": ({"messages": [U, done()], "tools": ["{"]}, r"tools\[0\]: is text but not valid JSON", "tools"),
    "tools of another kind": ({"messages": [U, done()], "tools": 3}, "tools: must be a list of objects", "tools"),
    "bad step": ({"problem_statement": "q", "trajectory_steps": [{"action": {"f": 1}}]},
                 r"trajectory_steps\[0\].action: must be text, got dict", "content"),
    "nothing to learn": ({"trajectory": [{"role": "user", "text": "q", "mask": False},
                                         {"role": "ai", "text": "a", "mask": False}]}, "trajectory: no token to train",
                         "no_target"),
}


@pytest.mark.parametrize("what", list(BAD))
def test_a_row_of_a_wrong_shape_is_named_in_one_line_or_counted(tmp_path, what):
    row, message, reason = BAD[what]
    file = write(tmp_path / "rows.jsonl", {"messages": [U, done()]}, {"id": 9, **row})
    with pytest.raises(ValueError, match=rf"rows.jsonl:2 \(id 9\): {message}") as caught:
        read_sft(file, CHAT, LIMIT)
    assert "\n" not in str(caught.value)
    skipped = Counter()
    assert len(read_sft(file, CHAT, LIMIT, strict=False, skipped=skipped)) == 1 and skipped == {reason: 1}


def test_an_empty_row_is_named_too(tmp_path):
    with pytest.raises(ValueError, match="rows.jsonl:1: row: fits no known shape: it has no field"):
        read(tmp_path, {})


# --- only what was solved

def test_only_resolved_keeps_the_rows_whose_own_mark_says_so(tmp_path, caplog):
    marks = [{"resolved": 1}, {"resolved": False}, {"target": True}, {"target": False}, {"reward": 1.0},
             {"reward": 0.5}, {"resolved": None, "reward": 1}]
    rows = [{"messages": [U, done()], "id": i, **mark} for i, mark in enumerate(marks)]
    skipped = Counter()
    kept = read(tmp_path, *rows, only_resolved=True, skipped=skipped)
    assert [e.unit for e in kept] == ["0", "2", "4", "6"] and skipped == {"unresolved": 3}
    assert "left out 3 of 7 rows: unresolved 3" in caplog.text
    assert len(read(tmp_path, *rows)) == 7


@pytest.mark.parametrize("mark,message", [
    ({}, "resolved: is missing, and so are target and reward"),
    ({"resolved": "yes"}, "resolved: must be true, false or a number, got 'yes'"),
])
def test_only_resolved_asks_every_row_for_a_mark(tmp_path, mark, message):
    rows = {"messages": [U, done()], "resolved": True}, {"messages": [U, done()], **mark}
    with pytest.raises(ValueError, match=f"rows.jsonl:2: {message}"):
        read(tmp_path, *rows, only_resolved=True)
    skipped = Counter()
    assert len(read(tmp_path, *rows, only_resolved=True, strict=False, skipped=skipped)) == 1
    assert skipped == {"no_mark": 1}


# --- files and folders

def test_a_folder_is_read_in_the_order_of_the_numbers_in_its_names(tmp_path):
    names = ["step_10.jsonl", "step_9.jsonl", "step_009.jsonl", "a-2-of-10.jsonl.gz", "a-10-of-10.jsonl", "Z1.jsonl"]
    for name in names:
        write(tmp_path / name, {"messages": [U, done()], "id": name})
    for ignored in ("README.md", ".step_1.jsonl", "step_1.jsonl.tmp"):
        (tmp_path / ignored).write_text("no row")
    (tmp_path / "more.jsonl").mkdir()
    want = ["Z1.jsonl", "a-2-of-10.jsonl.gz", "a-10-of-10.jsonl", "step_009.jsonl", "step_9.jsonl", "step_10.jsonl"]
    assert [e.unit for e in read_sft(tmp_path, CHAT, LIMIT)] == want
    assert sources.count(tmp_path) == 6


def test_a_folder_without_rows_and_a_path_that_is_not_there_are_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no .jsonl, .jsonl.gz, .parquet file in this folder"):
        read_sft(tmp_path, CHAT, LIMIT)
    with pytest.raises(FileNotFoundError, match="nowhere: no such file"):
        sources.count(tmp_path / "nowhere")


def test_a_last_line_that_was_cut_off_is_named_or_counted(tmp_path):
    whole = json.dumps({"messages": [U, done()], "id": "last"}).encode()
    rows = ({"messages": [U, done()], "id": "first"}, b"\n", whole[:-5])
    with pytest.raises(ValueError, match=r"rows.jsonl:3: row: is not valid JSON .*is the line cut off\?"):
        read(tmp_path, *rows)
    skipped = Counter()
    assert [e.unit for e in read(tmp_path, *rows, strict=False, skipped=skipped)] == ["first"]
    assert skipped == {"json": 1}


@pytest.mark.parametrize("strict", [True, False])
def test_a_packed_file_that_was_cut_off_is_an_error_whatever_is_skipped(tmp_path, strict):
    file = write(tmp_path / "rows.jsonl.gz", *[{"messages": [U, done()], "id": i} for i in range(50)])
    assert len(read_sft(file, CHAT, LIMIT)) == sources.count(file) == 50
    whole = file.read_bytes()
    for damaged in (whole[:-9], whole[:40], b"plain text"):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match="rows.jsonl.gz: cannot be unpacked"):
            read_sft(file, CHAT, LIMIT, strict=strict)


def test_counts_of_a_folder_are_summed_over_its_files(tmp_path):
    good = {"messages": [U, done()]}
    write(tmp_path / "a1.jsonl", good, {"messages": []}, b"{\n")
    write(tmp_path / "a2.jsonl", b"[]\n", good, {"messages": [U]})
    skipped = Counter()
    assert len(read_sft(tmp_path, CHAT, LIMIT, strict=False, skipped=skipped)) == 2
    assert skipped == {"messages": 1, "json": 2, "no_target": 1}
    with pytest.raises(ValueError, match="a1.jsonl:2: messages"):
        read_sft(tmp_path, CHAT, LIMIT)


def test_rows_are_read_one_at_a_time(tmp_path):
    file = write(tmp_path / "rows.jsonl", {"text": "return x"}, b"{\n")
    rows = sources.rows(file)
    assert next(rows) == (f"{file}:1", {"text": "return x"})
    assert isinstance(next(rows)[1], ValueError) and next(rows, None) is None


def test_plain_texts_come_from_folders_too(tmp_path):
    write(tmp_path / "t2.jsonl", {"text": "return return"})
    write(tmp_path / "t10.jsonl", {"text": TICKS})
    ids = [CHAT.tokenizer.decode(e.row.ids) for e in read_text(tmp_path, CHAT.tokenizer, LIMIT)]
    assert ids == ["return return", TICKS]


# --- through the stages

def test_a_stage_reads_a_folder_and_its_log_says_what_was_left_out(tmp_path, capsys):
    rows = tmp_path / "rows"
    rows.mkdir()
    write(rows / "part-9.jsonl", *[{"messages": [U, done()], "resolved": i % 2} for i in range(6)])
    write(rows / "part-10.jsonl.gz", {"messages": [U]}, b"{")
    CHAT.tokenizer.save(tmp_path)
    sizes = {"hidden": 16, "layers": 1, "heads": 1, "kv_heads": 1, "head_dim": 16, "intermediate": 16}
    hf.save(random_model(Config.model_validate({"model": sizes}), CHAT.tokenizer), tmp_path / "m",
            tokenizer_from=tmp_path)
    stage = ["--stage", "coding-sft", "--model", str(tmp_path / "m"), "--data.rows", str(rows), "--train.steps", "1",
             "--run.folder", str(tmp_path / "run")]
    with pytest.raises(SystemExit) as left:
        train.main(stage + ["--data.only_resolved", "true"])
    assert left.value.code == 2 and "part-10.jsonl.gz:1: resolved: is missing" in capsys.readouterr().err
    assert train.main(stage + ["--data.only_resolved", "true", "--data.strict", "false"]) == 0
    logged = json.loads((tmp_path / "run" / "coding-sft" / "metrics.jsonl").read_text())
    counts = {name: n for name, n in logged.items() if name.startswith("data/")}
    assert counts == {"data/left_out_unresolved": 3, "data/left_out_no_mark": 1, "data/left_out_json": 1}


def test_a_dry_run_counts_the_rows_of_a_folder_as_a_bound_where_some_may_be_left_out(tmp_path):
    for n in (2, 10):
        write(tmp_path / f"{n}.jsonl", *[{"messages": [U, done()]}] * n)
    for data, steps in (({}, "steps           3 of 4"), ({"only_resolved": True}, "steps           at most 3 of 4"),
                        ({"strict": False}, "steps           at most 3 of 4")):
        config = Config.model_validate({"data": {"rows": str(tmp_path), **data}, "train": {"batch": 4}})
        assert steps in describe("coding-sft", config, SimpleNamespace(resume=False))
        assert data_file(config, "coding-sft") == tmp_path
    with pytest.raises(FileNotFoundError, match="does not exist"):
        data_file(Config.model_validate({"data": {"tasks": str(tmp_path / "none")}}), "oprd")
