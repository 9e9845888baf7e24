"""The five hard rules about Go. What the compiler said is told from what a test, a vet analysis or a program printed
by where it stands: under a `# package` header, before any test has begun."""

from __future__ import annotations

import re

from oprd.rollout.shell import program, subcommand
from oprd.rollout.toolresult import QUOTE, ToolResult

BUILDERS = {"make", "just", "mage", "task", "bazel", "gotestsum", "ginkgo", "golangci-lint", "staticcheck", "dlv"}
COMPILES = ("build", "test", "vet", "run", "install", "generate", "list", "tool")

CROSS_DIR = re.compile(r"^named files must all be in one directory; have ")
GO_FMT = re.compile(r"^\s*go fmt ")


def go_fmt_cross_dir(result: ToolResult) -> str | None:
    """`go vet` and `go test` say the same of their files: only `go fmt` with more than one folder counts."""
    formats = any(program(words[0]) == "go" and subcommand(words) == "fmt" and _more_than_one(words)
                  for words in result.commands)
    echoed = result.heads & BUILDERS and result.line(GO_FMT)
    return result.line(CROSS_DIR) if formats or echoed else None


def _more_than_one(words: tuple[str, ...]) -> bool:
    """Files of two folders, or something that only the shell, find or xargs fills in."""
    files = [word for word in words[1:] if word.endswith(".go")]
    filled_in = len(words) == 2 or any(set("*$`{") & set(word) for word in words)
    return filled_in or len({word.rpartition("/")[0] for word in files}) > 1


DIAGNOSTIC = re.compile(r"^(?P<vet>vet: )?(?:\./|/|\.\./)*[\w./@+ -]+\.go:\d+:\d+: (?P<what>.+)")
HEADER = re.compile(r"^# (?P<vet>\[)?[\w./~@-]")
TEST_BEGAN = re.compile(r"^\s*(=== RUN|--- (PASS|FAIL|SKIP)|panic: )")
SIGNATURE = re.compile(r"(not enough|too many) (arguments in call|return values|arguments to return)|"
                       r"assignment mismatch|does not (implement|satisfy)|\bas (type )?func\(|type func\(.*\) as\b|"
                       r"wrong type for method|missing method|cannot use .* as .*interface|"
                       r"cannot use .* in argument to |multiple-value .* in |\(no value\) used as value|"
                       r"used as value$|returns? \d+ values?$")
NOT_COMPILER = re.compile(r"cannot find (module|package)|no required module|is not in (std|GOROOT)|missing go\.sum|"
                          r"could not import|requires go[\d.]+ or later|import lookup disabled|build constraints|"
                          r"no matching files found")
VET_FINDING = re.compile(r"^(fmt\.|[\w.()*]+ (format|call has|call needs)|struct field tag|unreachable code|"
                         r"self-assignment|result of|the cancel function|non-constant format string|loop variable|"
                         r"composite literal|method \w+\(.*should|call to \(|defers|using \w+ before|suspect|"
                         r"redundant|comparison of function|\w+ has malformed|.* refers to unknown|"
                         r".*(copies lock|passes lock|possible misuse))")
LINTER = re.compile(r" \((?P<by>[\w-]+)\)$")
IMPORT_CYCLE = re.compile(r"import cycle not allowed")


def diagnostics(result: ToolResult) -> list[tuple[str, str]]:
    """(the line, the whole diagnostic with its indented continuation) of every Go compiler diagnostic."""
    if not result.runs("go", *COMPILES) and not result.heads & BUILDERS or not result.went_wrong:
        return []
    found: list[list[str]] = []
    analysis, testing, runs_programs = False, False, result.runs("go", "run", "generate", "tool")
    for line in result.lines:
        if header := HEADER.match(line):
            analysis, testing, runs_programs = bool(header["vet"]), False, False
        elif TEST_BEGAN.match(line):
            testing = True
        said = DIAGNOSTIC.match(line)
        if said and (said["vet"] or not (analysis or testing or runs_programs)) and _compilers(line, said["what"]):
            found.append([line.strip(), line])
        elif found and line.startswith(("\t", "    ")) and not said and not TEST_BEGAN.match(line):
            found[-1][1] += "\n" + line
    return [(line[:QUOTE], whole) for line, whole in found]


