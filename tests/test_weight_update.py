"""rollout/update.py over scripted servers: the order of an update, and what a server that fails anywhere in it becomes."""

import time

import pytest
import torch

from oprd.rollout.engine import Sampling, Unserved
from oprd.rollout.server import DEAD, SERVING, UNUSABLE
from tests.sglang_help import furthest, moved, scripted

torch.set_num_threads(1)
pytestmark = pytest.mark.timeout(60)
TEN = Sampling(1.0, 1.0, 10, ())
CONTEXT = [3, 4, 5]


def states(engine):
    return [server.state for server in engine._router.servers]


def right(engine, model):
    done = engine.generate("r", CONTEXT, TEN, 1)
    return done.version == engine.version and furthest(model, CONTEXT, done) < 1e-5


def calls(fake):
    """The names of control calls from now on, in order."""
    heard, plain = [], fake.answer

    def answer(path, body):
        heard.append(path.strip("/"))
        return plain(path, body)

    fake.answer = answer
    return heard


@pytest.mark.parametrize("sessions", [False, True])
def test_the_order_is_pause_begin_buckets_end_flush_continue(tmp_path, sessions):
    with scripted(tmp_path, sessions=sessions, bucket_bytes=2**16) as (engine, [fake], model):
        heard = calls(fake)
        engine.load(moved(model, 1), 1)
        heard = [name for i, name in enumerate(heard) if i == 0 or heard[i - 1] != name]
        middle = ["update_weights_from_distributed"]
        middle = ["begin_weight_update", *middle, "end_weight_update"] if sessions else middle
        assert heard == ["pause_generation", *middle, "flush_cache", "continue_generation"]
        assert right(engine, model) and fake.label.endswith(".1")


@pytest.mark.parametrize("bucket_bytes", [1, 5000, 2**30])
def test_the_weights_do_not_depend_on_the_size_of_a_bucket(tmp_path, bucket_bytes):
    with scripted(tmp_path, bucket_bytes=bucket_bytes) as (engine, [fake], model):
        engine.load(moved(model, 1), 1)
        state = fake.model.state_dict()
        assert all(torch.equal(state[name], p) for name, p in model.state_dict().items())


def test_a_name_that_the_server_ignores_is_found_by_the_probe_and_mended_from_the_disk(tmp_path, caplog):
    with scripted(tmp_path) as (engine, [fake], model):
        fake.ignored = {"model.layers.0.self_attn.k_norm.weight"}
        engine.load(moved(model, 1), 1)
        assert "log-probabilities differ from the trainer's" in caplog.text
        assert states(engine) == [SERVING] and right(engine, model)


def test_a_broadcast_that_breaks_is_named_by_tensor_and_rank_and_the_other_server_goes_on(tmp_path, caplog):
    with scripted(tmp_path, 2, bucket_bytes=2**14) as (engine, fakes, model):
        server = engine._router.servers[0]
        group = engine._updater._groups[server]
        group.broken = group.sent + 2
        fakes[0].refuse["/update_weights_from_disk"] = 1
        engine.load(moved(model, 1), 1)
        assert states(engine) == [UNUSABLE, SERVING] and right(engine, model)
        assert "weights model." in caplog.text and "to rank 1: Connection closed by peer" in caplog.text
        engine.load(moved(model, 2), 2)  # the reload works now
        assert states(engine) == [SERVING, SERVING] and right(engine, model)


def test_a_half_updated_server_is_not_broadcast_to_until_a_reload_has_passed(tmp_path):
    with scripted(tmp_path) as (engine, [fake], model):
        fake.refuse = {"/update_weights_from_distributed": 1, "/update_weights_from_disk": 2}
        for version in (1, 2):
            with pytest.raises(Unserved, match="no rollout server holds version .*reload from the disk: .*refused"):
                engine.load(moved(model, version), version)
            assert states(engine) == [UNUSABLE]
            with pytest.raises(Unserved):
                engine.generate("s", CONTEXT, TEN, 0, seconds=0.2)
        heard = calls(fake)
        engine.load(model, 3)
        assert "update_weights_from_distributed" not in heard and right(engine, model)


def test_a_flush_that_fails_is_an_error_and_not_served_from_an_old_cache(tmp_path):
    with scripted(tmp_path) as (engine, [fake], model):
        engine.generate("warm", CONTEXT, TEN, 1)
        engine._updater._seconds = 1.5
        fake.refuse["/flush_cache"] = 10**6
        with pytest.raises(Unserved, match="flush: "):
            engine.load(moved(model, 1), 1)
        fake.refuse.clear()
        engine._updater._seconds = 30.0
        engine.load(model, 2)
        assert right(engine, model)


def test_a_flush_that_works_only_later_is_waited_for(tmp_path):
    with scripted(tmp_path) as (engine, [fake], model):
        fake.refuse["/flush_cache"] = 2
        heard = calls(fake)
        engine.load(moved(model, 1), 1)
        assert heard.count("flush_cache") == 3 and right(engine, model)


def test_from_disk_alone_needs_no_group(tmp_path):
    with scripted(tmp_path, way="disk") as (engine, [fake], model):
        heard = calls(fake)
        engine.load(moved(model, 1), 1)
        assert "init_weights_update_group" not in heard and not fake.groups and right(engine, model)


def test_a_server_that_came_back_from_the_dead_gets_everything_from_the_disk(tmp_path):
    with scripted(tmp_path, 2) as (engine, fakes, model):
        engine._router.servers[0].state = DEAD
        heard = calls(fakes[0])
        engine.load(moved(model, 1), 1)
        assert "update_weights_from_disk" in heard and "update_weights_from_distributed" not in heard
        assert states(engine) == [SERVING, SERVING] and right(engine, model)


def test_a_server_that_hangs_in_an_update_costs_its_limit_and_no_more(tmp_path):
    with scripted(tmp_path, 2, seconds=3.0) as (engine, fakes, model):
        fakes[0].do_pause_generation = lambda body: time.sleep(30)
        began = time.monotonic()
        engine._router.servers[0]._call_s = 0.5
        engine.load(moved(model, 1), 1)
        assert time.monotonic() - began < 25 and states(engine)[1] == SERVING and right(engine, model)
        assert states(engine)[0] == UNUSABLE and "pause" in engine._router.servers[0].why
