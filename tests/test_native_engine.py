"""rollout/native.py: samples equal the plain model's, are reproducible in lock-step, and nobody ever hangs."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest
import torch

from oprd.core.model import Model, ModelConfig
from oprd.rollout.engine import Sampling
from oprd.rollout.native import NativeEngine

torch.set_num_threads(1)
pytestmark = pytest.mark.timeout(60)
CONFIG = ModelConfig(vocab_size=31, hidden_size=24, intermediate_size=28, num_hidden_layers=3, num_attention_heads=6,
                     num_key_value_heads=2, head_dim=8, initializer_range=0.3)
GREEDY = Sampling(temperature=0.0, top_p=1.0, max_new_tokens=12, stop_ids=())


def a_model(seed=0) -> Model:
    """Random everywhere, norms too, so that a weight left out of the decoder shows."""
    model = Model(CONFIG).init(seed).requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if "norm" in name:
            p.add_(torch.rand(p.shape, generator=generator) - 0.3)
    return model


@contextmanager
def an_engine(model=None, **settings):
    engine = NativeEngine(model or a_model(), **settings)
    try:
        yield engine
    finally:
        engine.close()


def some_ids(n, seed):
    return torch.randint(31, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def plain_logprobs(model, context, sampled, temperature=1.0):
    """Log-probabilities of `sampled` after `context` by one full forward."""
    ids = torch.tensor([*context, *sampled])
    logits = model.logits(ids, torch.tensor([0, len(ids)]))[len(context) - 1 : -1]
    logprobs = torch.log_softmax(logits / temperature, -1)
    return logprobs.gather(1, torch.tensor(sampled)[:, None]).squeeze(1).tolist(), logits


def test_greedy_is_the_argmax_of_the_plain_model_over_turns_with_and_without_a_shared_prefix():
    model = a_model()
    with an_engine(model) as engine:
        context = some_ids(20, 1)
        for turn in range(4):
            done = engine.generate("s", context, GREEDY, seed=turn)
            want, logits = plain_logprobs(model, context, done.ids)
            assert list(done.ids) == logits.argmax(-1).tolist()
            assert done.logprobs == pytest.approx(want, abs=1e-4)
            assert (done.finish, done.version, len(done.ids)) == ("length", 0, 12)
            if turn == 0:
                context = [*context, *done.ids, *some_ids(7, 2)]  # an observation
            elif turn == 1:
                context = context[:25] + some_ids(9, 3)  # another history: only 25 tokens agree
            # turn 3 repeats turn 2's context: everything is cached, the last token runs again


def test_long_and_short_contexts_of_one_round_are_prefilled_right_in_several_packs():
    model = a_model()
    contexts = [some_ids(n, seed=n) for n in (700, 5, 400, 1100, 1)]
    with an_engine(model) as engine, ThreadPoolExecutor(5) as pool, ExitStack() as stack:
        for _ in contexts:
            stack.enter_context(engine.worker())
        done = list(pool.map(lambda i: engine.generate(f"s{i}", contexts[i], GREEDY, 0), range(5)))
    for context, one in zip(contexts, done):
        assert list(one.ids) == plain_logprobs(model, context, one.ids)[1].argmax(-1).tolist()


def test_the_cached_prefix_is_not_computed_again():
    model = a_model()
    seen = []
    with an_engine(model) as engine:
        plain = engine._model.hidden
        engine._model.hidden = lambda ids, cu, caches: seen.append(ids.tolist()) or plain(ids, cu, caches=caches)
        first = engine.generate("s", [1, 2, 3], GREEDY, seed=0)
        context = [1, 2, 3, *first.ids, 7, 8]
        engine.generate("s", context, GREEDY, seed=0)
        engine.generate("s", [1, 2, 9], GREEDY, seed=0)
        engine.forget("s")
        engine.generate("s", [1, 2, 9], GREEDY, seed=0)
    assert seen == [[1, 2, 3], [first.ids[-1], 7, 8], [9], [1, 2, 9]]


def test_sampling_logprobs_are_those_under_the_temperature_before_the_top_p_cut():
    model = a_model()
    context = some_ids(9, 4)
    with an_engine(model) as engine:
        done = engine.generate("s", context, Sampling(0.7, 0.8, 40, ()), seed=3)
    want, _ = plain_logprobs(model, context, done.ids, temperature=0.7)
    assert done.logprobs == pytest.approx(want, abs=1e-4)


def test_a_stop_id_ends_the_turn_and_is_kept():
    with an_engine() as engine:
        free = engine.generate("a", [1, 2], GREEDY, seed=0).ids
        stop = free[3]
        done = engine.generate("b", [1, 2], Sampling(0.0, 1.0, 12, (stop,)), seed=0)
    assert done.ids == free[: free.index(stop) + 1] and done.finish == "stop"


def play(engine, workers=6, turns=3, delays=None):
    """`workers` agents with ragged conversations, their tools taking random times; all that was sampled."""
    waits, got = random.Random(delays), {}

    def agent(i):
        with leaving.pop(i):
            context = some_ids(5 + 7 * i, seed=i)
            for turn in range(turns if i else 1):
                done = engine.generate(f"agent{i}", context, Sampling(1.0, 0.9, 10 + i, (4,)), seed=100 * i + turn)
                got[i, turn] = done
                context = [*context, *done.ids, *some_ids(3 + i, seed=turn)]
                if delays is not None:
                    time.sleep(waits.random() * 0.02)
            engine.forget(f"agent{i}")

    leaving = {}
    for i in range(workers):
        leaving[i] = ExitStack()
        leaving[i].enter_context(engine.worker())
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(agent, range(workers)))
    return got


def test_lockstep_gives_identical_samples_and_floats_whatever_the_tools_delays():
    runs = []
    for delays in (1, 2, None):
        with an_engine(rows=4, cached_tokens=150) as engine:  # fewer rows than workers, and evictions
            runs.append(play(engine, delays=delays))
    assert len(runs[0]) == 16 and runs[0] == runs[1] == runs[2]
    assert len({done.ids for done in runs[0].values()}) == 16


def test_a_sample_depends_on_its_seed_and_context_not_on_its_neighbours():
    with an_engine(lockstep=False, rows=3) as engine:
        together = play(engine, delays=5)
    model = a_model()
    with an_engine(model) as engine:
        for i in range(6):
            alone = engine.generate(f"x{i}", some_ids(5 + 7 * i, seed=i), Sampling(1.0, 0.9, 10 + i, (4,)), 100 * i)
            assert alone.ids == together[i, 0].ids
            assert alone.logprobs == pytest.approx(together[i, 0].logprobs, abs=1e-4)
        other = engine.generate("x5b", some_ids(40, seed=5), Sampling(1.0, 0.9, 15, (4,)), 501)
        assert other.ids != together[5, 0].ids


def test_a_lockstep_round_waits_for_every_announced_worker():
    with an_engine() as engine, ThreadPoolExecutor(2) as pool, engine.worker():
        with engine.worker():
            first = pool.submit(engine.generate, "a", [1], GREEDY, 0)
            time.sleep(0.2)
            assert not first.done()
        assert len(first.result(timeout=10).ids) == 12  # the second worker left: one request is everybody's


def test_continuous_lets_a_short_request_leave_and_a_new_one_join_while_a_long_one_runs():
    with an_engine(lockstep=False, rows=2) as engine, ThreadPoolExecutor(1) as pool:
        long = pool.submit(engine.generate, "long", [1], Sampling(1.0, 1.0, 3000, ()), 0)
        for i in range(3):
            assert len(engine.generate(f"short{i}", [2, i], GREEDY, i).ids) == 12
        assert not long.done()
        engine.close()
        with pytest.raises(RuntimeError, match="closed"):
            long.result(timeout=10)


def test_beyond_the_budget_the_oldest_sessions_go_first():
    with an_engine(cached_tokens=50) as engine:
        for name in ("a", "b", "c"):
            engine.generate(name, some_ids(10, 1), GREEDY, 0)  # leaves 21 tokens
        assert list(engine._sessions) == ["b", "c"]
        engine.generate("b", some_ids(10, 1), GREEDY, 0)
        engine.generate("d", some_ids(10, 1), GREEDY, 0)
        assert list(engine._sessions) == ["b", "d"]
        engine.generate("big", some_ids(60, 1), GREEDY, 0)
        assert list(engine._sessions) == []


def gated(engine, note):
    """Make the engine's decoding steps wait for the second event (the first tells that one does) and list notes."""
    step, inside, go_on, notes = engine._decoder.step, threading.Event(), threading.Event(), []

    def watched(ids):
        inside.set()
        go_on.wait(10)
        notes.append(note(ids))
        return step(ids)

    engine._decoder.step = watched
    return inside, go_on, notes


