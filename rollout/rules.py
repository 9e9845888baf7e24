"""The ten hard rules (class R1): explicit signals in the latest tool result.

Each is a pure function of a ToolResult that returns the quoted evidence, or None. A rule looks at the command as well
as at the output: the same words in a grep hit, a README or a failing assertion are no signal. Half of the rules are
about Go, as in the paper; a tool set that has no such output never fires them.
"""

from __future__ import annotations

import re
from typing import Callable, Mapping

from oprd.rollout.toolresult import ToolResult, is_test

Rule = Callable[[ToolResult], "str | None"]

SEARCHERS = {"rg", "grep", "egrep", "fgrep", "zgrep", "find", "fd", "ag", "ack", "awk"}
PRINTERS = SEARCHERS | {"cat", "head", "tail", "sed", "less", "echo", "cd"}


def matches(tool: str, arguments: Mapping[str, object], exit_code: int | None, is_error: bool,
            output: str) -> dict[str, str]:
    """rule name -> evidence, for every hard rule that fires, the most specific first."""
    result = ToolResult(tool, arguments, exit_code, is_error, output)
    return {name: evidence for name, rule in RULES.items() if (evidence := rule(result))}


def _line(result: ToolResult, pattern: re.Pattern) -> str | None:
    """The first output line the pattern is found in, cut to a quotable length."""
    return next((line.strip()[:200] for line in result.lines if pattern.search(line)), None)


def _went_wrong(result: ToolResult) -> bool:
    """Failed, or the exit code belongs to another part of the shell line."""
    return result.failed or result.compound


CROSS_DIR = re.compile(r"^named files must all be in one directory; have ")


def go_fmt_cross_dir(result: ToolResult) -> str | None:
    return _line(result, CROSS_DIR) if result.runs("go", "fmt") else None


AMBIGUOUS = re.compile(r"found \d+ (matches|occurrences)|multiple (matches|occurrences) of|matches \d+ (places|lines|"
                       r"locations)|(appears|occurs|found) (\d+ times|more than once|multiple times)|"
                       r"(is not|must be) unique|\d+ (matches|occurrences) (of|for) (the )?(string|old_string)", re.I)
REFUSED = re.compile(rf"^(ERROR|No replacement was performed).*({AMBIGUOUS.pattern})", re.I)
EDITORS = re.compile(r"str_replace|file_editor|apply_edit")


def ambiguous_edit_old_string(result: ToolResult) -> str | None:
    if result.kind == "edit" and result.failed:
        return _line(result, AMBIGUOUS)
    if result.kind == "edit" or EDITORS.search(result.command):  # some scaffolds' editors report success on errors
        return _line(result, REFUSED)
    return None


GO_DIAGNOSTIC = re.compile(r"^(?:vet: )?(?:\./|/|\.\./)?[\w./@+-]+\.go:\d+:\d+: (?P<what>.+)")
SIGNATURE = re.compile(r"(not enough|too many) (arguments in call|return values|arguments to return)|"
                       r"assignment mismatch|does not (implement|satisfy)|\bas (type )?func\(|wrong type for method|"
                       r"missing method|cannot use .* as .*interface")
NOT_COMPILER = re.compile(r"cannot find (module|package)|no required module|is not in (std|GOROOT)|missing go\.sum|"
                          r"could not import|requires go[\d.]+ or later|import lookup disabled|build constraints")
VET_FINDING = re.compile(r"^(fmt\.|[\w.]+ (format|call has)|struct field|unreachable code|self-assignment|"
                         r"result of|the cancel function|.*(copies lock|passes lock|possible misuse))")
IMPORT_CYCLE = re.compile(r"import cycle not allowed")


def _go_diagnostics(result: ToolResult) -> list[tuple[str, str]]:
    """(the line, the whole diagnostic with its indented continuation) of every Go compiler diagnostic."""
    builds = result.runs("go", "build", "test", "vet", "run", "install", "generate", "list", "tool")
    if not builds and not (result.heads & {"make", "just", "mage", "bazel"} and result.failed):
        return []
    found: list[list[str]] = []
    for line in result.lines:
        diagnostic = GO_DIAGNOSTIC.match(line)
        if diagnostic and not NOT_COMPILER.search(line) and not VET_FINDING.search(diagnostic["what"]):
            found.append([line.strip(), line])
        elif found and line.startswith(("\t", "    ")) and not diagnostic and "--- FAIL" not in line:
            found[-1][1] += "\n" + line
    return [(line[:200], whole) for line, whole in found]


def go_signature_callers(result: ToolResult) -> str | None:
    return next((line for line, whole in _go_diagnostics(result) if SIGNATURE.search(whole)), None)


def go_compile_error(result: ToolResult) -> str | None:
    """A diagnostic that the more specific signature rule does not take."""
    plain = next((line for line, whole in _go_diagnostics(result)
                  if not SIGNATURE.search(whole) and "too many errors" not in line), None)
    return plain or (_line(result, IMPORT_CYCLE) if result.failed and result.runs("go") else None)


