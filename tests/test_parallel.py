"""On every mesh a step is the step of one rank: loss, every gradient, and the weights after three steps."""

import functools

import pytest
import torch
from parallel_help import MODELS, train
from ranks_help import ranks

from oprd.parallel.mesh import Sizes

torch.set_num_threads(1)


@functools.cache
def alone(kind):
    return train(kind, Sizes(), 0)


def same(found, expected):
    for step, (shown, wanted) in enumerate(zip(found["shown"], expected["shown"], strict=True)):
        assert shown.keys() == wanted.keys()
        for name, value in wanted.items():
            assert shown[name] == pytest.approx(value, rel=1e-9, abs=1e-12), (step, name)
    for what in ("gradients", "weights"):
        assert found[what].keys() == expected[what].keys()
        for name, value in expected[what].items():
            torch.testing.assert_close(found[what][name], value, rtol=1e-9, atol=1e-11, msg=lambda m: f"{what} {name}: {m}")


MESHES = [("qwen3", Sizes(dp=2), 0), ("qwen3", Sizes(dp=2), 1), ("hybrid", Sizes(dp=2), 2),
          ("qwen3", Sizes(tp=2), 1), ("qwen3 untied", Sizes(tp=2), 0), ("hybrid", Sizes(tp=2), 2),
          ("hybrid moe", Sizes(tp=2), 1), ("qwen3", Sizes(cp=2), 0), ("hybrid", Sizes(cp=2), 1),
          ("hybrid moe", Sizes(cp=2), 2), ("hybrid moe", Sizes(dp=2, ep=2), 1), ("hybrid moe", Sizes(tp=2, ep=2), 0),
          ("hybrid moe", Sizes(cp=2, ep=2), 2),
          ("qwen3", Sizes(dp=4), 2), ("qwen3", Sizes(tp=4), 1), ("hybrid", Sizes(tp=4), 1), ("hybrid", Sizes(cp=4), 1),
          ("hybrid", Sizes(dp=2, tp=2), 2), ("hybrid", Sizes(cp=2, tp=2), 1), ("hybrid", Sizes(dp=2, cp=2), 1),
          ("hybrid moe", Sizes(cp=2, tp=2, ep=4), 2), ("hybrid moe", Sizes(dp=2, tp=2, ep=2), 1),
          ("hybrid moe", Sizes(dp=4, ep=4), 0), ("hybrid moe", Sizes(dp=2, cp=2, ep=4), 2)]


@pytest.mark.parametrize("kind, sizes, stage", MESHES, ids=lambda v: "-".join(
    f"{a}{b}" for a, b in vars(v).items() if b > 1) if isinstance(v, Sizes) else str(v))
def test_any_mesh_trains_as_one_rank_does(kind, sizes, stage):
    world = max(sizes.dp, 1) * sizes.cp * sizes.tp
    expected = alone(kind)
    assert expected["shown"][0]["train/micro_batches"] % 2 == 1 
    assert {"train/nll", "distillation/kl", "policy/ratio"} <= expected["shown"][0].keys()
    for found in ranks(world).run(train, kind, sizes, stage):
        same(found, expected)
