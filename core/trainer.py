"""The training loop of every stage: ask for examples, take a step, log, save, stop cleanly.

It knows no algorithm: `supply(step)` gives one optimizer step's examples, a pure function of the step number (and of
the weights of that step), so a resumed run continues exactly.
"""

from __future__ import annotations

import logging
import signal
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, Callable, Mapping, Sequence

import torch
from torch.distributed.checkpoint.api import CheckpointException

from oprd.core import checkpoint, hf
from oprd.core.pieces import Piece, read, state_pieces, write
from oprd.core.settings import Parallel, Train
from oprd.core.metrics import Last, Log, Metric, Progress, values
from oprd.core.model import Model
from oprd.core.objective import Distillation, Objective, PolicyGradient
from oprd.core.optim import AdamW, learning_rate
from oprd.core.step import train_step
from oprd.core.types import Example
from oprd.parallel.collectives import all_objects, from_first
from oprd.parallel.mesh import Mesh
from oprd.parallel.reducer import Reducer

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
    """One stage's training state in `folder`: checkpoints/, metrics.jsonl, tensorboard/, and at the end model/.

    On a mesh every rank has a Trainer and calls the same methods; the first alone asks the supply and writes curves.
    """

    def __init__(self, plan: Plan, folder: Path, start: Path, resume: bool, mesh: Mesh = Mesh(),
                 parallel: Parallel = Parallel()):
        """start: the Hugging Face folder that step 0 begins from; the trained model is written in its form.

        Raises ValueError when the folder already holds a run and resume is not asked for, or when the checkpoint
        to resume was made for another number of steps.
        """
        self.plan, self.folder, self.start, self.mesh, self.parallel = plan, folder, start, mesh, parallel
        self.step = 0
        found = self._newest(resume)
        state = checkpoint.load(found, mesh.world.rank) if found else None
        if state and state.position.get("steps") != plan.steps:
            raise ValueError(f"{found} was made for {state.position.get('steps')} steps, the settings now give "
                             f"{plan.steps}; resume with the train.steps (or train.epochs, train.batch and rows) it "
                             "was started with")
        made = dict(dtype=torch.bfloat16 if parallel.weights == "bf16" else torch.float32, mesh=mesh)
        build = (lambda **more: hf.blank(hf.load_config(start), **made, **more)) if state else (
            lambda **more: hf.load(start, **made, **more))
        self.model = build(recompute=parallel.recompute)
        self.teacher: Model | None = None
        if plan.teacher:
            self.teacher = self.model if plan.shared else build()
            self.teacher.requires_grad_(plan.shared)
        self.optimizer = self._optimizer()
        self._saving: Saving | None = None
        self.memory: Any = state.position.get("memory") if state else None  # what `remember` gave when it was saved
        if state:
            self.step = state.step
            self._restore(state, found)
            log.warning("resuming from %s", found)

    def run(self, supply: Supply | None, updated: Callable[[int], None] = lambda step: None,
            shown: Sequence[str] = ("train/loss",), remember: Callable[[], Any] = lambda: None) -> None:
        """Train to the end and write `model/`. supply: needed on the first rank. remember: what the supply knows from
        earlier steps, as JSON; saved with every checkpoint. Raises Stopped after SIGINT, SIGTERM or SIGUSR1, and when
        supply raises it, with everything saved."""
        plan, self._remember, first = self.plan, remember, self.mesh.first
        with (Log(self.folder, self.step) if first else nullcontext()) as book, _StopSignal() as stop:
            bar = Progress(plan.steps, self.step, self.folder.name) if first else None
            while self.step < plan.steps:
                began = time.monotonic()
                if self.teacher is not None and self.step in plan.refresh and not plan.shared:
                    self.teacher.load_state_dict(self.model.state_dict())
                examples, found = self._supplied(supply)
                supplied = time.monotonic()
                found = {**found, **self._update(examples)}
                self.step += 1
                updated(self.step)
                found["perf/supply_s"] = Last(supplied - began)
                found["perf/step_s"] = Last(time.monotonic() - began)
                if first:
                    book.write(self.step - 1, found)
                    bar.advance({name.split("/")[1]: v for name, v in values(found).items() if name in shown})
                asked = any(all_objects(stop.asked, self.mesh.world))
                if asked or self.step % plan.train.checkpoint_every == 0 or self.step == plan.steps:
                    self._save()
                if asked and self.step < plan.steps:
                    self._saved()
                    raise Stopped(f"stopped after step {self.step} of {plan.steps}, saved; --resume goes on")
            if first:
                bar.close()
        self._saved()
        hf.save_like(self.model, self.folder / "model", self.start, overwrite=True)

    def _newest(self, resume: bool) -> Path | None:
        """The checkpoint to go on from, as the first rank sees it."""
        found = problem = None
        if self.mesh.first:
            try:
                found = checkpoint.newest(self.folder / "checkpoints")
                if not resume and (found or (self.folder / "metrics.jsonl").exists()):
                    problem = (f"{self.folder} already holds a run; add --resume to go on with it, or choose another "
                               "run.folder")
            except ValueError as caught:
                problem = str(caught)
        found, problem = from_first((found, problem), self.mesh.world)
        if problem:
            raise ValueError(problem)
        return found

    def _optimizer(self) -> AdamW:
        t, p, named = self.plan.train, self.parallel, dict(self.model.named_parameters())
        reducer = None
        if self.mesh.world.size > 1 or p.offload or p.weights == "bf16":
            reducer = Reducer(named, {name: self.model.cuts[name].replicas for name in named}, self.mesh.world, p.zero,
                              p.bucket_mib * 2**20)
        return AdamW(named.items(), betas=(t.beta1, t.beta2), weight_decay=t.weight_decay, reducer=reducer,
                     offload="cpu" if p.offload else None)

    def _supplied(self, supply: Supply | None) -> tuple[Sequence[Example], Mapping[str, Metric]]:
        """What the first rank's supply gives, on every rank; where it stops the run, everything is saved first."""
        given = None
        if self.mesh.first:
            try:
                given = supply(self.step)
            except Stopped as reason:
                given = reason
        given = from_first(given, self.mesh.world)
        if isinstance(given, Stopped):
            self._save()
            self._saved()
            raise given
        return given

    def _pieces(self, writing: bool) -> list[Piece]:
        return state_pieces(self.model, self.optimizer, None if self.plan.shared else self.teacher, writing)

    def _restore(self, state: checkpoint.Checkpoint, found: Path) -> None:
        try:
            self.optimizer.prepare(state.position["updates"])
            read(state.state, self._pieces(writing=False), self.mesh.world)
            self.optimizer.loaded()
            checkpoint.restore_random(state.random)
        except (Exception, CheckpointException) as problem:  # damage shows as whatever its reader stumbles over
            if isinstance(problem, CheckpointException):
                problem = next(iter(problem.failures.values()))[0]
            reason = " ".join(str(problem).split())[:300]
            raise ValueError(f"{found}: state/ or its random files do not hold what a checkpoint of this run does "
                             f"({type(problem).__name__}: {reason}); move {found} away to go on from the checkpoint "
                             "before it") from None

    def _update(self, examples: Sequence[Example]) -> dict[str, Metric]:
        t = self.plan.train
        lr = learning_rate(self.step, self.plan.steps, t.lr, t.lr_min, t.warmup, t.lr_start)
        resting = self.parallel.teacher_on_cpu and self.teacher is not None and not self.plan.shared
        if resting:
            self.teacher.to(self.mesh.device)
        found = train_step(self.model, self.teacher, examples, self.optimizer, lr=lr, token_budget=t.micro_batch_tokens,
                           objective=self.plan.objective, distillation=self.plan.distillation, policy=self.plan.policy,
                           router_balance=t.router_balance, max_norm=t.clip, bf16=self.plan.bf16, mesh=self.mesh)
        if resting:
            self.teacher.to("cpu")
        return found

    def _save(self) -> None:
        """Write a checkpoint; with async_save in a thread, from a copy in CPU memory and over a group of its own."""
        self._saved()
        pieces, steps = self._pieces(writing=True), {}
        for known in all_objects(self.optimizer.steps(), self.mesh.world):
            steps |= known
        memory = self._remember() if self.mesh.first else None
        position = {"steps": self.plan.steps, "memory": memory, "updates": steps}
        if self.parallel.async_save:
            pieces = [piece.copied() for piece in pieces]
        axis = self.mesh.saving() if self.parallel.async_save else self.mesh.world
        work = partial(checkpoint.save, self.folder / "checkpoints", self.step, position=position, axis=axis,
                       keep=self.plan.train.keep, state=lambda path: write(path, pieces, axis),
                       random=checkpoint.random_state())
        if self.parallel.async_save:
            self._saving = Saving(work)
        else:
            work()

    def _saved(self) -> None:
        """Wait until the last checkpoint is written; its error is raised here."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.wait()


class Saving(Thread):
    """A save under way. Joined before the program ends, as it is no daemon."""

    def __init__(self, work: Callable[[], Any]):
        super().__init__(name="checkpoint")
        self._work, self._error = work, None
        self.start()

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._error = error

    def wait(self) -> None:
        self.join()
        if self._error is not None:
            raise self._error


class _StopSignal:
    """Turns the first SIGINT, SIGTERM or SIGUSR1 into a flag read at step boundaries; a second one acts as usual."""

    def __enter__(self) -> "_StopSignal":
        self.asked = False
        self._before = {s: signal.signal(s, self._ask) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
        return self

    def _ask(self, number, frame) -> None:
        self.asked = True
        log.warning("%s: stopping after this step", signal.Signals(number).name)
        for s, handler in self._before.items():
            signal.signal(s, handler)

    def __exit__(self, *_) -> None:
        for s, handler in self._before.items():
            signal.signal(s, handler)