@pytest.mark.parametrize("lockstep", [True, False])
def test_only_a_continuous_engine_lets_a_request_join_those_that_run(lockstep):
    with an_engine(lockstep=lockstep) as engine, ThreadPoolExecutor(2) as pool:
        inside, go_on, rows = gated(engine, len)
        first = pool.submit(engine.generate, "first", [3], GREEDY, 0)
        inside.wait(10)
        late = pool.submit(engine.generate, "late", [4], GREEDY, 0)
        while not engine._pending:
            time.sleep(0.001)
        go_on.set()
        assert len(first.result(timeout=10).ids) == len(late.result(timeout=10).ids) == 12
        assert rows == ([1] * 22 if lockstep else [1] + [2] * 10 + [1])


@pytest.mark.parametrize("lockstep", [True, False])
def test_forgetting_waits_for_the_end_of_a_lockstep_round_where_it_could_change_what_is_evicted(lockstep):
    with an_engine(lockstep=lockstep) as engine, ThreadPoolExecutor(1) as pool:
        engine.generate("old", [1, 2], GREEDY, 0)
        inside, go_on, held = gated(engine, lambda ids: "old" in engine._sessions)
        running = pool.submit(engine.generate, "new", [3], GREEDY, 0)
        inside.wait(10)
        engine.forget("old")
        go_on.set()
        running.result(timeout=10)
        assert held == ([True] * 11 if lockstep else [True] + [False] * 10)
        engine.generate("new", [3], GREEDY, 0)
        assert list(engine._sessions) == ["new"]