AUTH = re.compile(
    r"\b40[13]\b.*(unauthori[sz]ed|forbidden|client error)|returned error: 40[13]\b|HTTP/[\d.]+ 40[13]\b|HTTP 40[13]\b|"
    r"status code:? 40[13]\b|unauthenticated|bad credentials|"
    r"authentication (failed|required|is required|error)|requires authentication|"
    r"could not read (username|password)|permission denied \(publickey|\bGH_TOKEN\b|gh auth login|ENEEDAUTH|need auth|"
    r"not logged in|must (be logged|log) in|(invalid|expired|missing|no) (api[ -]?key|access token|token|credentials?|"
    r"identity)|(token|credentials?|session) (has |have )?(is )?(expired|invalid|not found)|permission[_ ]?denied:|"
    r"(not authorized|access denied|not permitted)|requested permissions? to use|identity (could not|not|is)", re.I)
DISCOVERY_TOOL = re.compile(r"search|retriev|context|lookup|find|index|mcp__|fetch|symbol", re.I)


def semantic_search_auth(result: ToolResult) -> str | None:
    if result.kind == "bash":
        fetched = result.heads & {"curl", "wget", "http"} and len(result.lines) <= 3  # exits 0 on an error page
        helper = (result.failed or fetched) and not is_test(result) and not (result.heads and result.heads <= PRINTERS)
    else:
        helper = result.kind in ("search", "glob") or (result.kind == "other" and DISCOVERY_TOOL.search(result.tool))
        helper = helper and (result.failed or len(result.lines) <= 3)
    return _line(result, AUTH) if helper else None


BAD_SEARCH = re.compile(
    r"^(rg: )?(regex parse error|unrecognized file type|error parsing (glob|flag)|unrecognized flag)|^Search failed|"
    r"^(rg: )?the literal .* is not allowed in a regex|^error: (Found argument|unexpected argument|The argument|"
    r"The following required|Invalid value)|^(rg: )?PCRE2: error|"
    r"^[efz]?grep: (Unmatched|Invalid|Trailing backslash|unrecognized option|invalid option|option|lookbehind|"
    r"unmatched|missing|quantifier|nothing to repeat|character class|the -P|conflicting|stray|unbalanced|.*: Is a dir|"
    r"exceeded PCRE|reference to non-existent|range out of order|invalid|regular expression|unknown)|"
    r"^Usage: [efz]?grep|^find: (unknown|Unknown|Expected|missing argument|paths must precede|invalid|Invalid|"
    r"possible unquoted|"
    r"unrecognized|I cannot|.*regular expression)|^[gm]?awk: .*(missing|syntax error|unterminated|regular expression)|"
    r"unexpected EOF while looking for matching|^(ag|ack|fd): .*(pattern|regex)|^fatal: command line, .*(Unmatched|"
    r"Invalid)|^ERR: Bad regex|^.{0,40}Invalid regexp?|InputValidationError")
NOTHING_FOUND = re.compile(r"\A\s*(No (files|matches) found)?\s*\Z")
SURELY_BAD = ("unterminated character set", "missing ), unterminated subpattern", "unbalanced parenthesis",
              "nothing to repeat", "bad escape (end of pattern)")
OPEN_BRACE = re.compile(r"(?<!\\)(?<!\\[pPxu])\{(?!\d)")


def malformed_search(result: ToolResult) -> str | None:
    if result.kind == "search":
        seen = _line(result, BAD_SEARCH) if result.failed else None
        return seen or (_bad_pattern(result) if NOTHING_FOUND.match(result.text) else None)
    if not (result.heads & SEARCHERS or result.runs("git", "grep")):
        return None
    return _line(result, BAD_SEARCH) if _went_wrong(result) else None


def _bad_pattern(result: ToolResult) -> str | None:
    """Some search tools hide a regex error behind "nothing found"; then only the pattern shows it."""
    pattern = str(result.arguments.get("pattern", ""))
    try:
        re.compile(pattern)
    except re.error as problem:
        return f"pattern {pattern!r}: {problem.msg}" if str(problem.msg).startswith(SURELY_BAD) else None
    return f"pattern {pattern!r}: unescaped brace" if OPEN_BRACE.search(pattern) else None


NO_INLINE = re.compile(r"all=(?=[^\"']*-N)(?=[^\"']*-l)")
GO_TEST_FAILED = re.compile(r"^\s*--- FAIL|^FAIL\b|^panic:")
MOCKEY = re.compile(r"mockey", re.I)


def mockey_gcflags(result: ToolResult) -> str | None:
    if not result.runs("go", "test") or NO_INLINE.search(result.command) or _go_diagnostics(result):
        return None
    failure = _line(result, GO_TEST_FAILED)
    if not failure or not (MOCKEY.search(result.command) or MOCKEY.search(result.text)):
        return None
    return _line(result, MOCKEY) or failure


