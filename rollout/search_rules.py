"""Hard rules about looking things up: a malformed search, and a helper that lacks login or permission."""

from __future__ import annotations

import re

from oprd.rollout.shell import program, subcommand
from oprd.rollout.toolresult import QUOTE, ToolResult, is_test

SEARCHERS = {"rg", "grep", "egrep", "fgrep", "zgrep", "ggrep", "ugrep", "find", "fd", "fdfind", "ag", "ack", "awk",
             "gawk", "mawk"}
PRINTERS = SEARCHERS | {"cat", "head", "tail", "sed", "less", "more", "nl", "echo", "cd", "ls", "wc", "sort", "uniq",
                        "cut", "tr", "jq", "diff", "true", "false", "tee", "pwd", "xxd", "strings", "column"}
LOCAL = PRINTERS | {"cp", "mv", "rm", "mkdir", "rmdir", "touch", "ln", "chmod", "chown", "chgrp", "stat", "du", "df",
                    "tar", "unzip", "zip", "gzip", "kill", "pkill", "mount", "patch", "test", "[", "source", ".",
                    "export", "set", "sleep", "su", "mysql", "psql", "redis-cli", "mongo", "sqlite3", "go", "cargo",
                    "dpkg", "apt", "apt-get", "systemctl", "service", "which", "crontab"}
REMOTE_GIT = {"ls-remote", "clone", "fetch", "pull", "push", "submodule", "remote", "archive", "lfs"}

FILE_TROUBLE = (r"No such file|Permission denied|Is a directory|Not a directory|os error|IO error|Input/output|"
                r"binary file|(can't|cannot) open|[Tt]oo many (levels|open)|No files were searched|not permitted|"
                r"name too long|not found|is also the output|[Ww]rite error|Broken pipe|Terminated|"
                r"Value too large|file system loop")
BAD_SEARCH = re.compile(  # a search program complains, and not of a file; the rest are those that do not say their name
    rf"^\[?([efzgu]{{0,2}}grep|rg|find|[gmn]?awk|ag|ack|fd)( error\])?: (?!warning)(?!.*({FILE_TROUBLE}))|"
    r"^(regex parse error|unrecognized file type|error parsing glob|PCRE2: error|"
    r"the literal .* is not allowed in a regex|compiled regex exceeds)|"
    r"^error: (Found argument|unexpected argument|invalid value|a value is required|"
    r"The argument|The following required)|^Usage: [efz]?grep|^ERR: Bad regex|^Search failed|InputValidationError|"
    r"^fatal: (command line, |-e option, )?.*(Unmatched|Invalid (preceding|range|back|content|character|regular)|"
    r"Trailing backslash)|^.{0,40}Invalid (regexp?|regular expression|glob|pattern)|^.{0,40}regex (parse|compilation) "
    r"error", re.I)
DIRECTORY = re.compile(r"^[efz]?grep: .*: Is a directory$")
BAD_SHELL = re.compile(r"unexpected EOF while looking for matching|syntax error near unexpected token|"
                       r"Unterminated quoted string|Syntax error: .* unexpected|"
                       r"^zsh:(\d+:)? (unmatched|parse error|no matches found)")


def malformed_search(result: ToolResult) -> str | None:
    """A pattern, its quoting, a file type or an argument was refused. Finding nothing is no fault of a search."""
    if result.kind in ("search", "glob"):
        seen = result.line(BAD_SEARCH) if result.failed else None
        return seen or (_silently_bad(result) if NOTHING_FOUND.match(result.text) and not result.failed else None)
    heads = [program(words[0]) for words in result.commands]
    if not result.went_wrong or not (set(heads) & SEARCHERS or result.runs("git", "grep")):
        return None
    directories = result.failed and result.lines and all(DIRECTORY.match(line) for line in result.lines)
    shell = result.line(BAD_SHELL) if {heads[0], *heads[1:2] * (heads[0] == "cd")} & SEARCHERS else None
    return result.line(BAD_SEARCH) or shell or (result.lines[0] if directories else None)


