"""`--stage plan` against what is measured: memory and products of tiny models, bytes of real steps; its refusals."""

import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from families_help import config_of, randomised
from parallel_help import HEADS, mesh_of, part_of
from ranks_help import ranks
from torch.utils.flop_counter import FlopCounterMode, bmm_flop

from oprd.core import config as configuration
from oprd.core.optim import AdamW
from oprd.core.plan_costs import Work, costs
from oprd.core.plan_report import report
from oprd.core.settings import Parallel
from oprd.core.step import train_step
from oprd.core.types import Example, Row
from oprd.parallel.mesh import Sizes
from oprd.parallel.reducer import Reducer

torch.set_num_threads(1)
LENGTH = 128
WIDE = dict(hidden_size=64, intermediate_size=96, head_dim=16, num_attention_heads=8, num_key_value_heads=8)
TINY = {"qwen3": WIDE, "qwen3_5_text": {**HEADS, **WIDE}, "qwen3_5_moe_text": {**HEADS, **WIDE, "num_experts": 8,
                                                                              "intermediate_size": 0}}
COUNTS = torch.tensor([0, LENGTH], dtype=torch.int32)


@functools.cache
def planned(family, **settings):
    return costs(config_of(family, **TINY[family]), Parallel(zero=0, **settings), 1, Work(1, LENGTH, LENGTH))


@pytest.mark.parametrize("family", TINY)
def test_memory_is_what_is_measured(family):
    model = randomised(family, **TINY[family])
    own = {p.untyped_storage()._cdata for p in model.parameters()}
    saved, kept = {}, []

    def keep(t):
        storage = t.untyped_storage()
        if storage._cdata not in own:
            saved[storage._cdata] = storage.nbytes()
            kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        hidden = model.hidden(torch.arange(LENGTH) % 37, COUNTS)
    optimizer = AdamW(model.named_parameters())
    hidden.sum().backward()
    gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    optimizer.step(1e-3)
    memory = planned(family).memory
    assert memory["weights"] == sum(p.nbytes for p in model.parameters())
    moments = sum(rows.nbytes for kind, *_, rows in optimizer.parts() if kind != "model")
    head = 0 if family == "qwen3" else model.head_weight.nbytes  # hidden() does not use it
    assert memory["gradients"] == gradients + head and memory["moments"] == moments + 2 * head
    assert memory["activations"] == pytest.approx(sum(saved.values()), rel=0.15)


@pytest.mark.parametrize("family", TINY)
def test_products_are_those_of_torchs_counter(family):
    model, config = randomised(family, **TINY[family]), config_of(family, **TINY[family])
    # torch counts baddbmm and not baddbmm_, which is the same product in place
    in_place = {torch.ops.aten.baddbmm_: lambda tensor, a, b, **other: bmm_flop(a.shape, b.shape)}
    for formula in in_place.values():
        formula._get_raw = True  # tensors, not shapes
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        model.hidden(torch.arange(LENGTH) % 37, COUNTS).sum().backward()
    found = planned(family)
    head = 3 * 2 * LENGTH * config.hidden_size * config.vocab_size
    attention = 3.5 * sum(4 * LENGTH**2 * config.num_attention_heads * config.head_dim
                          for kind in config.layer_types if kind == "full_attention")
    counted = sum(n for op, n in counter.get_flop_counts()["Global"].items() if "attention" not in str(op))
    assert found.counted - head - attention == pytest.approx(counted, rel=0.02)
    assert found.counted - found.flops == pytest.approx(attention / 2)


def sent(family, sizes, zero):
    """Bytes by axis of one real step: four rows of the same length, a row a micro-batch, (nearly) all tokens scored."""
    mesh = mesh_of(sizes)
    model = part_of(randomised(family, **TINY[family]), mesh)
    named = dict(model.named_parameters())
    reducer = Reducer(named, {n: model.cuts[n].replicas for n in named}, mesh.world, zero)
    ids = np.random.default_rng(0).integers(0, 37, (4, LENGTH))
    rows = [Example(Row(row, np.arange(1, LENGTH)), {"nll": np.ones(LENGTH - 1)}) for row in ids]
    optimizer = AdamW(named.items(), reducer=reducer)
    mesh.traffic.clear()
    train_step(model, None, rows, optimizer, lr=1e-3, token_budget=LENGTH, mesh=mesh)
    return dict(mesh.traffic)


