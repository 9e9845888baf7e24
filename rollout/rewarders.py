"""Who gives rewards, put together from a run's settings: the GRM, the checklists' verifier, the policy itself."""

from __future__ import annotations

from typing import Callable, Mapping, Sequence

from oprd.core.chat import Chat
from oprd.core.settings import Config
from oprd.rollout.ask import Asker, EngineChat
from oprd.rollout.checklist import checklists
from oprd.rollout.engine import Engine
from oprd.rollout.grm import GRM, OWN, Item, ModelGRM, load_items
from oprd.rollout.groups import OutcomeRewards, Score
from oprd.rollout.item_verifier import ItemVerifier, ModelVerifier, PolicyVerifier, ScriptedVerifier
from oprd.rollout.scripted_grm import ScriptedGRM
from oprd.rollout.self_verify import SelfSettings, SelfVerification, Watching
from oprd.rollout.soft_reward import SoftRewards, SoftSettings
from oprd.rollout.verifier import verifier_asker
from oprd.sandbox.task import Task

SeedOf = Callable[..., int]


class Rewarders:
    """asker: the model that is asked, if any. own: the live policy as verifier; frozen: its copy, which an engine of
    its own serves (`frozen.engine` is to be set). Both only after `score`, where the settings want them."""

    def __init__(self, config: Config, chat: Chat | None):
        self.config, self.chat = config, chat
        self.asker: Asker | None = None
        self.own: PolicyVerifier | None = None
        self.frozen: PolicyVerifier | None = None

    def serve(self, engine: Engine) -> None:
        """Tell who asks the policy which engine it is."""
        if self.asker and isinstance(self.asker.completer, EngineChat):
            self.asker.completer.engine = engine
        if self.own:
            self.own.engine = engine

    def counts(self) -> Mapping[str, int]:
        """What became of the questions to a model since the last call."""
        return self.asker.counts.take() if self.asker else {}

    def grm(self) -> tuple[tuple[Item, ...], GRM]:
        """The GRM's rubric, and the one who judges by it. Raises ValueError, FileNotFoundError."""
        v, items = self.config.verifier, load_items(self.config.rft.rubric or OWN)
        if v.kind == "scripted":
            return items, ScriptedGRM(items)
        self.asker = verifier_asker(self.config, self.chat)
        return items, ModelGRM(items, self.asker, v.votes, v.retries)

    def score(self, tasks: Sequence[Task], seed_of: SeedOf) -> Score:
        """Who gives group RL its rewards. Raises ValueError: a task without a checklist, a setting that cannot work."""
        c, v, s = self.config.checklist, self.config.verifier, self.config.selfverify
        if self.config.rl.reward == "outcome":
            if s.on:
                raise ValueError("selfverify.on = true needs rl.reward = checklist: there is nothing else to verify")
            return OutcomeRewards()
        if s.on or v.kind == "policy":
            self.own = self._policy(seed_of)
        if v.kind == "frozen":
            self.frozen = self._policy(seed_of)
        soft = SoftSettings(self.config.rl.reward, c.bonus, c.correct, c.drop_saturated, c.ask_holistic)
        rewards = SoftRewards(checklists(tasks, c.path), self._items(), soft)
        if not s.on:
            return rewards
        rewards.verifier = Watching(rewards.verifier)
        settings = SelfSettings(s.anchor, s.rows, s.gold, s.canaries, s.alarm, s.patience, s.penalty,
                                seed=self.config.run.seed)
        return SelfVerification(rewards, self.own, settings, tasks)

    def _items(self) -> ItemVerifier:
        v = self.config.verifier
        if v.kind == "scripted":
            return ScriptedVerifier(v.true_positive, v.false_positive, v.votes, self.config.run.seed)
        if v.kind == "endpoint":
            self.asker = verifier_asker(self.config, self.chat)
            return ModelVerifier(self.asker, v.votes, v.retries, v.concurrency)
        return self.frozen if v.kind == "frozen" else self.own

    def _policy(self, seed_of: SeedOf) -> PolicyVerifier:
        v, r = self.config.verifier, self.config.rollout
        return PolicyVerifier(self.chat, self.config.chat.system, seed_of, v.votes, v.retries, r.workers,
                              temperature=r.temperature)