def test_load_brings_new_weights_and_drops_every_cache():
    old, new = a_model(0), a_model(1)
    context = some_ids(15, 6)
    with an_engine(old, version=3) as engine:
        assert engine.generate("s", context, GREEDY, 0).version == 3
        old.model.norm.weight.mul_(2)  # the engine has its own copy
        for weights, version in ((new, 4), (new.state_dict(), 5)):
            engine.load(weights, version)
            done = engine.generate("s", context, GREEDY, 0)
            assert done.logprobs == pytest.approx(plain_logprobs(new, context, done.ids)[0], abs=1e-4)
            assert (done.version, engine.version) == (version, version)


def test_weights_of_another_model_are_refused_and_the_old_ones_go_on_serving():
    with an_engine() as engine:
        before = engine.generate("a", [1, 2], GREEDY, 0)
        state = a_model(1).state_dict()
        with pytest.raises(ValueError, match="do not fit the engine's model, first at lm_head.weight"):
            engine.load({name: t for name, t in state.items() if name != "lm_head.weight"}, 1)
        with pytest.raises(ValueError, match="first at model.norm.weight"):
            engine.load({**state, "model.norm.weight": torch.ones(5)}, 1)
        assert engine.generate("b", [1, 2], GREEDY, 0) == before


def test_load_is_refused_while_a_request_waits():
    with an_engine() as engine, ThreadPoolExecutor(1) as pool, engine.worker():
        with engine.worker():
            waiting = pool.submit(engine.generate, "a", [1], GREEDY, 0)
            while not engine._pending:
                time.sleep(0.001)
            with pytest.raises(RuntimeError, match="cannot load version 1 while 1 requests run or wait"):
                engine.load(a_model(1), 1)
        assert waiting.result(timeout=10).version == 0


