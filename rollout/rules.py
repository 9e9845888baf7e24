"""The ten hard rules (class R1): explicit signals in the latest tool result.

Each is a pure function of a ToolResult that returns the quoted evidence, or None. A rule looks at the command and the
exit state as well as at the output: the same words in a grep hit, a README or a failing assertion are no signal. Half
of the rules are about Go, as in the paper; a tool set that has no such output never fires them. The rules about edits
and about the size of an output stand here, the others in go_rules.py, search_rules.py and path_rules.py.
"""

from __future__ import annotations

import re
from typing import Callable, Mapping

from oprd.rollout.go_rules import (go_compile_error, go_fmt_cross_dir, go_signature_callers, go_toolchain_env,
                                   mockey_gcflags)
from oprd.rollout.path_rules import QUOTED_BACK, missing_file_path_narrow
from oprd.rollout.search_rules import malformed_search, semantic_search_auth
from oprd.rollout.shell import program
from oprd.rollout.toolresult import QUOTE, ToolResult, is_test

Rule = Callable[[ToolResult], "str | None"]


def matches(tool: str, arguments: Mapping[str, object], exit_code: int | None, is_error: bool,
            output: str) -> dict[str, str]:
    """rule name -> evidence, for every hard rule that fires, the most specific first."""
    result = ToolResult(tool, arguments, exit_code, is_error, output)
    return {name: evidence for name, rule in RULES.items() if (evidence := rule(result))}


PLACES = r"(match(es)?|occurrences?|places?|locations?|times|instances?|lines)"
SEVERAL = r"(multiple|several|many|more than (one|1)|(?!0+\b|1\b)\d+)"
AMBIGUOUS = re.compile(
    rf"\b{SEVERAL} ([\w-]+ ){{0,2}}{PLACES}\b|"
    rf"\b(found|match(es|ed)?|appears?|occurs?|exists?) ({SEVERAL}\b|more than once|twice|(multiple|several) times)|"
    r"(is not|isn't|must be|not) unique|\bambiguous\b|uniquely identif", re.I)
ABSENT = re.compile(r"\b(not found|no (match|occurrence)|did not (appear|match)|does not (appear|occur|exist)|"
                    r"could not find|(found|matched|matches) (0|no)\b|\b0 (matches|occurrences))", re.I)
REFUSED = re.compile(r"^\W*(error|failed|no replacement was performed)", re.I)
SPOKEN_OF = re.compile(r"`[^`]*`|(?<![\w])'[^'\n]*'(?!\w)|(?<![\w])\"[^\"\n]*\"(?!\w)")
EDITOR = re.compile(r"(str_replace\w*|file_editor|edit_?file|apply_edit\w*)(\.py|\.sh)?")


def ambiguous_edit_old_string(result: ToolResult) -> str | None:
    """What the tool quotes back of the edit is not its own word. Some scaffolds' editors report success on errors."""
    runs_editor = any(EDITOR.fullmatch(program(word)) for words in result.commands for word in words[:2])
    if not (result.kind == "edit" or runs_editor):
        return None
    for line in SPOKEN_OF.sub("...", QUOTED_BACK.sub("", result.text)).split("\n"):
        if AMBIGUOUS.search(line) and not ABSENT.search(line) and (result.failed or REFUSED.match(line)) and \
                not re.search(r"successfully|has been (updated|edited)|were replaced", line):
            return line.strip()[:QUOTE]
    return None


NOUN = r"(lines?|characters?|chars?|bytes?|tokens?|[KM]i?B)"
VERB = r"(truncated|elided|omitted|clipped|cut( off)?|hidden|removed|skipped|snipped|not shown|left out)"
WHAT = r"(output|observation|log|response|result|content|text|middle)s?"
CUT = re.compile(
    r"^<persisted-output>|^Output too large|<output_head>|<elided_chars>|<response clipped>|"
    r"output of your last command was too long|"
    rf"^[^\w]{{0,8}}\d[\d,.]* ?(more |middle )?{NOUN}( (of|from) (the )?{WHAT})? (were |was )?{VERB}\b\W{{0,8}}$|"
    rf"^\W{{0,8}}(the |full )?{WHAT} (was |is |has been )?(too long|{VERB})\b|"
    rf"^[\[<(](?=[^\])>]*\b{VERB}\b)(?=[^\])>]*\b({NOUN}|{WHAT})\b)[^\])>]*[\])>]$|"
    r"\.\.\. ?[\[(](output )?truncated[^\])]*[\])]$", re.I)
TESTS_TRUNCATED = re.compile(r"^E  |Full output truncated|use '-vv'|maxDiff|^\s{4,}\S")
RUN_FAILED = re.compile(
    r"^\s*--- FAIL|^FAIL\b|^panic:|^FAILED\b|\b[1-9]\d* (tests? )?(failed|failures?|errors?)\b|"
    r"(Failures|Errors): [1-9]|^test result: FAILED|BUILD (FAILURE|FAILED)|^FAILURES!|^npm (ERR!|error)|"
    r"^error(\[E\d+\])?: |: error:|: error TS\d+|\bTests failed\b|^FAILED \(|^make: \*\*\*|"
    r"^Segmentation fault|^not ok\b|^Traceback ")
DIAGNOSTIC = re.compile(r"\bFAIL(ED)?\b|\bpanic:|assert|\b[Ee]rror\b|Error: |Exception|:\d+:\d+: |\b[Ee]xpected\b|"
                        r"^E  |^not ok\b|[✕✖✘×●]")
NARROWS = {"grep", "egrep", "rg", "tail", "head", "sed", "awk"}
NOISY_LINES, NOISY_SHARE = 200, 0.02


def noisy_validation_output_narrow(result: ToolResult) -> str | None:
    """A failed validation whose output was cut, or is long with next to no diagnostics in it."""
    if not is_test(result) or not (result.failed or result.compound and result.line(RUN_FAILED)):
        return None
    raw = [*result.lines, *(line for line in result.output.splitlines() if "<output_head>" in line)]
    for line in raw:
        if CUT.search(line.strip()) and not TESTS_TRUNCATED.search(line):
            return line.strip()[:QUOTE]
    useful = sum(bool(DIAGNOSTIC.search(line)) for line in result.lines)
    if len(result.lines) >= NOISY_LINES and useful < NOISY_SHARE * len(result.lines) and not result.heads & NARROWS:
        return f"{len(result.lines)} lines of output, {useful} of them diagnostics"
    return None


RULES: dict[str, Rule] = {  # the most specific first; the names are the rubric's
    "hard_go_fmt_cross_dir": go_fmt_cross_dir,
    "hard_ambiguous_edit_old_string": ambiguous_edit_old_string,
    "hard_go_signature_callers": go_signature_callers,
    "hard_semantic_search_auth": semantic_search_auth,
    "hard_malformed_search": malformed_search,
    "hard_mockey_gcflags": mockey_gcflags,
    "hard_go_toolchain_env": go_toolchain_env,
    "hard_go_compile_error": go_compile_error,
    "hard_missing_file_path_narrow": missing_file_path_narrow,
    "hard_noisy_validation_output_narrow": noisy_validation_output_narrow,
}
