"""The rollout side of a run, put together from its settings: sandboxes, the agent's limits, reminders."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Callable, Sequence, TypeVar

from oprd.core.chat import Chat
from oprd.core.settings import Config, Eval, Reminders, Rollout
from oprd.core.types import Reminder, Trajectory
from oprd.rollout import utility
from oprd.rollout.agent import AgentLimits, Remind, Reminding
from oprd.rollout.answers import Answers
from oprd.rollout.ask import Asker, EngineChat, asker_of
from oprd.rollout.attempts import Attempts, Outcome
from oprd.rollout.audit import Audit, ModelAudit, each_boundary
from oprd.rollout.controller import ControlSettings
from oprd.rollout.controls import Placebo, controlled, pool_of
from oprd.rollout.engine import Engine, Sampling
from oprd.rollout.evidence_judge import EvidenceJudge
from oprd.rollout.events import Event, error_events
from oprd.rollout.global_reminder import CATEGORY, global_reminder, ineligible
from oprd.rollout.judge import Judge, NoJudge
from oprd.rollout.model_judge import ModelJudge
from oprd.rollout.prefix import PrefixSampling, PrefixSettings
from oprd.rollout.rewarders import Rewarders
from oprd.rollout.rubric import MICRO, Rubric, load_rubric, nearest
from oprd.rollout.scripted import ScriptedJudge
from oprd.rollout.select import Annotation, Dropped, SelectSettings, annotate_trajectory, decide, remind
from oprd.rollout.teach import Reminded
from oprd.sandbox.box import Limits
from oprd.sandbox.opener import opener
from oprd.sandbox.sweep import run_label

A, B = TypeVar("A"), TypeVar("B")


def box_opener(config: Config):
    """What opens this run's sandboxes (sandbox/opener.py). ValueError: no docker SDK."""
    s = config.sandbox
    limits = Limits(command_s=s.command_s, cpu_s=s.cpus * max(s.command_s, s.tests_s), memory_mib=s.memory_mib,
                    file_mib=s.file_mib, processes=s.processes, output_bytes=s.output_bytes, cpus=s.cpus,
                    disk_mib=s.disk_mib)
    settings = None
    if s.kind == "docker":
        try:
            from oprd.sandbox.docker_host import DockerSettings  # the docker SDK is an extra
        except ImportError:
            raise ValueError("sandbox.kind = docker needs the docker package; install oprd[docker]") from None
        settings = DockerSettings(s.hosts, s.network, s.mounts, s.environment, s.pulls, s.free_gib, s.warm)
    return opener(s.kind, limits, run_label(config.run.folder), s.image, settings)


def rubric_of(r: Reminders) -> Rubric:
    """The rubric that the settings ask for. FileNotFoundError, or ValueError for a rubric file or a category."""
    rubric = load_rubric(*([MICRO] if r.micro_texts else []), *([r.rubric] if r.rubric else []))
    for name in r.disabled:
        if name not in rubric:
            raise ValueError(f"reminders.disabled names {name!r}, which is no category of the rubric; did you mean "
                             f"{nearest(name, rubric.categories)}?")
    return rubric


