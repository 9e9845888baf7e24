"""`grep` and `glob` inside a box: ripgrep where the image has it, else `git grep` outside of any repository, which
every image has and which leaves out what .gitignore names. Results are in the order of the paths: no clock."""

from __future__ import annotations

import posixpath
import re
import shlex

from oprd.sandbox.box import Sandbox
from oprd.sandbox.toolargs import Arguments

TYPES = {"py": ("*.py", "*.pyi"), "python": ("*.py", "*.pyi"), "go": ("*.go",), "rust": ("*.rs",), "java": ("*.java",),
         "js": ("*.js", "*.jsx", "*.mjs", "*.cjs", "*.vue"), "ts": ("*.ts", "*.tsx", "*.mts", "*.cts"),
         "c": ("*.c", "*.h"),
         "cpp": ("*.cpp", "*.cc", "*.cxx", "*.hpp", "*.hh", "*.hxx", "*.h"), "ruby": ("*.rb",), "php": ("*.php",),
         "md": ("*.md",), "json": ("*.json",), "yaml": ("*.yaml", "*.yml"), "toml": ("*.toml",), "html": ("*.html",),
         "css": ("*.css",), "sh": ("*.sh", "*.bash"), "kotlin": ("*.kt",), "swift": ("*.swift",), "scala": ("*.scala",)}
OUTPUT_BYTES = 4 * 2**20  # of a search that are looked at
GLOB_FILES = 100


class SearchFailed(Exception):
    """The search could not be made as it was asked for; in words for the model."""


def grep_files(box: Sandbox, given: Arguments, where: str, folder: str, most: int, seconds: float | None) -> str:
    """What the tool shows. Raises SearchFailed, Broke."""
    mode = given.text("output_mode", "") or "files_with_matches"
    kind = given.text("type")
    if kind and kind not in TYPES:
        raise SearchFailed(f"Search failed: rg: unrecognized file type: {kind}")
    globs = [given.text("glob")] * bool(given.text("glob")) + list(TYPES.get(kind, ()))
    flags = [flag for flag in ("-A", "-B", "-C") if given.number(flag) is not None] if mode == "content" else []
    lines = [part for flag in flags for part in (flag, str(int(given.number(flag))))]
    shown = {"content": ["-n"] if given.truth("-n") else [], "files_with_matches": ["-l"], "count": ["-c"]}[mode]
    common = [*shown, *lines, *["-i"] * given.truth("-i")]
    rg = ["rg", "--no-heading", "--with-filename", "--color=never", "--sort=path", "--hidden", "-g", "!.git", *common,
          *["-U", "--multiline-dotall"] * given.truth("multiline"), *(p for g in globs for p in ("-g", g)),
          "-e", given.text("pattern"), "--"]
    git = ["git", "grep", "--no-index", "--exclude-standard", "--no-color", "-I", *common]
    paths = [f":(glob){g}" if "/" in g else f":(glob)**/{g}" for g in globs]
    multiline = "exit 65" if given.truth("multiline") else ":"
    command = f"""target={shlex.quote(where)}
if [ -d "$target" ]; then cd "$target" || exit; name=.; elif [ -e "$target" ]; then cd "$(dirname "$target")" || exit
name=$(basename "$target"); else echo "Path does not exist: $target"; exit 66; fi
if command -v rg >/dev/null 2>&1; then {shlex.join(rg)} "$name"; exit; fi
{multiline}
kind=-P; git grep --no-index -q -P x -- /dev/null >/dev/null 2>&1; [ $? -le 1 ] || kind=-E
if [ "$name" = . ]; then {shlex.join(git)} $kind -e {shlex.quote(given.text("pattern"))} -- {shlex.join(paths or ["."])}
else {shlex.join(git)} $kind -e {shlex.quote(given.text("pattern"))} -- ":(literal)$name"; fi"""
    ran = box.run(command, seconds, output_bytes=OUTPUT_BYTES, folder=folder)
    text = ran.output.rstrip("\n")
    if ran.code == 66:
        raise SearchFailed(f"{text}. Note: your current working directory is {folder}.")
    if ran.code == 65:
        raise SearchFailed("Search failed: multiline needs ripgrep, which this image does not have.")
    if ran.timed_out or ran.code not in (0, 1):
        raise SearchFailed(f"Search failed — the pattern, glob, or file type was rejected without "
                           f"searching:\n{text[:2000]}")
    base = where if not _is_file(text, where) else posixpath.dirname(where)
    found = [_placed(line, base, folder) for line in text.split("\n")] if text else []
    if not found:
        return "No files found" if mode == "files_with_matches" else "No matches found"
    cut = ""
    if len(found) > most:
        cut = f"\n(showing {most} of {len(found)} lines; raise head_limit or narrow the search)"
    head = f"Found {len(found)} file{'s' * (len(found) != 1)}\n" if mode == "files_with_matches" else ""
    return head + "\n".join(found[:most]) + cut


