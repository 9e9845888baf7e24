"""Text to ids and back: nothing is lost, and no text is ever a control token."""

import itertools
import json
import random
import re

import pytest
import tokenizers

from oprd.core.tokenizer import MARKS, SPECIAL, Tokenizer, train_bpe

CORPUS = [
    f"def {name}_{verb}(items, limit):\n    for item in items:\n        if item > {n}:\n            return {name}\n"
    for name, verb, n in itertools.product(("ledger", "basket", "orbit"), ("total", "merge", "scan"), range(12))
]


@pytest.fixture(scope="module")
def small() -> Tokenizer:
    return train_bpe(CORPUS, 400)


def test_any_text_survives_the_round_trip(small):
    rng = random.Random(0)
    alphabet = "ab_Z09 \n\t\r()<>|/éß漢😀\u0301\u00a0\x00\u2028\\\"'"
    texts = ["", " ", "\n\n   \n", "\r\n", "e\u0301", "🧑‍🚀"] + list(SPECIAL + MARKS)
    texts += ["".join(rng.choices(alphabet, k=rng.randrange(60))) for _ in range(300)]
    for text in texts:
        assert small.decode(small.encode(text)) == text


def test_a_name_has_the_same_ids_wherever_it_stands(small):
    for name in ("ledger_total", "basketmerge", "qzx", "orbit2", "_scan"):
        ids = small.encode(name)
        befores, afters = ("", " ", "\n", "\n    ", "(", ".", "=", '"', "\t"), ("", " ", "(", "\n")
        for before, after in itertools.product(befores, afters):
            around = small.encode(before), small.encode(after)
            assert small.encode(before + name + after) == around[0] + ids + around[1]


def test_text_is_cut_into_words_digits_line_starts_spaces_and_the_rest(small):
    cut = [piece for piece, _ in small._plain.pre_tokenizer.pre_tokenize_str("ab_c12  x\n\n    y(): é")]
    assert cut == ["ab", "_", "c", "1", "2", "ĠĠ", "x", "Ċ", "ĊĠĠĠĠ", "y", "():", "Ġ", "Ã©"]


def test_the_spelling_of_a_control_token_never_becomes_its_id(small):
    for name in SPECIAL + MARKS:
        for text in (name, f"x{name}y", f"{name}{name}", f" {name}\n"):
            assert not set(small.encode(text)) & small.control_ids
    assert small._full.encode("<|im_start|>").ids == [small.token_id("<|im_start|>")]  # the library alone would


def test_a_control_token_hidden_by_the_normaliser_or_a_post_processor_stays_text():
    spec = json.loads(train_bpe(CORPUS, 300).spec)
    spec["normalizer"] = {"type": "Lowercase"}
    start = next(t["id"] for t in spec["added_tokens"] if t["content"] == "<|im_start|>")
    template = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}}], "pair": [{"Sequence": {"id": "A", "type_id": 0}},
                {"Sequence": {"id": "B", "type_id": 0}}],
                "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [start], "tokens": ["<|im_start|>"]}}}
    spec["post_processor"] = template
    tokenizer = Tokenizer(json.dumps(spec))
    assert not set(tokenizer.encode("<|IM_START|> <TOOL_CALL>")) & tokenizer.control_ids