class Harness:
    """Opens sandboxes and answers for reminders. `sweep()` removes what killed runs left behind."""

    def __init__(self, config: Config, chat: Chat):
        """Raises ValueError or FileNotFoundError for a rubric file or category that does not exist."""
        self.config, self.chat = config, chat
        s, r = config.sandbox, config.reminders
        # a fresh sandbox at a task's base commit; raises Broke, Unusable
        self.open_box = box_opener(config)
        self.rubric: Rubric = rubric_of(r)
        self.judge: Judge = ScriptedJudge(self.rubric) if r.judge == "scripted" else NoJudge()
        self.asker: Asker | None = None  # whom the model judges ask
        if r.judge == "model":
            self.asker = asker_of(config, chat)
            self.judge = ModelJudge(self.rubric, self.asker)
        self.audit: Audit = ModelAudit(self.rubric, self.asker) if self.asker else each_boundary(self.judge)
        scopes = tuple(name for name, on in (("global", r.global_), ("local", r.local)) if on)
        self.rewarders = Rewarders(config, chat)
        self.score: utility.Score | None = None  # the teacher's log-probabilities; handed in by who has a model
        self.selection = SelectSettings(budget=r.budget, family_cap=r.family_cap, classes=r.classes, off=r.disabled,
                                        scopes=scopes)

    def sweep(self) -> list[str]:
        """End what killed runs left on this machine and its engines; returns what was removed. Raises Broke."""
        return self.open_box.sweep()

    def close(self) -> None:
        """Remove every sandbox. Idempotent."""
        self.open_box.close()

    def pool(self, engine: Engine, sampling: Rollout | Eval) -> Attempts | Answers:
        """Runs attempts under this run's limits, sampling as the given section says: at repositories, or at prompts."""
        r, stop = self.config.rollout, self.chat.stop_ids
        if self.asker and isinstance(self.asker.completer, EngineChat):
            self.asker.completer.engine = engine
        self.rewarders.serve(engine)
        how = Sampling(sampling.temperature, sampling.top_p, r.max_turn_tokens, tuple(stop))
        if self.config.data.world == "prompts":
            return Answers(engine, self.chat, self.config.chat.system, how, r.workers)
        limits = AgentLimits(self.config.chat.system, r.max_turns, r.max_context_tokens, r.max_turn_tokens,
                             r.max_malformed, r.attempt_s, self.config.sandbox.command_s,
                             self.config.sandbox.tests_s, self.config.chat.tools,
                             self.config.sandbox.tools, self.config.sandbox.output_tokens,
                             sampling is r and self.config.prefix.on and self.config.prefix.compare_states)
        return Attempts(engine, self.chat, self.open_box, limits, how, r.workers, r.verifiers)

    def steer(self, n: int, steps: int) -> PrefixSampling | None:
        """Prefix Sampling for groups of n attempts over a training of so many steps, if it is on."""
        p = self.config.prefix
        if not p.on:
            return None
        control = ControlSettings(p.alpha, p.target, p.zone, p.move, p.cooldown, restart=p.restart)
        return PrefixSampling(PrefixSettings(p.low, p.high, p.remaining, p.prefix, p.remaining_cap, p.prefix_cap, p.most,
                                             p.kinds, p.adaptive, control, p.withdraw), n, steps)

    def remind(self) -> Remind:
        """Reminders beside a script: passive mode, one-shot."""
        return remind(self.rubric, self.judge, self.selection)

    def reminding(self, free: Sequence[Outcome] = ()) -> Reminding:
        """Reminders while agents run, in the mode and under the control of the settings. free: reminder-free attempts
        at the same tasks, from whose reminders the placebo control draws."""
        control, active = self.config.reminders.control, self.config.eval.mode == "active"
        at = decide(self.rubric, self.judge, self.selection)
        if control == "none":
            return Reminding(at, active)
        if control == "withheld":
            return Reminding(at, active, lambda task, reminder: None)
        placebo = self.placebo(free)

        def shown(task, reminder):
            other = placebo.instead(task.instance_id, reminder)
            return other.text if other else None
        return Reminding(at, active, shown)

    def placebo(self, free: Sequence[Outcome]) -> Placebo:
        """What finished, reminder-free attempts give to stand in the place of other tasks' reminders."""
        judged = [o for o in free if not o.trouble]
        return pool_of(zip([o.attempt.task.instance_id for o in judged], self.each(self.reminded, judged)))

    def reminded(self, outcome: Outcome) -> Reminded:
        """The reminders of one finished attempt, for its teacher, before any control."""
        local = self.local(outcome.attempt.task.problem_statement, outcome.trajectory)
        whole, dropped = self.global_(outcome)
        return Reminded(whole, local.reminders, local.dropped + dropped)

    def local(self, statement: str, trajectory: Trajectory) -> Annotation:
        """The Turn-local Reminders of a finished attempt, post hoc."""
        return annotate_trajectory(statement, trajectory, self.rubric, self.judge, self.selection, unread=False)

    def global_(self, outcome: Outcome) -> tuple[Reminder | None, tuple[Dropped, ...]]:
        """The Global Reminder of a finished attempt, or why there is none."""
        if "global" not in self.selection.scopes:
            return None, ()
        if why := ineligible(outcome.verdict):
            return None, (Dropped(CATEGORY, -1, why, "ineligible"),)
        evidence = [EvidenceJudge(self.asker)] if self.asker else []
        return global_reminder(outcome.attempt.task, outcome.verdict, *evidence), ()

    def globals(self, failed: Sequence[Outcome]) -> list[Reminded]:
        """The Global Reminders of failed attempts that are made afresh, under the control of the settings."""
        found = self.each(self.global_, failed)
        tasks = [o.attempt.task.instance_id for o in failed]
        return controlled(self.config.reminders.control, tasks, [Reminded(whole, {}, why) for whole, why in found])

    def reminders(self, outcomes: Sequence[Outcome], wanted: Callable[[Outcome], bool]) -> list[Reminded | None]:
        """What the teacher gets for each attempt that is `wanted`, the others None: found, measured with `self.score`
        where the settings ask for utilities, and put under the settings' control."""
        r, some = self.config.reminders, [o for o in outcomes if wanted(o)]
        found = self.each(self.reminded, some)
        if r.utility != "off":
            least = r.min_utility if r.utility == "filter" else None
            found = [utility.measured(reminded, o.trajectory, self.chat.reminder, self.score, least)
                     for reminded, o in zip(found, some)]
        ready = iter(controlled(r.control, [o.attempt.task.instance_id for o in some], found))
        return [next(ready) if wanted(o) else None for o in outcomes]

    def each(self, do: Callable[[A], B], items: Sequence[A]) -> list[B]:
        """`do` of every item, in order; at once where it waits for a judge that is a model.

        Who does which item is fixed beforehand, and an engine that judges is told of all the threads: in lock-step its
        batches, and with them its answers, are then the same in every run.
        """
        n = min(self.config.reminders.judge_concurrency, len(items))
        if self.asker is None or n == 0:
            return [do(item) for item in items]
        judge = self.asker.completer
        engine = judge.engine if isinstance(judge, EngineChat) else None
        announced = [ExitStack() for _ in range(n)]
        for stack in announced if engine else ():
            stack.enter_context(engine.worker())

        def work(first: int) -> list[B]:
            with announced[first]:
                return [do(item) for item in items[first::n]]

        with ThreadPoolExecutor(n) as pool:
            shares = [pool.submit(work, i) for i in range(n)]
            done = [share.result() for share in shares]
        return [done[i % n][i // n] for i in range(len(items))]

    def judge_counts(self) -> dict[str, int]:
        """What became of the questions to a judge that is a model since the last call, by metric name."""
        counts = (("judge", self.asker.counts.take() if self.asker else {}), ("verifier", self.rewarders.counts()))
        return {f"{who}/{name}": n for who, own in counts for name, n in own.items()}

    def events(self, outcome: Outcome) -> tuple[Event, ...]:
        """Error events of a finished attempt, each fine category at most once."""
        return error_events(outcome.attempt.task.problem_statement, outcome.trajectory, self.rubric, self.audit)
