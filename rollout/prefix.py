"""Prefix Sampling: own beginnings replayed, so that groups which nearly agree come near a pass rate of one half.

Binary rewards teach most where a group is divided. After a step, of every group of originals (attempts at a whole
task) with k passes among n valid members:

    k = 0 or n               nothing of the needed outcome exists: left alone
    k / n < low              mostly failing ("head_start"): the beginning of one of its rare successes is kept
    low <= k / n <= high     trains as it is
    k / n > high             mostly passing ("handicap"): the beginning of one of its rare failures is kept

The originals train all the same. In the next step each kept beginning is a group of its own beside the originals: its
turns are executed again in fresh sandboxes (`agent.converse`) and only what follows is sampled and trained. How many
turns, of a source with `steps` of them (both ratios are such that larger is harder):

    head_start    steps - min(int(steps * remaining), remaining_cap)
    handicap      min(int(steps * prefix), prefix_cap)

at least one and at most all but the last. A bucket is a pass count scaled to the whole group ("2/8"); each has its own
ratio, fixed or held by a controller (`controller.py`).
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from typing import Any, Mapping, Sequence

from oprd.core.types import Observation, Span, ToolCall, Turn
from oprd.rollout.attempts import Attempt, Outcome
from oprd.rollout.controller import Controller, ControlSettings
from oprd.sandbox.task import Task

HEAD_START, HANDICAP = "head_start", "handicap"
TASK = "task"


@dataclass(frozen=True)
class PrefixSettings:
    """low, high: the bands. remaining, prefix: the ratios, fixed or where an adaptive one begins. caps: most turns left
    (head start) or replayed (handicap), 0: none. most: kept beginnings in a step, 0: all. kinds: which bands help.
    withdraw: shares of training between which the help shrinks to nothing (1, 1: never)."""

    low: float = 0.3
    high: float = 0.7
    remaining: float = 0.75
    prefix: float = 0.25
    remaining_cap: int = 0
    prefix_cap: int = 0
    most: int = 0
    kinds: tuple[str, ...] = (HEAD_START, HANDICAP)
    adaptive: bool = False
    control: ControlSettings = ControlSettings()
    withdraw: tuple[float, float] = (1.0, 1.0)

    def __post_init__(self):
        if not 0 <= self.low <= self.high <= 1:
            raise ValueError(f"low = {self.low} must not exceed high = {self.high}, both from 0 to 1")
        if not (0 <= self.remaining <= 1 and 0 <= self.prefix <= 1):
            raise ValueError(f"remaining = {self.remaining} and prefix = {self.prefix} must lie between 0 and 1")
        first, last = self.withdraw
        if not 0 <= first <= last <= 1:
            raise ValueError(f"withdraw = {list(self.withdraw)} must be two shares of training, the first not larger")


@dataclass(frozen=True)
class Beginning:
    """Turns to replay in the next step: of which task, for which kind and bucket."""

    task: Task
    kind: str
    bucket: str
    turns: tuple[Turn, ...]


def band(passed: int, valid: int, s: PrefixSettings) -> str | None:
    """The help a group needs: HEAD_START, HANDICAP or None."""
    if not 0 < passed < valid:
        return None
    rate = passed / valid
    return HEAD_START if rate < s.low else HANDICAP if rate > s.high else None


def length(kind: str, steps: int, ratio: float, s: PrefixSettings) -> int:
    """Turns to replay of a source with `steps` turns; 0 when it is too short for any."""
    cap = s.remaining_cap if kind == HEAD_START else s.prefix_cap
    part = int(steps * ratio + 1e-9)
    part = min(part, cap) if cap else part
    turns = steps - part if kind == HEAD_START else part
    return max(0, min(max(1, turns), steps - 1))


@dataclass
class PrefixSampling:
    """What one step leaves for the next. `attempts` asks for the kept beginnings, `observe` learns from a step."""

    settings: PrefixSettings
    n: int  # attempts of a group
    steps: int  # of the whole training
    kept: tuple[Beginning, ...] = ()
    controllers: dict[str, Controller] = field(default_factory=dict)
    left_out: int = 0  # beginnings of the last step that were too short, or over `most`

    def attempts(self, step: int, seed_of) -> list[Attempt]:
        """The next step's extra attempts; seed_of(i, j): the seed of beginning i's j-th."""
        return [Attempt(f"step{step}/{b.kind}{i}.{j}/{b.task.instance_id}", b.task, seed_of(i, j),
                        f"step{step}/{b.kind}{i}", b.kind, b.turns)
                for i, b in enumerate(self.kept) for j in range(self.n)]

    def observe(self, step: int, outcomes: Sequence[Outcome], rewards: Sequence[float | None]) -> None:
        """Move the controllers by the replayed groups' pass rates, then keep beginnings of the originals. rewards: one
        an outcome, None where it is masked; above one half is a pass."""
        groups: dict[str, list[tuple[Outcome, float]]] = defaultdict(list)
        for outcome, reward in zip(outcomes, rewards, strict=True):
            if reward is not None and reward == reward:
                groups[outcome.attempt.group].append((outcome, reward))
        help_ = self.help(step + 1)
        if self.settings.adaptive and help_ == 1.0:
            self._control(groups)
        found, self.left_out = [], 0
        for name in sorted(groups):
            members = groups[name]
            if members[0][0].attempt.origin == TASK and (beginning := self._keep(step, name, members, help_)):
                found.append(beginning)
        most = self.settings.most or len(found)
        self.left_out += max(0, len(found) - most)
        self.kept = tuple(found[:most])

    def help(self, step: int) -> float:
        """1 before the withdrawal, 0 after it, a line between."""
        first, last = (share * self.steps for share in self.settings.withdraw)
        if step < first or self.settings.withdraw == (1.0, 1.0):
            return 1.0
        return 0.0 if step >= last else (last - step) / (last - first)

    def ratio(self, kind: str, bucket: str) -> float:
        start = self.settings.remaining if kind == HEAD_START else self.settings.prefix
        return self.controllers[bucket].ratio if bucket in self.controllers else start

    def measured(self) -> dict[str, tuple[float, int]]:
        """Of the last `observe`: beginnings kept for the next step and left out, and every bucket's ratio."""
        found = {"prefix/kept": (float(len(self.kept)), 1), "prefix/left_out": (float(self.left_out), 1)}
        for bucket, c in self.controllers.items():
            found[f"prefix/ratio_{bucket.replace('/', '_of_')}"] = (c.ratio, 1)
            if c.mean is not None:
                found[f"prefix/mean_pass_rate_{bucket.replace('/', '_of_')}"] = (c.mean, 1)
        return found

    def _control(self, groups: Mapping[str, list[tuple[Outcome, float]]]) -> None:
        """One pass rate a bucket and step: over all valid members of its replayed groups."""
        by_name = {f"{b.kind}{i}": b for i, b in enumerate(self.kept)}
        seen: dict[tuple[str, str], list[float]] = defaultdict(list)
        for name, members in groups.items():
            if beginning := by_name.get(name.rsplit("/", 1)[-1]):
                seen[beginning.kind, beginning.bucket] += [float(reward > 0.5) for _, reward in members]
        for (kind, bucket), passes in sorted(seen.items()):
            before = self.controllers.get(bucket) or Controller(self.ratio(kind, bucket))
            self.controllers[bucket] = before.seen(sum(passes) / len(passes), self.settings.control)

    def _keep(self, step: int, name: str, members: Sequence[tuple[Outcome, float]], help_: float) -> Beginning | None:
        passed = sum(reward > 0.5 for _, reward in members)
        kind = band(passed, len(members), self.settings)
        if kind is None or kind not in self.settings.kinds:
            return None
        bucket = f"{round(passed * self.n / len(members))}/{self.n}"
        sources = [o for o, reward in members if (reward > 0.5) == (kind == HEAD_START)]
        source = random.Random(f"{step}/{name}").choice(sources)
        turns = source.trajectory.turns
        n = int(length(kind, len(turns), self.ratio(kind, bucket), self.settings) * help_ + 1e-9)
        if not 0 < n < len(turns) or any(t.observation is None or t.reminder_ids for t in turns[:n]):
            self.left_out += 1
            return None
        return Beginning(source.attempt.task, kind, bucket, turns[:n])

    # --- what a resume needs

    def memory(self) -> dict[str, Any]:
        return {"kept": [{**asdict(b), "task": b.task.instance_id} for b in self.kept],
                "controllers": {bucket: asdict(c) for bucket, c in self.controllers.items()}}

    def recall(self, memory: Mapping[str, Any], tasks: Mapping[str, Task]) -> None:
        self.kept = tuple(Beginning(tasks[b["task"]], b["kind"], b["bucket"], tuple(map(_turn, b["turns"])))
                          for b in memory["kept"])
        self.controllers = {bucket: Controller(**c) for bucket, c in memory["controllers"].items()}


