"""rollout/sglang.py over scripted servers: what a turn becomes when its server aborts, lies, is late, or dies."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from oprd.core.types import Span
from oprd.rollout.engine import Sampling, Unserved
from oprd.rollout.server import Server
from tests.sglang_help import a_model, furthest, moved, scripted

torch.set_num_threads(1)
pytestmark = pytest.mark.timeout(60)
TWENTY = Sampling(1.0, 1.0, 20, ())
CONTEXT = [5, 6, 7, 8]


def budgets(fake):
    return [body["sampling_params"]["max_new_tokens"] for body in fake.seen if body["logprob_start_len"] == -1]


def test_a_turn_in_pieces_goes_on_from_its_tokens_with_the_budget_that_is_left(tmp_path):
    with scripted(tmp_path) as (engine, [fake], model):
        fake.script = ["abort:6", "null:0", "null:5", "ok"]
        done = engine.generate("s", CONTEXT, TWENTY, 3)
        assert len(done.ids) == 20 and done.finish == "length" and furthest(model, CONTEXT, done) < 1e-5
        assert budgets(fake) == [20, 14, 14, 9]
        sent = [body["input_ids"] for body in fake.seen if body["logprob_start_len"] == -1]
        assert sent[1] == [*CONTEXT, *done.ids[:6]] and sent[3] == [*CONTEXT, *done.ids[:11]]
        assert len({body["sampling_params"]["sampling_seed"] for body in fake.seen[-4:]}) == 3  # 14 left twice: same
        assert engine.measured()["aborted"] == 3


def test_a_stop_id_of_the_servers_own_does_not_end_a_turn(tmp_path):
    with scripted(tmp_path) as (engine, [fake], model):
        fake.script = ["eos:4", "ok"]
        assert len(engine.generate("s", CONTEXT, TWENTY, 3).ids) == 20 and budgets(fake) == [20, 16]


def test_no_field_is_left_to_the_server(tmp_path):
    """The scripted server takes hostile defaults for what is left out, so equal log-probabilities would not be
    enough: the body is compared with all fields it knows."""
    from tests.sglang_fake import HOSTILE

    with scripted(tmp_path) as (engine, [fake], _):
        engine.generate("s", CONTEXT, TWENTY, 3)
        assert fake.seen[-1]["sampling_params"].keys() == HOSTILE.keys()


@pytest.mark.parametrize("word", ["500", "503", "drop"])
def test_a_failure_is_borne_and_tokens_recorded_before_it_are_kept(tmp_path, word):
    with scripted(tmp_path) as (engine, [fake], model):
        fake.script = ["abort:6", word, word, "ok"]
        done = engine.generate("s", CONTEXT, TWENTY, 3)
        assert len(done.ids) == 20 and furthest(model, CONTEXT, done) < 1e-5 and budgets(fake) == [20, 14, 14, 14]


def test_failures_end_a_turn_at_their_bound(tmp_path):
    with scripted(tmp_path, retries=2) as (engine, [fake], _):
        fake.script = ["500"] * 10
        with pytest.raises(Unserved, match="failed 3 times.*out of order"):
            engine.generate("s", CONTEXT, TWENTY, 3)
        assert len(budgets(fake)) == 3


@pytest.mark.parametrize("word, why", [("label", "somebody else's"), ("short", "20 tokens"), ("nan", "nan"),
                                       ("foreign", "1000000")])
def test_a_reply_that_cannot_be_trusted_is_thrown_away_with_its_server(tmp_path, word, why):
    with scripted(tmp_path, 2) as (engine, fakes, model):
        for fake in fakes:
            fake.script = [word] if fake is fakes[0] else []
        done = [engine.generate(f"s{i}", [i, *CONTEXT], TWENTY, 3) for i in range(2)]
        assert all(furthest(model, [i, *CONTEXT], one) < 1e-5 and len(one.ids) == 20 for i, one in enumerate(done))
        assert engine.measured()["servers"] == 1
        assert why in engine._router.servers[0].why
        engine.load(model, 1)  # all weights anew, from the disk: it serves again
        assert engine.measured()["servers"] == 2


def test_all_servers_dead_is_one_line_that_names_them(tmp_path):
    with scripted(tmp_path, 2) as (engine, fakes, _):
        for fake in fakes:
            fake.kill()
        with pytest.raises(Unserved, match="no rollout server is left: http.*; http"):
            engine.generate("s", CONTEXT, TWENTY, 3)


def test_a_server_killed_in_the_middle_of_many_turns_loses_none_of_them(tmp_path):
    with scripted(tmp_path, 2) as (engine, fakes, model), ThreadPoolExecutor(16) as pool:
        for fake in fakes:
            fake.token_s = 0.01
        turns = [pool.submit(engine.generate, f"s{i}", [i, *CONTEXT], TWENTY, i) for i in range(16)]
        time.sleep(0.1)
        assert fakes[0].running and fakes[1].running
        fakes[0].kill()
        for i, turn in enumerate(turns):
            assert len(turn.result().ids) == 20 and furthest(model, [i, *CONTEXT], turn.result()) < 1e-5
        assert engine.measured()["servers"] == 1


def test_turns_cut_by_an_update_go_on_under_the_new_weights_and_say_which_token_is_whose(tmp_path):
    with scripted(tmp_path) as (engine, [fake], model):
        fake.token_s = 0.02
        old = a_model()
        with ThreadPoolExecutor(4) as pool:
            turns = [pool.submit(engine.generate, f"s{i}", [i, *CONTEXT], TWENTY, i) for i in range(4)]
            time.sleep(0.15)
            engine.load(moved(model, 1), 1)
        for i, turn in enumerate(turns):
            done = turn.result()
            assert [span.version for span in done.spans] == [0, 1] and done.version == 0
            first, second = done.spans
            assert first == Span(0, 0, second.start) and second.end == 20
            for weights, span in ((old, first), (model, second)):
                context, ids = [i, *CONTEXT, *done.ids[: span.start]], done.ids[span.start : span.end]
                part = type(done)(ids, done.logprobs[span.start : span.end], 0, "")
                assert furthest(weights, context, part) < 1e-5
        assert engine.measured()["turns_of_several_versions"] == 4


def test_conversations_stay_with_their_server_and_new_ones_go_to_the_idlest(tmp_path):
    with scripted(tmp_path, 3) as (engine, fakes, _):
        for turn in range(3):
            for i in range(6):
                engine.generate(f"s{i}", [i, *CONTEXT, *range(turn)], TWENTY, 0)
        asked = [[body["input_ids"][0] for body in fake.seen if body["logprob_start_len"] == -1] for fake in fakes]
        for i in range(6):
            assert sorted(of.count(i) for of in asked) == [0, 0, 3]
        for fake in fakes:
            fake.token_s = 0.02
        with ThreadPoolExecutor(9) as pool:  # nine attempts at one task, at once: its home may be 4 busier, not 9
            list(pool.map(lambda i: engine.generate(f"t{i}", [90, *CONTEXT], TWENTY, i), range(9)))
        shares = sorted(sum(body["input_ids"][0] == 90 for body in fake.seen) for fake in fakes)
        assert shares[-1] < 9 and sum(shares) == 9


def test_a_turn_has_its_own_limit_of_time_beside_the_callers(tmp_path):
    with scripted(tmp_path, turn_s=0.2) as (engine, [fake], _):
        fake.token_s = 0.05
        began = time.monotonic()
        done = engine.generate("s", CONTEXT, TWENTY, 0, seconds=30)
        assert done.finish == "time" and 0 < len(done.ids) < 20 and time.monotonic() - began < 5


def test_a_server_that_hangs_is_found_by_its_health_and_its_turns_go_elsewhere(tmp_path):
    with scripted(tmp_path, 2, health_s=0.2) as (engine, fakes, model):
        fakes[0].script = fakes[1].script = []
        fakes[0].script = ["hang"] * 9
        fakes[0].do_health = lambda body: time.sleep(5)
        done = [engine.generate(f"s{i}", [i, *CONTEXT], TWENTY, 0) for i in range(3)]
        assert all(len(one.ids) == 20 for one in done) and engine.measured()["servers"] == 1
        assert "health checks" in engine._router.servers[0].why


def test_closing_frees_who_waits(tmp_path):
    with scripted(tmp_path) as (engine, [fake], _):
        engine._router.close()
        heard = []

        def wait():
            try:
                engine.generate("s", CONTEXT, TWENTY, 0)
            except Unserved as why:
                heard.append(str(why))

        waiting = threading.Thread(target=wait)
        waiting.start()
        time.sleep(0.1)
        engine.close()
        waiting.join(5)
        assert heard and not waiting.is_alive()


@pytest.mark.parametrize("url", ["http://host", "https://host:1", "ftp://h:1", "http://h:1/v1", "http://h:x"])
def test_a_url_that_is_no_server_is_refused(url):
    with pytest.raises(ValueError, match="sglang.servers"):
        Server(url)
