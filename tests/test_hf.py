"""core/hf.py and core/model.py against transformers, which reads what we write and computes the same numbers."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from oprd.core import hf
from oprd.core.model import Model, ModelConfig

torch.set_num_threads(1)


def small(tied: bool = False, **change) -> ModelConfig:
    sizes = dict(vocab_size=61, hidden_size=24, intermediate_size=36, num_hidden_layers=3, num_attention_heads=6,
                 num_key_value_heads=2, head_dim=10, rope_theta=1234.5, rms_norm_eps=1e-5, tie_word_embeddings=tied)
    return ModelConfig(**{**sizes, **change})


def randomised(config: ModelConfig, seed: int = 0) -> Model:
    """Every parameter random, norms included, large enough that each of them moves the logits."""
    model = Model(config).init(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * 0.3)
    return model


def packed(lengths, vocab, seed=1):
    ids = torch.randint(vocab, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    return ids, torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])


@pytest.mark.parametrize("tied", [False, True])
def test_logits_and_gradients_equal_those_of_transformers_reading_our_directory(tmp_path, tied):
    from transformers import AutoModelForCausalLM

    model = randomised(small(tied))
    hf.save(model, tmp_path / "m")
    theirs, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "m", dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    assert type(theirs).__name__ == "Qwen3ForCausalLM"
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    lengths = [7, 1, 13]
    ids, cu = packed(lengths, 61)
    ours = model.logits(ids, cu)
    want = torch.cat([theirs(input_ids=part[None]).logits[0] for part in ids.split(lengths)])
    torch.testing.assert_close(ours, want, atol=1e-4, rtol=1e-4)
    weight = torch.randn(ours.shape, generator=torch.Generator().manual_seed(2))
    (ours.log_softmax(-1) * weight).sum().backward()
    (want.log_softmax(-1) * weight).sum().backward()
    their_grads = {name: p.grad for name, p in theirs.named_parameters()}
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, their_grads[name], atol=1e-4, rtol=1e-3, msg=lambda m: f"{name}: {m}")


@pytest.mark.parametrize("tied", [False, True])
def test_we_read_what_transformers_writes(tmp_path, tied):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    theirs = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=33, hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=1, head_dim=6, tie_word_embeddings=tied, eos_token_id=5,
        rope_parameters={"rope_type": "default", "rope_theta": 777.0}, attn_implementation="eager"))
    theirs.save_pretrained(tmp_path)
    ours = hf.load(tmp_path)
    assert (ours.config.rope_theta, ours.config.eos_token_id) == (777.0, 5)
    ids, cu = packed([9], 33)
    torch.testing.assert_close(ours.logits(ids, cu), theirs(input_ids=ids[None]).logits[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shard_bytes", [10**9, 5000])
def test_saving_and_loading_gives_back_every_bit(tmp_path, shard_bytes):
    model = randomised(small())
    hf.save(model, tmp_path / "m", shard_bytes=shard_bytes)
    assert (tmp_path / "m" / hf.INDEX).exists() == (shard_bytes == 5000)
    again = hf.load(tmp_path / "m")
    assert again.config == model.config
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert [p.name for p in tmp_path.iterdir()] == ["m"]  # nothing left aside


def test_transformers_reads_our_shards(tmp_path):
    from transformers import AutoModelForCausalLM

    model = randomised(small())
    hf.save(model, tmp_path / "m", shard_bytes=5000)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32).state_dict()
    assert all(torch.equal(theirs[name], tensor) for name, tensor in model.state_dict().items())


def test_dtypes_convert_on_the_way_out_and_in(tmp_path):
    model = randomised(small())
    hf.save(model, tmp_path / "m", dtype=torch.bfloat16)
    assert json.loads((tmp_path / "m" / "config.json").read_text())["dtype"] == "bfloat16"
    again = hf.load(tmp_path / "m", dtype=torch.float64)
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor.bfloat16().double()), name


def test_tokenizer_files_are_carried_byte_for_byte(tmp_path):
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "tokenizer.json").write_bytes('{"ä": 1}\r\n'.encode())
    hf.save(randomised(small()), tmp_path / "m", tokenizer_from=tmp_path / "t")
    assert (tmp_path / "m" / "tokenizer.json").read_bytes() == (tmp_path / "t" / "tokenizer.json").read_bytes()
    assert not (tmp_path / "m" / "tokenizer_config.json").exists()


def test_an_existing_model_is_replaced_only_when_told_and_anything_else_never(tmp_path):
    first, second = randomised(small(), 0), randomised(small(), 1)
    hf.save(first, tmp_path / "m")
    with pytest.raises(ValueError, match="already holds a model"):
        hf.save(second, tmp_path / "m")
    assert torch.equal(hf.load(tmp_path / "m").head_weight, first.head_weight)
    hf.save(second, tmp_path / "m", overwrite=True)
    assert torch.equal(hf.load(tmp_path / "m").head_weight, second.head_weight)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    with pytest.raises(ValueError, match="not a model directory"):
        hf.save(second, tmp_path / "thesis", overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m", "thesis"]


def test_a_save_that_fails_half_way_leaves_the_old_model_and_no_rubbish(tmp_path, monkeypatch):
    model = randomised(small())
    hf.save(model, tmp_path / "m")

    def full_disk(*_, **__):
        raise OSError("No space left on device")

    monkeypatch.setattr(hf, "write_file", full_disk)
    with pytest.raises(OSError, match="No space left"):
        hf.save(randomised(small(), 1), tmp_path / "m", overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
    assert torch.equal(hf.load(tmp_path / "m").head_weight, model.head_weight)


def break_shard(folder):
    (folder / "model-00002-of-00020.safetensors").unlink()


def truncate(folder):
    file = folder / "model-00001-of-00020.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def lie_in_index(folder):
    index = json.loads((folder / hf.INDEX).read_text())
    index["weight_map"]["model.ghost.weight"] = "model-00001-of-00020.safetensors"
    (folder / hf.INDEX).write_text(json.dumps(index))


def single(change):
    def apply(folder):
        tensors = {}
        for file in folder.glob("*.safetensors"):
            tensors.update(load_file(file))
            file.unlink()
        (folder / hf.INDEX).unlink()
        change(tensors)
        save_file(tensors, folder / hf.SINGLE)
    return apply


NORM = "model.norm.weight"
BREAKAGES = {
    "shard": (break_shard, FileNotFoundError, ["model-00002-of-00020.safetensors", "is missing", hf.INDEX]),
    "truncated": (truncate, ValueError, ["model-00001-of-00020.safetensors", "not a whole safetensors file"]),
    "index": (lie_in_index, ValueError, ["model.ghost.weight", "not in the shard"]),
    "no weights": (lambda f: (f / hf.INDEX).unlink(), FileNotFoundError, ["neither model.safetensors"]),
    "no config": (lambda f: (f / "config.json").unlink(), FileNotFoundError, ["config.json"]),
    "bad config": (lambda f: (f / "config.json").write_text('{"a":'), ValueError, ["config.json", "not JSON"]),
    "missing": (single(lambda t: t.pop(NORM)), ValueError, ["missing tensor model.norm.weight"]),
    "unexpected": (single(lambda t: t.update(extra=t[NORM] + 1)), ValueError, ["unexpected tensor extra"]),
    "shape": (single(lambda t: t.update({NORM: t[NORM][:5].clone()})), ValueError, [NORM, "[5]", "[24]"]),
    "dtype": (single(lambda t: t.update({NORM: t[NORM].to(torch.int8)})), ValueError, [NORM, "stored as I8"]),
}


@pytest.mark.parametrize("kind", BREAKAGES)
def test_a_broken_directory_is_one_line_that_names_the_place(tmp_path, kind):
    breaking, error_type, words = BREAKAGES[kind]
    hf.save(randomised(small()), tmp_path / "m", shard_bytes=5000)
    assert len(list((tmp_path / "m").glob("*-of-00020.safetensors"))) == 20
    breaking(tmp_path / "m")
    with pytest.raises(error_type) as error:
        hf.load(tmp_path / "m")
    assert str(tmp_path / "m") in str(error.value) and "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_a_missing_directory_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere: no such model directory"):
        hf.load(tmp_path / "nowhere")


def test_a_tied_model_with_another_head_in_its_file_is_refused(tmp_path):
    hf.save(randomised(small(tied=True)), tmp_path / "m")
    tensors = load_file(tmp_path / "m" / hf.SINGLE)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "m" / hf.SINGLE)
    hf.load(tmp_path / "m")
    tensors["lm_head.weight"] += 1
    save_file(tensors, tmp_path / "m" / hf.SINGLE)
    with pytest.raises(ValueError, match="lm_head.weight differs"):
        hf.load(tmp_path / "m")
