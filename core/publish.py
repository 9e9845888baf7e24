"""The trainer's weights as a rollout server takes them: Hugging Face names, one bucket after the other, and a proof.

Which names there are is not guessed from the family: they are those of the folder the training started from, which is
the one the server was started with. A server ignores a name that it does not know and says nothing; so every name here
is proved against the model before anything is sent.
"""

from __future__ import annotations

from pathlib import Path
from typing import Iterator

import torch
from torch import Tensor

from oprd.core import hf
from oprd.core.model import Model
from oprd.core.names import is_extra_head, is_untouched, pairs
from oprd.core.score import logprobs
from oprd.core.tensors import DTYPES, entries, read_headers
from oprd.parallel.broadcast import Bucket, Form, Group, buckets

PROBES, PROBE_TOKENS = 4, 32


class Publisher:
    """What rollout/update.py needs of a trainer. source: the Hugging Face folder training started from. dtype: of what
    is sent, `float32` or `bfloat16`; empty: as the folder stores it (`send_as` may change it). Raises ValueError for a
    folder whose tensors are not exactly the model's and the known carried ones."""

    def __init__(self, source: Path, dtype: str, bucket_bytes: int, backend: str, seconds: float,
                 device: str | torch.device = "cpu"):
        self.source, self.config, stored = source, hf.load_config(source), read_headers(source)
        hf.check_coverage(stored, self.config)
        self._stored, self._bucket_bytes, self.backend = stored, bucket_bytes, backend
        self._seconds, self._device = seconds, device
        self.send_as(dtype)
        self.vocab = self.config.vocab_size
        generator = torch.Generator().manual_seed(0)
        # without the last id of the vocabulary, which SGLang (0.5.20) reports as 0 among its input ids
        self.probes = torch.randint(self.vocab - 1, (PROBES, PROBE_TOKENS), generator=generator).tolist()

    def send_as(self, dtype: str) -> None:
        """Send in another dtype; what the folder keeps wider than its embedding stays so."""
        self._dtype = dtype
        headers = hf.recast(self._stored, getattr(torch, dtype)) if dtype else self._stored.headers
        # A head that is tied to the embedding is the embedding: the server makes it from that.
        self.form: Form = {
            name: (DTYPES[entry.dtype], tuple(entry.shape)) for file, header in headers.items()
            for name, entry in entries(header, file).items()
            if not is_untouched(name) and not is_extra_head(name, self.config)}
        self.wide = any(dtype == torch.float32 and len(shape) > 1 for dtype, shape in self.form.values())

    def buckets(self, model: Model) -> Iterator[Bucket]:
        """The model's weights, whole tensors under the folder's names."""
        parameters = model.state_dict()

        def fill(name: str, out: Tensor) -> None:
            for _, target, ours in pairs(name, out, parameters, self.config):
                target.copy_(ours)

        return buckets(self.form, self._bucket_bytes, fill, self._device)

    def group(self, size: int, name: str) -> Group:
        return Group(self.backend, size, name, self._seconds)

    def expected(self, model: Model) -> list[list[float]]:
        """What the probes' log-probabilities are under these weights: log p(ids[i] | ids[:i]) for i >= 1."""
        return [values.tolist() for values in logprobs(model, self.probes)]

    def write(self, model: Model, folder: Path) -> None:
        """The weights as a folder that a server can load."""
        hf.save_like(model, folder, self.source, overwrite=True,
                     dtype=getattr(torch, self._dtype) if self._dtype else None)
