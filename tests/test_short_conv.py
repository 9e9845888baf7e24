"""kernels/short_conv.py: packed sequences, windows and the decoding step are the token-by-token convolution."""

import pytest
import torch
import torch.nn.functional as F

from oprd.kernels.short_conv import short_conv, short_conv_definition, short_conv_step

torch.set_num_threads(1)
LENGTHS = [5, 0, 1, 2, 3, 9]


def bounds(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])


def inputs(lengths, width=4, channels=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (sum(lengths), channels), (channels, width), (len(lengths), width - 1, channels)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def same(a, b):
    torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("with_windows", [False, True])
def test_it_equals_the_definition_in_values_and_all_gradients(width, with_windows):
    sides = []
    for conv in (short_conv, short_conv_definition):
        x, weight, windows = inputs(LENGTHS, width)
        out = conv(x, weight, bounds(LENGTHS), windows if with_windows else None)
        loss = sum((t * torch.arange(1.0, t.numel() + 1, dtype=t.dtype).view(t.shape)).sum() for t in out)
        loss.backward()
        sides.append([*out, x.grad, weight.grad, *([windows.grad] if with_windows else [])])
    for got, wanted in zip(*sides, strict=True):
        same(got, wanted)


def test_one_sequence_is_torchs_causal_depthwise_convolution():
    x, weight, _ = inputs([11])
    wanted = F.silu(F.conv1d(F.pad(x.T, (3, 0)), weight[:, None], groups=3)).T
    same(short_conv(x, weight, bounds([11]))[0], wanted)


def test_three_tokens_by_hand():
    # width 2, weight [10, 1]: y = silu(x_t + 10 x_{t-1}); the second sequence does not see the first
    x, weight = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[10.0, 1.0]])
    out, windows = short_conv(x, weight, torch.tensor([0, 2, 3]))
    same(out.flatten(), F.silu(torch.tensor([1.0, 12.0, 3.0])))
    assert windows.tolist() == [[[2.0]], [[3.0]]]


@pytest.mark.parametrize("pieces", [[9, 11], [1] * 20, [2, 0, 18], [20]])
def test_pieces_that_hand_on_their_window_equal_one_piece(pieces):
    x, weight, windows = inputs([20])
    whole, last = short_conv(x, weight, bounds([20]), windows)
    got = []
    for piece in x.split(pieces):
        out, windows = short_conv(piece, weight, bounds([len(piece)]), windows)
        got.append(out)
    same(torch.cat(got), whole)
    same(windows, last)


def test_a_step_equals_one_token_and_writes_the_windows_in_place():
    x, weight, windows = (t.detach() for t in inputs([1] * 6))
    wanted, after = short_conv(x, weight, bounds([1] * 6), windows)
    same(short_conv_step(x, weight, windows), wanted)
    same(windows, after)


def test_it_is_the_convolution_of_transformers():
    from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs

    x, weight, windows = (t.detach() for t in inputs([1] * 6))
    state = torch.cat([torch.zeros_like(windows[:, :1]), windows], dim=1).transpose(1, 2).contiguous()
    wanted = theirs.causal_conv1d_update(x[:, :, None], state, weight, None, "silu")[:, :, 0]
    same(short_conv_step(x, weight, windows), wanted)
    same(windows, state[:, :, 1:].transpose(1, 2))


def test_channels_may_be_a_view_and_no_input_is_written_to():
    x, weight, windows = inputs(LENGTHS)
    wide = torch.cat([x, x], dim=1).detach()
    before = wide.clone(), windows.detach().clone()
    got, wanted = (short_conv(t, weight, bounds(LENGTHS), windows) for t in (wide[:, :3], x))
    for a, b in zip(got, wanted):
        same(a, b)
    assert torch.equal(wide, before[0]) and torch.equal(windows, before[1])


@pytest.mark.parametrize("lengths", [[0], [0, 0]])
def test_without_tokens_the_windows_stay_and_their_gradient_passes(lengths):
    x, weight, windows = inputs(lengths)
    out, after = short_conv(x, weight, bounds(lengths), windows)
    assert out.shape == (0, 3) and torch.equal(after, windows)
    after.sum().backward()
    assert torch.equal(windows.grad, torch.ones_like(windows))
