"""core/hf.py and core/model.py against transformers, which reads what we write and computes the same numbers."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from oprd.core import hf
from oprd.core.model import Model, ModelConfig

torch.set_num_threads(1)


def small(tied: bool = False, **change) -> ModelConfig:
    sizes = dict(vocab_size=61, hidden_size=24, intermediate_size=36, num_hidden_layers=3, num_attention_heads=6,
                 num_key_value_heads=2, head_dim=10, rope_theta=1234.5, rms_norm_eps=1e-5, tie_word_embeddings=tied)
    return ModelConfig(**{**sizes, **change})


def randomised(config: ModelConfig, seed: int = 0) -> Model:
    """Every parameter random, norms included, large enough that each of them moves the logits."""
    model = Model(config).init(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * 0.3)
    return model


def packed(lengths, vocab, seed=1):
    ids = torch.randint(vocab, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    return ids, torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])


@pytest.mark.parametrize("tied", [False, True])
def test_logits_and_gradients_equal_those_of_transformers_reading_our_directory(tmp_path, tied):
    from transformers import AutoModelForCausalLM

    model = randomised(small(tied))
    hf.save(model, tmp_path / "m")
    theirs, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "m", dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    assert type(theirs).__name__ == "Qwen3ForCausalLM"
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    lengths = [7, 1, 13]
    ids, cu = packed(lengths, 61)
    ours = model.logits(ids, cu)
    want = torch.cat([theirs(input_ids=part[None]).logits[0] for part in ids.split(lengths)])
    torch.testing.assert_close(ours, want, atol=1e-4, rtol=1e-4)
    weight = torch.randn(ours.shape, generator=torch.Generator().manual_seed(2))
    (ours.log_softmax(-1) * weight).sum().backward()
    (want.log_softmax(-1) * weight).sum().backward()
    their_grads = {name: p.grad for name, p in theirs.named_parameters()}
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, their_grads[name], atol=1e-4, rtol=1e-3, msg=lambda m: f"{name}: {m}")