def _compilers(line: str, what: str) -> bool:
    linter = LINTER.search(line)
    lint = linter and linter["by"] not in ("typecheck", "compile") and re.fullmatch(r"[a-z]+|[A-Z]+\d+", linter["by"])
    return not (NOT_COMPILER.search(line) or VET_FINDING.search(what) or lint)


def go_signature_callers(result: ToolResult) -> str | None:
    return next((line for line, whole in diagnostics(result) if SIGNATURE.search(whole)), None)


def go_compile_error(result: ToolResult) -> str | None:
    """Any diagnostic; where all are about signatures, the more specific rule stands before this one."""
    said = next((line for line, _ in diagnostics(result) if "too many errors" not in line), None)
    return said or (result.line(IMPORT_CYCLE) if result.failed and result.runs("go", *COMPILES) else None)


TEST_FAILED = re.compile(r"^\s*--- FAIL|^FAIL\b|^panic:")
MOCKEY = re.compile(r"mockey", re.I)
MOCKEY_HINT = re.compile(r"^Mockey check failed")


def mockey_gcflags(result: ToolResult) -> str | None:
    """The hint itself quotes the flags, and passing runs print it too: the command and a failure decide."""
    hint = result.line(MOCKEY_HINT)
    if not (result.runs("go", "test") or hint and result.heads & BUILDERS) or diagnostics(result):
        return None
    failure = result.line(TEST_FAILED)
    if not failure or not result.went_wrong or _no_inline(result):
        return None
    return result.line(MOCKEY) or (failure if MOCKEY.search(result.command) else None)


def _no_inline(result: ToolResult) -> bool:
    """Whether -gcflags for all packages, in the command or in a make line it echoes, hold -N and -l."""
    echoed = [line for line in result.lines if re.match(r"\s*(\w+=\S+ )*go test ", line)]
    for given in [result.command, *echoed]:
        for flags in re.findall(r"gcflags[= ]+([\"']?all=[\"']?(?:[^\"'\s]|\\ |\s+-[Nlm]\b)*)", given):
            if {"N", "l"} <= set(re.findall(r"-([Nl])\b", flags)):
                return True
    return False


NEW_PACKAGES = (r"slices|maps|cmp|iter|unique|weak|structs|log/slog|math/rand/v2|testing/\w+|go/version|io/fs|embed|"
                r"net/netip|hash/maphash|crypto/\w+|encoding/json/v2|runtime/(coverage|metrics)|sync/\w+")
TOOLCHAIN = re.compile(
    r"^(go: )?.*requires go ?>= ?[\d.]+(?!.*; switching to)|^go: .*toolchain not available|^go: download go1\.|"
    r"^go: cannot find (GOROOT|\"go1)|^go: .* requires cgo|^go: -race (is )?(only|not) supported|"
    r"C compiler .* not found|(^|: )go(fmt)?: (command )?not found|does not match go tool version|"
    rf"requires go1?[\d.]+ or later \(-lang|package ({NEW_PACKAGES}) is not in (std|GOROOT)|"
    r"^note: module requires Go|invalid go version|go\.mod:\d+: unknown (directive|block type): \w+|"
    r"go\.mod file indicates go [\d.]+, but|the Go language version \(go[\d.]+\) used to build|^go: no such tool|"
    r"unsupported GOOS/GOARCH|version of Go .* (is|are) (too old|not supported)|"
    r"(/go\S*|^go): .*(exec format|cannot execute)|/go: .*GLIBC_[\d.]+. not found|"
    r"invalid GOTOOLCHAIN|^go: invalid toolchain", re.I)
GO_HEADS = BUILDERS | {"go", "gofmt", "goimports", "gopls", "which", "cgo"}


def go_toolchain_env(result: ToolResult) -> str | None:
    scripts = any(word.endswith((".sh", ".bash")) for words in result.commands for word in words[:2])
    if not result.went_wrong or not (result.heads & GO_HEADS or scripts):
        return None
    said = result.line(TOOLCHAIN)
    return None if said and "; switching to" in said else said