def test_a_failure_in_the_scheduler_reaches_every_waiting_caller_and_all_later_ones():
    with an_engine() as engine, ThreadPoolExecutor(3) as pool:
        def broken(*_, **__):
            raise ArithmeticError("the machine is tired")

        engine._model.hidden = broken
        with ExitStack() as stack:
            for _ in range(3):
                stack.enter_context(engine.worker())
            waiting = [pool.submit(engine.generate, f"s{i}", [1], GREEDY, 0) for i in range(3)]
            for future in waiting:
                with pytest.raises(RuntimeError, match="the machine is tired") as error:
                    future.result(timeout=10)
                assert isinstance(error.value.__cause__, ArithmeticError)
        with pytest.raises(RuntimeError, match="the machine is tired"):
            engine.generate("later", [1], GREEDY, 0)


def test_weights_that_diverged_are_named_as_the_cause():
    model = a_model()
    model.model.norm.weight.fill_(float("nan"))
    with an_engine(model) as engine, pytest.raises(RuntimeError, match="logits are not finite"):
        engine.generate("s", [1], GREEDY, 0)


def test_closing_wakes_whoever_waits():
    engine = NativeEngine(a_model())
    with ThreadPoolExecutor(1) as pool, engine.worker(), engine.worker():
        waiting = pool.submit(engine.generate, "a", [1], GREEDY, 0)
        while not engine._pending:
            time.sleep(0.001)
        engine.close()
        with pytest.raises(RuntimeError, match="closed"):
            waiting.result(timeout=10)
    assert not engine._thread.is_alive()


def test_a_seed_no_generator_takes_is_refused():
    with an_engine() as engine, pytest.raises(ValueError, match="seed = -1 must be from 0"):
        engine.generate("s", [1], GREEDY, -1)


@pytest.mark.parametrize("context, sampling, words", [
    ([1, 31], GREEDY, "context_ids holds 31, the vocabulary is 0..30"),
    ([-1], GREEDY, "context_ids holds -1"),
    ([], GREEDY, "the context is empty"),
    ([1], Sampling(1.0, 1.0, 5, (99,)), "stop_ids holds 99"),
    ([1], Sampling(1.0, 1.0, 0, ()), "max_new_tokens = 0 must be at least 1"),
    ([1], Sampling(-0.5, 1.0, 5, ()), "temperature = -0.5 must be at least 0"),
    ([1], Sampling(float("nan"), 1.0, 5, ()), "temperature = nan"),
    ([1], Sampling(1.0, 0.0, 5, ()), "top_p = 0.0 must be above 0"),
    ([1], Sampling(1.0, 1.5, 5, ()), "top_p = 1.5 must be above 0 and at most 1"),
])
def test_a_request_that_cannot_be_served_is_refused_and_harms_nobody(context, sampling, words):
    with an_engine() as engine:
        with pytest.raises(ValueError) as error:
            engine.generate("s", context, sampling, 0)
        assert words in str(error.value)
        assert len(engine.generate("s", [1], GREEDY, 0).ids) == 12


def test_a_session_takes_one_request_at_a_time():
    with an_engine() as engine, ThreadPoolExecutor(1) as pool, engine.worker():
        with engine.worker():
            first = pool.submit(engine.generate, "s", [1], GREEDY, 0)
            while not engine._pending:
                time.sleep(0.001)
            with pytest.raises(ValueError, match="session 's' already has a request running"):
                engine.generate("s", [2], GREEDY, 0)
        assert len(first.result(timeout=10).ids) == 12
