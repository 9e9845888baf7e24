"""core/decode.py: decoding many conversations a token at a time equals the plain model on each."""

import pytest
import torch
from families_help import FAMILIES, randomised

torch.set_num_threads(1)


def some_ids(n, seed):
    return torch.randint(31, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def same(a, b):
    torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("family", FAMILIES)
def test_decoder_steps_equal_full_forwards_for_rows_of_many_lengths_as_rows_come_and_go(family):
    model = randomised(family).double().requires_grad_(False)
    conversations = {n: some_ids(n, seed=n) for n in (1, 127, 5, 130, 40)}
    decoder, rows = model.decoder(rows=4), []

    def enter(n):
        cache = model.new_cache()
        model.hidden(torch.tensor(conversations[n]), torch.tensor([0, n]), caches=[cache])
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
                same(logits[row], model.logits(ids, torch.tensor([0, len(ids)]))[-1])
    cache = leave(0)  # what a decoder gives back goes on through the plain model
    n = cache.length
    whole = torch.tensor([*[c for c in conversations.values() if len(c) == n][0], 3, 4])
    same(model.logits(torch.tensor([3, 4]), torch.tensor([0, 2]), caches=[cache]),
         model.logits(whole, torch.tensor([0, n + 2]))[n:])
