"""Does a checklist or one holistic question tell two answers apart better? From measured error rates, exactly.

Of m items of equal weight an answer misses d. The verifier says yes to a met item at the rate a, to an unmet one at b,
each item by itself. The score of such an answer is the number of its yes,

    Binomial(m - d, a) + Binomial(d, b)     mean m a - d (a - b), variance (m - d) a (1 - a) + d b (1 - b)

and of two answers that miss d < e items the better one scores higher by (e - d)(a - b) on average: the separation is
that over the root of the summed variances. The holistic question is a single yes at the rate A for a complete answer
and B for any other. docs/checklists.md derives when which is larger; here `right` is the probability, exact for the
discrete scores, that the better of two answers gets the larger reward, ties counting one half.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Iterable, Mapping, Sequence

import numpy as np

from oprd.rollout.soft_reward import Rates
from oprd.rollout.tables import columns


def scores(m: int, d: int, a: float, b: float) -> np.ndarray:
    """Probability of 0 .. m times yes for an answer that misses d of m items."""
    found = np.ones(1)
    for rate in [a] * (m - d) + [b] * d:
        found = np.convolve(found, [1 - rate, rate])
    return found


def right(better: np.ndarray, worse: np.ndarray) -> float:
    """Probability that a draw of the first is larger than one of the second, ties counting one half."""
    below = np.concatenate([[0.0], np.cumsum(worse)])[: len(better)] if len(worse) >= len(better) else np.concatenate(
        [[0.0], np.cumsum(worse), np.ones(len(better) - len(worse) - 1)])[: len(better)]
    same = np.zeros(len(better))
    same[: min(len(better), len(worse))] = worse[: len(better)]
    return float((better * (below + same / 2)).sum())


def separation(m: int, d: int, e: int, a: float, b: float) -> float:
    """Mean difference of the checklist's scores over its standard deviation, for answers missing d and e > d items."""
    variance = (2 * m - d - e) * a * (1 - a) + (d + e) * b * (1 - b)
    apart = (e - d) * (a - b)
    return apart / math.sqrt(variance) if variance else math.copysign(math.inf, apart) if apart else 0.0


def holistic_separation(d: int, e: int, a: float, b: float) -> float:
    """The same of the holistic question: nothing unless one of the two is complete."""
    if d > 0 or e == 0:
        return 0.0
    variance = a * (1 - a) + b * (1 - b)
    return (a - b) / math.sqrt(variance) if variance else math.inf


def whole_score(d: int, a: float, b: float) -> np.ndarray:
    rate = b if d else a
    return np.array([1 - rate, rate])


@dataclass(frozen=True)
class Measured:
    """items, whole: rates of the items and of the holistic question (assumed: the items', where it was not asked).
    pairs: (m, d, e) -> how many pairs of attempts of one group miss d and e > d of m items."""

    items: Rates
    whole: Rates
    assumed: bool
    pairs: Mapping[tuple[int, int, int], int]


def measure(records: Iterable[Mapping[str, Any]]) -> Measured:
    """From recorded attempts whose `notes` hold what was said and what is true. ValueError when there are none."""
    items, whole, groups = Rates(), Rates(), defaultdict(list)
    for row in records:
        notes = row.get("notes") or {}
        said, truth = notes.get("said"), notes.get("truth")
        if not truth or None in truth:
            continue
        if notes["kind"] == "holistic":
            whole.add(truth[0], said[0])
            continue
        for s, t in zip(said, truth):
            items.add(t, s)
        whole.add(all(truth), notes.get("holistic"))
        groups[row["group"]].append((len(truth), len(truth) - sum(truth)))
    pairs: Counter = Counter()
    for members in groups.values():
        pairs.update((m, *sorted((d, e))) for (m, d), (_, e) in combinations(members, 2) if d != e)
    if not pairs or not items.met or not items.unmet:
        raise ValueError("no two recorded attempts of one group with a checklist and known truth differ; record a run "
                         "of --stage rl with rl.reward = checklist on prompts with constraints (rollout.record = text)")
    asked = bool(whole.met and whole.unmet)
    return Measured(items, whole if asked else items, not asked, pairs)


def report(found: Measured) -> str:
    """The table and the verdict."""
    a, b = found.items.true_positive, found.items.false_positive
    A, B = found.whole.true_positive, found.whole.false_positive
    lines = [f"items: yes to met {a:.3f}, to unmet {b:.3f}; holistic: yes to complete {A:.3f}, to incomplete {B:.3f}"
             + (" (assumed: not asked)" if found.assumed else "")]
    rows, sums = [], defaultdict(lambda: [0.0, 0.0, 0])
    for (m, d, e), n in sorted(found.pairs.items()):
        ours = right(scores(m, d, a, b), scores(m, e, a, b))
        theirs = right(whole_score(d, A, B), whole_score(e, A, B))
        rows.append([f"{m} items, {d} against {e} missing", str(n), f"{separation(m, d, e, a, b):.2f}",
                     f"{holistic_separation(d, e, A, B):.2f}", f"{ours:.3f}", f"{theirs:.3f}", _winner(ours, theirs)])
        for name in ["any two answers"] + ["complete against incomplete"] * (d == 0) + \
                ["complete against one missing"] * (d == 0 and e == 1):
            sums[name] = [sums[name][0] + n * ours, sums[name][1] + n * theirs, sums[name][2] + n]
    for name, (ours, theirs, n) in sums.items():
        rows.append([name, str(n), "", "", f"{ours / n:.3f}", f"{theirs / n:.3f}", _winner(ours / n, theirs / n)])
    head = ["pairs", "number", "checklist sep.", "holistic sep.", "checklist right", "holistic right", "better"]
    ours, theirs, n = sums["any two answers"]
    return "\n".join([*lines, columns([head, *rows]),
                      f"for these answers a {_winner(ours / n, theirs / n)} reward orders more pairs rightly"])


def _winner(ours: float, theirs: float) -> str:
    return "equal" if abs(ours - theirs) < 1e-9 else "checklist" if ours > theirs else "holistic"


def read_report(rows: Sequence[Mapping[str, Any]]) -> str:
    return report(measure(rows))
