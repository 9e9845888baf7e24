"""Which implementation of a kernel runs: decided here, by the device of its tensors and by what is installed.

The Triton files (`*_triton.py`) have the signatures of the files they stand beside. On a CPU they run in Triton's
interpreter (TRITON_INTERPRET=1), which only the tests want, so there the torch version is taken.
"""

from __future__ import annotations

import functools
import importlib.util

from torch import Tensor


def use_triton(x: Tensor) -> bool:
    return x.is_cuda and x.element_size() <= 4 and _installed("triton")


def use_flash_attention(q: Tensor) -> bool:
    """flash-attn's kernels take half precision and heads of at most 256 elements."""
    return q.is_cuda and q.element_size() == 2 and q.shape[-1] <= 256 and _installed("flash_attn")


def use_fla(v: Tensor) -> bool:
    """flash-linear-attention's delta rule: half precision or float32 on a GPU."""
    return v.is_cuda and v.element_size() <= 4 and _installed("fla")


@functools.cache
def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None
