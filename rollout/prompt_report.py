"""How a policy answers prompts whose constraints a program can check (MicroIF): the truth, no verifier."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Mapping, Sequence

from oprd.rollout.answers import response_of
from oprd.rollout.attempts import Outcome
from oprd.rollout.tables import columns
from oprd.sandbox.microif import constraints_of
from oprd.sandbox.task import Task


@dataclass(frozen=True)
class PromptReport:
    """answers: with known truth; complete: meet every constraint. met, asked: constraints by kind."""

    answers: int
    complete: int
    met: Mapping[str, int]
    asked: Mapping[str, int]
    tokens: float

    def scalars(self) -> dict[str, float]:
        n = self.answers
        return {} if not n else {
                "eval/all_met": self.complete / n, "eval/answers": n, "eval/tokens_per_answer": self.tokens,
                "eval/items_met": sum(self.met.values()) / max(1, sum(self.asked.values())),
                **{f"eval/met_{kind}": self.met.get(kind, 0) / m for kind, m in self.asked.items()}}


def check_known(tasks: Sequence[Task]) -> None:
    """ValueError for a task that no evaluation can judge: a prompt without constraints."""
    if unknown := next((t for t in tasks if not t.fail_to_pass and not constraints_of(t)), None):
        raise ValueError(f"{unknown.instance_id} has no constraints, so an evaluation cannot know whether an answer is "
                         "right; give it some, or train on it with rl.reward = checklist only")


def prompt_report(outcomes: Sequence[Outcome]) -> PromptReport:
    known = [o for o in outcomes if o.verdict and constraints_of(o.attempt.task)]
    met, asked = Counter(), Counter()
    for outcome in known:
        for constraint in constraints_of(outcome.attempt.task):
            asked[constraint.kind] += 1
            met[constraint.kind] += constraint.holds(response_of(outcome))
    tokens = sum(len(o.trajectory.turns[0].sampled_ids) for o in known) / max(1, len(known))
    return PromptReport(len(known), sum(o.verdict.resolved for o in known), met, asked, tokens)


def prompt_table(rows: Sequence[tuple[str, PromptReport]]) -> str:
    kinds = sorted({kind for _, r in rows for kind in r.asked})
    head = ["checkpoint", "answers", "all met", "items met", *kinds, "tokens"]
    share = lambda a, b: f"{100 * a / b:.1f}%" if b else "-"  # noqa: E731
    body = [[name, str(r.answers), share(r.complete, r.answers), share(sum(r.met.values()), sum(r.asked.values())),
             *(share(r.met.get(k, 0), r.asked.get(k, 0)) for k in kinds), f"{r.tokens:.1f}"] for name, r in rows]
    return columns([head, *body])
