"""AdamW with fp32 masters, the learning-rate schedule, and gradient clipping."""

from __future__ import annotations

import math
from typing import Any, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from oprd.parallel.reducer import LOW_PRECISION, Reducer


MOMENTS = ("exp_avg", "exp_avg_sq")


def learning_rate(step: int, total: int, peak: float, minimum: float = 0.0, warmup_ratio: float = 0.0,
                  start: float = 0.0) -> float:
    """The learning rate of optimizer step `step`, counted from 0, of a run of `total` steps.

    Warm-up takes W = ceil(warmup_ratio * total) steps, at most total - 1: linear from `start`, which step 0 uses, to
    `peak`, which step W uses. From there a cosine falls to `minimum`, which the last step (total - 1) uses. Without
    warm-up step 0 uses `peak`. The last rule wins when the run is too short for both.

    Table 5 of the paper (start 0, peak 1e-5, minimum 1e-6, ratio 0.005) in 375 steps: W = 2, so 0, 5e-6, 1e-5, ...,
    1e-6.
    """
    assert 0 <= step < total, f"step {step} of {total}"
    if step == total - 1:
        return minimum
    warmup = min(math.ceil(warmup_ratio * total - 1e-9), total - 1)
    if step < warmup:
        return start + (peak - start) * step / warmup
    done = (step - warmup) / (total - 1 - warmup)
    return minimum + (peak - minimum) * 0.5 * (1 + math.cos(math.pi * done))


def global_norm(parameters: Iterable[Tensor]) -> float:
    """L2 norm of all gradients together, each parameter once; 0.0 when none has a gradient."""
    norms = [torch.linalg.vector_norm(p.grad, dtype=_at_least_fp32(p.grad)) for p in parameters if p.grad is not None]
    return torch.linalg.vector_norm(torch.stack(norms)).item() if norms else 0.0


def clip_gradients(parameters: Iterable[Tensor], max_norm: float, norm: float | None = None) -> float:
    """Scale all gradients so that their global norm is at most `max_norm`; returns the norm before that.

    `max_norm = inf` measures and leaves them alone. norm: the global norm, where these are not all gradients.
    """
    parameters = list(parameters)
    norm = global_norm(parameters) if norm is None else norm
    if math.isfinite(norm) and norm > max_norm:
        for p in parameters:
            if p.grad is not None:
                p.grad.mul_(max_norm / norm)
    return norm


