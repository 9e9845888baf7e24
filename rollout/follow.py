"""Whether the action after a reminder did what the reminder asks: behaviour, not outcome.

An action is looked at under the five aspects that the paper's active verifier names: the tool chosen, its arguments,
the path, the scope of an edit, and the immediate follow-up (what the call itself gave). A check says only what the one
call can show; a reminder whose wish the call neither fulfils nor denies is unclear, and counts in no rate.

A contextual text that puts a command in backticks is followed by that command and nothing else.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Callable, Mapping, Sequence

from oprd.core.types import Observation, Reminder, Turn
from oprd.rollout.rules import RULES
from oprd.rollout.toolresult import ToolResult, is_test, is_validation, same_file, tool_result

ASPECTS = ("tool", "arguments", "path", "scope", "follow_up")
Aspects = dict[str, bool]

COMMAND = re.compile(r"`((?:git|python|pytest|go|gofmt|rg|find|ls|cargo|npm|make)\b[^`]*)`")
PATH = re.compile(r"[\w.-]+(?:/[\w.-]+)+")
LITERAL = re.compile(r"\w\(\s*[\"'](\w+)[\"']")  # of a target such as f("x")
CONDITION = re.compile(r"\b(?:if|elif|else|case|when|switch|match|unless)\b")
DEFINITION = re.compile(r"^\s*(?:pub |export |async |public |private |static )*(?:def|func|function|fn|class)\s+\w+.*$",
                        re.M)
TEST_FILE = re.compile(r"(^|/)(tests?|specs?|__tests__)/|(^|/)(test_|conftest|check\.py)|(_test|\.test|_spec|\.spec)\.")
LOOKERS = {"rg", "grep", "find", "fd", "ls", "tree", "cat", "head", "tail", "less", "nl", "ag"}
FINDERS = {"rg", "grep", "find", "fd", "ag"}


@dataclass(frozen=True)
class Check:
    """What the action shows, by aspect; empty: nothing that this reminder asks about."""

    aspects: Mapping[str, bool] = field(default_factory=dict)

    @property
    def followed(self) -> bool | None:
        """Every aspect is as asked; None: unclear."""
        return all(self.aspects.values()) if self.aspects else None


@dataclass(frozen=True)
class _Action:
    """The call after a reminder, and what was before it. executed: whether its result is known."""

    reminder: Reminder
    before: Sequence[ToolResult | None]
    now: ToolResult
    executed: bool

    @property
    def last(self) -> ToolResult:
        """The result that fired the reminder; empty where that turn held no call."""
        return (self.before[-1] if self.before else None) or ToolResult("", {}, None, False, "")

    @property
    def edited(self) -> list[ToolResult]:
        return [r for r in self.before if r and r.kind == "edit" and not r.failed]

    @property
    def looks(self) -> bool:
        """Reads, searches or lists."""
        return self.now.kind in ("read", "search", "glob") or bool(self.now.heads & LOOKERS) or self.now.runs(
            "git", "diff", "show", "log", "grep", "status", "blame")

    def follow_up(self, good: bool) -> Aspects:
        return {"follow_up": good} if self.executed else {}


def check(reminder: Reminder, before: Sequence[ToolResult | None], now: ToolResult | None,
          executed: bool = True) -> Check:
    """`before`: results up to the one that fired the reminder; `now`: the next call, None for a malformed reply."""
    if now is None:
        return Check({"tool": False})
    action, command = _Action(reminder, before, now, executed), COMMAND.search(reminder.text)
    look = CHECKS.get(reminder.category)
    if command and (look is None or reminder.category not in RULES):
        return Check({"arguments": command[1].split() == now.command.split()})
    return Check(look(action) if look else {})


def check_turn(reminder: Reminder, before: Sequence[Turn], turn: Turn) -> Check:
    """`before`: the turns up to the observation that fired the reminder; `turn`: the one that read it."""
    return check(reminder, [result(t) for t in before], result(turn), executed=turn.observation is not None)


def followed(reminder: Reminder, before: Sequence[Turn], turn: Turn) -> bool | None:
    return check_turn(reminder, before, turn).followed


def result(turn: Turn) -> ToolResult | None:
    return tool_result(turn.call, turn.observation or Observation("")) if turn.call else None


# --- hard rules ---------------------------------------------------------------------------------------------------

def _again(a: _Action) -> Aspects:
    """The same error does not come again."""
    rule = RULES.get(a.reminder.category)
    return a.follow_up(not (rule and rule(a.now)))


def _format_by_directory(a: _Action) -> Aspects:
    repeats = RULES["hard_go_fmt_cross_dir"](replace(a.last, tool=a.now.tool, arguments=a.now.arguments))
    right = any("-w" in words for words in a.now.commands if words[0].endswith("gofmt")) or (
        a.now.runs("go", "fmt") and not repeats)
    return {"tool": a.now.kind == "bash", "arguments": right, **_again(a)}


def _longer_anchor(a: _Action) -> Aspects:
    """The same file, an old string with more context, and no second ambiguity."""
    return {"tool": a.now.kind == "edit", "path": same_file(a.now.file, a.last.file),
            "arguments": len(_old(a.now)) > len(_old(a.last)), **a.follow_up(not a.now.failed)}


def _callers(a: _Action) -> Aspects:
    return {"tool": a.looks or a.now.kind == "edit", **_reported(a)}


def _another_way(a: _Action) -> Aspects:
    same = a.now.tool == a.last.tool and (a.now.kind != "bash" or bool(a.now.heads & a.last.heads))
    return {"tool": not same and a.looks, **_again(a)}


def _another_search(a: _Action) -> Aspects:
    searches = a.now.kind in ("search", "glob") or bool(a.now.heads & FINDERS) or a.now.runs("git", "grep")
    return {"tool": searches, "arguments": a.now.arguments != a.last.arguments, **_again(a)}


def _without_inlining(a: _Action) -> Aspects:
    flags = all(flag in a.now.command for flag in ("-gcflags", "-N", "-l"))
    return {"tool": a.now.runs("go", "test"), "arguments": flags}


def _no_product_edit(a: _Action) -> Aspects:
    return {"scope": a.now.kind != "edit"}


def _first_concrete_line(a: _Action) -> Aspects:
    narrower = is_validation(a.now) and a.now.command != a.last.command
    return {"scope": a.now.kind != "edit", "tool": a.looks or narrower}


def _compile(a: _Action) -> Aspects:
    return {"tool": a.now.kind in ("edit", "read") or a.looks, **_reported(a)}


def _another_path(a: _Action) -> Aspects:
    """Neither the same call again nor another path that does not exist."""
    same = a.now.tool == a.last.tool and a.now.arguments == a.last.arguments
    return {"arguments": not same, **a.follow_up(not a.now.failed)}


def _reported(a: _Action) -> Aspects:
    """An edit goes to a file that the output names."""
    name = (a.now.file or "").rsplit("/", 1)[-1]
    return {"path": name in a.last.text} if a.now.kind == "edit" and name else {}


# --- contextual categories ----------------------------------------------------------------------------------------

def _evidence_first(a: _Action) -> Aspects:
    """Looks or tests before the next edit."""
    if a.now.kind == "edit":
        return {"tool": False}
    return {"tool": True} if a.looks or is_test(a.now) else {}


def _test_first(a: _Action) -> Aspects:
    if is_test(a.now) or TEST_FILE.search(a.now.file or ""):
        return {"tool": True}
    return {"tool": False} if a.now.kind in ("edit", "submit") else {}


def _to_named_path(a: _Action) -> Aspects:
    named, file = PATH.search(a.reminder.text), a.now.file or a.now.path
    if named:
        return {"path": same_file(file, named[0].rstrip("."))}
    if a.now.kind == "edit":  # the text names no path: a neighbour's is where the last call was
        return {"path": not same_file(file, a.last.file)}
    return {"tool": True} if a.looks else {}


def _inside_the_task(a: _Action) -> Aspects:
    return {} if a.now.kind != "edit" else {"scope": not TEST_FILE.search(a.now.file or "")}


def _existing_first(a: _Action) -> Aspects:
    created = a.now.kind == "edit" and not _old(a.now)
    return {"tool": not created} if created or a.looks else {}


def _contract_kept(a: _Action) -> Aspects:
    if a.now.kind != "edit":
        return {}
    before, after = DEFINITION.findall(_old(a.now)), DEFINITION.findall(_new(a.now))
    return {"arguments": all(line in after for line in before)}


def _one_condition(a: _Action) -> Aspects:
    """The edit touches one condition, that of the target where the text names one."""
    if a.now.kind != "edit":
        return {"scope": True} if _takes_back(a) else {}
    if literal := LITERAL.search(a.reminder.text):
        return {"arguments": literal[1] in _old(a.now) + _new(a.now)}
    changed = set(_old(a.now).splitlines()) ^ set(_new(a.now).splitlines())
    return {"scope": sum(bool(CONDITION.search(line)) for line in changed) <= 2}  # one, before and after


def _sibling_restored(a: _Action) -> Aspects:
    if _takes_back(a):
        return {"scope": True}
    if a.now.kind == "edit":
        return {"path": any(same_file(a.now.file, r.file) for r in a.edited) or not a.edited}
    return {"scope": False} if a.now.kind == "submit" else {}


def _stops(a: _Action) -> Aspects:
    """Takes the surplus edit back, or stops; where the text does not say to submit, testing is no widening either."""
    if a.now.kind == "submit" or _takes_back(a):
        return {"scope": True}
    if "submit" in a.reminder.text:
        return {"scope": False}
    if a.now.kind == "edit":
        return {"scope": any(same_file(a.now.file, r.file) for r in a.edited)}
    return {"scope": True} if is_test(a.now) else {}


def _re_anchored(a: _Action) -> Aspects:
    if _takes_back(a):
        return {"scope": True}
    if a.now.kind == "submit":
        return {"scope": False}
    return _to_named_path(a) if PATH.search(a.reminder.text) else {}


def _same_place(a: _Action) -> Aspects:
    """Edits, or takes back, what was edited before, or looks at it."""
    if _takes_back(a) or a.looks:
        return {"scope": True}
    return {"path": any(same_file(a.now.file, r.file) for r in a.edited)} if a.now.kind == "edit" else {}


def _local_repair(a: _Action) -> Aspects:
    if a.now.kind in ("edit", "read") or a.looks:
        return {"tool": True}
    return {"tool": False} if a.now.kind == "submit" else {}


def _one_test_first(a: _Action) -> Aspects:
    narrower = is_test(a.now) and a.now.command != a.last.command
    if narrower or a.looks:
        return {"tool": True}
    return {"tool": False} if a.now.kind in ("edit", "submit") or is_test(a.now) else {}


def _mechanical(a: _Action) -> Aspects:
    if a.now.kind == "edit":
        return {"tool": True, **_reported(a)}
    return {"tool": False} if a.now.kind == "submit" else {}


def _tested(a: _Action) -> Aspects:
    return {"tool": is_test(a.now)} if is_test(a.now) or a.now.kind == "submit" else {}


def _old(r: ToolResult) -> str:
    return str(next((r.arguments[a] for a in ("old_string", "old_str", "search") if r.arguments.get(a)), ""))


def _new(r: ToolResult) -> str:
    return str(next((r.arguments[a] for a in ("new_string", "new_str", "replace", "content", "file_text")
                     if r.arguments.get(a)), ""))


def _takes_back(a: _Action) -> bool:
    if a.now.runs("git", "checkout", "restore", "reset", "stash", "revert"):
        return True
    surplus = a.edited[-1] if a.edited else None
    return surplus is not None and a.now.kind == "edit" and same_file(a.now.file, surplus.file) and (
        (_old(a.now), _new(a.now)) == (_new(surplus), _old(surplus)))


CHECKS: dict[str, Callable[[_Action], Aspects]] = {
    "hard_go_fmt_cross_dir": _format_by_directory,
    "hard_ambiguous_edit_old_string": _longer_anchor,
    "hard_go_signature_callers": _callers,
    "hard_semantic_search_auth": _another_way,
    "hard_malformed_search": _another_search,
    "hard_mockey_gcflags": _without_inlining,
    "hard_go_toolchain_env": _no_product_edit,
    "hard_noisy_validation_output_narrow": _first_concrete_line,
    "hard_go_compile_error": _compile,
    "hard_missing_file_path_narrow": _another_path,
    "patch_surface_from_task": _inside_the_task,
    "fix_production_not_test": _inside_the_task,
    "existing_helper_before_new": _existing_first,
    "public_contract_before_edit": _contract_kept,
    "root_cause_before_symptom_patch": _evidence_first,
    "scenario_matrix_guard": _evidence_first,
    "sibling_scenario_invariant": _sibling_restored,
    "static_branch_pair_read_mature": _evidence_first,
    "one_condition_repair": _one_condition,
    "strict_one_condition_literal": _one_condition,
    "scenario_source_scope_guard": _evidence_first,
    "named_path_source_guard": _to_named_path,
    "named_path_over_neighbor": _to_named_path,
    "prove_value_source_before_shared_change": _evidence_first,
    "read_failing_test_first": _test_first,
    "change_surface_budget_guard": _stops,
    "edit_scope_evidence_guard": _re_anchored,
    "safe_default_or_data_model_path_guard": _same_place,
    "assertion_diff_local_repair": _local_repair,
    "test_failure_localization_guard": _one_test_first,
    "compile_mechanical_only": _mechanical,
    "diff_wrapup_format_test": _tested,
}
