"""Soft-SVeRL: the policy verifies its own answers, and what it said about them is trained too.

The rewards are `soft_reward.py`'s, with a policy as verifier. Left alone, such a policy learns to say yes: its answers
earn more, and its yes to them is what the next step believes. Here its votes become rows: a vote earns

    [it says what the anchor says] - penalty * inflation * [it says yes]

and is trained by its advantage within its task's votes. inflation is how much larger the share of yes is than it should
be, on questions whose truth is known, smoothed over steps (never below 0). The stabilisers, each a setting of its own:

    verifier   another model than the live policy judges the answers: the start model, or a copy renewed now and then
               (train.py); the policy's own votes are then asked for only to be trained
    anchor     what a vote is held against: `majority`, the policy's own votes (no stabiliser: it agrees with itself);
               `frozen`, the other verifier; `gold`, the truth where it is known
    gold       that many questions of known truth a step are imitated, yes and no in equal number
    canaries   that many answers a step that are known not to meet an item; more yes to them than `alarm`, smoothed, in
               `patience` steps in a row ends the run
    penalty    see above

The paper's abstract says that stabilisation is essential and what kind; forms and defaults are ours.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import astuple, dataclass
from typing import Any, Mapping, Sequence

import numpy as np

from oprd.core.types import Example, Row
from oprd.rollout.advantages import advantages
from oprd.rollout.attempts import Outcome
from oprd.rollout.groups import Reward
from oprd.rollout.item_verifier import NO, YES, ItemVerifier, PolicyVerifier, Question, Said, own_question
from oprd.rollout.soft_reward import SoftRewards
from oprd.rollout.teach import Forgetful
from oprd.rollout.views import student_example
from oprd.sandbox.task import Task

ANCHORS = ("none", "majority", "frozen", "gold")


@dataclass(frozen=True)
class SelfSettings:
    """anchor `none`: votes are not trained. rows: most votes trained a step. smooth: weight of the newest step in
    inflation and in the canaries' pass rate."""

    anchor: str = "none"
    rows: int = 64
    gold: int = 0
    canaries: int = 0
    alarm: float = 0.5
    patience: int = 3
    penalty: float = 0.0
    smooth: float = 0.3
    seed: int = 0

    def __post_init__(self):
        if self.anchor not in ANCHORS:
            raise ValueError(f"anchor = {self.anchor!r} must be one of {', '.join(ANCHORS)}")


class Watching:
    """An ItemVerifier that keeps what it was asked and what was said."""

    def __init__(self, verifier: ItemVerifier):
        self.verifier, self.asked, self.answers = verifier, [], []

    def verify(self, asked: Sequence[Question], tag: str) -> list[bool | None]:
        self.asked, self.answers = list(asked), self.verifier.verify(asked, tag)
        return self.answers


