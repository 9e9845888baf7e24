"""Two nodes, as two network namespaces on one machine, run the launch script end to end; a killed rank, a stop."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from families_help import config_of

from oprd.core import hf
from oprd.core.model import Model
from oprd.core.tokenizer import train_bpe

ROOT = Path(__file__).resolve().parents[1]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900),
              pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="makes network namespaces: needs "
                                                                                     "root and the ip command")]


@pytest.fixture
def nodes():
    """Names of two namespaces that reach each other as 10.231.7.1 and 10.231.7.2."""
    names, ip = [f"oprd{os.getpid()}{side}" for side in "ab"], lambda *words: subprocess.run(["ip", *words], check=True)
    made = []
    try:
        for name in names:
            ip("netns", "add", name)
            made.append(name)
        ip("link", "add", "veth0", "netns", names[0], "type", "veth", "peer", "name", "veth0", "netns", names[1])
        for number, name in enumerate(names, start=1):
            ip("-n", name, "address", "add", f"10.231.7.{number}/24", "dev", "veth0")
            ip("-n", name, "link", "set", "veth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name])


@pytest.fixture
def settings(tmp_path):
    """Text, a tokenizer, a tiny hybrid model and the settings file of eight steps on them."""
    drawn = random.Random(0)
    words = "def return if else for in range x y z a b c 1 2 3 + - * / ( ) : print value total".split()
    texts = [" ".join(drawn.choice(words) for _ in range(drawn.randint(10, 60))) for _ in range(60)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = train_bpe(texts, 301)
    (tmp_path / "tokenizer").mkdir()
    tokenizer.save(tmp_path / "tokenizer")
    model = Model(config_of("qwen3_5_text", vocab_size=tokenizer.vocab_size, num_attention_heads=4)).init(0)
    hf.save(model, tmp_path / "start", tokenizer_from=tmp_path / "tokenizer")
    file = tmp_path / "settings.toml"
    file.write_text(f'[run]\nprecision = "fp32"\nthreads = 1\n[data]\nrows = "{tmp_path}/texts.jsonl"\n[model]\n'
                    f'path = "{tmp_path}/start"\n[train]\nsteps = 8\nbatch = 4\nmicro_batch_tokens = 1024\nlr = 1e-2\n'
                    "checkpoint_every = 2\n")
    return file


def launch(nodes, settings, folder, *more):
    """The launch script on both nodes."""
    started = []
    for rank, name in enumerate(nodes):
        variables = {**os.environ, "NNODES": "2", "NODE_RANK": str(rank), "MASTER_ADDR": "10.231.7.1",
                     "MASTER_PORT": "29511", "RANKS_PER_NODE": "1", "GLOO_SOCKET_IFNAME": "veth0",
                     "OMP_NUM_THREADS": "1", "PYTHON": sys.executable}
        started.append(subprocess.Popen(
            ["ip", "netns", "exec", name, str(ROOT / "launch/torchrun.sh"), "--stage", "pretrain", "--config",
             str(settings), "--run.folder", str(folder), *more], env=variables, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True))
    return started


def ended(started, seconds=300):
    return [(p.communicate(timeout=seconds)[0], p.returncode) for p in started]


def curve(folder):
    file = folder / "base" / "metrics.jsonl"
    return [json.loads(line)["train/loss"] for line in file.read_text().splitlines()] if file.exists() else []


def wait_for_steps(folder, count, started):
    end = time.monotonic() + 300
    while len(curve(folder)) < count:
        assert time.monotonic() < end and all(p.poll() is None for p in started), [p.poll() for p in started]
        time.sleep(0.2)


def ranks_of(script):
    """The process ids of train.py below a launch script: script -> torchrun -> ranks."""
    children = lambda pid: [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]  # noqa: E731
    return [rank for launcher in children(script.pid) for rank in children(launcher)]


def test_two_nodes_train_as_one_process_does_and_go_on_after_a_kill_and_a_stop(nodes, settings, tmp_path):
    one = [sys.executable, str(ROOT / "train.py"), "--stage", "pretrain", "--config", str(settings), "--run.folder",
           str(tmp_path / "one")]
    subprocess.run(one, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})

    started = launch(nodes, settings, tmp_path / "two", "--parallel.tp", "2")
    wait_for_steps(tmp_path / "two", 3, started)
    killed = time.monotonic()
    os.kill(ranks_of(started[1])[0], signal.SIGKILL)
    assert all(code != 0 for _, code in ended(started, 120)) and time.monotonic() - killed < 60

    started = launch(nodes, settings, tmp_path / "two", "--parallel.tp", "2", "--resume")
    wait_for_steps(tmp_path / "two", 5, started)
    started[1].send_signal(signal.SIGTERM)
    said = ended(started)
    assert [code for _, code in said] == [0, 0], said
    assert "stopped after step" in said[0][0] or len(curve(tmp_path / "two")) == 8

    said = ended(launch(nodes, settings, tmp_path / "two", "--parallel.cp", "2", "--resume"))
    assert [code for _, code in said] == [0, 0], said
    assert curve(tmp_path / "two") == pytest.approx(curve(tmp_path / "one"), rel=1e-4)
    assert (tmp_path / "two" / "base" / "model" / "config.json").exists()
