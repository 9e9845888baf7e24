"""core/cache.py: a conversation in pieces equals the conversation in one forward; forks and rewinds leave no trace."""

import pytest
import torch
from families_help import FAMILIES, randomised

torch.set_num_threads(1)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return randomised(request.param).double().requires_grad_(False)


def some_ids(n, seed=0):
    return torch.randint(37, (n,), generator=torch.Generator().manual_seed(seed))


def run(model, ids, cache=None):
    return model.logits(ids, torch.tensor([0, len(ids)]), caches=None if cache is None else [cache])


def same(a, b):
    torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("pieces", [[23], [1] * 23, [10, 1, 12], [1, 22], [7, 1, 1, 5, 9]])
def test_pieces_through_a_cache_equal_one_forward(model, pieces):
    ids, cache = some_ids(23), model.new_cache()
    got = torch.cat([run(model, piece, cache) for piece in ids.split(pieces)])
    same(got, run(model, ids))
    assert cache.length == 23


def test_packed_pieces_of_several_conversations_equal_each_alone(model):
    conversations = [some_ids(n, seed=n) for n in (9, 14, 4)]
    caches = [model.new_cache() for _ in conversations]
    got = [[], [], []]
    for cut in ((3, 0, 1), (9, 13, 3), (9, 14, 4)):  # conversation 1 starts with an empty piece; 0 ends with one
        pieces = [ids[cache.length : end] for ids, cache, end in zip(conversations, caches, cut)]
        cu = torch.tensor([0, *torch.tensor([len(p) for p in pieces]).cumsum(0)])
        out = model.logits(torch.cat(pieces), cu, caches=caches)
        for rows, part in zip(got, out.split([len(p) for p in pieces])):
            rows.append(part)
    for rows, ids in zip(got, conversations):
        same(torch.cat(rows), run(model, ids))


def test_a_fork_and_its_trunk_do_not_see_each_other(model):
    trunk_ids, reminder, reply = some_ids(11, 1), some_ids(4, 2), some_ids(6, 3)
    trunk = model.new_cache()
    run(model, trunk_ids, trunk)
    branch = trunk.fork()
    on_branch = run(model, torch.cat([reminder, reply]), branch)
    on_trunk = run(model, reply, trunk)
    same(on_branch, run(model, torch.cat([trunk_ids, reminder, reply]))[11:])
    same(on_trunk, run(model, torch.cat([trunk_ids, reply]))[11:])
    assert (trunk.length, branch.length) == (17, 21)
    assert (on_branch[4:] - on_trunk).abs().max() > 1e-3  # the reminder did change the reply


@pytest.mark.parametrize("back_to", [0, 1, 7, 11, 12])
def test_after_a_rewind_what_was_dropped_has_no_effect(model, back_to):
    first, dropped, then = some_ids(back_to, 4), some_ids(12 - back_to, 5), some_ids(5, 6)
    cache = model.new_cache()
    for piece in (first, dropped):
        run(model, piece, cache)
    kept = cache.fork()
    assert cache.rewind(back_to) == back_to  # a piece ended there
    assert (cache.length, kept.length) == (back_to, 12)
    same(run(model, then, cache), run(model, torch.cat([first, then]))[back_to:])
    same(run(model, then, kept), run(model, torch.cat([first, dropped, then]))[12:])


def test_a_rewind_into_a_piece_keeps_what_every_layer_can_go_on_from(model):
    ids, cache = some_ids(20), model.new_cache()
    for piece in ids.split([4, 5, 6, 5]):
        run(model, piece, cache)
    recurrent = "linear_attention" in model.config.layer_types
    assert cache.rewind(17) == cache.length == (15 if recurrent else 17)
    same(run(model, ids[cache.length:], cache), run(model, ids)[15 if recurrent else 17:])
    assert cache.rewind(8) == cache.length == (0 if recurrent else 8)  # the point at 4 is no longer kept
    same(run(model, ids[cache.length:], cache), run(model, ids)[0 if recurrent else 8:])


def test_rewinding_forward_is_our_mistake(model):
    cache = model.new_cache()
    run(model, some_ids(3), cache)
    with pytest.raises(AssertionError, match="rewind to 4 tokens of 3"):
        cache.rewind(4)