class SelfVerification(Forgetful):
    """A groups.Score around SoftRewards. own: the live policy; rewards.verifier: a Watching of whoever gives rewards,
    which may be the live policy as well."""

    def __init__(self, rewards: SoftRewards, own: PolicyVerifier, settings: SelfSettings, tasks: Sequence[Task]):
        self.rewards, self.own, self.settings = rewards, own, settings
        self._canaries = [Question(t.problem_statement, c["response"], t.meta["checklist"][c["item"]]["text"], False)
                          for t in tasks for c in t.meta.get("canaries", ())]
        if settings.canaries and not self._canaries:
            raise ValueError("selfverify.canaries needs tasks with canaries: answers known not to meet an item")
        self.rows: list[Example] = []
        self.inflation, self.canary, self._alarms = 0.0, None, 0
        self._means: dict[str, tuple[float, int]] = {}

    @property
    def notes(self) -> Sequence[Mapping[str, Any]]:
        return self.rewards.notes

    def __call__(self, outcomes: Sequence[Outcome]) -> list[Reward]:
        s, watching = self.settings, self.rewards.verifier
        found = self.rewards(outcomes)
        step = self.rewards.calls
        rng = random.Random(f"selfverify/{s.seed}/{step}")
        asked, judged = watching.asked, watching.answers
        if watching.verifier is not self.own and s.anchor != "none":
            self.own.verify(asked, f"own{step}")
        votes = self.own.said if watching.verifier is self.own or s.anchor != "none" else []
        self.rows = self._rows(asked, judged, votes, rng) + self._gold(asked, rng)
        self._means = dict(self.rewards.measured())
        self._note(votes)
        self._watch_canaries(rng, step)
        return found

    def measured(self) -> Mapping[str, tuple[float, int]]:
        return self._means

    def stop(self) -> str:
        if not self.settings.canaries or self._alarms < self.settings.patience:
            return ""
        return (f"the verifier passed {100 * self.canary:.0f}% of the answers known to be wrong (alarm at "
                f"{100 * self.settings.alarm:.0f}%) in {self._alarms} steps in a row: its rewards mean nothing any "
                "more; use a frozen verifier, gold rows or a penalty, or start from an earlier checkpoint")

    def memory(self) -> dict[str, Any]:
        return {"rewards": self.rewards.memory(), "inflation": self.inflation, "canary": self.canary,
                "alarms": self._alarms}

    def recall(self, memory: Mapping[str, Any]) -> None:
        self.rewards.recall(memory["rewards"])
        self.inflation, self.canary, self._alarms = memory["inflation"], memory["canary"], memory["alarms"]

    # --- rows

    def _rows(self, asked, judged, votes: Sequence[Sequence[Said]], rng: random.Random) -> list[Example]:
        """The votes as policy-gradient rows: each against the anchor, compared within its task."""
        groups: dict[str, list[tuple[Said, float]]] = defaultdict(list)
        for question, answer, own in zip(asked, judged, votes):
            anchor = self._anchor(question, answer, own)
            for said in own if anchor is not None else ():
                reward = float(said.met == anchor) - self.settings.penalty * max(0.0, self.inflation) * said.met
                groups[question.statement].append((said, reward))
        rows = []
        for members in groups.values():
            found = advantages([reward for _, reward in members])
            rows += [self._row(said, a) for (said, _), a in zip(members, found.values) if found.signal]
        return rng.sample(rows, min(len(rows), self.settings.rows))

    def _anchor(self, question: Question, answer: bool | None, own: Sequence[Said]) -> bool | None:
        if self.settings.anchor == "gold":
            return question.truth
        if self.settings.anchor == "frozen":
            return answer
        return 2 * sum(s.met for s in own) > len(own) if self.settings.anchor == "majority" and own else None

    @staticmethod
    def _row(said: Said, advantage: float) -> Example:
        return student_example(said.told, {"pg": advantage}, "policy", source=said.told.attempt_id)

    def _gold(self, asked: Sequence[Question], rng: random.Random) -> list[Example]:
        """Questions of this step whose truth is known, with the right reply, to be imitated."""
        rows = []
        for truth in (True, False):
            known = sorted({q for q in asked if q.truth is truth}, key=astuple)
            for q in rng.sample(known, min(len(known), self.settings.gold // 2)):
                rows.append(self.imitate(q, truth))
        return rows

    def imitate(self, question: Question, met: bool) -> Example:
        chat = self.own.chat
        before = (*chat.open(self.own.system, own_question(question)), *chat.generation_ids)
        reply = chat.assistant(YES if met else NO)
        row = Row(np.asarray(before + reply, np.int64), np.arange(len(before), len(before) + len(reply)))
        return Example(row, {"nll": np.ones(len(reply))}, "sft", source=f"gold: {question.requirement}")

    # --- what is watched

    def _note(self, votes: Sequence[Sequence[Said]]) -> None:
        """The live policy's own votes against the truth, and the smoothed inflation that the penalty uses."""
        flat = [(s.met, s.question.truth) for own in votes for s in own if s.question.truth is not None]
        if flat:
            gap = sum(met - truth for met, truth in flat) / len(flat)
            self.inflation += self.settings.smooth * (gap - self.inflation)
            self._means["selfverify/self_minus_gold"] = (sum(met - truth for met, truth in flat), len(flat))
            self._means["selfverify/agreement"] = (sum(met == truth for met, truth in flat), len(flat))
            self._means["selfverify/says_yes"] = (sum(met for met, _ in flat), len(flat))
        self._means["selfverify/inflation"] = (self.inflation, 1)
        self._means["selfverify/rows"] = (len(self.rows), 1)

    def _watch_canaries(self, rng: random.Random, step: int) -> None:
        """Ask whoever gives the rewards about answers that are known to be wrong."""
        s = self.settings
        if not s.canaries:
            return
        asked = rng.sample(self._canaries, min(s.canaries, len(self._canaries)))
        answers = [a for a in self.rewards.verifier.verifier.verify(asked, f"canary{step}") if a is not None]
        if not answers:
            return
        rate = sum(answers) / len(answers)
        self.canary = rate if self.canary is None else self.canary + s.smooth * (rate - self.canary)
        self._alarms = self._alarms + 1 if self.canary > s.alarm else 0
        self._means |= {"selfverify/canary_pass_rate": (sum(answers), len(answers)),
                        "selfverify/alarms": (self._alarms, 1)}
