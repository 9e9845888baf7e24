"""The short causal convolution before the gated delta rule, over packed sequences: each channel by itself, then SiLU.

T packed tokens, B sequences, C channels, W width, N rows being decoded.

    y_t = silu( sum_j weight[:, W - 1 - j] x_{t-j} )      j = 0 .. W - 1

Before a sequence's first token there are zeros, or the last W - 1 inputs of the piece before it (its window).
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


def short_conv_definition(x: Tensor, weight: Tensor, cu_seqlens: Tensor,
                          windows: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """What short_conv() means, token by token, in float64. Slow on purpose."""
    x, weight, width = x.double(), weight.double(), weight.shape[1]
    out, after = [], []
    for b, (start, end) in enumerate(zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:])):
        seen = list(x.new_zeros(width - 1, x.shape[1]) if windows is None else windows[b].double())
        for t in range(start, end):
            seen.append(x[t])
            total = sum(weight[:, width - 1 - j] * seen[-1 - j] for j in range(width))
            out.append(total * torch.sigmoid(total))
        after.append(torch.stack(seen[len(seen) - width + 1 :]) if width > 1 else x.new_zeros(0, x.shape[1]))
    return torch.stack(out) if out else x, torch.stack(after)


def short_conv(x: Tensor, weight: Tensor, cu_seqlens: Tensor, windows: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """y [T, C] for x [T, C], weight [C, W] and windows [B, W - 1, C] (the inputs before, oldest first; default: zeros),
    and each sequence's window after its last token, [B, W - 1, C]."""
    before, count = weight.shape[1] - 1, len(cu_seqlens) - 1
    if windows is None:
        windows = x.new_zeros(count, before, x.shape[1])
    cu = cu_seqlens.cpu().numpy().astype(np.int64)
    starts, lengths = cu[:-1], np.diff(cu)
    # every sequence behind its window, end to end; sequence b then begins at starts[b] + b * before
    behind = starts + np.arange(count) * before
    token = np.arange(cu[-1]) + np.repeat(np.arange(1, count + 1) * before, lengths)
    source = np.empty(cu[-1] + count * before, dtype=np.int64)
    source[token] = np.arange(cu[-1])
    window = behind[:, None] + np.arange(before)
    source[window] = cu[-1] + np.arange(count * before).reshape(count, before)
    index = lambda places: torch.from_numpy(places).to(x.device)  # noqa: E731
    joined = torch.cat([x, windows.to(x.dtype).flatten(0, 1)]).index_select(0, index(source))
    after = joined.index_select(0, index((window + lengths[:, None]).ravel())).view(windows.shape)
    n = max(0, len(joined) - before)
    total = joined[:n] * weight[:, 0]
    for j in range(1, before + 1):
        total = total.addcmul(joined[j : j + n], weight[:, j])
    return F.silu(total.index_select(0, index(token - before))), after


def short_conv_step(x: Tensor, weight: Tensor, windows: Tensor) -> Tensor:
    """One token for each of N rows: x [N, C] -> y [N, C]; windows [N, W - 1, C] are updated in place."""
    seen = torch.cat([windows, x.unsqueeze(1)], dim=1)
    windows.copy_(seen[:, 1:])
    return F.silu((seen * weight.T).sum(1))
