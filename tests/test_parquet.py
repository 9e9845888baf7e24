"""Parquet files of rows: the same examples as JSON lines, without what the columnar form adds."""

import json
import sys
from collections import Counter

import pytest

from public_rows import BASH, ROWS, U, done
from oprd.core import sources
from oprd.core.chat import Chat
from oprd.core.data import read_sft, read_text
from oprd.core.tokenizer import train_bpe

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

CHAT = Chat(train_bpe(["user assistant tool def f(x):\n    return x\n"] * 9, 300))
LIMIT = 10**5


def parquet(file, rows, **settings):
    pq.write_table(rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows), file, **settings)
    return file


def lines(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def read(file, **settings):
    return read_sft(file, CHAT, LIMIT, **settings)


def same(a, b):
    return (a.row.ids.tolist(), a.row.targets.tolist(), a.weights["nll"].tolist()) == (
        b.row.ids.tolist(), b.row.targets.tolist(), b.weights["nll"].tolist())


def calling(*calls):
    return {"role": "assistant", "content": None, "tool_calls": list(calls)}


@pytest.mark.parametrize("name", list(ROWS))
def test_every_public_shape_gives_the_same_ids_and_targets_from_parquet_and_from_json_lines(tmp_path, name):
    rows = [ROWS[name][0]] * 3
    columnar = read(parquet(tmp_path / "rows.parquet", rows, row_group_size=2))
    plain = read(lines(tmp_path / "rows.jsonl", rows))
    assert len(columnar) == 3 and all(map(same, columnar, plain))


def test_a_call_has_exactly_the_arguments_of_its_source_though_the_column_holds_those_of_all_tools(tmp_path):
    edits = [{"old": "x", "new": "y"}, {"old": "z"}]
    rows = [
        {"messages": [U, calling({"name": "bash", "arguments": {"command": "ls"}}), {"role": "tool", "content": "a"},
                      calling({"name": "edit", "arguments": {"path": "a.py", "edits": edits}},
                              {"name": "wait", "arguments": {"seconds": 0, "quiet": False, "note": ""}})]},
        {"messages": [U, done(reasoning_content="hm")]},
    ]
    file = parquet(tmp_path / "rows.parquet", rows)
    stored = pq.read_table(file).to_pylist()[0]["messages"][1]["tool_calls"][0]["arguments"]
    invented = dict.fromkeys(("path", "edits", "seconds", "quiet", "note"))
    assert stored == {"command": "ls", **invented}
    columnar, plain = read(file), read(lines(tmp_path / "rows.jsonl", rows))
    assert all(map(same, columnar, plain))
    text = CHAT.tokenizer.decode(columnar[0].row.ids)
    assert text.count("<parameter=") == 6 and "None" not in text and "null" not in text  # command, path, edits and 3


def test_schemas_and_calls_without_arguments_survive_the_column(tmp_path):
    tool = {"type": "function", "function": {"name": "edit", "parameters": {"type": "object", "properties": {
        "path": {"type": "string", "enum": ["a", "b"]}}, "required": ["path"]}}}
    both = calling({"name": "submit", "arguments": {}}, {"name": "bash", "arguments": {"command": "ls"}})
    rows = [{"messages": [U, both], "tools": [BASH, tool]}]
    [columnar], [plain] = read(parquet(tmp_path / "rows.parquet", rows)), read(lines(tmp_path / "rows.jsonl", rows))
    assert same(columnar, plain)


def test_nulls_that_cannot_be_invented_are_kept(tmp_path):
    """JSON text in a column, elements of a list, values of a map: what is null there was null in the source."""
    as_text = [{"messages": [U, calling({"name": "f", "arguments": '{"a": null}'})]}]
    [columnar], [plain] = read(parquet(tmp_path / "a.parquet", as_text)), read(lines(tmp_path / "a.jsonl", as_text))
    assert same(columnar, plain) and "<parameter=a>\nNone\n" in CHAT.tokenizer.decode(columnar.row.ids)

    number, text = pa.int64(), pa.string()
    kind = pa.schema([("l", pa.large_list(number)), ("m", pa.map_(text, pa.struct([("x", number), ("y", number)]))),
                      ("n", pa.map_(text, number)),
                      ("s", pa.struct([("x", number), ("z", pa.struct([("w", number)]))]))])
    row = {"l": [1, None], "m": [("k", {"x": None, "y": 2})], "n": [("k", None)], "s": {"x": None, "z": {"w": None}}}
    file = parquet(tmp_path / "b.parquet", pa.Table.from_pylist([row, {}], schema=kind))
    want = {"l": [1, None], "m": {"k": {"y": 2}}, "n": {"k": None}, "s": {"z": {}}}
    assert [got for _, got in sources.rows(file)] == [want, {}]


def test_rows_keep_their_order_and_their_numbers_over_row_groups_and_batches(tmp_path):
    rows = [{"text": f"return {i}"} for i in range(2 * sources._BATCH + 7)]
    file = parquet(tmp_path / "rows.parquet", rows, row_group_size=sources._BATCH + 3)
    got = list(sources.rows(file))
    assert [row for _, row in got] == rows and sources.count(file) == len(rows)
    n = sources._BATCH + 3
    assert [got[i][0] for i in (0, n)] == [f"{file}:1, row group 1", f"{file}:{n + 1}, row group 2"]
    texts = [CHAT.tokenizer.decode(e.row.ids) for e in read_text(file, CHAT.tokenizer, LIMIT)]
    assert texts == [row["text"] for row in rows]


def test_a_bad_row_is_named_by_file_row_group_and_id_or_counted(tmp_path):
    rows = [{"uuid": f"u{i}", "messages": [U, done("robot" if i == 2 else "assistant")]} for i in range(4)]
    file = parquet(tmp_path / "rows.parquet", rows, row_group_size=2)
    with pytest.raises(ValueError, match=r"rows.parquet:3, row group 2 \(id u2\): messages\[1\].role: .* got 'robot'"):
        read(file)
    skipped = Counter()
    assert [e.unit for e in read(file, strict=False, skipped=skipped)] == ["u0", "u1", "u3"] and skipped == {"role": 1}


def test_a_file_with_a_wrong_column_says_what_it_has_and_what_is_nearest(tmp_path):
    file = parquet(tmp_path / "rows.parquet", [{"id": "r1", "conversation": [U, done()]}])
    with pytest.raises(ValueError, match=r"rows.parquet:1, row group 1 \(id r1\): row: fits no known shape: it has "
                                         r"conversation, id; the nearest is ShareGPT or chat in conversations, with"):
        read(file)
    with pytest.raises(ValueError, match=r"no usable row \(1 left out\)"):
        read(file, strict=False)
    number = parquet(tmp_path / "n.parquet", [{"messages": 3}])
    with pytest.raises(ValueError, match="n.parquet:1, row group 1: messages: must be a non-empty list, got int"):
        read(number)


def test_a_file_without_rows_is_an_error(tmp_path):
    file = parquet(tmp_path / "rows.parquet", pa.table({"messages": pa.array([], pa.string())}))
    assert sources.count(file) == 0
    with pytest.raises(ValueError, match=r"rows.parquet: no usable row \(0 left out\)"):
        read(file)


@pytest.mark.parametrize("strict", [True, False])
def test_a_damaged_file_is_an_error_in_one_line_whatever_is_skipped(tmp_path, strict):
    rows = [{"id": i, "messages": [U, done(content=f"{i} " * 99)]} for i in range(99)]
    file = parquet(tmp_path / "rows.parquet", rows)
    whole = file.read_bytes()
    for damaged in (b"", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", whole[:-20], whole[:200]):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"rows.parquet: is no Parquet file \(.*git LFS") as caught:
            read(file, strict=strict)
        assert "\n" not in str(caught.value)
    file.write_bytes(whole[:4] + bytes(len(whole) // 2) + whole[4 + len(whole) // 2:])  # the footer is whole
    with pytest.raises(ValueError, match=r"rows.parquet: cannot be read after row 0 \(.*is the file damaged"):
        read(file, strict=strict)


def test_columns_that_python_cannot_hold_do_not_matter(tmp_path):
    table = pa.table({"created_at": pa.array([1], pa.timestamp("ns")), "id": ["a"], "text": ["return x"]})
    file = parquet(tmp_path / "rows.parquet", table)
    assert [row for _, row in sources.rows(file)] == [{"id": "a", "text": "return x"}]
    broken = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff\xfe"], pa.binary()).buffers())
    file = parquet(tmp_path / "bytes.parquet", pa.table({"text": broken}))
    with pytest.raises(ValueError, match="bytes.parquet: cannot be read after row 0 .*utf-8"):
        read_text(file, CHAT.tokenizer, LIMIT)


def test_a_folder_may_hold_parquet_and_json_lines_and_only_resolved_reads_both(tmp_path):
    rows = [{"id": f"r{i}", "resolved": i % 2, "messages": [U, done()]} for i in range(4)]
    parquet(tmp_path / "part-10.parquet", rows[2:])
    lines(tmp_path / "part-9.jsonl", rows[:2])
    assert [e.unit for e in read(tmp_path)] == ["r0", "r1", "r2", "r3"]
    assert [e.unit for e in read(tmp_path, only_resolved=True)] == ["r1", "r3"]


def test_without_pyarrow_one_line_says_how_to_get_it(tmp_path, monkeypatch):
    file = parquet(tmp_path / "rows.parquet", [{"messages": [U, done()]}])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for reading in (read, sources.count):
        with pytest.raises(ValueError, match="rows.parquet: reading Parquet needs pyarrow; pip install pyarrow"):
            reading(file)
    assert len(read(lines(tmp_path / "rows.jsonl", [{"messages": [U, done()]}]))) == 1
