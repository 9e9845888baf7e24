"""MicroIF: an endless, seeded generator of small writing tasks whose every requirement a program can check.

A task asks for a line of words under a few constraints (IFEval's idea, in MicroSWE's words): how many, which must
occur, which must not, with which the line begins and ends. Everything about an answer is known: which constraints it
meets (`Constraint.holds`), so that learnt verifiers can be held against the truth. Rows, a JSON line each:

    {"instance_id", "problem_statement", "constraints": [{"kind", "word", "n"}],
     "checklist": [{"text", "weight", "gate", "check"}], "canaries": [{"response", "item"}]}

Only the first two are needed; other prompts may have no constraints (no truth), and a checklist of their own.
`check` is a constraint: what a scripted verifier holds the item against. A canary is an answer that is known not to
meet the item of that number.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Mapping, Sequence

from oprd.sandbox.jsonl import read_jsonl
from oprd.sandbox.microswe import FAMILIES, pick
from oprd.sandbox.task import Task

KINDS = ("count", "use", "avoid", "begin", "end", "twice")
TEXTS = {"count": "Write {n} words.", "use": "Use {word}.", "avoid": "Avoid {word}.", "begin": "Begin with {word}.",
         "end": "End with {word}.", "twice": "Use {word} twice."}


@dataclass(frozen=True)
class Constraint:
    """One requirement. word: of the kinds that name one; n: of `count`."""

    kind: str
    word: str = ""
    n: int = 0

    def text(self) -> str:
        return TEXTS[self.kind].format(word=self.word, n=self.n)

    def holds(self, response: str) -> bool:
        words = response.split()
        times = words.count(self.word)
        return {"count": len(words) == self.n, "use": times >= 1, "avoid": times == 0, "twice": times == 2,
                "begin": words[:1] == [self.word], "end": words[-1:] == [self.word]}[self.kind]


def generate(seed: int, index: int, family: str = "train", items: int = 4) -> Task:
    """Task number `index` of the sequence `seed`: `items` constraints (2 to 6) that can be met together."""
    if not 2 <= items <= len(KINDS):
        raise ValueError(f"items = {items} must be from 2 to {len(KINDS)}")
    rng = random.Random(f"microif/{seed}/{family}/{index}")
    kinds = rng.sample(KINDS, items)
    words = dict(zip(KINDS, pick(rng, family, len(KINDS))))
    constraints = [Constraint(kind, "" if kind == "count" else words[kind], rng.randint(5, 7) if kind == "count" else 0)
                   for kind in kinds]
    statement = " ".join(c.text() for c in constraints)
    task = Task(f"microif__{family}-{seed}-{index}", "", "", statement, "", "", (), (), {},
                meta={"constraints": [asdict(c) for c in constraints],
                      "checklist": [{"text": c.text(), "weight": 1.0, "gate": False, "check": asdict(c)}
                                    for c in constraints]})
    canaries = [{"response": response, "item": i} for i, c in enumerate(constraints)
                if not c.holds(response := answer(task, rng, broken=(i,)))]
    return Task(**{**vars(task), "meta": {**task.meta, "canaries": canaries}})


def constraints_of(task: Task) -> list[Constraint]:
    return [Constraint(**c) for c in task.meta.get("constraints", ())]


def answer(task: Task, rng: random.Random, broken: Sequence[int] = (), family: str = "train") -> str:
    """A line that meets the task's constraints, those numbered in `broken` apart (as far as they can be broken)."""
    constraints = constraints_of(task)
    kept = {c.kind: c for i, c in enumerate(constraints) if i not in broken}
    lost = {c.kind: c for i, c in enumerate(constraints) if i in broken}
    fill = [w for w in FAMILIES[family] if w not in task.problem_statement]
    inner = [kept["use"].word] if "use" in kept else []
    inner += [kept["twice"].word] * 2 if "twice" in kept else [lost["twice"].word] if "twice" in lost else []
    inner += [lost["avoid"].word] if "avoid" in lost else []
    ends = [[kept["begin"].word] if "begin" in kept else [rng.choice(fill)],
            [kept["end"].word] if "end" in kept else [rng.choice(fill)]]
    n = kept["count"].n if "count" in kept else len(inner) + 2 + rng.randint(0, 2)
    n += "count" in lost and n == lost["count"].n
    inner += [rng.choice(fill) for _ in range(n - 2 - len(inner))]
    rng.shuffle(inner)
    return " ".join([*ends[0], *inner, *ends[1]])


def task_row(task: Task) -> dict[str, Any]:
    return {"instance_id": task.instance_id, "problem_statement": task.problem_statement, **task.meta}


def read_prompts(path: str | Path) -> list[Task]:
    """The tasks of a JSONL file of prompts. Raises FileNotFoundError, or ValueError naming file, line and field."""
    tasks: dict[str, Task] = {}
    for where, row in read_jsonl(path):
        for name in ("instance_id", "problem_statement"):
            if not isinstance(row.get(name), str) or not row[name].strip():
                raise ValueError(f"{where}: {name} must be a text that is not empty")
        if row["instance_id"] in tasks:
            raise ValueError(f"{where}: instance_id {row['instance_id']!r} is taken; every prompt needs its own")
        meta = {name: row[name] for name in ("constraints", "checklist", "canaries") if name in row}
        for i, c in enumerate(meta.get("constraints", ())):
            if not isinstance(c, Mapping) or c.get("kind") not in KINDS or c.keys() - {"kind", "word", "n"}:
                raise ValueError(f"{where}: constraints[{i}] must be an object with kind ({', '.join(KINDS)}), word, n")
        tasks[row["instance_id"]] = Task(row["instance_id"], "", "", row["problem_statement"], "", "", (), (), {},
                                         meta=meta)
    if not tasks:
        raise ValueError(f"{path}: no prompts in the file")
    return list(tasks.values())