def test_a_saved_truncation_or_padding_changes_no_ids(small):
    spec = json.loads(small.spec)
    spec["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    spec["padding"] = {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                       "pad_type_id": 0, "pad_token": "!"}
    assert Tokenizer(json.dumps(spec)).encode("one two three four") == small.encode("one two three four")


def test_control_tokens_are_the_last_nine_ids_in_qwens_order_and_three_are_special(small):
    ids = [small.token_id(name) for name in SPECIAL + MARKS]
    assert ids == list(range(small.vocab_size - 9, small.vocab_size)) and small.control_ids == set(ids)
    added = {t["content"]: t["special"] for t in json.loads(small.spec)["added_tokens"]}
    assert [name for name, special in added.items() if special] == list(SPECIAL)
    assert small.decode(ids) == "".join(SPECIAL + MARKS)  # decoding keeps them
    with pytest.raises(ValueError, match=re.escape("<|nope|>")):
        small.token_id("<|nope|>")


def test_the_same_texts_give_the_same_file_in_any_order():
    specs = {train_bpe(random.Random(seed).sample(CORPUS, len(CORPUS)), 420).spec for seed in range(4)}
    assert len(specs) == 1


def test_training_gives_the_size_asked_for_or_less_when_the_texts_run_out():
    assert train_bpe(CORPUS, 300).vocab_size == 300
    assert train_bpe(["abab"], 5000).vocab_size < 280
    assert train_bpe([], 265).vocab_size == 265
    with pytest.raises(ValueError, match="264.*265"):
        train_bpe(CORPUS, 264)


def test_saving_and_loading_is_byte_for_byte(small, tmp_path):
    small.save(tmp_path)
    for path in (tmp_path, tmp_path / "tokenizer.json", str(tmp_path)):
        again = Tokenizer.load(path)
        assert again.spec == small.spec and again.encode("ledger_total(x)") == small.encode("ledger_total(x)")


def test_loading_says_which_file_is_wrong_in_one_line(tmp_path):
    with pytest.raises(FileNotFoundError, match="tokenizer.json"):
        Tokenizer.load(tmp_path)
    for text in ("{", "[]", '{"model": 3}', "\xff", "{}"):
        (tmp_path / "tokenizer.json").write_text(text, encoding="latin-1")
        with pytest.raises(ValueError, match=re.escape(str(tmp_path))) as caught:
            Tokenizer.load(tmp_path)
        assert "\n" not in str(caught.value)


def test_a_tokenizer_larger_than_the_model_is_refused_with_both_numbers(small):
    small.fits(small.vocab_size)
    small.fits(small.vocab_size + 100)
    with pytest.raises(ValueError, match=f"0..{small.vocab_size - 1}.*{small.vocab_size - 1};"):
        small.fits(small.vocab_size - 1)


def test_lone_surrogates_become_the_replacement_character(small):
    assert small.decode(small.encode("a\ud800b")) == "a\ufffdb"


def test_transformers_reads_the_file_and_agrees_on_plain_text(small, tmp_path):
    transformers = pytest.importorskip("transformers", reason="the oracle for reading tokenizer.json")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(small.save(tmp_path)))
    text = "def ledger_total(items):\n    return 12\n"
    assert tuple(theirs.encode(text, add_special_tokens=False)) == small.encode(text)
    assert tokenizers.Tokenizer.from_str(small.spec).get_vocab_size() == small.vocab_size


def test_a_control_token_is_there_once_as_one_id_of_its_own_or_the_file_is_refused(small, tmp_path):
    def refused(change, words):
        spec = json.loads(small.spec)
        change(spec)
        (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
        with pytest.raises(ValueError, match=f"not a usable tokenizer.json: added token {words}") as caught:
            Tokenizer.load(tmp_path)
        assert "\n" not in str(caught.value)

    def mark(spec, name="<think>"):
        return next(t for t in spec["added_tokens"] if t["content"] == name)

    refused(lambda spec: spec["added_tokens"].append(dict(mark(spec))), "'<think>' is listed 2 times")
    refused(lambda spec: mark(spec).update(id=5), rf"'<think>' is encoded as the ids \[{small.token_id('<think>')}\]")

    def forge(spec):  # the last merged piece becomes the mark's spelling, which the model looks up whole
        vocabulary = spec["model"]["vocab"]
        id = vocabulary.pop("".join(spec["model"]["merges"].pop()))
        vocabulary["<think>"] = mark(spec)["id"] = id
        mark(spec, "</think>")["id"] -= 1
        spec["model"]["ignore_merges"], spec["pre_tokenizer"] = True, None

    refused(forge, "'<think>' is also an entry of the vocabulary")
