"""A model of many ranks as whole tensors on the first of them, one at a time: for whoever writes or serves it."""

from __future__ import annotations

from typing import Callable, Iterator, Mapping, TypeVar

import torch
from torch import Tensor

from oprd.core.model import Model
from oprd.parallel.collectives import from_first

T = TypeVar("T")


def with_whole_state(model: Model, work: Callable[[Mapping[str, Tensor]], T]) -> T | None:
    """work(state) on the first rank, where state[name] is a whole parameter (in CPU memory if it had to be gathered);
    every rank must call it, and the others get None. Only what work looks up is gathered, when it looks it up.

    What work raises is raised there; on the others it is a RuntimeError with its text.
    """
    world, own = model.mesh.world, model.state_dict()
    if world.size == 1:
        return work(own)
    if world.rank:
        while True:
            name, failure = from_first(None, world)
            if failure is not None:
                raise RuntimeError(f"the first rank failed: {failure}")
            if name is None:
                return None
            model.cuts[name].join(own[name])
    try:
        result = work(_Gathered(model, own))
    except BaseException as problem:
        from_first((None, f"{type(problem).__name__}: {problem}"), world)
        raise
    from_first((None, None), world)
    return result


class Mirror:
    """A whole copy of a model on the first rank, for a rollout engine there; on one rank the model itself, elsewhere
    nothing. refresh() brings it up to date; every rank must call it."""

    def __init__(self, model: Model):
        self._source = model
        self.model: Model | None = model
        if model.mesh.world.size > 1:
            self.model = None
            if model.mesh.first:
                with torch.device("meta"):
                    self.model = Model(model.config)
                self.model.to_empty(device="cpu")
            self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        def copy(state: Mapping[str, Tensor]) -> None:
            for name, p in self.model.state_dict().items():
                p.copy_(state[name])

        if self._source.mesh.world.size > 1:
            with_whole_state(self._source, copy)


class _Gathered(Mapping):
    def __init__(self, model: Model, own: Mapping[str, Tensor]):
        self._model, self._own = model, own
        self._last: dict[str, Tensor] = {}  # two, as writers of experts one by one go to and fro between two

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._own:
            raise KeyError(name)
        if name not in self._last:
            from_first((name, None), self._model.mesh.world)
            whole = self._model.cuts[name].join(self._own[name]).cpu()
            self._last = dict([*self._last.items()][-1:]) | {name: whole}
        return self._last[name]

    def __contains__(self, name: object) -> bool:
        return name in self._own

    def __iter__(self) -> Iterator[str]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)
