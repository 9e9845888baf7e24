"""The judge's client and its cache against a real server that misbehaves: every wait ends, every trouble has a name."""

import json
import multiprocessing
import shutil
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate

import pytest

import judge_server as server_help
from judge_server import drip, drop, endless_drip, garbage, half_a_body, hang, no_http, says, serving, slowly, status
from oprd.rollout import endpoint as client
from oprd.rollout.endpoint import Counts, Endpoint, EndpointSettings, Malformed, NoAnswer
from oprd.rollout.judge_cache import Cache

ASK = [{"role": "user", "content": "well? é \ud800"}]


def endpoint(url, counts=None, **settings):
    quick = dict(request_s=0.6, total_s=5.0, backoff_s=0.02)
    return Endpoint(EndpointSettings(url, "m", **{**quick, **settings}), counts or Counts())


def test_a_request_holds_model_messages_and_the_settings_body():
    with serving(says("fine")) as server:
        assert endpoint(server.url + "/", body={"temperature": 0}).complete(ASK) == "fine"
    assert server.seen == [{"model": "m", "messages": ASK, "temperature": 0}]
    assert server.paths == ["/v1/chat/completions"]
    assert "Authorization" not in server.headers[0]


@pytest.mark.parametrize("trouble, count", [
    (status(429), "rate_limited"), (status(500), "failed"), (status(503, Retry_After="0"), "failed"),
    (drop, "failed"), (half_a_body, "failed"), (no_http, "failed"), (hang, "timed_out"), (drip, "timed_out"),
    (endless_drip, "timed_out"), (status(408), "failed"),
])
def test_what_passes_is_tried_again_and_counted_and_what_stays_ends_without_an_answer(trouble, count):
    counts = Counts()
    with serving(trouble, says("fine")) as server:
        assert endpoint(server.url, counts).complete(ASK) == "fine"
    assert counts.take() == {count: 1}
    with serving(trouble) as server:
        start = time.monotonic()
        with pytest.raises(NoAnswer, match=count):
            endpoint(server.url, counts, request_s=0.2, total_s=0.5).complete(ASK)
        assert time.monotonic() - start < 5  # `hang` and `drip` go on for 20 s
    counted = counts.take()
    assert set(counted) == {count} and counted[count] >= 2


def test_nobody_listening_is_no_answer():
    with serving(says("x")) as server:
        url = server.url
    with pytest.raises(NoAnswer, match="failed"):
        endpoint(url, total_s=0.3).complete(ASK)


@pytest.mark.parametrize("code", [301, 400, 401, 404, 422])
def test_what_will_not_pass_is_asked_once(code, caplog):
    counts = Counts()
    with serving(status(code, Location="http://127.0.0.1:9/")) as server:
        asked = endpoint(server.url, counts)
        for _ in range(5):
            with pytest.raises(NoAnswer, match="refused"):
                asked.complete(ASK)
        assert len(server.seen) == 5 and counts.take() == {"refused": 5}
    [line] = caplog.messages
    assert str(code) in line and "go away" not in line


@pytest.mark.parametrize("body", [b"", b"null", b"[]", b"{}", b'{"choices": []}', b'{"choices": [{"message": null}]}',
                                  b'{"choices": [{"message": {"content": null}}]}', b"[" * 100_000, b'{"choices": 3}',
                                  b'{"choices": [{"message": {"content": " "}}]}',
                                  b'{"choices": [{"message": {"content": 7}}]}'])
def test_a_reply_that_holds_no_text_is_malformed(body):
    with serving(lambda h: server_help.reply(h, 200, body)) as server, pytest.raises(Malformed):
        endpoint(server.url).complete(ASK)
    with serving(garbage) as server, pytest.raises(Malformed):
        endpoint(server.url).complete(ASK)


@pytest.mark.parametrize("text, seconds", [("0.4", 0.4), ("3", 3.0), ("soon", None), (None, None), ("", None),
                                           ("-3", None), ("nan", None), ("inf", None)])
def test_retry_after_is_a_number_of_seconds(text, seconds):
    assert client._seconds(text) == seconds


