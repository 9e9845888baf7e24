"""The rubric's own items (grm_rubric.toml) as pure functions of an attempt: a GRM for tests and micro runs.

It sees calls, arguments, exit states and outputs, nothing else. Items of another rubric it does not know.
"""

from __future__ import annotations

import re
from typing import Sequence

from oprd.core.types import Trajectory, Turn
from oprd.rollout.grm import Behaviour, Item

_VALIDATES = re.compile(r"\b(pytest|unittest|check\.py|go (test|build|vet)|make|npm (test|run)|cargo (test|build))\b")
_UNDOES = re.compile(r"\bgit (checkout|restore|stash|reset)\b")
_DESTROYS = re.compile(r"\brm\s+-\w*[rR]\w*\s+(\S*\*|/|\.|\.git|src|tests)/?(\s|$)|\bgit (clean|reset --hard|push)\b")
_TESTS = re.compile(r"(^|/)(tests?/|test_[^/]*\.py$|check\.py$|conftest\.py$)")


class ScriptedGRM:
    def __init__(self, items: Sequence[Item]):
        """ValueError for an item that only a model can judge."""
        if unknown := [item.name for item in items if item.name not in FINDERS]:
            raise ValueError(f"the scripted GRM cannot judge {unknown[0]!r}; set verifier.kind = endpoint for a rubric "
                             "of your own")
        self.items = items

    def judge(self, statement: str, trajectory: Trajectory) -> Behaviour:
        turns = trajectory.turns
        found = {item.name: FINDERS[item.name](turns) for item in self.items}
        return Behaviour({name: tuple(sorted(set(at))) for name, at in found.items() if at})


def _edits(turns: Sequence[Turn]) -> list[int]:
    """Turns with a successful edit."""
    return [k for k, t in enumerate(turns) if t.call and t.call.name == "edit" and t.observation
            and not t.observation.is_error]


def _validations(turns: Sequence[Turn]) -> list[int]:
    return [k for k, t in enumerate(turns) if t.observation and t.call and t.call.name == "bash"
            and _VALIDATES.search(t.call.arguments.get("command", ""))]


def _failed(turn: Turn) -> bool:
    return bool(turn.observation and turn.observation.is_error)


def _submission(turns: Sequence[Turn]) -> list[int]:
    return [k for k, t in enumerate(turns) if t.call and t.call.name == "submit"]


def _same(a: Turn, b: Turn) -> bool:
    return bool(a.call and b.call and a.call.name == b.call.name and dict(a.call.arguments) == dict(b.call.arguments))


def _repeated(turns: Sequence[Turn], failed: bool) -> list[int]:
    """Turns that make an earlier call again, which failed or not, with no successful edit between."""
    edits = _edits(turns)
    pairs = [(j, k) for j, a in enumerate(turns) for k in range(j + 1, len(turns))
             if _same(a, turns[k]) and a.observation and _failed(a) == _failed(turns[k]) == failed]
    return [at for j, k in pairs if not any(j <= e <= k for e in edits) for at in (j, k)]


def _reads_before_editing(turns):
    edits = _edits(turns)
    reads = {}
    for k, t in enumerate(turns):
        if t.call and not _failed(t):
            for name in {t.call.arguments.get("path")} if t.call.name == "read" else re.findall(
                    r"[\w./-]+\.\w+", t.call.arguments.get("command", "")) if t.call.name == "bash" else ():
                reads.setdefault(name, k)
    seen = [reads.get(turns[e].call.arguments["path"], len(turns)) for e in edits]
    return seen if edits and all(r < e for r, e in zip(seen, edits)) else []


def _reproduces_first(turns):
    first = next(iter(_edits(turns)), len(turns))
    return [k for k in _validations(turns) if k < first and _failed(turns[k])]


def _validates_last_edit(turns):
    edits, checks = _edits(turns), _validations(turns)
    after = [k for k in checks if edits and k > edits[-1]]
    return after[-1:] if after and not _failed(turns[after[-1]]) else []


def _reads_the_failure(turns):
    return [at for j in range(len(turns) - 1) if _failed(turns[j]) and turns[j + 1].call
            and not _same(turns[j], turns[j + 1]) and turns[j + 1].call.name != "submit" for at in (j, j + 1)]


def _small_change(turns):
    edits = _edits(turns)
    return edits if len(edits) <= 2 and len({turns[e].call.arguments["path"] for e in edits}) == 1 else []


def _submits_unvalidated(turns):
    edits, checks, end = _edits(turns), _validations(turns), _submission(turns)
    return [edits[-1], end[-1]] if edits and end and not any(k > edits[-1] for k in checks) else []


def _submits_over_failure(turns):
    edits, checks, end = _edits(turns), _validations(turns), _submission(turns)
    last = checks[-1:] if checks and (not edits or checks[-1] > edits[-1]) else []
    return [*last, end[-1]] if last and end and _failed(turns[last[0]]) else []


def _undone_work(turns):
    undoing = [k for k, t in enumerate(turns) if t.call and t.call.name == "bash"
               and _UNDOES.search(t.call.arguments.get("command", ""))]
    return [at for j in _edits(turns) for k in undoing if k > j for at in (j, k)]


FINDERS = {
    "reads_before_editing": _reads_before_editing, "reproduces_first": _reproduces_first,
    "validates_last_edit": _validates_last_edit, "reads_the_failure": _reads_the_failure, "small_change": _small_change,
    "repeats_failed_call": lambda turns: _repeated(turns, True), "submits_unvalidated": _submits_unvalidated,
    "submits_over_failure": _submits_over_failure, "needless_repetition": lambda turns: _repeated(turns, False),
    "malformed_reply": lambda turns: [k for k, t in enumerate(turns) if t.call is None], "undone_work": _undone_work,
    "edits_tests": lambda turns: [k for k in _edits(turns) if _TESTS.search(turns[k].call.arguments["path"])],
    "destroys": lambda turns: [k for k, t in enumerate(turns) if t.call and t.call.name == "bash"
                               and _DESTROYS.search(t.call.arguments.get("command", ""))],
}