NOTHING_FOUND = re.compile(r"\A\s*((No|0) (files|matches|results)( were)?( found)?\.?|Found 0 \w+)?\s*\Z")
PYTHON_ALONE = re.compile(r"bad escape \\[pPzh<>]|global flags|unknown extension \?<|redefinition|look-behind")
UNKNOWN_TO_RUST = ("bad escape", "unterminated character set", "missing ), unterminated subpattern",
                   "unbalanced parenthesis", "nothing to repeat", "bad character range")
CHARACTER_SET = re.compile(r"\\[pPxuU]\{[^}]*\}|\\.|\[\^?\]?(?:\\.|\[:\w+:\]|[^\]\\])*\]", re.S)
OPEN_BRACE = re.compile(r"\{(?!\d+(,\d*)?\}|,\d+\})")
LOOK_AROUND = re.compile(r"\(\?(?:[=!]|<[=!])")
FILE_TYPES = frozenset("""ada agda aidl alire amake asciidoc asm asp ats avro awk bat batch bazel bitbake boxlang brotli
    buildstream bzip2 c
    cabal candid carp cbor ceylon clojure cmake cmd cml coffeescript config coq cpp creole crystal
    cs csharp cshtml css csv cuda cython d dart devicetree dhall diff dita docker dockercompose dts dvc ebuild edn elisp
    elixir elm erb erlang fennel fidl fish flatbuffers fortran fsharp fut gap gdscript gleam gn go gprbuild gradle
    graphql groovy gzip h haml hare haskell hbs hs html hy idris janet java jinja jl js json jsonl julia jupyter k
    kconfig kotlin lean less license lilypond lisp llvm lock log lua lz4 lzma m4 make mako man markdown matlab md meson
    minified mint mk ml mojo motoko msbuild nim nix objc objcpp ocaml odin org pants pascal pdf perl php po pod
    postscript prolog protobuf ps puppet purs py pyi python qmake qml qrc qui r racket raku rdoc readme reasonml red
    rescript robot rst ruby rust sass scala scdoc seed7 sh slim smarty sml solidity soy spark spec sql ssa starlark
    stylus sv svelte svg swift swig systemd taskpaper tcl tex texinfo textile tf thrift toml ts twig txt typescript
    typoscript typst usd v vala vb vcl verilog vhdl vim vimscript vue webidl wgsl wiki xml xz yacc yaml yang z zig zsh
    zstd all""".split())  # what `rg --type` knows in some version


def _silently_bad(result: ToolResult) -> str | None:
    """Some search tools hide a refusal by ripgrep behind "nothing found"; then only the arguments show it."""
    if result.kind == "glob":
        return None
    pattern = str(result.arguments.get("pattern", ""))
    kind, glob = str(result.arguments.get("type") or ""), str(result.arguments.get("glob") or "")
    if kind and kind not in FILE_TYPES:
        return f"type {kind!r} is no file type"
    if glob.count("{") != glob.count("}") or glob.count("[") > glob.count("]"):
        return f"glob {glob!r} is not closed"
    bare = CHARACTER_SET.sub("x", pattern)
    if OPEN_BRACE.search(bare):
        return f"pattern {pattern!r}: unescaped brace"
    if LOOK_AROUND.search(bare):
        return f"pattern {pattern!r}: look-around is not supported"
    try:
        re.compile(pattern)
    except re.error as problem:
        if not PYTHON_ALONE.search(problem.msg) and problem.msg.startswith(UNKNOWN_TO_RUST):
            return f"pattern {pattern!r}: {problem.msg}"
    return None


