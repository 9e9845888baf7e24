"""--stage score and --stage export: the two commands for comparing this program with another."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import tiny

from oprd.core import hf
from oprd.core.score import read_lines, score_lines

ROOT = Path(__file__).resolve().parent.parent


def train(*arguments):
    return subprocess.run([sys.executable, "train.py", *map(str, arguments)], cwd=ROOT, capture_output=True, text=True)


def lines_of(*lengths):
    generator = torch.Generator().manual_seed(0)
    return [{"ids": torch.randint(240, (n,), generator=generator).tolist(), "tag": n} for n in lengths]


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_scores_are_transformers_log_probabilities_one_line_for_one_line(tmp_path):
    theirs = tiny("qwen3_5_text", tmp_path / "m")
    lines = lines_of(9, 1, 70, 2)
    source = write(tmp_path / "in.jsonl", lines)
    done = train("--stage", "score", "--model", tmp_path / "m", "--input", source)
    assert done.returncode == 0, done.stderr
    scored = [json.loads(text) for text in done.stdout.splitlines()]
    assert [{k: line[k] for k in ("ids", "tag")} for line in scored] == lines
    for line in scored:
        ids = torch.tensor(line["ids"])
        with torch.no_grad():
            wanted = theirs(input_ids=ids[None]).logits[0].log_softmax(-1)[:-1].gather(1, ids[1:, None]).squeeze(1)
        torch.testing.assert_close(torch.tensor(line["logprobs"]), wanted, atol=1e-4, rtol=1e-4)
    train("--stage", "score", "--model", tmp_path / "m", "--input", source, "--output", tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_text() == done.stdout
    again = train("--stage", "score", "--model", tmp_path / "m", "--input", source, "--output", tmp_path / "out.jsonl")
    assert again.returncode == 2 and "out.jsonl exists" in again.stderr


@pytest.mark.parametrize("budget", [1, 10, 10_000])
def test_lines_score_the_same_whoever_shares_their_forward(tmp_path, budget):
    tiny("qwen3_5_moe_text", tmp_path / "m")
    model, lines = hf.load(tmp_path / "m", torch.float64), lines_of(5, 3, 8, 1, 40, 2)
    alone = [next(score_lines(model, [line], 10)) for line in lines]
    for got, wanted in zip(score_lines(model, lines, budget), alone, strict=True):
        assert got["logprobs"] == pytest.approx(wanted["logprobs"], abs=1e-10)


BAD = {"not json": ('{"ids": [1, 2', "in.jsonl:2: is not valid JSON"), "no ids": ('{"id": [1]}', 'in.jsonl:2: must be an object'),
       "no list": ('{"ids": "1 2"}', "in.jsonl:2: must be an object"), "empty": ('{"ids": []}', "in.jsonl:2: must be"),
       "a fraction": ('{"ids": [1, 2.5]}', "in.jsonl:2: must be an object"),
       "a list": ("[1, 2]", "in.jsonl:2: must be a JSON object, got list; each line must be an object of its own"),
       "scored": ('{"ids": [1], "logprobs": []}', "in.jsonl:2: has a field logprobs already"),
       "outside": ('{"ids": [1, 256]}', "in.jsonl:2: ids holds 256, the model's vocabulary is 0..255")}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_line_is_named(kind, tmp_path):
    text, words = BAD[kind]
    (tmp_path / "in.jsonl").write_text('{"ids": [1, 2]}\n' + text + "\n")
    with pytest.raises(ValueError) as error:
        read_lines(tmp_path / "in.jsonl", 256)
    assert words in str(error.value)


def test_an_empty_file_and_a_file_that_is_one_array_are_named(tmp_path):
    for text, words in (("\n", "in.jsonl: no lines in the file"), ('[\n{"ids": [1]}\n]\n', "is the file one JSON array?")):
        (tmp_path / "in.jsonl").write_text(text)
        with pytest.raises(ValueError) as error:
            read_lines(tmp_path / "in.jsonl", 256)
        assert words in str(error.value)


def test_a_log_probability_that_is_no_number_is_null_and_told(tmp_path, caplog):
    tiny("qwen3", tmp_path / "m")
    model = hf.load(tmp_path / "m")
    model.model.norm.weight.data[0] = float("nan")
    (line,) = score_lines(model, [{"ids": [1, 2, 3]}], 10)
    assert json.loads(json.dumps(line, allow_nan=False))["logprobs"] == [None, None]
    assert "2 log-probabilities are not finite" in caplog.text


def test_separators_of_unicode_inside_a_text_end_no_line(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"ids": [1], "tag": "a\u2028b\x85c"}\n{"ids": [2]}\n', encoding="utf-8")
    assert [line["ids"] for line in read_lines(tmp_path / "in.jsonl", 256)] == [[1], [2]]


def test_with_a_bad_line_nothing_is_written(tmp_path):
    tiny("qwen3", tmp_path / "m")
    (tmp_path / "in.jsonl").write_text('{"ids": [1, 2]}\n{"ids": [1, 999]}\n')
    done = train("--stage", "score", "--model", tmp_path / "m", "--input", tmp_path / "in.jsonl", "--output", tmp_path / "out")
    assert done.returncode == 2 and "in.jsonl:2" in done.stderr and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_export_writes_the_same_files_and_says_what_it_wrote(tmp_path):
    tiny("qwen3_5_vl", tmp_path / "a")
    done = train("--stage", "export", "--model", tmp_path / "a", "--output", tmp_path / "b")
    assert done.returncode == 0 and "carried along" in done.stdout, done.stderr
    assert (tmp_path / "a" / hf.SINGLE).read_bytes() == (tmp_path / "b" / hf.SINGLE).read_bytes()
    again = train("--stage", "export", "--model", tmp_path / "a", "--output", tmp_path / "b")
    assert again.returncode == 2 and "already holds a model; name another place" in again.stderr
    for inside in (tmp_path / "a", tmp_path / "b" / ".." / "a" / "c"):
        with pytest.raises(ValueError, match="lies within .*a, the model to be read; name a place outside it"):
            hf.export(tmp_path / "a", inside)


@pytest.mark.parametrize("arguments, words", [
    (["--stage", "score"], "--stage score needs --model DIR"),
    (["--stage", "export", "--model", "nowhere"], "needs --output DIR"),
    (["--stage", "export", "--model", "nowhere", "--output", "x"], "nowhere"),
    (["--stage", "eval", "--input", "x"], "--input means nothing to --stage eval"),
])
def test_an_option_that_is_missing_or_out_of_place_is_one_line(arguments, words):
    done = train(*arguments)
    assert done.returncode == 2 and words in done.stderr and len(done.stderr.splitlines()) == 1
