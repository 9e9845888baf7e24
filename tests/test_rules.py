"""The hard rules on real tool outputs (when the corpus is there) and on hand-written near-misses."""

import csv
import json
import re
from pathlib import Path

import pytest

from oprd.rollout.rules import RULES, matches
from oprd.rollout.toolresult import ToolResult, is_test, is_validation, simple_commands

CORPUS = next((p for p in (Path("/work/shared/tool_outputs"), Path("shared/tool_outputs")) if p.is_dir()), None)
FIRES = {"positive", "positive-borderline", "positive-silent"}


def cases():
    """(case, rule, polarity, tool, arguments, exit_code, is_error, output) of every rule case in the corpus."""
    with open(CORPUS / "INDEX.tsv", newline="") as file:
        rows = [row for row in csv.DictReader(file, delimiter="\t") if row["rule"]]
    for row in rows:
        body, _, state = (CORPUS / f"{row['case']}.txt").read_text().rstrip("\n").rpartition("\n")
        first, *rest = body.split("\n")
        command = first.removeprefix("$ ")
        code, flag = re.search(r"\[exit (-?\d+)\]", state), re.search(r"\[is_error (\w+)\]", state)
        if not code and not flag:  # one scaffold writes its exit code into the output only
            rest.append(state)
        called = re.match(r"([A-Z]\w+) (\{.*\})$", command)
        tool, arguments = (called[1], json.loads(called[2])) if called else ("bash", {"command": command})
        yield (row["case"], row["rule"], row["polarity"], tool, arguments, int(code[1]) if code else None,
               bool(flag) and flag[1] == "True", "\n".join(rest))


@pytest.mark.skipif(CORPUS is None, reason="the corpus of real tool outputs is not on this machine")
def test_precision_and_recall_on_real_tool_outputs_are_at_least_095(capsys):
    hit, missed, wrong = [], [], []
    for case, rule, polarity, *call in cases():
        fired = rule in matches(*call)
        if polarity in FIRES:
            (hit if fired else missed).append(case)
        elif fired and polarity in ("near-miss", "truncation-marker"):
            wrong.append(case)
    recall, precision = len(hit) / (len(hit) + len(missed)), len(hit) / (len(hit) + len(wrong))
    with capsys.disabled():
        print(f"\nhard rules on {len(hit) + len(missed)} positives: recall {recall:.3f}, precision {precision:.3f}")
    assert recall >= 0.95 and precision >= 0.95, f"missed {missed}, wrong {wrong}"


@pytest.mark.skipif(CORPUS is None, reason="the corpus of real tool outputs is not on this machine")
def test_no_rule_fires_on_the_near_miss_of_another_rule_unless_the_case_is_its_own():
    own = {"hard_missing_file_path_narrow": {"neg__sweagent_missing_path", "neg__grep_missing_path",
                                             "neg__no_such_pkg"},
           "hard_go_compile_error": {"signature_callers", "mockey_compile_error"}}
    for case, rule, polarity, *call in cases():
        if polarity == "near-miss":
            for other in matches(*call):
                assert any(part in case for part in own.get(other, ())), (case, other)
