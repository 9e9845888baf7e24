"""The served engine against a real SGLang: every update seen in the log-probabilities, every accident survived."""

import os
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from oprd.rollout.engine import Sampling, Unserved
from oprd.rollout.server import DEAD, SERVING, UNUSABLE, Refused
from tests.sglang_help import a_model, furthest, moved, needs_sglang, real

torch.set_num_threads(1)
pytestmark = [pytest.mark.timeout(1000), needs_sglang]
TEN = Sampling(1.0, 1.0, 10, ())
LONG = 3e-5  # over thousands of tokens two orders of summation in float32 differ by 1.3e-5 here and there
CONTEXT = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two servers, their engine and the trainer's model. When they are closed, no process of theirs is left."""
    with real(tmp_path_factory.mktemp("sglang"), count=2) as (engine, model):
        yield engine, model
        processes = list(engine._managed._processes.values())
        alive = [process for process in processes if process.poll() is None]
        assert alive and all(len(group_members(process)) >= 4 for process in alive)  # guard, server, scheduler,
        # detokenizer
    assert not any(group_members(process) for process in processes)


@pytest.fixture
def two(pair):
    """Both servers serve at the beginning of a test, whatever the one before did to them."""
    engine, model = pair
    model.load_state_dict(a_model().state_dict())
    deadline = time.monotonic() + 400  # a killed one is being started again
    while True:
        engine.load(model, engine.version + 1)
        if [s.state for s in engine._router.servers] == [SERVING, SERVING] or time.monotonic() > deadline:
            break
        time.sleep(3)
    assert [s.state for s in engine._router.servers] == [SERVING, SERVING]
    return engine, model


def group_members(process):
    """Ids of the processes of a server's session."""
    listed = subprocess.run(["ps", "-s", str(process.pid), "-o", "pid="], capture_output=True, text=True).stdout
    return [int(pid) for pid in listed.split()]


def kill(engine, i):
    """SIGKILL to everything of one of our servers, the guard too."""
    port = engine._router.servers[i].port
    process = engine._managed._processes[port]
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def served_right(engine, model):
    """Both servers' tokens have the trainer's log-probabilities."""
    with ThreadPoolExecutor(4) as pool:
        turns = list(pool.map(lambda i: engine.generate(f"r{i}", [i, *CONTEXT], TEN, i), range(4)))
    return all(one.version == engine.version and furthest(model, [i, *CONTEXT], one) < 1e-5
               for i, one in enumerate(turns))


def test_log_probabilities_are_the_trainers_before_and_after_each_of_twenty_updates(two):
    engine, model = two
    context = [1, 2, 3, 4]
    for i in range(20):
        before = engine.generate("before", context, TEN, i)
        assert furthest(model, context, before) < 1e-5 and before.version == engine.version
        engine.load(moved(model, i), engine.version + 1)
        after = engine.generate("after", context, TEN, i)
        assert furthest(model, context, after) < 1e-5 and after.version == engine.version
    assert engine.measured()["servers"] == 2


def test_one_single_tensor_left_out_of_an_update_is_seen_and_mended(two, caplog):
    """The server says success; only the probe can tell. Then everything comes from the disk."""
    engine, model = two
    updater = engine._updater
    name = "model.layers.1.mlp.down_proj.weight"
    whole = dict(updater.publisher.form)
    updater.publisher.form = {n: form for n, form in whole.items() if n != name}
    try:
        with torch.no_grad():
            dict(model.named_parameters())[name].add_(0.01 * torch.randn(64, 96))
        engine.load(model, engine.version + 1)
    finally:
        updater.publisher.form = whole
    assert caplog.text.count("log-probabilities differ from the trainer's") == 2
    assert served_right(engine, model) and engine.measured()["servers"] == 2


def test_the_server_says_success_to_an_unknown_name_and_we_do_not(two, caplog):
    engine, model = two
    publisher, plain = engine._updater.publisher, engine._updater.publisher.buckets

    def misnamed(weights):
        for bucket in plain(weights):
            yield type(bucket)(tuple(n.replace("o_proj", "out_proj") for n in bucket.names), bucket.dtypes,
                               bucket.shapes, bucket.data, bucket.last)

    publisher.buckets = misnamed
    try:
        engine.load(moved(model, 50), engine.version + 1)
    finally:
        del publisher.buckets
    assert "log-probabilities differ" in caplog.text and served_right(engine, model)


