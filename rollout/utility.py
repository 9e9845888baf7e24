"""Does a reminder move the teacher at the bad step? Its utility, in nats.

For a local reminder fired by observation k, with a the action that was taken next and the teacher's log-probability of
the whole of a:

    utility = log p(a | without it) - log p(a | with it)      where a does not do what the reminder asks
              log p(a | with it) - log p(a | without it)      where it does
              the absolute difference                         where that is unclear

so a useful reminder has a positive one: it makes the bad action less likely, or the good one more. The Global Reminder
stands in both contexts. Scoring is handed in; nothing here knows a model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Callable, Mapping, Sequence

import numpy as np

from oprd.core.types import Reminder, Row, Trajectory
from oprd.rollout.follow import followed
from oprd.rollout.select import Dropped
from oprd.rollout.teach import Encode, Reminded
from oprd.rollout.views import teacher_view

Score = Callable[[Sequence[Row]], Sequence[np.ndarray]]  # log-probability of every target of every row


def utilities(trajectory: Trajectory, encode: Encode, global_: Reminder | None, local: Mapping[int, Reminder],
              score: Score) -> dict[int, float]:
    """k -> utility of the reminder fired by observation k, for those that a turn reads."""
    turns = trajectory.turns
    seen = {k: r for k, r in sorted(local.items()) if k + 1 < len(turns)}
    if not seen:
        return {}
    plain = teacher_view(trajectory, encode, global_, {}).rows[0]
    trunk, *branches = teacher_view(trajectory, encode, global_, seen).rows
    without, *with_ = score([plain, *branches])
    ends = np.cumsum([len(turn.sampled_ids) for turn in turns])
    found = {}
    for (k, reminder), logprobs in zip(seen.items(), with_, strict=True):
        moved = float(logprobs.sum() - without[ends[k]: ends[k + 1]].sum())  # > 0: more likely with it
        does = followed(reminder, turns[: k + 1], turns[k + 1])
        found[k] = abs(moved) if does is None else moved if does else -moved
    return found


def measured(reminded: Reminded, trajectory: Trajectory, encode: Encode, score: Score, least: float | None) -> Reminded:
    """The same reminders with their utilities; below `least` (None: keep all) one is dropped, with the reason."""
    found = utilities(trajectory, encode, reminded.global_, reminded.local, score)
    low = [k for k, u in found.items() if least is not None and u < least]
    dropped = tuple(Dropped(reminded.local[k].category, k, f"utility {found[k]:.2f} below {least:.2f}", "utility")
                    for k in low)
    return replace(reminded, local={k: r for k, r in reminded.local.items() if k not in low},
                   dropped=reminded.dropped + dropped, utility=found)