def test_retry_after_is_a_date_as_well():
    assert 950 < client._seconds(formatdate(time.time() + 1000, usegmt=True)) <= 1000
    assert client._seconds(formatdate(time.time() - 1000, usegmt=True)) == 0.0


def test_the_server_s_own_pause_is_kept_and_one_beyond_the_budget_ends_the_question_at_once():
    with serving(status(429, Retry_After="0.4"), says("fine")) as server:
        start = time.monotonic()
        assert endpoint(server.url).complete(ASK) == "fine"
        assert time.monotonic() - start >= 0.4
    with serving(status(429, Retry_After="3600")) as server:
        start = time.monotonic()
        with pytest.raises(NoAnswer, match="rate_limited"):
            endpoint(server.url).complete(ASK)
        assert time.monotonic() - start < 3 and len(server.seen) == 1


def test_pauses_double():
    with serving(status(500)) as server:
        with pytest.raises(NoAnswer):
            endpoint(server.url, total_s=0.7, backoff_s=0.1).complete(ASK)  # after 0, 0.1, 0.3; 0.7 at the earliest
        assert 2 <= len(server.seen) <= 4


def test_no_more_requests_are_under_way_than_allowed():
    with serving(slowly(0.05, says("fine"))) as server:
        asked = endpoint(server.url, concurrency=2, total_s=5)
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(lambda _: asked.complete(ASK), range(8))) == ["fine"] * 8
        assert server.most == 2


def test_a_server_that_stays_away_is_left_alone_for_a_while_and_then_tried_again(monkeypatch, caplog):
    monkeypatch.setattr(client, "RESTS", 0.3)
    with serving(status(500), status(500), status(500), slowly(0.2, says("back"))) as server:
        asked = endpoint(server.url, total_s=4.0, request_s=4.0, backoff_s=10.0)
        for _ in range(3):
            with pytest.raises(NoAnswer, match="failed"):
                asked.complete(ASK)
        with pytest.raises(NoAnswer, match="skipped"):
            asked.complete(ASK)
        assert len(server.seen) == 3 and len(caplog.messages) == 1
        time.sleep(1.3)
        with ThreadPoolExecutor(3) as pool:  # one question tries, the others do not wait for it
            found = [str(f.exception() or f.result()) for f in [pool.submit(asked.complete, ASK) for _ in range(3)]]
        assert sorted(found) == ["back", "skipped", "skipped"]
        assert [asked.complete(ASK) for _ in range(2)] == ["back"] * 2


def test_the_key_goes_into_one_header_and_nowhere_else(monkeypatch, caplog):
    caplog.set_level("DEBUG")
    monkeypatch.setenv("JUDGE_KEY", " sk-secret\n")
    with serving(status(401), says("you are sk-secret")) as server:
        asked = endpoint(server.url, key_variable="JUDGE_KEY")
        with pytest.raises(NoAnswer):
            asked.complete(ASK)
        assert asked.complete(ASK) == "you are [key]"
        assert server.headers[1]["Authorization"] == "Bearer sk-secret"
    assert "sk-secret" not in "".join([caplog.text, repr(asked), asked.identity, repr(asked._settings)])


@pytest.mark.parametrize("settings, message", [
    ({"url": "host:8000/v1"}, "must look like http"), ({"url": ""}, "must look like http"),
    ({"url": "http://me:sk-secret@host/v1"}, "no user, password"), ({"url": "http://h/v1?key=sk-secret"}, "no user"),
    ({"model": ""}, "judge_model"), ({"key_variable": "NO_SUCH_KEY"}, "NO_SUCH_KEY, which is not set"),
    ({"key_variable": "BAD_KEY"}, "BAD_KEY holds characters")])
def test_settings_that_cannot_work_are_an_error_that_does_not_show_the_key(settings, message, monkeypatch):
    monkeypatch.setenv("BAD_KEY", "sk-secret\nX-More: é")
    with pytest.raises(ValueError, match=message) as problem:
        Endpoint(EndpointSettings(**{"url": "http://h/v1", "model": "m", **settings}), Counts())
    assert "sk-secret" not in str(problem.value)


