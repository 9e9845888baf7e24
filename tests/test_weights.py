"""core/hf.py and core/names.py: whatever form a checkpoint has, nothing is lost on the way in and out."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import MODELS, tiny

from oprd.core import hf, tensors
from oprd.core.settings import Train
from oprd.core.model import stays_float32
from oprd.core.trainer import Plan, Trainer
from oprd.core.types import Example, Row

torch.set_num_threads(1)


def files(folder):
    return {p.name: p.read_bytes() for p in sorted(Path(folder).iterdir())}


def tensors_of(folder):
    return {name: t for file in sorted(Path(folder).glob("*.safetensors")) for name, t in load_file(file).items()}


def rewrite(folder, change):
    """Change the tensors of a single-file folder."""
    tensors = load_file(folder / hf.SINGLE)
    change(tensors)
    save_file(tensors, folder / hf.SINGLE, metadata={"format": "pt"})


def add_mtp(tensors):
    tensors["mtp.fc.weight"] = torch.randn(64, 128)
    tensors["mtp.layers.0.mlp.experts.gate_up_proj"] = torch.randn(2, 3, 4).bfloat16()


def as_released(tensors):
    """The dtypes and the extra layer of the published Qwen3.5 folders."""
    add_mtp(tensors)
    tensors.update({n: x.bfloat16() for n, x in tensors.items() if "A_log" not in n and "linear_attn.norm" not in n})


def logits(folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(input_ids=torch.arange(5, 42)[None]).logits[0]


@pytest.mark.parametrize("name", MODELS)
def test_load_and_save_like_gives_the_same_bytes_and_transformers_reads_the_same_logits(name, tmp_path):
    tiny(name, tmp_path / "a", **({"max_shard_size": "100KB"} if name == "qwen3_moe" else {}))
    said = hf.export(tmp_path / "a", tmp_path / "b")
    assert "carried" in said
    before, after = files(tmp_path / "a"), files(tmp_path / "b")
    assert before.keys() == after.keys() and all(after[f] == before[f] for f in before)
    hf.export(tmp_path / "b", tmp_path / "c")
    assert files(tmp_path / "c") == after
    assert torch.equal(logits(tmp_path / "b"), logits(tmp_path / "a"))


@pytest.mark.parametrize("name", MODELS)
def test_our_own_form_is_read_by_transformers_with_the_same_logits(name, tmp_path):
    tiny(name, tmp_path / "a")
    hf.save(hf.load(tmp_path / "a"), tmp_path / "b")
    torch.testing.assert_close(logits(tmp_path / "b"), logits(tmp_path / "a"), atol=1e-5, rtol=1e-5)
    ours = hf.load(tmp_path / "b")
    assert all(torch.equal(t, ours.state_dict()[n]) for n, t in hf.load(tmp_path / "a").state_dict().items())


def test_vision_and_mtp_tensors_come_back_byte_for_byte_and_trained_ones_in_their_own_dtype(tmp_path):
    tiny("qwen3_5_moe_vl", tmp_path / "a")
    rewrite(tmp_path / "a", as_released)
    before = tensors_of(tmp_path / "a")
    assert {t.dtype for t in before.values()} == {torch.bfloat16, torch.float32}
    model = hf.load(tmp_path / "a")
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)  # exact in every dtype
    hf.save_like(model, tmp_path / "b", source=tmp_path / "a")
    after = tensors_of(tmp_path / "b")
    assert before.keys() == after.keys()
    carried = [n for n in before if n.startswith(("model.visual.", "mtp."))]
    assert len(carried) > 20 and all(torch.equal(before[n], after[n]) for n in carried)
    for name in before.keys() - set(carried):
        assert after[name].dtype == before[name].dtype and torch.equal(after[name], before[name] * 2), name
    assert (tmp_path / "a" / "config.json").read_bytes() == (tmp_path / "b" / "config.json").read_bytes()


def test_fused_and_single_experts_and_either_prefix_give_the_same_model(tmp_path):
    tiny("qwen3_5_moe_text", tmp_path / "a")
    plain = hf.load(tmp_path / "a").state_dict()

    def fuse(t):
        for layer in range(4):
            at = f"model.layers.{layer}.mlp.experts"
            gate, up, down = ([t.pop(f"{at}.{e}.{what}_proj.weight") for e in range(4)]
                              for what in ("gate", "up", "down"))
            t[f"{at}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(gate, up)])
            t[f"{at}.down_proj"] = torch.stack(down)
        for name in [n for n in t if n.startswith("model.")]:
            t[name.replace("model.", "model.language_model.", 1)] = t.pop(name)

    rewrite(tmp_path / "a", fuse)
    assert all(torch.equal(plain[n], t) for n, t in hf.load(tmp_path / "a").state_dict().items())


def test_a_half_precision_model_keeps_decays_and_norms_in_float32(tmp_path):
    tiny("qwen3_5_text", tmp_path / "a")
    kept = {n: t.dtype for n, t in hf.load(tmp_path / "a", dtype=torch.bfloat16).state_dict().items()}
    assert {n for n, d in kept.items() if d == torch.float32} == {n for n in kept if stays_float32(n)}
    assert stays_float32("model.layers.0.linear_attn.A_log") and stays_float32("model.layers.0.self_attn.q_norm.weight")
    assert not stays_float32("model.layers.0.linear_attn.in_proj_a.weight")


def test_another_dtype_is_written_and_said_in_config_json(tmp_path):
    tiny("qwen3_5_vl", tmp_path / "a")
    hf.save_like(hf.load(tmp_path / "a"), tmp_path / "b", tmp_path / "a", dtype=torch.bfloat16)
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and config["model_type"] == "qwen3_5"
    after = tensors_of(tmp_path / "b")
    assert after["model.language_model.norm.weight"].dtype == torch.bfloat16
    assert after["model.visual.pos_embed.weight"].dtype == torch.float32  # carried, not ours to change


def counted(monkeypatch, place, attribute):
    """Wraps what gives a tensor from or for a file; the list it returns gets how many earlier ones are still held."""
    from torch.multiprocessing.reductions import StorageWeakRef

    given, held, inner = [], [], getattr(place, attribute)

    def counting(*arguments):
        held.append(sum(not storage.expired() for storage in given))
        tensor = inner(*arguments)
        given.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor

    monkeypatch.setattr(place, attribute, counting)
    return held


def test_loading_holds_the_model_and_one_tensor(tmp_path, monkeypatch):
    tiny("qwen3_next", tmp_path / "a")
    held = counted(monkeypatch, tensors.Stored, "read")
    hf.load(tmp_path / "a")
    assert not any(held) and len(held) >= len(tensors_of(tmp_path / "a"))


@pytest.mark.parametrize("like", [True, False])
def test_saving_builds_one_tensor_at_a_time(tmp_path, monkeypatch, like):
    tiny("qwen3_next", tmp_path / "a")
    model = hf.load(tmp_path / "a")
    held = counted(monkeypatch, hf, "_built")
    hf.save_like(model, tmp_path / "b", tmp_path / "a") if like else hf.save(model, tmp_path / "b")
    assert held == [0] * len(tensors_of(tmp_path / "b"))


GATE = "model.layers.1.mlp.experts.2.gate_proj.weight"
WRONG = {
    "an expert is missing": (lambda t: t.pop(GATE), "mlp.experts.gate_up_proj is only partly there"),
    "an expert too many": (lambda t: t.update({GATE.replace(".2.", ".9."): t[GATE] + 1}), "unexpected tensor"),
    "an expert of another shape": (lambda t: t.update({GATE: t[GATE][:5].clone()}), f"{GATE} has shape [5, 64]"),
    "no head": (lambda t: t.pop("lm_head.weight"), "missing tensor lm_head.weight"),
    "a tensor twice": (lambda t: t.update({"model.language_model.norm.weight": t["model.norm.weight"] + 1}),
                       "model.norm.weight is more than once there"),
    "an expert twice and one missing": (
        lambda t: t.update({GATE.replace("2.gate", "3.gate").replace("model.", "model.language_model."): t.pop(GATE)}),
        "experts.gate_up_proj is more than once there, again in"),
    "linear attention in an attention layer": (
        lambda t: t.update({"model.layers.3.linear_attn.in_proj_ba.weight": torch.zeros(8, 64)}),
        "unexpected tensor model.layers.3.linear_attn"),
    "grouped rows": (lambda t: t.update({"model.layers.0.linear_attn.in_proj_ba.weight": torch.zeros(7, 64)}),
                     "in_proj_ba.weight has shape [7, 64], config.json asks for [8, 64]"),
}


@pytest.mark.parametrize("what", WRONG)
def test_tensors_that_are_not_exactly_the_models_are_refused_before_anything_is_written(what, tmp_path):
    change, words = WRONG[what]
    tiny("qwen3_next", tmp_path / "a")
    model = hf.load(tmp_path / "a")
    rewrite(tmp_path / "a", change)
    for act in (lambda: hf.load(tmp_path / "a"), lambda: hf.save_like(model, tmp_path / "b", tmp_path / "a")):
        with pytest.raises(ValueError) as error:
            act()
        assert words in str(error.value) and str(tmp_path / "a") in str(error.value) and "\n" not in str(error.value)
    assert sorted(os.listdir(tmp_path)) == ["a"]


def test_a_source_of_another_model_is_refused(tmp_path):
    tiny("qwen3", tmp_path / "a")
    tiny("qwen3_tied", tmp_path / "b")
    with pytest.raises(ValueError, match="another model .* tie_word_embeddings = True, the model has False"):
        hf.save_like(hf.load(tmp_path / "a"), tmp_path / "c", tmp_path / "b")


def test_a_shard_that_holds_what_the_index_does_not_say_is_refused(tmp_path):
    tiny("qwen3", tmp_path / "a", max_shard_size="60KB")
    index = json.loads((tmp_path / "a" / hf.INDEX).read_text())
    shards = sorted(set(index["weight_map"].values()))
    many = max(shards, key=list(index["weight_map"].values()).count)
    moved = next(n for n, file in index["weight_map"].items() if file == many)
    other = next(file for file in shards if file != many)
    index["weight_map"][moved] = other
    (tmp_path / "a" / hf.INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=f"{many}: holds {moved}, which .* places in {other}|{moved} is in"):
        hf.load(tmp_path / "a")
    del index["weight_map"][moved]
    (tmp_path / "a" / hf.INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=f"{many}: holds {moved}, which .* does not name"):
        hf.load(tmp_path / "a")


def test_what_a_killed_save_left_is_swept_by_the_next_and_a_moved_out_model_comes_back(tmp_path):
    tiny("qwen3", tmp_path / "a")
    model, dead = hf.load(tmp_path / "a"), 2**22 + 1  # above any process id of Linux
    hf.save(model, tmp_path / "m")
    (tmp_path / f".m.{dead}.tmp").mkdir()
    (tmp_path / ".m.1.tmp").mkdir()  # process 1 is alive
    (tmp_path / ".m.notes.tmp").mkdir()  # not ours
    (tmp_path / "m").rename(tmp_path / f".m.{dead}.old")  # killed between the two renames
    with pytest.raises(ValueError, match="already holds a model"):
        hf.save(model, tmp_path / "m")
    hf.save(model, tmp_path / "m", overwrite=True)
    assert sorted(os.listdir(tmp_path)) == [".m.1.tmp", ".m.notes.tmp", "a", "m"]
    shutil.rmtree(tmp_path / ".m.1.tmp")


def test_a_name_with_brackets_is_swept_too(tmp_path):
    tiny("qwen3", tmp_path / "a")
    (tmp_path / f".m[1].{2**22 + 1}.tmp").mkdir()
    hf.export(tmp_path / "a", tmp_path / "m[1]")
    assert sorted(os.listdir(tmp_path)) == ["a", "m[1]"]


def foreign(folder):
    """The file of a folder as another program might have written it: other order, unaligned, more metadata."""
    given = load_file(folder / hf.SINGLE)
    given["mtp.odd"] = torch.tensor([1, 2, 3], dtype=torch.int8)
    header, numbers = {"__metadata__": {"z": "1", "format": "pt", "a": "ä", "m": "2"}}, b""
    for name in sorted(given, key=lambda n: (n != "mtp.odd", n[::-1])):
        raw = given[name].reshape(-1).view(torch.uint8).numpy().tobytes()
        dtype = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int8: "I8"}[given[name].dtype]
        header[name] = dict(shape=list(given[name].shape), dtype=dtype, data_offsets=[len(numbers), len(numbers + raw)])
        numbers += raw
    text = json.dumps(header).encode()
    (folder / hf.SINGLE).write_bytes(len(text).to_bytes(8, "little") + text + numbers)


def test_a_file_in_another_programs_layout_comes_back_byte_for_byte(tmp_path):
    tiny("qwen3_5_vl", tmp_path / "a")
    wanted = hf.load(tmp_path / "a").state_dict()
    foreign(tmp_path / "a")
    assert all(torch.equal(t, wanted[n]) for n, t in hf.load(tmp_path / "a").state_dict().items())
    hf.export(tmp_path / "a", tmp_path / "b")
    assert files(tmp_path / "b") == files(tmp_path / "a")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_export_reads_every_dtype_exactly(dtype, tmp_path):
    tiny("qwen3_5_text", tmp_path / "a")
    rewrite(tmp_path / "a", lambda t: t.update({n: x.to(dtype) + 1 / 3 for n, x in t.items() if "A_log" not in n}))
    hf.export(tmp_path / "a", tmp_path / "b")
    assert files(tmp_path / "b") == files(tmp_path / "a")


def test_another_dtype_leaves_what_the_source_keeps_wider_and_corrects_the_index(tmp_path):
    tiny("qwen3_5_text", tmp_path / "a")
    rewrite(tmp_path / "a", lambda t: t.update({n: x.bfloat16() for n, x in t.items() if "A_log" not in n}))
    hf.save_like(hf.load(tmp_path / "a"), tmp_path / "b", tmp_path / "a", dtype=torch.float16)
    assert {n for n, t in tensors_of(tmp_path / "b").items() if t.dtype != torch.float16} == {
        f"model.layers.{i}.linear_attn.A_log" for i in range(3)}
    tiny("qwen3", tmp_path / "c", max_shard_size="60KB")
    hf.save_like(hf.load(tmp_path / "c"), tmp_path / "d", tmp_path / "c", dtype=torch.bfloat16)
    sizes = [json.loads((tmp_path / f / hf.INDEX).read_text())["metadata"]["total_size"] for f in "cd"]
    assert sizes[0] == 2 * sizes[1] == 2 * sum(t.nbytes for t in tensors_of(tmp_path / "d").values())
    assert all(t.dtype == torch.bfloat16 for t in hf.load(tmp_path / "d", torch.bfloat16).state_dict().values()
               if t.dim() > 1)


def lie(change):
    def apply(folder):
        index = json.loads((folder / hf.INDEX).read_text())
        change(index)
        (folder / hf.INDEX).write_text(json.dumps(index))
    return apply


LIES = {
    "metadata": (lie(lambda i: i.update(metadata=[1])), "metadata = [1] must be a JSON object"),
    "total": (lie(lambda i: i["metadata"].update(total_size=7)), "total_size = 7, but the shards hold 378368 bytes"),
    "no map": (lie(lambda i: i.pop("weight_map")), "weight_map must map tensor names to files of this folder"),
    "numbers": (lie(lambda i: i.update(weight_map=dict.fromkeys(i["weight_map"], 5))), "to files of this folder"),
    "elsewhere": (lie(lambda i: i.update(weight_map=dict.fromkeys(i["weight_map"], "../x.safetensors"))),
                  "to files of this folder"),
    "both forms": (lambda folder: shutil.copyfile(next(folder.glob("model-*")), folder / hf.SINGLE),
                   "remove the one that is stale"),
}


@pytest.mark.parametrize("what", LIES)
def test_an_index_that_lies_is_one_line_that_says_so(what, tmp_path):
    change, words = LIES[what]
    tiny("qwen3", tmp_path / "a", max_shard_size="60KB")
    hf.load(tmp_path / "a")
    change(tmp_path / "a")
    with pytest.raises(ValueError) as error:
        hf.load(tmp_path / "a")
    assert words in str(error.value) and str(tmp_path / "a") in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_equal_tied_head_is_written_back_and_an_unequal_one_refused_whatever_the_dtype(dtype, tmp_path):
    tiny("qwen3_tied", tmp_path / "a", max_shard_size="60KB")
    hf.export(tmp_path / "a", tmp_path / "sharded")
    assert files(tmp_path / "sharded") == files(tmp_path / "a")
    tiny("qwen3_tied", tmp_path / "a2")
    rewrite(tmp_path / "a2", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    model = hf.load(tmp_path / "a2", dtype)
    with torch.no_grad():
        model.head_weight.mul_(2)
    hf.save_like(model, tmp_path / "b", tmp_path / "a2")
    after = tensors_of(tmp_path / "b")
    assert torch.equal(after["lm_head.weight"], after["model.embed_tokens.weight"])
    rewrite(tmp_path / "a2", lambda t: t["lm_head.weight"][3, 3].add_(1e-6))  # nothing that bfloat16 would show
    for act in (lambda: hf.load(tmp_path / "a2", dtype), lambda: hf.save_like(model, tmp_path / "c", tmp_path / "a2")):
        with pytest.raises(ValueError, match="lm_head.weight differs from the embedding"):
            act()
    assert not (tmp_path / "c").exists()


def test_a_resumed_run_of_a_multi_modal_model_ends_in_the_form_it_started_from(tmp_path):
    """Checkpoints hold the language model alone, exactly; the final folder is the start's form again."""
    tiny("qwen3_5_vl", tmp_path / "start")
    rewrite(tmp_path / "start", as_released)

    def supply(step):
        row = Row(np.random.default_rng(step).integers(0, 240, 12), np.arange(4, 12))
        return [Example(row, {"nll": np.ones(8)}, "success")], {}

    plan = Plan(4, Train(batch=1, lr=1e-2, checkpoint_every=2))
    Trainer(plan, tmp_path / "whole", tmp_path / "start", False).run(supply)
    trainer = Trainer(plan, tmp_path / "cut", tmp_path / "start", False)
    with pytest.raises(KeyboardInterrupt):
        trainer.run(supply, lambda step: step == 3 and (_ for _ in ()).throw(KeyboardInterrupt))
    Trainer(plan, tmp_path / "cut", tmp_path / "start", True).run(supply)
    assert files(tmp_path / "cut" / "model") == files(tmp_path / "whole" / "model")
    before, after = tensors_of(tmp_path / "start"), tensors_of(tmp_path / "cut" / "model")
    assert [(n, t.dtype, t.shape) for n, t in before.items()] == [(n, t.dtype, t.shape) for n, t in after.items()]
    changed = {n for n in before if not torch.equal(before[n], after[n])}
    assert changed and not any(n.startswith(("model.visual.", "mtp.")) for n in changed)