class AdamW:
    """Adam with decoupled weight decay (on matrices only: 1-D parameters do not decay).

    bf16 and fp16 parameters get an fp32 master, which takes the update and is rounded back into them; others are
    their own master. Build it AFTER the weights are loaded: the masters are made here, from the parameters.

    With a reducer the gradients come from it, and only the rows that it says are this rank's have a master and moments
    here (on `offload`, if given: "cpu"); a step then ends with every rank's rows in every rank's parameters.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]], betas: tuple[float, float] = (0.9, 0.95),
                 eps: float = 1e-8, weight_decay: float = 0.0, reducer: Reducer | None = None,
                 offload: str | None = None):
        self.parameters = {name: p for name, p in named_parameters if p.requires_grad}
        self.reducer = reducer
        if reducer is None:
            self._masters = {n: p.detach().float() if p.dtype in LOW_PRECISION else p
                             for n, p in self.parameters.items()}
        else:
            own = {n: p.detach()[slice(*reducer.rows(n))] for n, p in self.parameters.items()}
            self._masters = {n: torch.empty_like(p, dtype=_at_least_fp32(p), device=offload).copy_(p)
                             for n, p in own.items() if len(p)}
        decayed = [m for m in self._masters.values() if m.ndim >= 2]
        plain = [m for m in self._masters.values() if m.ndim < 2]
        groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
        groups = [g for g in groups if g["params"]]
        self._adam = torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=eps, fused=True)

    def zero_grad(self) -> None:
        for p in [*self.parameters.values(), *self._masters.values()]:
            p.grad = None
        if self.reducer is not None:
            self.reducer.clear()

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradient of one micro-batch's loss. last: the step's last one."""
        if self.reducer is None:
            loss.backward()
            return
        self.reducer.begin(last)
        loss.backward()
        self.reducer.end()

    def not_finite(self) -> list[str]:
        """Names of the parameters whose gradient here has a number that is not finite."""
        holders = self.parameters if self.reducer is None else self._masters
        return [n for n, p in holders.items() if p.grad is not None and not torch.isfinite(p.grad).all()]

    def clip(self, max_norm: float) -> float:
        """clip_gradients over everything that is trained, on whatever ranks; each number counts once."""
        if self.reducer is None:
            return clip_gradients(self.parameters.values(), max_norm)
        gradients = self.reducer.gradients()
        for name, g in gradients.items():
            self._masters[name].grad = g.to(self._masters[name].device)
        return clip_gradients(self._masters.values(), max_norm, self.reducer.norm(gradients))

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update at this learning rate, from the gradients that clip() left; a parameter without one stays."""
        for group in self._adam.param_groups:
            group["lr"] = lr
        if self.reducer is not None:
            self._adam.step()
            self.reducer.publish(self._masters)
            return
        low = [(p, self._masters[n]) for n, p in self.parameters.items() if p.dtype in LOW_PRECISION]
        for p, master in low:
            master.grad = None if p.grad is None else p.grad.float()
        self._adam.step()
        for p, master in low:
            master.grad = None
            p.copy_(master)

    def parts(self) -> Iterator[tuple[str, str, int, Tensor]]:
        """What is updated here, for a checkpoint: (`model`, `exp_avg` or `exp_avg_sq`; the parameter's name; its first
        row that is here; the rows)."""
        for name, master in self._masters.items():
            first = self.reducer.rows(name)[0] if self.reducer else 0
            yield "model", name, first, master.detach()
            state = self._adam.state.get(master, {})
            for kind in MOMENTS if state else ():
                yield kind, name, first, state[kind]

    def steps(self) -> dict[str, int]:
        """How many updates every parameter has had; one that never got a gradient is left out."""
        return {n: int(state["step"]) for n, m in self._masters.items() if (state := self._adam.state.get(m))}

    def prepare(self, steps: Mapping[str, int]) -> None:
        """Make room for a saved state of so many updates, for parts() to be filled in place; then call loaded()."""
        for name, master in self._masters.items():
            if name in steps:
                self._adam.state[master] = {"step": torch.tensor(float(steps[name]), device=master.device),
                                            **{kind: torch.zeros_like(master) for kind in MOMENTS}}

    @torch.no_grad()
    def loaded(self) -> None:
        """The masters have new numbers: bring the parameters after them."""
        if self.reducer is not None:
            self.reducer.publish(self._masters)
        for name, master in self._masters.items() if self.reducer is None else ():
            if master is not self.parameters[name]:
                self.parameters[name].copy_(master)

    def state_dict(self) -> dict[str, Any]:
        """By parameter name: {"state": moments and step count, "masters": fp32 masters}. A parameter that never
        got a gradient has no state."""
        state = {n: dict(self._adam.state[m]) for n, m in self._masters.items() if self._adam.state.get(m)}
        masters = {n: m for n, m in self._masters.items() if m is not self.parameters[n]}
        return {"state": state, "masters": masters}

    @torch.no_grad()
    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take over a saved state. A parameter without saved state starts fresh; an unknown name is a ValueError."""
        for name, entry in [*saved["state"].items(), *saved["masters"].items()]:
            if name not in self.parameters:
                raise ValueError(f"optimizer state has parameter {name!r}, which the model has not")
            shape = list((entry if isinstance(entry, Tensor) else entry["exp_avg"]).shape)
            expected = list(self.parameters[name].shape)
            if shape != expected:
                raise ValueError(f"optimizer state of {name!r} has shape {shape}, the model's is {expected}")
        self._adam.state.clear()
        for name, entry in saved["state"].items():
            master = self._masters[name]
            state = {key: v.to(master, copy=True) for key, v in entry.items()}
            state["step"] = entry["step"].to(master.device, torch.float32, copy=True)
            self._adam.state[master] = state
        for name, master in saved["masters"].items():
            if self._masters[name] is not self.parameters[name]:
                self._masters[name].copy_(master)
                self.parameters[name].copy_(master)


def _at_least_fp32(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in LOW_PRECISION else x.dtype
