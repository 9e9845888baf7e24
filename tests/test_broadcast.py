"""parallel/broadcast.py and core/publish.py: every byte of a model in buckets of any size, and over a real group."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from oprd.core import hf
from oprd.core.publish import Publisher
from oprd.parallel.broadcast import Group, buckets, plan
from tests.tiny_models import MODELS, tiny

pytestmark = pytest.mark.timeout(120)
FORM = {"a": (torch.bfloat16, (3,)), "b": (torch.float32, (2, 5)), "c": (torch.float16, (7,)),
        "d": (torch.float32, (1,)), "e": (torch.bfloat16, (40, 3))}


def taken_apart(bucket):
    """The tensors of a bucket, as the server takes them out: at aligned places, one after the other."""
    at = 0
    for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes):
        dtype = getattr(torch, dtype)
        end = at + torch.Size(shape).numel() * dtype.itemsize
        assert at % dtype.itemsize == 0, name
        yield name, bucket.data[at:end].view(dtype).view(shape).clone()
        at = end
    assert at == len(bucket.data)


@pytest.mark.parametrize("size", [1, 5, 40, 64, 10_000])
def test_any_bucket_size_brings_every_tensor_once_and_aligned(size):
    whole = {name: torch.randn(shape).to(dtype) for name, (dtype, shape) in FORM.items()}
    found, lasts = {}, []
    for bucket in buckets(FORM, size, lambda name, out: out.copy_(whole[name])):
        assert len(bucket.data) <= size or len(bucket.names) == 1
        lasts.append(bucket.last)
        for name, tensor in taken_apart(bucket):
            assert name not in found
            found[name] = tensor
    assert found.keys() == whole.keys() and all(torch.equal(found[n], whole[n]) for n in whole)
    assert lasts == [False] * (len(lasts) - 1) + [True]


def test_a_bucket_holds_what_fits_in_the_order_of_the_form_and_widest_numbers_first():
    assert plan(FORM, 64) == [["b", "d", "a", "c"], ["e"]]
    with pytest.raises(ValueError, match="bucket_bytes = 0"):
        plan(FORM, 0)


def test_two_buffers_are_all_that_is_held():
    """The memory of bucket 0 is that of bucket 2: nothing else was allocated, and bucket 1 did not touch it."""
    places = [bucket.data.data_ptr() for bucket in buckets(FORM, 40, lambda name, out: out.zero_())]
    assert len(places) > 3 and len(set(places)) == 2 and places[0] == places[2] and places[1] == places[3]


@pytest.mark.parametrize("name", MODELS)
def test_every_family_is_sent_under_the_names_and_numbers_of_its_folder(name, tmp_path):
    """What another program would read from the folder, from buckets that are smaller than most tensors."""
    from safetensors.torch import load_file

    tiny(name, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    publisher = Publisher(tmp_path, "", 3000, "gloo", 10.0)
    sent = dict(pair for bucket in publisher.buckets(hf.load(tmp_path)) for pair in taken_apart(bucket))
    untouched = {n for n in stored if n.startswith(("model.visual.", "mtp."))}
    assert sent.keys() == stored.keys() - untouched
    assert all(torch.equal(sent[n], stored[n]) for n in sent)


def test_the_dtype_asked_for_is_sent_but_for_what_the_folder_keeps_wider(tmp_path):
    tiny("qwen3_5_text", tmp_path)
    publisher = Publisher(tmp_path, "bfloat16", 3000, "gloo", 10.0)
    assert {dtype for dtype, _ in publisher.form.values()} == {torch.bfloat16}
    assert not publisher.wide


OTHER_SIDE = """
import sys, torch, torch.distributed as dist
from datetime import timedelta
from torch.distributed import distributed_c10d as c10d
port, name, sizes = int(sys.argv[1]), sys.argv[2], [int(n) for n in sys.argv[3].split(",")]
limit = timedelta(seconds=20)
store, rank, size = next(c10d.rendezvous(f"tcp://127.0.0.1:{port}", 1, 2, timeout=limit))
group, _ = c10d._new_process_group_helper(2, 1, [], dist.Backend("gloo"), dist.PrefixStore(name, store),
                                          group_name=name, timeout=limit)
c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
for n in sizes:
    got = torch.empty(n, dtype=torch.uint8)
    dist.broadcast(got, src=0, group=group)
    print(int(got.sum()), flush=True)
"""


def joined(sizes, seconds=20.0):
    """(the trainer's end, the other program), which expects messages of these sizes and then ends."""
    group = Group("gloo", 2, "weights", seconds)
    other = subprocess.Popen([sys.executable, "-c", OTHER_SIDE, str(group.port), "weights", ",".join(map(str, sizes))],
                             stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent)
    group.join()
    return group, other


def test_a_group_beside_torchs_default_brings_bytes_to_another_program_and_can_be_made_again():
    for _ in range(2):
        group, other = joined([5, 70_000])
        for data in (torch.arange(5, dtype=torch.uint8), torch.ones(70_000, dtype=torch.uint8)):
            group.send(data).wait()
        assert other.communicate()[0].split() == ["10", "70000"]
        group.close()


def test_a_program_that_dies_in_a_broadcast_is_an_error_at_once():
    group, other = joined([5, 5])
    other.kill()
    other.wait()
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        group.send(torch.zeros(2**26, dtype=torch.uint8)).wait()
    assert time.monotonic() - began < 10
    group.close()