AUTH = re.compile(
    r"\b40[13]\b.*(unauthori[sz]ed|forbidden|client error)|(unauthori[sz]ed|forbidden).*\b40[13]\b|"
    r"returned error: 40[13]\b|HTTP/[\d.]+ 40[13]\b|HTTP 40[13]\b|status.?(code)?\W{1,3}40[13]\b|^(ERROR )?40[13]\b|"
    r"^\W*((\w+|remote|error)\W{1,4}){0,2}(unauthori[sz]ed|forbidden)\b|unauthenticated|bad credentials|"
    r"authentication (failed|required|is required|error|token|credentials)|requires? (authentication|login)|"
    r"could not read (username|password)|permission denied \(publickey|\bGH_TOKEN\b|\b(gh|glab) auth login|ENEEDAUTH|"
    r"need auth|not (logged|signed) in|must (be logged|log|sign|authenticate)|please (log|sign) ?in\b|login required|"
    r"(invalid|expired|missing|no|incorrect|revoked) (api[ -]?key|(access |auth\w* )?token|credentials?|identity)|"
    r"api[ _-]?key\b.*\b(not (set|found|provided)|missing|required|invalid)|"
    r"(token|credentials?|session|api key) (has |have )?(is |was )?(been )?(expired|invalid|revoked|not found|not set)|"
    r"could not (find|load|locate) .*credentials|unable to locate credentials|permission_denied\b|permission ?denied: |"
    r"\b(not authori[sz]ed|access ?denied|request denied|insufficient (scopes?|permissions?|privileges))\b|"
    r"requested permissions? to use|identity (could not|not|is)|saml|single sign-on|"
    r"resource not accessible|lacks? (the )?(required )?(permission|scope)|(do|does) not have (permission|access)|"
    r"don't have (permission|access)", re.I)
NOT_AUTH = re.compile(r"\b404\b|E404|operation not permitted|dubious ownership|: Permission denied( \(os error 13\))?$|"
                      r"Errno 13|EACCES|^zsh: |Syntax ?Error|Parse ?Error|unexpected token|^\s*\S+\.\w+:\d+[:-]", re.I)
SAID_PLAINLY = re.compile(r"^\W{0,4}(error|failed|failure|request|http|unauth|forbidden|authenti|permission|access|"
                          r"not |invalid|expired|missing|no |please|you |token|login|40[13]\b|message|status)", re.I)
DISCOVERY_TOOL = re.compile(r"search|retriev|context|lookup|find|index|mcp__|fetch|symbol|references|definition", re.I)
OWN_MACHINE = re.compile(r"\b(localhost|127\.0\.0\.1|0\.0\.0\.0)\b|\[::1\]")


def semantic_search_auth(result: ToolResult) -> str | None:
    """The helper itself was refused: a test, a local program or a hit that quotes the words is another matter."""
    if result.kind == "bash":
        fetches = result.heads & {"curl", "wget", "http", "https"}
        if is_test(result) or not any(_asks_others(words) for words in result.commands):
            return None
        if fetches and OWN_MACHINE.search(result.command):  # the program under work, not a helper
            return None
        page = fetches and (len(result.lines) <= 3 or result.line(re.compile(r"^(< )?HTTP/[\d.]+ 40[13]\b")))
        return _refusal(result, plainly=not result.failed) if result.failed or page else None
    if result.kind in ("search", "glob") or result.kind == "other" and DISCOVERY_TOOL.search(result.tool):
        return _refusal(result, plainly=not result.failed) if result.failed or len(result.lines) <= 3 else None
    return None


def _asks_others(words: tuple[str, ...]) -> bool:
    head = program(words[0])
    if head == "git":
        return subcommand(words) in REMOTE_GIT
    return head not in LOCAL and head not in ("exit", "return")


def _refusal(result: ToolResult, plainly: bool) -> str | None:
    for line in result.lines:
        if AUTH.search(line) and not NOT_AUTH.search(line) and (SAID_PLAINLY.match(line) or not plainly):
            return line.strip()[:QUOTE]
    return None
