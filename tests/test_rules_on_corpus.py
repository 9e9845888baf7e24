"""Recall and precision of every hard rule on real tool outputs, plain and decorated. Skips where the corpus is absent.

A rule is right when it fires on its own positives, stays silent on its near-misses, and on the cases of the other rules
fires only where the case is its own too (OWN). Unlabelled runs of test runners are negatives but for those.
"""

import csv
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from oprd.rollout.rules import RULES, matches

CORPUS = next((p for p in (Path("/work/shared/tool_outputs"), Path("shared/tool_outputs")) if p.is_dir()), None)
pytestmark = pytest.mark.skipif(CORPUS is None, reason="the corpus of real tool outputs is not on this machine")
SILENT = ("near-miss", "truncation-marker", "tool-absent", "")
OWN = {  # parts of the names of cases of another rule, or of none, in which a rule's signal is plainly there as well
    "hard_missing_file_path_narrow": ("neg__sweagent_missing_path", "neg__grep_missing_path", "neg__no_such_pkg",
                                      "mocha_missing"),
    "hard_go_compile_error": ("signature_callers", "mockey_compile_error"),
    "hard_go_signature_callers": ("compile_error__pos__test_all_mixed", "compile_error__pos__test_json"),
}
NAG = ("\n\n<system-reminder>\nregex parse error:\n401 Unauthorized\noutput truncated\na.go:1:2: undefined: x\n"
       "cat: a: No such file or directory\n</system-reminder>")
ASIS = "as it is"
DRESSES = {
    ASIS: lambda text: text,
    "carriage returns": lambda text: text.replace("\n", "\r\n"),
    "colours": lambda text: "\n".join(f"\x1b[31m{line}\x1b[0m" if line else line for line in text.split("\n")),
    "a reminder block": lambda text: text + NAG,
    "line numbers": lambda text: "\n".join(f"{i:6}\t{line}" for i, line in enumerate(text.split("\n"), 1)),
}


def cases():
    """(case, rule, polarity, tool, arguments, exit_code, is_error, output) of every case in the corpus."""
    with open(CORPUS / "INDEX.tsv", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
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


@pytest.mark.parametrize("dress", DRESSES)
def test_recall_and_precision_are_at_least_095_overall_and_for_every_rule(dress, capsys):
    hit, missed, wrong, failures = Counter(), Counter(), Counter(), []
    for case, rule, polarity, tool, arguments, code, is_error, output in cases():
        if dress == "line numbers" and output.startswith("<returncode>"):
            continue  # this scaffold's exit state would be numbered too
        fired = set(matches(tool, arguments, code, is_error, DRESSES[dress](output)))
        mine = {rule} if polarity not in SILENT else set()
        hit.update(fired & mine)
        missed.update(mine - fired)
        strange = {name for name in fired - mine if not any(part in case for part in OWN.get(name, ()))}
        wrong.update(strange)
        failures += [(case, sorted(mine - fired), sorted(strange))] * bool(mine - fired or strange)
    table = {name: (hit[name] / (hit[name] + missed[name]), hit[name] / max(hit[name] + wrong[name], 1))
             for name in RULES}
    if dress == ASIS:
        with capsys.disabled():
            print(f"\n{'hard rule':36} cases recall precision")
            for name, (recall, precision) in table.items():
                print(f"{name:36} {hit[name] + missed[name]:5} {recall:6.3f} {precision:9.3f}")
    assert all(min(pair) >= 0.95 for pair in table.values()), (table, failures)
    assert hit.total() >= 0.95 * (hit.total() + max(missed.total(), wrong.total())), failures


def test_an_error_flag_stands_in_for_an_exit_code():
    for case, rule, polarity, tool, arguments, code, is_error, output in cases():
        if polarity == "positive" and code:
            assert rule in matches(tool, arguments, None, True, output), case