@pytest.mark.parametrize("family, sizes, zero", [
    ("qwen3", Sizes(dp=2), 1), ("qwen3_5_text", Sizes(dp=2), 2), ("qwen3", Sizes(tp=2), 1),
    ("qwen3_5_text", Sizes(tp=2), 2), ("qwen3_5_text", Sizes(cp=2), 1)], ids=str)
def test_bytes_sent_are_the_plans(family, sizes, zero):
    expected = costs(config_of(family, **TINY[family]), Parallel(zero=zero, cp=sizes.cp, tp=sizes.tp), 2,
                     Work(4, LENGTH, LENGTH)).sent
    for found in ranks(2).run(sent, family, sizes, zero):
        assert found.keys() == expected.keys() | {"world"}
        for axis, bytes_ in expected.items():
            assert found[axis] == pytest.approx(bytes_, rel=0.02, abs=64), axis


def test_ulysses_and_tensor_parallel_send_the_known_least():
    """Ulysses: S/P (q + k + v + o)(P - 1)/P numbers a layer and direction, the gate not among them; tensor parallel:
    four gathers or scatters of the stream a layer and direction."""
    config, S, b = config_of("qwen3", **WIDE), 128, 4
    layers, heads = config.num_hidden_layers, config.num_attention_heads + config.num_key_value_heads
    ulysses = costs(config, Parallel(cp=4, zero=0), 4, Work(1, S, S)).sent["cp"]
    assert ulysses == 2 * layers * S // 4 * 2 * heads * config.head_dim * 3 // 4 * b
    tensor = costs(config, Parallel(tp=4, zero=0), 4, Work(1, S, S)).sent["tp"]
    stream = S * config.hidden_size * 3 // 4 * b
    head, embedding = 2 * stream + S * 12 * 2 * 3 // 4, 2 * stream
    assert tensor == pytest.approx(2 * layers * 4 * stream + head + embedding, rel=0.01)


ROOT = Path(__file__).resolve().parents[1]
STAGES = ("coding_sft", "if_sft", "oprd")  # the paper's three; other systems have files of their own beside them
FILES = sorted(file for file in ROOT.glob("configs/qwen3_5_*/*.toml") if file.stem in STAGES)


def test_the_papers_settings_are_nine_files():
    assert len(FILES) == 9


@pytest.mark.parametrize("file", FILES, ids=lambda f: f"{f.parent.name}-{f.stem}")
def test_the_papers_settings_are_planned_and_fit(file, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = configuration.load(str(file), "plan", {})
    t = config.train
    assert (t.batch, t.epochs, t.lr, t.lr_min, t.warmup, t.weight_decay) == (32, 3, 1e-5, 1e-6, 0.005, 0.0)
    assert (config.parallel.cp, config.plan.gpus) == (4, 16)
    text = report(config)
    assert "rows of 131,072 tokens" in text and "dp 4 x cp 4 x tp 1" in text and "step time" in text


def test_what_cannot_fit_is_refused_with_the_smallest_change(monkeypatch):
    monkeypatch.chdir(ROOT)
    file = str(ROOT / "configs/qwen3_5_4b/coding_sft.toml")
    with pytest.raises(ValueError, match=r"needs 2\d\d\.\d GiB on a GPU of 96 GiB .* most of it activations .*; "
                                         "smallest change that fits: parallel.recompute = true"):
        report(configuration.load(file, "plan", {"parallel.recompute": "false"}))
    with pytest.raises(ValueError, match="linear_num_key_heads = 16 must be a multiple of the tp axis = 32"):
        report(configuration.load(file, "plan", {"parallel.tp": "32", "parallel.cp": "1", "plan.gpus": "32"}))
    with pytest.raises(ValueError, match="parallel.dp = what is left x parallel.cp = 4 .* the world of 6 ranks"):
        report(configuration.load(file, "plan", {"plan.gpus": "6"}))
