"""Engines for the tests: a small model in a folder, an engine over scripted servers, and the real server where there is
one (OPRD_SGLANG names its environment, which .ci/sglang.sh makes)."""

import os
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from oprd.core import hf
from oprd.core.model import Model, ModelConfig
from oprd.core.publish import Publisher
from oprd.core.settings import Config
from oprd.rollout.serve import serve
from oprd.rollout.server import Server
from oprd.rollout.sglang import SGLangEngine
from oprd.rollout.update import Updater
from tests.sglang_fake import Fake, Pipe

VOCAB = 96
CONFIG = ModelConfig(vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, head_dim=16, initializer_range=0.2, tie_word_embeddings=False)
ENVIRONMENT = os.environ.get("OPRD_SGLANG", "")
needs_sglang = pytest.mark.skipif(
    not (Path(ENVIRONMENT) / "bin" / "python").exists() or not ENVIRONMENT,
    reason="no SGLang: OPRD_SGLANG names no environment with it (.ci/sglang.sh makes one)")


def a_model(seed=0, config=CONFIG):
    """Random everywhere, norms too, so that a weight left out shows."""
    model = Model(config).init(seed).requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if "norm" in name:
            p.add_(torch.rand(p.shape, generator=generator) - 0.3)
    return model


def moved(model, seed, by=0.02):
    """Another version of a model: every parameter moved a little, in place."""
    generator = torch.Generator().manual_seed(1000 + seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(by * torch.randn(p.shape, generator=generator))
    return model


def plain_logprobs(model, context, sampled, temperature=1.0):
    """Log-probabilities of `sampled` after `context` by one full forward, and the logits."""
    ids = torch.tensor([*context, *sampled])
    with torch.inference_mode():
        logits = model.logits(ids, torch.tensor([0, len(ids)]))[len(context) - 1 : -1]
    logprobs = torch.log_softmax(logits / temperature, -1)
    return logprobs.gather(1, torch.tensor(sampled)[:, None]).squeeze(1), logits


def furthest(model, context, done, temperature=1.0):
    """The largest difference of served log-probabilities to the plain model's."""
    return (plain_logprobs(model, context, done.ids, temperature)[0] - torch.tensor(done.logprobs)).abs().max().item()


class PipePublisher(Publisher):
    """A Publisher whose groups reach scripted servers. broken: see Pipe."""

    broken = None

    def group(self, size, name):
        return Pipe(size, name, self.broken)


@contextmanager
def scripted(tmp_path, count=1, way="broadcast", bucket_bytes=2**14, seconds=30.0, sessions=False, token_s=0.0,
             **settings):
    """(engine, its fakes, the model it serves as version 0)."""
    model = a_model()
    fakes = [Fake(a_model(99), sessions, token_s) for _ in range(count)]
    if not (tmp_path / "model").exists():
        hf.save(model, tmp_path / "model")
    publisher = PipePublisher(tmp_path / "model", "", bucket_bytes, "gloo", seconds)
    servers = [Server(fake.url, call_s=30.0) for fake in fakes]
    engine = SGLangEngine(servers, Updater(publisher, tmp_path / "disk", way, seconds), VOCAB, **settings)
    try:
        for server in servers:
            server.learn()
        engine.load(model, 0)
        yield engine, fakes, model
    finally:
        engine.close()
        for fake in fakes:
            fake.kill()


def real_config(folder, **sglang):
    """Settings under which servers of ours run on this machine's CPU."""
    os.environ["SGLANG_PYTHON"], os.environ["SGLANG_CPU"] = str(Path(ENVIRONMENT) / "bin" / "python"), "1"
    fields = {"command": "launch/sglang.sh {model} {port} --dtype float32 --max-total-tokens 8192 "
              "--context-length 1024 --max-running-requests 48", "bucket_mib": 1,
              "update_s": 30.0, "ready_s": 900.0, **sglang}
    return Config.model_validate({"run": {"folder": str(folder)}, "sglang": fields,
                                  "rollout": {"engine": "sglang", "max_context_tokens": 512}})


@contextmanager
def real(folder, count=1, model=None, **sglang):
    """(engine over real servers, the model they serve as version 0)."""
    model, config = model or a_model(), real_config(folder, count=count, **sglang)
    hf.save(model, folder / "model")
    publisher = Publisher(folder / "model", "", config.sglang.bucket_mib * 2**20, "gloo", config.sglang.update_s)
    engine = serve(config, publisher, folder / "model", model, 0)
    try:
        yield engine, model
    finally:
        engine.close()
