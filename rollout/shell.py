"""A shell line taken apart into the simple commands it runs: enough of the grammar to know who spoke.

Quoted text stays inside its word, so a command that is only quoted, written into a here-document or commented out is
not seen. `bash -c "..."` and `find ... -exec` are opened; redirections, assignments and wrappers (env, timeout 5,
sudo) are taken off. A line with an unclosed quote is split at blanks, as it never ran.
"""

from __future__ import annotations

import re
from functools import lru_cache

HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1([^\n]*)\n(?:.*?\n)??\s*\2(?=\n|\Z)", re.S)
TOKEN = re.compile(r"""
    (?P<blank>[ \t\r]+|\\\n) | (?P<comment>(?<![^\s;&|()])\#[^\n]*)
  | (?P<redirect>(?:\d+|&)?(?:>>|>\||>&|<<<|<<|<&|<>|>|<)(?!\()\s*)
  | (?P<operator>&&|\|\||\|&|;;|[;&|()\n]|[<>](?=\())
  | (?P<word>(?:\\.|'[^']*'|"(?:\\.|[^"\\])*"|[^\s;&|()<>'"\\])+)
""", re.X | re.S)
QUOTED = re.compile(r"\\(.)|'([^']*)'|\"((?:\\.|[^\"\\])*)\"", re.S)
KEYWORDS = {"if", "then", "elif", "else", "do", "while", "until", "!", "{", "time"}
WRAPPERS = {  # program: (its options that take a value, words of its own before the command)
    "sudo": ("ugCpD", 0), "env": ("uCS", 0), "nice": ("n", 0), "command": ("", 0), "exec": ("a", 0),
    "xargs": ("nIPdLsaE", 0), "nohup": ("", 0), "timeout": ("ks", 1), "stdbuf": ("ioe", 0), "npx": ("p", 0),
    "bunx": ("", 0), "setsid": ("", 0), "ionice": ("cn", 0), "time": ("fo", 0), "unbuffer": ("", 0),
}
RUNNERS = {"uv": "run", "poetry": "run", "pipenv": "run", "pdm": "run", "hatch": "run", "bundle": "exec",
           "pnpm": "exec", "conda": "run"}  # wrappers with this word after them


@lru_cache(maxsize=256)
def simple_commands(line: str) -> tuple[tuple[str, ...], ...]:
    """The simple commands of a shell line as words, the inner ones of `sh -c` and `find -exec` in their place."""
    parts: list[list[str]] = [[]]
    skip = False
    for kind, word in _tokens(line):
        if kind == "operator":
            skip = False
            parts.append([])
        elif kind == "redirect":
            skip = True
        elif skip:
            skip = False
        else:
            parts[-1].append(word)
    found: list[tuple[str, ...]] = []
    for part in parts:
        words = _bare(part)
        if len(words) > 2 and program(words[0]) in ("bash", "sh", "zsh", "dash") and re.fullmatch(r"-\w*c", words[1]):
            found += simple_commands(words[2])
        elif words:
            found.append(tuple(words))
            inner = [i for i, word in enumerate(words) if re.fullmatch("-(exec|ok)(dir)?", word)]
            found += [tuple(words[i + 1:]) for i in inner if words[0] == "find" and words[i + 1:]]
    return tuple(found)


def program(word: str) -> str:
    """The name of a program without its folder."""
    return word.rsplit("/", 1)[-1]


def subcommand(words: tuple[str, ...]) -> str:
    """What `go`, `git` or `cargo` is asked to do, whatever options stand before it (`go -C dir test` is `test`)."""
    rest = iter(words[1:])
    for word in rest:
        if word in ("-C", "-c", "--git-dir", "--work-tree"):
            next(rest, None)
        elif not word.startswith(("-", "+")):
            return word
    return ""


def _tokens(line: str) -> list[tuple[str, str]]:
    """(kind, text) of each token, quotes taken off words."""
    line = HEREDOC.sub(r"\3", line)
    tokens, at = [], 0
    while at < len(line):
        found = TOKEN.match(line, at)
        if not found:  # an unclosed quote
            return [("operator" if re.fullmatch(r"[;&|()\n]+", word) else "word", word)
                    for word in re.sub(r"([;&|()\n]+)", r" \1 ", line).split(" ") if word]
        at = found.end()
        if found.lastgroup == "word":
            tokens.append(("word", QUOTED.sub(_unquote, found[0])))
        elif found.lastgroup in ("operator", "redirect"):
            tokens.append((found.lastgroup, found[0]))
    return tokens


def _unquote(part: re.Match) -> str:
    escaped, single, double = part.groups()
    if escaped is not None:
        return "" if escaped == "\n" else escaped
    return single if single is not None else re.sub(r"\\([\"\\$`\n])", r"\1", double)


def _bare(words: list[str]) -> list[str]:
    """Without leading keywords, assignments and wrapper programs."""
    while words:
        head = program(words[0])
        if words[0] in KEYWORDS or re.match(r"[A-Za-z_]\w*=", words[0]):
            words = words[1:]
        elif RUNNERS.get(head) and words[1:2] == [RUNNERS[head]]:
            words = words[2:]
        elif head in WRAPPERS:
            valued, own = WRAPPERS[head]
            words = words[1:]
            while words and words[0].startswith("-"):
                words = words[2 if re.fullmatch(f"-[{valued or '-'}]", words[0]) else 1:]
            while words and head == "env" and "=" in words[0]:
                words = words[1:]
            words = words[own:]
        else:
            return words
    return words
