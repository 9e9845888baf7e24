"""What every rollout engine must do, asked of the native one, of the client over a scripted server, and of SGLang."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

from oprd.rollout.engine import Sampling
from oprd.rollout.native import NativeEngine
from tests.sglang_help import VOCAB, a_model, furthest, moved, needs_sglang, plain_logprobs, real, scripted

torch.set_num_threads(1)
pytestmark = pytest.mark.timeout(1000)
GREEDY = Sampling(temperature=0.0, top_p=1.0, max_new_tokens=12, stop_ids=())
CLOSE = 1e-5  # float32, one machine


@contextmanager
def native():
    model = a_model()
    engine = NativeEngine(model, lockstep=False)
    try:
        yield engine, model
    finally:
        engine.close()


@pytest.fixture(scope="module", params=["native", "scripted", "scripted, sessions",
                                        pytest.param("sglang", marks=needs_sglang)])
def served(request, tmp_path_factory):
    """(engine, the model it serves, a count of its versions)."""
    folder = tmp_path_factory.mktemp("engine")
    if request.param == "native":
        with native() as (engine, model):
            yield engine, model
    elif request.param == "sglang":
        with real(folder) as (engine, model):
            yield engine, model
    else:
        with scripted(folder, token_s=0.001, sessions="sessions" in request.param) as (engine, fakes, model):
            yield engine, model


def some_ids(n, seed):
    return torch.randint(VOCAB, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_greedy_is_the_argmax_of_the_plain_model_over_turns_with_and_without_a_shared_prefix(served):
    engine, model = served
    context = some_ids(20, 1)
    for turn in range(3):
        done = engine.generate("turns", context, GREEDY, seed=turn)
        assert list(done.ids) == plain_logprobs(model, context, done.ids)[1].argmax(-1).tolist()
        assert furthest(model, context, done) < CLOSE
        assert (done.finish, done.version, len(done.ids), done.spans) == ("length", engine.version, 12, ())
        context = [*context, *done.ids, *some_ids(7, 2)] if turn == 0 else context[:25] + some_ids(9, 3)
    engine.forget("turns")


@pytest.mark.parametrize("temperature, top_p", [(1.0, 1.0), (0.7, 0.8), (1.6, 0.5)])
def test_logprobs_are_those_under_the_temperature_before_the_top_p_cut(served, temperature, top_p):
    engine, model = served
    done = engine.generate("p", some_ids(9, 4), Sampling(temperature, top_p, 40, ()), seed=3)
    assert furthest(model, some_ids(9, 4), done, temperature) < CLOSE


def test_samples_follow_the_models_distribution(served):
    """1,200 first tokens: the frequency of each of the six likeliest is its probability."""
    engine, model = served
    context = some_ids(6, 5)
    probabilities = torch.softmax(plain_logprobs(model, context, [0])[1][0], -1)
    with ThreadPoolExecutor(8) as pool:
        first = list(pool.map(lambda i: engine.generate(f"d{i}", context, Sampling(1.0, 1.0, 1, ()), i).ids[0],
                              range(1200)))
    for token in probabilities.topk(6).indices.tolist():
        p = probabilities[token].item()
        assert abs(first.count(token) / 1200 - p) < 5 * (p * (1 - p) / 1200) ** 0.5


def test_a_stop_id_ends_the_turn_and_is_kept(served):
    engine, _ = served
    free = engine.generate("a", [1, 2], GREEDY, seed=0).ids
    stop = free[3]
    done = engine.generate("b", [1, 2], Sampling(0.0, 1.0, 12, (stop, VOCAB - 1)), seed=0)
    assert done.ids == free[: free.index(stop) + 1] and done.finish == "stop"


@pytest.mark.parametrize("context, sampling, seed, message", [
    ([], GREEDY, 0, "context is empty"), ([1, VOCAB], GREEDY, 0, f"holds {VOCAB}"), ([-1], GREEDY, 0, "holds -1"),
    ([1], Sampling(-0.1, 1.0, 5, ()), 0, "temperature"), ([1], Sampling(1.0, 0.0, 5, ()), 0, "top_p"),
    ([1], Sampling(1.0, 1.0, 0, ()), 0, "max_new_tokens"), ([1], Sampling(1.0, 1.0, 5, (VOCAB,)), 0, "stop_ids"),
    ([1], GREEDY, -1, "seed"),
])
def test_what_cannot_be_served_is_refused_before_it_reaches_a_server(served, context, sampling, seed, message):
    engine, _ = served
    with pytest.raises(ValueError, match=message):
        engine.generate("bad", context, sampling, seed)
    assert len(engine.generate("good", [1], GREEDY, 0).ids) == 12


def test_many_conversations_at_once_are_each_the_plain_models(served):
    engine, model = served

    def talk(i):
        context = some_ids(5 + 3 * i, i)
        for turn in range(3):
            done = engine.generate(f"c{i}", context, Sampling(1.0, 1.0, 9, ()), i * 10 + turn)
            assert furthest(model, context, done) < CLOSE
            context = [*context, *done.ids, *some_ids(3, i)]
        engine.forget(f"c{i}")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(talk, range(8)))


def test_after_a_load_nothing_of_the_old_weights_is_used(served):
    """The same conversations again and again: what a cache kept of them is of older weights."""
    engine, model = served
    context = some_ids(30, 6)
    for _ in range(3):
        engine.load(moved(model, engine.version), engine.version + 1)
        done = engine.generate("same", context, GREEDY, 0)
        assert done.version == engine.version and furthest(model, context, done) < CLOSE
        assert list(done.ids) == plain_logprobs(model, context, done.ids)[1].argmax(-1).tolist()


def test_a_turn_whose_time_is_over_ends_and_keeps_what_it_has(served):
    engine, model = served
    done = engine.generate("late", [1, 2, 3], Sampling(1.0, 1.0, 400, ()), 0, seconds=0.02)
    assert done.finish == "time" and 0 < len(done.ids) < 400
    assert len(done.logprobs) == len(done.ids) and furthest(model, [1, 2, 3], done) < CLOSE
