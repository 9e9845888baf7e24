"""Soft-RLVR: the reward of an answer is the share of its task's checklist that a verifier says is met.

    soft      sum of weights of met items / sum of weights
    gates     an unmet gate item makes it 0
    bonus     (1 - bonus) soft + bonus [all items met]: partial credit must not outbid a complete answer
    correct   every item's yes or no, y, is replaced by (y - b) / (a - b), whose mean is the truth's when the verifier
              says yes to met items at the rate a and to unmet ones at b (estimated on items of known truth); this is
              (y - r0) / (1 - r0 - r1) with r0 = b, r1 = 1 - a. Gates and bonus look at y itself
    saturated items on which all answers of a group agree tell nothing apart; they can be left out of the share

`holistic` asks once whether all requirements are met: the baseline. A single item without a verdict leaves the whole
attempt without a reward (named, counted, masked): the share of the others is another reward.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Mapping, Sequence

from oprd.rollout.answers import response_of
from oprd.rollout.attempts import Outcome
from oprd.rollout.checklist import Checklist
from oprd.rollout.groups import Reward
from oprd.rollout.item_verifier import ItemVerifier, Question
from oprd.rollout.teach import Forgetful

HOLISTIC = "All of it holds."


@dataclass(frozen=True)
class SoftSettings:
    """kind: `checklist` or `holistic`. ask_holistic: of a checklist's answers too, for the report alone. least: items
    of known truth, met and unmet, that an estimate of a and b needs."""

    kind: str = "checklist"
    bonus: float = 0.0
    correct: bool = False
    drop_saturated: bool = False
    ask_holistic: bool = False
    least: int = 20


@dataclass
class Rates:
    """What a verifier says, held against the truth: counts over the run."""

    yes_of_met: int = 0
    met: int = 0
    yes_of_unmet: int = 0
    unmet: int = 0

    def add(self, truth: bool | None, said: bool | None) -> None:
        if truth is None or said is None:
            return
        if truth:
            self.met += 1
            self.yes_of_met += said
        else:
            self.unmet += 1
            self.yes_of_unmet += said

    @property
    def true_positive(self) -> float:
        return self.yes_of_met / max(1, self.met)

    @property
    def false_positive(self) -> float:
        return self.yes_of_unmet / max(1, self.unmet)

    def correction(self, least: int) -> tuple[float, float]:
        """(a, b) to correct with; (1, 0), no correction, while there are too few or yes and no tell nothing apart."""
        a, b = self.true_positive, self.false_positive
        return (a, b) if min(self.met, self.unmet) >= least and a - b > 0.1 else (1.0, 0.0)


def soft_reward(items: Checklist, said: Sequence[bool], settings: SoftSettings = SoftSettings(),
                rates: tuple[float, float] = (1.0, 0.0), counted: Sequence[bool] | None = None) -> float:
    """The reward of one answer; see the head. counted: items that are not left out (all, if none would be left)."""
    if any(item.gate and not met for item, met in zip(items, said, strict=True)):
        return 0.0
    a, b = rates
    kept = [i for i in range(len(items)) if counted is None or counted[i]] or list(range(len(items)))
    share = sum(items[i].weight * (said[i] - b) / (a - b) for i in kept) / sum(items[i].weight for i in kept)
    return (1 - settings.bonus) * share + settings.bonus * all(said)


@dataclass
class SoftRewards(Forgetful):
    """A groups.Score. After a call, `notes` has one mapping an outcome: what was said and what is true, by item."""

    lists: Mapping[str, Checklist]
    verifier: ItemVerifier
    settings: SoftSettings = SoftSettings()
    rates: Rates = field(default_factory=Rates)
    notes: list[dict[str, Any]] = field(default_factory=list)
    calls: int = 0
    means: dict[str, tuple[float, int]] = field(default_factory=dict)

    def __call__(self, outcomes: Sequence[Outcome]) -> list[Reward]:
        owners, asked = [], []
        for i, outcome in enumerate(outcomes):
            for question in self._questions(outcome):
                owners.append(i)
                asked.append(question)
        answers = self.verifier.verify(asked, f"call{self.calls}")
        whole = self._whole(outcomes)
        self.calls += 1
        said, truth = ([[] for _ in outcomes] for _ in range(2))
        for i, question, answer in zip(owners, asked, answers, strict=True):
            said[i].append(answer)
            truth[i].append(question.truth)
            self.rates.add(question.truth, answer)
        counted, saturated = self._counted(outcomes, said)
        rewards = [self._reward(o, s, c) for o, s, c in zip(outcomes, said, counted)]
        self.notes = [{"kind": self.settings.kind, "said": s, "truth": t, **w} for s, t, w in zip(said, truth, whole)]
        self.means = self._means(outcomes, said, truth, rewards, saturated)
        return rewards

    def measured(self) -> dict[str, tuple[float, int]]:
        return self.means

    def memory(self) -> dict[str, Any]:
        return {"rates": vars(self.rates), "calls": self.calls}

    def recall(self, memory: Mapping[str, Any]) -> None:
        self.rates, self.calls = Rates(**memory["rates"]), memory["calls"]

    def _whole(self, outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
        """What the holistic question is answered with, where it is asked beside the items."""
        if not self.settings.ask_holistic or self.settings.kind == "holistic":
            return [{} for _ in outcomes]
        asked = [self._questions(o, "holistic")[0] for o in outcomes]
        return [{"holistic": answer} for answer in self.verifier.verify(asked, f"whole{self.calls}")]

    def _questions(self, outcome: Outcome, kind: str = "") -> list[Question]:
        statement, response = outcome.attempt.task.problem_statement, response_of(outcome)
        items = self.lists[outcome.attempt.task.instance_id]
        truths = [item.truth(response) for item in items]
        if (kind or self.settings.kind) == "holistic":
            whole = None if None in truths else all(truths)
            return [Question(statement, response, HOLISTIC, whole)]
        return [Question(statement, response, item.text, truth) for item, truth in zip(items, truths)]

    def _counted(self, outcomes, said) -> tuple[list[list[bool]], tuple[int, int]]:
        """Per outcome, which items its group disagrees on (all count unless saturated ones are dropped); and how many
        (group, item) pairs of all are saturated."""
        groups: dict[str, list[int]] = defaultdict(list)
        for i, outcome in enumerate(outcomes):
            if None not in said[i]:
                groups[outcome.attempt.group].append(i)
        counted = [[True] * len(s) for s in said]
        flat = total = 0
        for members in groups.values():
            for j in range(len(said[members[0]])):
                agree = len({said[i][j] for i in members}) == 1
                flat, total = flat + agree, total + 1
                for i in members:
                    counted[i][j] = not (agree and self.settings.drop_saturated)
        return counted, (flat, total)

    def _reward(self, outcome: Outcome, said: Sequence[bool | None], counted: Sequence[bool]) -> Reward:
        if None in said:
            return Reward(None, "unverified")
        rates = self.rates.correction(self.settings.least) if self.settings.correct else (1.0, 0.0)
        if self.settings.kind == "holistic":
            a, b = rates
            return Reward((said[0] - b) / (a - b))
        return Reward(soft_reward(self.lists[outcome.attempt.task.instance_id], said, self.settings, rates, counted))

    def _means(self, outcomes, said, truth, rewards, saturated) -> dict[str, tuple[float, int]]:
        pairs = [(s, t) for own, known in zip(said, truth) for s, t in zip(own, known) if None not in (s, t)]
        found = {"verifier/agreement": (sum(s == t for s, t in pairs), len(pairs)),
                 "verifier/true_positive": (self.rates.yes_of_met, self.rates.met),
                 "verifier/false_positive": (self.rates.yes_of_unmet, self.rates.unmet),
                 "verifier/said_minus_true": (sum(s - t for s, t in pairs), len(pairs)),
                 "checklist/saturated": saturated,
                 "checklist/unverified": (sum(r.value is None for r in rewards), len(rewards))}
        known = [t for t in truth if None not in t]
        if self.settings.kind == "checklist":
            found["checklist/items_met"] = (sum(map(sum, known)), sum(map(len, known)))
            found["checklist/all_met"] = (sum(map(all, known)), len(known))
        return found