def test_a_wrong_shape_makes_a_server_unusable_until_everything_is_reloaded(two, caplog):
    engine, model = two
    updater, plain = engine._updater, engine._updater.publisher.buckets

    def short(weights):
        for bucket in plain(weights):
            shapes = [shape[:-1] + (shape[-1] // 2,) if name == "lm_head.weight" else shape
                      for name, shape in zip(bucket.names, bucket.shapes)]
            size = sum(torch.Size(shape).numel() * 4 for shape in shapes)
            yield type(bucket)(bucket.names, bucket.dtypes, tuple(shapes), bucket.data[:size], bucket.last)

    updater.publisher.buckets = short
    reload, updater._from_disk = updater._from_disk, lambda run, weights, label: run.each("reload", no_disk)

    def no_disk(server):
        raise Refused(400, "no disk today")

    try:
        with pytest.raises(Unserved, match="no disk today"):
            engine.load(moved(model, 60), engine.version + 1)
        assert [s.state for s in engine._router.servers] == [UNUSABLE, UNUSABLE]
        assert caplog.text.count("lm_head.weight") >= 2 and "partially updated" in caplog.text
        del updater.publisher.buckets
        with pytest.raises(Unserved):  # a broadcast alone, however right, does not make them usable again
            engine.load(model, engine.version + 1)
    finally:
        updater._from_disk = reload
        updater.publisher.__dict__.pop("buckets", None)
    engine.load(model, engine.version + 1)
    assert served_right(engine, model) and engine.measured()["servers"] == 2


def test_a_server_killed_in_the_middle_of_thirty_two_turns_loses_none_and_is_started_again(two):
    engine, model = two
    context = [3, 4, 5]
    with ThreadPoolExecutor(32) as pool:
        long = Sampling(1.0, 1.0, 120, ())
        turns = [pool.submit(engine.generate, f"k{i}", [i, *context], long, i) for i in range(32)]
        time.sleep(0.3)
        kill(engine, 0)
        done = [turn.result() for turn in turns]
    for i, one in enumerate(done):
        assert len(one.ids) == 120 and one.version == engine.version
        assert furthest(model, [i, *context], one) < LONG
    assert engine._router.servers[0].state == DEAD
    engine.load(moved(model, 70), engine.version + 1)  # brings it back
    assert engine.measured()["servers"] == 2 and served_right(engine, model)


def test_a_server_killed_in_the_middle_of_a_broadcast_is_left_out_and_the_other_goes_on(two, caplog):
    engine, model = two
    publisher, plain = engine._updater.publisher, engine._updater.publisher.buckets
    port = engine._router.servers[1].port

    def deadly(weights):
        for i, bucket in enumerate(plain(weights)):
            if i == 1:
                kill(engine, 1)
            yield bucket

    publisher.buckets, publisher._bucket_bytes = deadly, 16384
    try:
        engine.load(moved(model, 80), engine.version + 1)
    finally:
        publisher.__dict__.pop("buckets", None)
    assert [s.state for s in engine._router.servers] == [SERVING, DEAD]
    assert "model." in caplog.text and "rank 1" in caplog.text and str(port) in caplog.text
    assert served_right(engine, model)


def test_turns_under_way_at_an_update_are_cut_and_go_on_with_every_tokens_version_known(two):
    engine, model = two
    old = a_model()
    old.load_state_dict(model.state_dict())
    context, first = [7, 8, 9], engine.version
    with ThreadPoolExecutor(4) as pool:
        turns = [pool.submit(engine.generate, f"u{i}", [i, *context], Sampling(1.0, 1.0, 400, ()), i) for i in range(4)]
        time.sleep(0.3)
        engine.load(moved(model, 90), first + 1)
        done = [turn.result() for turn in turns]
    assert all([span.version for span in one.spans] == [first, first + 1] for one in done)
    for i, one in enumerate(done):
        for weights, span in zip((old, model), one.spans):
            part = type(one)(one.ids[span.start : span.end], one.logprobs[span.start : span.end], 0, "")
            assert furthest(weights, [i, *context, *one.ids[: span.start]], part) < LONG