TOOLCHAIN = re.compile(
    r"^go: .*requires go ?>= ?[\d.]+|^go: .*toolchain not available|^go: download go1\.|"
    r"^go: cannot find (GOROOT|\"go1)|"
    r"^go: .* requires cgo|C compiler .* not found|"
    r"(^|: )go(fmt)?: (command )?not found|does not match go tool version|requires go1?[\d.]+ or later \(-lang|"
    r"package (slices|maps|cmp|iter|unique|weak|structs|log/slog|math/rand/v2|testing/\w+|go/version|io/fs|embed|"
    r"net/netip|hash/maphash|crypto/\w+) is not in (std|GOROOT)|^note: module requires Go|"
    r"invalid go version|unknown directive: toolchain|go\.mod file indicates go [\d.]+, but|"
    r"the Go language version \(go[\d.]+\) used to build|^go: no such tool|unsupported GOOS/GOARCH|"
    r"version of Go .* (is|are) (too old|not supported)|fork/exec .*/go/.*(exec format|permission)", re.I)
GO_HEADS = {"go", "gofmt", "golangci-lint", "make", "goimports", "staticcheck", "gopls"}


def go_toolchain_env(result: ToolResult) -> str | None:
    return _line(result, TOOLCHAIN) if result.heads & GO_HEADS and _went_wrong(result) else None


CUT = re.compile(r"^<persisted-output>|^Output too large|^\W{0,8}\d[\d,]* (lines|characters|chars|bytes|tokens) "
                 r"(truncated|elided|omitted|cut|hidden|removed|not shown)\b\W{0,8}$|<output_head>|<elided_chars>|"
                 r"output of your last command was too long|^\W*(output|log) (was )?(truncated|cut)\b|"
                 r"^<response clipped>|^\[\.\.\..*(truncated|omitted).*\]$", re.I)
DIAGNOSTIC = re.compile(r"\bFAIL(ED)?\b|\bpanic:|assert|\bError\b|:\d+:\d+: |\bexpected\b|^E  ", re.I)
NOISY_LINES, NOISY_SHARE = 200, 0.02


def noisy_validation_output_narrow(result: ToolResult) -> str | None:
    if not is_test(result) or result.heads & {"grep", "rg", "tail", "head", "sed", "awk"}:
        return None
    failed = result.failed or (result.compound and _line(result, GO_TEST_FAILED))
    if not failed:
        return None
    if cut := next((line.strip()[:200] for line in result.output.splitlines() if CUT.search(line.strip())), None):
        return cut
    useful = sum(bool(DIAGNOSTIC.search(line)) for line in result.lines)
    if len(result.lines) >= NOISY_LINES and useful < NOISY_SHARE * len(result.lines):
        return f"{len(result.lines)} lines of output, {useful} of them diagnostics"
    return None


NO_FILE = re.compile(
    r"^(?!\s).*: No such file or directory( \(os error 2\))?$|^(\S+: )?can't open file .*No such file|"
    r"^(\S*Error: )?\[Errno 2\] No such file|FileNotFoundError: .*No such file|^(stat|open|lstat) .*: no such file|"
    r"can't open patch .*No such file|^fatal: .*(did not match any files|unknown revision or path not in|"
    r"no such path|does not exist in)|^The path .* does not exist|^error: pathspec .* did not match|^Error: ENOENT|"
    r"^Error: Cannot find module '/.*\.\w+'|^(sh|bash|dash)?: ?.*: (\d+: )?\./\S+: not found|"
    r"cannot (open|access|stat) .*No such file|manifest path .* does not exist$|"
    r"^\w+: No such file or directory -- |^(\S+: )?no such file or directory: ", re.I)
NO_TEST_FILE = re.compile(r"^ERROR: (file or directory not found|not found): |^pattern .*: .*(no such|not found)|"
                          r"^stat .*(directory not found|no such file)|can't open file .*No such file|"
                          r"^(bash|sh|make|cat|cd|ls|/bin/\w+): .*No such file or directory$|"
                          r"no required module provides package \S+\.go;|manifest path .* does not exist$|"
                          r"^go: .*(no such file|directory not found)|^FAIL\s+\S+ \[setup failed\]$", re.I)
NO_TOOL_PATH = re.compile(r"^(error: )?((the )?(file|path|directory)\b.*(does not exist|not found|doesn't exist)|"
                          r".*no such (file|path|directory)|[\w./-]*[./][\w./-]* does not exist|ENOENT)", re.I)


def missing_file_path_narrow(result: ToolResult) -> str | None:
    if result.kind in ("read", "edit", "search", "glob"):
        return _line(result, NO_TOOL_PATH) if result.failed else None
    if result.kind != "bash" or not _went_wrong(result):
        return None
    if is_test(result):  # a test's own output may speak of files: only what the runner itself says counts
        return _line(result, NO_TEST_FILE)
    return _line(result, NO_FILE)


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