# --- the cache

def test_what_is_kept_is_read_and_keys_are_the_content(tmp_path):
    cache, key = Cache(tmp_path / "a" / "b"), Cache.key(["m", ASK])
    assert cache.get(key) is None
    cache.put(key, "answer é \ud800")
    assert Cache(tmp_path / "a" / "b").get(key) == "answer é \ud800"
    assert Cache.key({"a": 1, "b": 2}) == Cache.key({"b": 2, "a": 1}) != Cache.key({"a": 1, "b": 3})


@pytest.mark.parametrize("damage", [b"", b"{", b"null", b"[]", b'{"request": "other", "answer": "x"}', b"\xff\xfe",
                                    b'{"answer": "x"}', b"[" * 100_000])
def test_a_damaged_entry_is_ignored_and_written_anew(tmp_path, damage):
    cache, key = Cache(tmp_path), Cache.key("q")
    cache.put(key, "right")
    [file] = tmp_path.glob("*/*.json")
    file.write_bytes(damage)
    assert cache.get(key) is None
    cache.put(key, "right")
    assert cache.get(key) == "right"


def test_an_entry_that_cannot_be_kept_costs_no_run(tmp_path, caplog):
    cache, key = Cache(tmp_path), Cache.key("q")
    (tmp_path / key[:2]).write_text("a file where the folder should be")
    cache.put(key, "x")
    assert cache.get(key) is None and "could not be kept" in caplog.text
    with pytest.raises(OSError):
        Cache(tmp_path / key[:2] / "x")


def hammer(folder, number):
    cache, bad = Cache(folder), 0
    for i in range(150):
        key = Cache.key(i % 10)
        found = cache.get(key)
        bad += found not in (None, f"{i % 10}" * 2000)
        cache.put(key, f"{i % 10}" * 2000)
    return bad


def test_many_threads_and_processes_share_a_folder(tmp_path):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=lambda n=n: (_ for _ in ()).throw(SystemExit(hammer(tmp_path, n))))
                 for n in range(2)]
    for process in processes:
        process.start()
    threads = [threading.Thread(target=lambda n=n: results.append(hammer(tmp_path, n))) for n in range(2)]
    results = []
    for thread in threads:
        thread.start()
    for thing in (*threads, *processes):
        thing.join()
    assert results == [0, 0] and [p.exitcode for p in processes] == [0, 0]
    assert not list(tmp_path.glob("*/*.tmp")) and len(list(tmp_path.glob("*/*.json"))) == 10
    assert all(json.loads(f.read_text())["request"] == f.stem for f in tmp_path.glob("*/*.json"))


def test_a_server_that_is_overrun_for_a_while_answers_everybody_in_the_end():
    counts = Counts()
    with serving(*[status(429)] * 9, says("fine")) as server:
        asked = endpoint(server.url, counts, concurrency=3, backoff_s=0.05)
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(lambda _: asked.complete(ASK), range(8))) == ["fine"] * 8
        assert counts.take() == {"rate_limited": 9} and len(server.seen) == 17 and server.most <= 3


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl, to make a certificate")
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
                    "-addext", "subjectAltName=DNS:localhost", "-keyout", folder / "key.pem", "-out",
                    folder / "cert.pem"], check=True, capture_output=True)
    return folder


def test_over_tls_the_certificate_is_checked_and_waits_end_as_well(certificate, monkeypatch):
    counts = Counts()
    for trusted in (False, True):
        if trusted:
            monkeypatch.setenv("SSL_CERT_FILE", str(certificate / "cert.pem"))
        with serving(says("fine"), hang, drip, says("fine"), tls=certificate) as server:
            asked = endpoint(server.url, counts, total_s=3.0 if trusted else 0.3, request_s=0.5)
            if not trusted:
                with pytest.raises(NoAnswer, match="failed"):
                    asked.complete(ASK)
                assert server.seen == [] and set(counts.take()) == {"failed"}
                continue
            assert [asked.complete(ASK) for _ in range(2)] == ["fine"] * 2
            assert counts.take() == {"timed_out": 2}
