"""SFT files to examples, and the order they are read in."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from oprd.core.chat import Chat
from oprd.core.data import Order, read_sft, read_text
from oprd.core.tokenizer import train_bpe

CHAT = Chat(train_bpe(["user assistant tool def f(x):\n    return x\n"] * 9, 300))
U = {"role": "user", "content": "q"}
A = {"role": "assistant", "content": "yes"}


def write(tmp_path, *lines):
    file = tmp_path / "rows.jsonl"
    encoded = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    file.write_bytes(b"".join(line + b"\n" for line in encoded))
    return file


def test_a_row_becomes_the_rendered_ids_with_weight_1_on_every_sampled_token(tmp_path):
    file = write(tmp_path, {"messages": [U, A, U, {**A, "weight": 0}], "id": "r1"}, b"", {"messages": [U, A]})
    first, second = read_sft(file, CHAT, 1000)
    gen, yes = CHAT.generation_ids, CHAT.assistant("yes")
    start = len(CHAT.open(None, "q") + gen)
    assert first.row.ids.tolist() == list(CHAT.open(None, "q") + gen + yes + CHAT.user("q") + gen + yes)
    assert first.row.targets.tolist() == list(range(start, start + len(yes)))
    assert first.row.ids[first.row.targets[-1]] == CHAT.end_id
    assert first.row.ids.dtype == first.row.targets.dtype == np.int64
    assert first.weights.keys() == {"nll"} and first.weights["nll"].tolist() == [1.0] * len(yes)
    assert first.branch == "sft" and first.teacher is None
    assert (first.unit, first.source) == ("r1", f"{file}:1 (id r1)") and second.source == f"{file}:3"


def test_tools_reach_the_ids(tmp_path):
    tools = [{"type": "function", "function": {"name": "bash"}}]
    row = {"messages": [U, A]}
    with_tools, as_text, without = read_sft(
        write(tmp_path, {**row, "tools": tools}, {**row, "tools": json.dumps(tools)}, row), CHAT, 2000
    )
    assert (with_tools.row.ids == as_text.row.ids).all() and len(with_tools.row.ids) > len(without.row.ids)
    assert '{"name": "bash"}' in CHAT.tokenizer.decode(with_tools.row.ids)


BAD = {  # reason -> (line, what the message says)
    "json": (b'{"messages": [{"role": "us', "row: is not valid JSON .*is the line cut off"),
    "shape": (
        {"id": "r9", "conversation": []},
        r"\(id r9\): row: fits no known shape: it has conversation, id; the nearest is ShareGPT .*, with conversations",
    ),
    "messages": ({"id": "r9", "messages": []}, r"\(id r9\): messages: must be a non-empty list, got an empty one"),
    "role": ({"messages": [U, {"role": "robot"}]}, r"messages\[1\].role: must be one of .* got 'robot'"),
    "arguments": (
        {"messages": [U, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": [1]}]}], "id": 7},
        r"\(id 7\): messages\[1\].tool_calls\[0\].arguments: must be an object, got a list",
    ),
    "tools": ({"messages": [U, A], "tools": {"name": "f"}}, "tools: must be a list of objects, got an object"),
    "unspeakable": ({"messages": [{"role": "assistant", "tool_calls": [{"name": "a b"}]}]}, "'a b' cannot be written"),
    "no_target": ({"messages": [U, {**A, "weight": 0}]}, "messages: no token to train"),
    "too_long": (
        {"messages": [U, {**A, "content": "x " * 500}]},
        r"messages: 10\d\d tokens must be at most max_tokens = 99",
    ),
}


@pytest.mark.parametrize("reason", list(BAD))
def test_a_bad_row_is_named_by_file_line_id_and_field(tmp_path, reason):
    line, message = BAD[reason]
    file = write(tmp_path, {"messages": [U, A]}, line)
    with pytest.raises(ValueError, match=f"rows.jsonl:2.*{message}") as caught:
        read_sft(file, CHAT, 99)
    assert "\n" not in str(caught.value)


def test_other_broken_lines_are_errors_too(tmp_path):
    for line in (b"[]", b"3", b"null", b"\xff\xfe", b"[" * 100_000):
        with pytest.raises(ValueError, match="rows.jsonl:1: row: "):
            read_sft(write(tmp_path, line), CHAT, 99)


@pytest.mark.parametrize("data,message", [
    ('{"messages": "\u00e9"}\n'.encode("latin-1"), "rows.jsonl:1: row: is not UTF-8 .*save the file as UTF-8"),
    ('{"messages": []}\n'.encode("utf-16"), "rows.jsonl:1: row: is not UTF-8"),
    (b'[{"messages": []}]', "row: must be a JSON object, got list; each line must be an object of its own"),
    (b'[\n{"messages": []}\n]\n', "row: is not valid JSON .*; is the file one JSON array?"),
])
def test_a_file_of_another_form_is_told_apart_from_a_line_cut_off(tmp_path, data, message):
    (tmp_path / "rows.jsonl").write_bytes(data)
    with pytest.raises(ValueError, match=message):
        read_sft(tmp_path / "rows.jsonl", CHAT, 99)


def test_a_byte_order_mark_is_passed_over(tmp_path):
    row = json.dumps({"messages": [U, A]}).encode()
    (tmp_path / "rows.jsonl").write_bytes(b"\xef\xbb\xbf" + row + b"\n" + row)
    assert len(read_sft(tmp_path / "rows.jsonl", CHAT, 99)) == 2


def test_bad_rows_can_be_left_out_with_a_count_by_reason(tmp_path, caplog):
    lines = [line for line, _ in BAD.values()]
    skipped = Counter()
    rows = [{"messages": [U, {**A, "content": f"yes {i}"}], "id": i} for i in range(3)]
    file = write(tmp_path, rows[0], *lines, rows[1], lines[0], rows[2])
    examples = read_sft(file, CHAT, 99, strict=False, skipped=skipped)
    assert [e.unit for e in examples] == ["0", "1", "2"]  # the file's order
    assert skipped == Counter(BAD.keys()) + Counter(["json"])
    assert "left out 10 of 13 rows" in caplog.text and "json 2" in caplog.text


def test_a_row_of_exactly_max_tokens_is_kept(tmp_path):
    file = write(tmp_path, {"messages": [U, A]})
    length = len(read_sft(file, CHAT, 10**6)[0].row.ids)
    assert len(read_sft(file, CHAT, length)) == 1
    with pytest.raises(ValueError, match=f"{length} tokens must be at most max_tokens = {length - 1}"):
        read_sft(file, CHAT, length - 1)


def test_a_file_that_is_missing_or_has_no_usable_row_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere.jsonl: no such file"):
        read_sft(tmp_path / "nowhere.jsonl", CHAT, 99)
    with pytest.raises(ValueError, match=r"no usable row \(0 left out\)"):
        read_sft(write(tmp_path), CHAT, 99)
    with pytest.raises(ValueError, match=r"no usable row \(1 left out\)"):
        read_sft(write(tmp_path, b"{"), CHAT, 99, strict=False)


def test_every_epoch_holds_every_item_once_in_an_order_of_its_own():
    for n in (1, 2, 7, 64):
        order = Order(n, seed=3)
        epochs = [[order[e * n + i] for i in range(n)] for e in range(4)]
        assert all(sorted(epoch) == list(range(n)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert [Order(64, 4)[i] for i in range(64)] != epochs[0]


def test_a_resumed_reading_sees_what_the_straight_one_saw():
    straight = Order(5, seed=1)
    want = [straight[i] for i in range(23)]
    for stop in (0, 3, 5, 8, 22):  # at the start, inside an epoch, at its edge
        resumed = Order(5, seed=1)
        assert [resumed[i] for i in range(stop, 23)] == want[stop:]
    assert [straight[i] for i in (22, 0, 11)] == [want[i] for i in (22, 0, 11)]  # position alone decides


def test_the_order_is_the_same_in_another_process():
    code = "from oprd.core.data import Order; o = Order(9, 5); print([o[i] for i in range(20)])"
    order = Order(9, 5)
    root = Path(__file__).parent.parent
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert json.loads(out.stdout) == [order[i] for i in range(20)]


def test_an_order_of_nothing_is_refused():
    with pytest.raises(ValueError, match="items = 0"):
        Order(0, 1)
    with pytest.raises(IndexError, match="-1"):
        Order(3, 1)[-1]


# --- plain text

def test_a_text_trains_every_token_but_the_first_and_is_cut_at_the_limit(tmp_path):
    file = write(tmp_path, {"text": "def f(x):"}, b"", {"text": "return return return"})
    first, second = read_text(file, CHAT.tokenizer, 7)
    ids = CHAT.tokenizer.encode("def f(x):")
    assert first.row.ids.tolist() == list(ids) and first.row.targets.tolist() == list(range(1, len(ids)))
    assert len(CHAT.tokenizer.encode("return return return")) > 4
    [short] = read_text(write(tmp_path, {"text": "return return return"}), CHAT.tokenizer, 4)
    assert short.row.ids.tolist() == second.row.ids.tolist()[:4]


@pytest.mark.parametrize("line,message", [
    (b'{"text": "cut', "rows.jsonl:2.*JSON"), ({"text": 3}, "rows.jsonl:2: .*text.* must be a string, got int"),
    ({"text": "x"}, "rows.jsonl:2: .*two tokens"), ({"txt": "return x"}, "rows.jsonl:2: .*text.* got NoneType"),
])
def test_a_bad_text_is_named_or_left_out_as_asked(tmp_path, line, message):
    file = write(tmp_path, {"text": "return x"}, line)
    with pytest.raises(ValueError, match=message):
        read_text(file, CHAT.tokenizer, 100)
    skipped = Counter()
    assert len(read_text(file, CHAT.tokenizer, 100, strict=False, skipped=skipped)) == 1 and skipped.total() == 1