def _is_file(text: str, where: str) -> bool:
    name = posixpath.basename(where)
    marks = (name + ":", name + "-", "--")
    return bool(text) and all(line == name or line.startswith(marks) for line in text.split("\n")[:3])


def _placed(line: str, base: str, folder: str) -> str:
    """A result's path as seen from the working directory."""
    line = line.removeprefix("./")
    here = posixpath.relpath(base, folder)
    return line if here == "." or line == "--" else posixpath.join(here, line)


def glob_files(box: Sandbox, pattern: str, where: str, folder: str, seconds: float | None) -> str:
    """The files below `where` whose path matches, sorted. Raises SearchFailed, Broke."""
    if pattern.startswith("/"):
        fixed = pattern[:re.search(r"[*?\[{]|$", pattern).start()].rpartition("/")[0] or "/"
        where, pattern = fixed, pattern[len(fixed):].lstrip("/")
    command = (f"cd {shlex.quote(where)} 2>/dev/null || exit 66; "
               "find . -name .git -prune -o \\( -type f -o -type l \\) -print")
    ran = box.run(command, seconds, output_bytes=OUTPUT_BYTES, folder=folder)
    if ran.code == 66:
        raise SearchFailed(f"Directory does not exist: {where}. Note: your current working directory is {folder}.")
    try:
        wanted = re.compile(glob_to_regex(pattern))
    except (re.error, ValueError) as problem:
        raise SearchFailed(f"glob failed: the pattern {pattern!r} is malformed: {problem}") from None
    found = (line.removeprefix("./") for line in ran.output.split("\n") if line)
    paths = sorted(path for path in found if wanted.fullmatch(path))
    if not paths:
        return "No files found"
    cut = ""
    if len(paths) > GLOB_FILES:
        cut = "\n(Results are truncated. Consider using a more specific path or pattern.)"
    return "\n".join(posixpath.join(where, path) for path in paths[:GLOB_FILES]) + cut


def glob_to_regex(pattern: str) -> str:
    """`*` and `?` within a name, `**` over folders, [...] and {a,b}. A pattern without a slash matches at any depth.

    Example: "src/**/*.{ts,tsx}" matches src/a.ts and src/b/c.tsx.
    """
    out, at, depth = "" if "/" in pattern else "(?:.*/)?", 0, 0
    while at < len(pattern):
        if pattern.startswith("**/", at):
            out, at = out + "(?:.*/)?", at + 3
            continue
        if pattern.startswith("**", at):
            out, at = out + ".*", at + 2
            continue
        char = pattern[at]
        end = pattern.find("]", at + 2)
        if char == "[" and end > 0:
            inside = pattern[at + 1:end].replace("\\", "\\\\")
            out, at = out + "[" + ("^" + inside[1:] if inside[0] in "!^" else inside) + "]", end + 1
            continue
        if char == "{" and "}" in pattern[at:]:
            out, depth = out + "(?:", depth + 1
        elif char == "}" and depth:
            out, depth = out + ")", depth - 1
        elif char == "," and depth:
            out += "|"
        else:
            out += {"*": "[^/]*", "?": "[^/]"}.get(char, re.escape(char))
        at += 1
    if depth:
        raise ValueError("a brace is not closed")
    return out