def _turn(entry: Mapping[str, Any]) -> Turn:
    """A turn from `asdict`, through JSON."""
    ids = {name: tuple(entry[name]) for name in ("context_ids", "sampled_ids", "logprobs", "reminder_ids")}
    call, seen = entry["call"], entry["observation"]
    return Turn(**{**entry, **ids, "spans": tuple(Span(*span) for span in entry["spans"]), "call": ToolCall(**call) if call else None,
                   "observation": Observation(**seen) if seen else None})


def measured(outcomes: Sequence[Outcome], rewards: Sequence[float | None]) -> dict[str, tuple[float, int]]:
    """Pass rates by origin, and of replays how many diverged, as (total, count)."""
    found: dict[str, tuple[float, int]] = {}
    for origin in (TASK, HEAD_START, HANDICAP):
        own = [(o, r) for o, r in zip(outcomes, rewards, strict=True) if o.attempt.origin == origin]
        valid = [r for _, r in own if r is not None and r == r]
        if valid:
            found[f"prefix/pass_rate_{origin}"] = (sum(r > 0.5 for r in valid), len(valid))
    replays = [o for o in outcomes if o.attempt.prefix]
    if replays:
        found["prefix/diverged"] = (sum(o.trouble == "replay_diverged" for o in replays), len(replays))
        found["prefix/replayed_turns"] = (sum(len(o.attempt.prefix) for o in replays), len(replays))
        for kind in (HEAD_START, HANDICAP):
            groups = {o.attempt.group for o in replays if o.attempt.origin == kind}
            found[f"prefix/groups_{kind}"] = (len(groups), 1)
    return found
