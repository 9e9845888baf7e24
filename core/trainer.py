"""The training loop of every stage: ask for examples, take a step, log, save, stop cleanly.

It knows no algorithm: `supply(step)` gives one optimizer step's examples, a pure function of the step number (and of
the weights of that step), so a resumed run continues exactly.
"""

from __future__ import annotations

import logging
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Mapping, Sequence

import torch

from oprd.core import checkpoint, hf
from oprd.core.settings import Train
from oprd.core.metrics import Last, Log, Metric, Progress, values
from oprd.core.model import Model
from oprd.core.objective import Distillation, Objective, PolicyGradient
from oprd.core.optim import AdamW, learning_rate
from oprd.core.step import train_step
from oprd.core.types import Example

log = logging.getLogger("oprd.trainer")

Supply = Callable[[int], tuple[Sequence[Example], Mapping[str, Metric]]]


@dataclass(frozen=True)
class Plan:
    """What is fixed before step 0. refresh: steps before which the teacher takes the student's weights; shared: the
    teacher is the student itself; teacher: whether there is one at all."""

    steps: int
    train: Train
    objective: Objective = Objective()
    distillation: Distillation = Distillation()
    policy: PolicyGradient = PolicyGradient()
    teacher: bool = False
    shared: bool = False
    refresh: frozenset[int] = frozenset()
    bf16: bool = False


class Stopped(Exception):
    """The run was asked to stop, by a signal (code 0) or by its supply; everything is saved. The message says why."""

    def __init__(self, why: str, code: int = 0):
        super().__init__(why)
        self.code = code


class Trainer:
    """One stage's training state in `folder`: checkpoints/, metrics.jsonl, tensorboard/, and at the end model/."""

    def __init__(self, plan: Plan, folder: Path, start: Path, resume: bool):
        """start: the Hugging Face folder that step 0 begins from; the trained model is written in its form.

        Raises ValueError when the folder already holds a run and resume is not asked for, or when the checkpoint
        to resume was made for another number of steps.
        """
        self.plan, self.folder, self.start = plan, folder, start
        self.step = 0
        found = checkpoint.newest(folder / "checkpoints")
        if not resume and (found or (folder / "metrics.jsonl").exists()):
            raise ValueError(f"{folder} already holds a run; add --resume to go on with it, or choose another "
                             "run.folder")
        state = checkpoint.load(found) if found else None
        if state and state.position.get("steps") != plan.steps:
            raise ValueError(f"{found} was made for {state.position.get('steps')} steps, the settings now give "
                             f"{plan.steps}; resume with the train.steps (or train.epochs, train.batch and rows) it was "
                             "started with")
        self.model = hf.load(state.model if state else start)
        self.teacher: Model | None = None
        if plan.teacher:
            self.teacher = self.model if plan.shared else hf.load(state.teacher if state else start)
            self.teacher.requires_grad_(plan.shared)
        self.optimizer = AdamW(self.model.named_parameters(), betas=(plan.train.beta1, plan.train.beta2),
                               weight_decay=plan.train.weight_decay)
        self.memory: Any = state.position.get("memory") if state else None  # what `remember` gave when it was saved
        if state:
            self.step = state.step
            self._restore(state, found)
            log.warning("resuming from %s", found)

    def run(self, supply: Supply, updated: Callable[[int], None] = lambda step: None,
            shown: Sequence[str] = ("train/loss",), remember: Callable[[], Any] = lambda: None) -> None:
        """Train to the end and write `model/`. remember: what the supply knows from earlier steps, as JSON; saved with
        every checkpoint. Raises Stopped after SIGINT or SIGTERM, and when supply raises it, with everything saved."""
        plan, self._remember = self.plan, remember
        with Log(self.folder, self.step) as book, _StopSignal() as stop:
            bar = Progress(plan.steps, self.step, self.folder.name)
            while self.step < plan.steps:
                began = time.monotonic()
                if self.teacher is not None and self.step in plan.refresh and not plan.shared:
                    self.teacher.load_state_dict(self.model.state_dict())
                try:
                    examples, found = supply(self.step)
                except Stopped:
                    self._save()
                    raise
                supplied = time.monotonic()
                found = {**found, **self._update(examples)}
                self.step += 1
                updated(self.step)
                found["perf/supply_s"] = Last(supplied - began)
                found["perf/step_s"] = Last(time.monotonic() - began)
                book.write(self.step - 1, found)
                bar.advance({name.split("/")[1]: v for name, v in values(found).items() if name in shown})
                if stop.asked or self.step % plan.train.checkpoint_every == 0 or self.step == plan.steps:
                    self._save()
                if stop.asked and self.step < plan.steps:
                    raise Stopped(f"stopped after step {self.step} of {plan.steps}, saved; --resume goes on")
            bar.close()
        hf.save_like(self.model, self.folder / "model", self.start, overwrite=True)

    def _restore(self, state: checkpoint.Checkpoint, found: Path) -> None:
        try:
            self.optimizer.load_state_dict(state.optimizer)
            checkpoint.restore_random(state.random)
        except (LookupError, TypeError, AttributeError, ValueError, RuntimeError) as problem:
            raise ValueError(f"{found}: optimizer.pt or random.pt does not hold what a checkpoint of this program does "
                             f"({type(problem).__name__}: {problem}); move {found} away to go on from the checkpoint "
                             "before it") from None

    def _update(self, examples: Sequence[Example]) -> dict[str, Metric]:
        t = self.plan.train
        lr = learning_rate(self.step, self.plan.steps, t.lr, t.lr_min, t.warmup, t.lr_start)
        return train_step(self.model, self.teacher, examples, self.optimizer, lr=lr, token_budget=t.micro_batch_tokens,
                          objective=self.plan.objective, distillation=self.plan.distillation, policy=self.plan.policy,
                          router_balance=t.router_balance, max_norm=t.clip, bf16=self.plan.bf16)

    def _save(self) -> None:
        teacher = self.teacher if not self.plan.shared else None
        checkpoint.save(
            self.folder / "checkpoints", self.step,
            model=lambda path: hf.save(self.model, path, tokenizer_from=self.start),
            teacher=(lambda path: hf.save(teacher, path)) if teacher is not None else None,
            optimizer=self.optimizer.state_dict(), keep=self.plan.train.keep,
            position={"steps": self.plan.steps, "memory": self._remember()})


class _StopSignal:
    """Turns the first SIGINT or SIGTERM into a flag read at step boundaries; a second one acts as usual."""

    def __enter__(self) -> "_StopSignal":
        self.asked = False
        self._before = {s: signal.signal(s, self._ask) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _ask(self, number, frame) -> None:
        self.asked = True
        log.warning("%s: stopping after this step", signal.Signals(number).name)
        for s, handler in self._before.items():
            signal.signal(s, handler)

    def __exit__(self, *_) -> None:
        for s, handler in self._before.items():
            signal.signal(s, handler)
