"""core/decode.py: decoding many conversations a token at a time equals the plain model on each."""

import torch

from oprd.core.decode import Decoder
from oprd.core.model import Model, ModelConfig

torch.set_num_threads(1)
CONFIG = ModelConfig(vocab_size=31, hidden_size=24, intermediate_size=28, num_hidden_layers=3, num_attention_heads=6,
                     num_key_value_heads=2, head_dim=8, initializer_range=0.3)


def a_model(seed=0) -> Model:
    """Random everywhere, norms too, so that a weight left out of the decoder shows."""
    model = Model(CONFIG).init(seed).requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if "norm" in name:
            p.add_(torch.rand(p.shape, generator=generator) - 0.3)
    return model


def some_ids(n, seed):
    return torch.randint(31, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_decoder_steps_equal_full_forwards_for_rows_of_many_lengths_as_rows_come_and_go():
    model = a_model().double()
    conversations = {n: some_ids(n, seed=n) for n in (1, 127, 5, 130, 40)}
    decoder, rows = Decoder(model, rows=4), []
    decoder_error = 0.0

    def enter(n):
        cache = model.new_cache()
        model.hidden(torch.tensor(conversations[n]), torch.tensor([0, n]), caches=[cache])
        for entry in cache.entries:
            entry.k, entry.v = entry.k.float(), entry.v.float()
        assert decoder.join(cache, room=6) == len(rows)
        rows.append(n)

    def leave(row):
        cache = decoder.leave(row)
        assert cache.length == len(conversations[rows[row]])
        rows[row] = rows[-1]
        rows.pop()
        return cache

    for action in (lambda: enter(127), lambda: enter(1), lambda: enter(5), lambda: leave(0), lambda: enter(130),
                   lambda: enter(40), lambda: leave(3), lambda: leave(1)):
        action()
        for _ in range(2):
            new = torch.tensor([len(conversations[n]) % 31 for n in rows])
            logits = decoder.step(new)
            for row, n in enumerate(rows):
                conversations[n].append(int(new[row]))
                ids = torch.tensor(conversations[n])
                want = model.logits(ids, torch.tensor([0, len(ids)]))[-1]
                decoder_error = max(decoder_error, (logits[row].double() - want).abs().max().item())
    assert decoder_error < 2e-4  # float32 against float64, logits of size 10
    cache = leave(0)  # what a decoder gives back goes on through the plain model
    ids = torch.tensor([3, 4])
    for entry in cache.entries:
        entry.k, entry.v = entry.k.double(), entry.v.double()
    n = cache.length
    whole = torch.tensor([*[c for c in conversations.values() if len(c) == n][0], 3, 4])
    torch.testing.assert_close(model.logits(ids, torch.tensor([0, 2]), caches=[cache]),
                               model.logits(whole, torch.tensor([0, n + 2]))[n:], atol=2e-4, rtol=0)
