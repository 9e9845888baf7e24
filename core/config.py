"""Reading the settings (core/settings.py): a TOML file first, then `--section.field value` on top.

A file may hold overlays for single stages: `[stages.if-sft.train]` counts for `--stage if-sft` only. Precedence:
command line, stage overlay, file, default. A name that does not exist is an error that names the nearest one.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
import tomllib
from pathlib import Path
from typing import Any, Mapping, NoReturn

from pydantic import ValidationError

from oprd.core.settings import FILES, STAGES, Config


def fields() -> dict[str, Any]:
    """`section.field` -> pydantic field, for every setting."""
    return {f"{section}.{field.alias or name}": field
            for section, holder in Config.model_fields.items()
            for name, field in holder.annotation.model_fields.items()}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parse(argv: list[str]) -> tuple[argparse.Namespace, dict[str, str]]:
    """Command line -> (stage, config, resume, dry_run), and the `section.field` settings given as text.

    Raises ValueError for a name that does not exist or a value that is missing.
    """
    parser = _Parser(prog="train.py", allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
                     description="Trains a coding agent: Coding SFT, IF SFT, OPRD, evaluation, one stage at a time.",
                     epilog="Every setting may stand in the TOML file ([section] field = value) or here.")
    parser.add_argument("--stage", required=True, choices=STAGES, help="what to do")
    parser.add_argument("--config", metavar="FILE.toml", help="settings file")
    parser.add_argument("--model", metavar="DIR", dest="model.path", default=argparse.SUPPRESS,
                        help="short for --model.path: the Hugging Face folder to start from")
    parser.add_argument("--input", metavar="PATH",
                        help='score: lines of {"ids": [...]}; annotate: recorded attempts; match-rules: tool calls')
    parser.add_argument("--output", metavar="PATH",
                        help="score, annotate: file to write; export: folder to write")
    parser.add_argument("--resume", action="store_true", help="go on from the newest complete checkpoint")
    parser.add_argument("--dry-run", action="store_true", help="print settings and derived numbers, then stop")
    groups = {section: parser.add_argument_group(f"[{section}]") for section in Config.model_fields}
    for name, field in fields().items():
        section = name.split(".")[0]
        default = field.default if not isinstance(field.default, tuple) else list(field.default)
        groups[section].add_argument(f"--{name}", metavar="", dest=name, default=argparse.SUPPRESS,
                                     help=f"{field.description} (default: {default!r})".replace("%", "%%"))
    try:
        known, rest = parser.parse_known_args(argv)
    except argparse.ArgumentError as problem:
        raise ValueError(str(problem))
    if rest:
        raise ValueError(f"unknown setting {rest[0]}; {_nearest(rest[0].split('=')[0].lstrip('-'), fields())}")
    for option, stages in FILES.items():
        if getattr(known, option) is not None and known.stage not in stages:
            raise ValueError(f"--{option} means nothing to --stage {known.stage}; it belongs to {' and '.join(stages)}")
    given = {name: value for name, value in vars(known).items() if "." in name}
    return known, given


def load(path: str | None, stage: str, given: Mapping[str, str]) -> Config:
    """The resolved settings of one stage. Raises FileNotFoundError, or ValueError naming file and setting."""
    tree: dict[str, Any] = {}
    if path:
        try:
            tree = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except tomllib.TOMLDecodeError as problem:
            raise ValueError(f"{path}: not TOML: {problem}")
    overlays = tree.pop("stages", {})
    if not isinstance(overlays, Mapping) or not all(isinstance(overlay, Mapping) for overlay in overlays.values()):
        raise ValueError(f"{path}: [stages] must hold tables, such as [stages.oprd.train]")
    for name in overlays:
        if name not in STAGES:
            raise ValueError(f"{path}: [stages.{name}] is no stage; {_nearest(name, STAGES)}")
        _check_names(overlays[name], f"{path}: [stages.{name}]")
    _check_names(tree, f"{path}:")
    _merge(tree, overlays.get(stage, {}))
    for name, text in given.items():
        section, field = name.split(".")
        tree.setdefault(section, {})[field] = _value(text, fields()[name])
    try:
        return Config.model_validate(tree)
    except ValidationError as problem:
        first = problem.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{where} = {first['input']!r}: {first['msg'].removeprefix('Value error, ')}")


def _value(text: str, field: Any) -> Any:
    """Command-line text -> TOML-like value; pydantic converts scalars, lists are written [a, b] or a,b."""
    if getattr(field.annotation, "__origin__", None) is tuple:
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            return [part.strip() for part in text.strip("[]").split(",") if part.strip()]
    return text


def _check_names(tree: Mapping[str, Any], where: str) -> None:
    sections = {name.split(".")[0] for name in fields()}
    for section, values in tree.items():
        if section not in sections:
            raise ValueError(f"{where} unknown section [{section}]; {_nearest(section, sections)}")
        if not isinstance(values, Mapping):
            raise ValueError(f"{where} [{section}] must be a table of settings, got {values!r}")
        for name in values:
            if f"{section}.{name}" not in fields():
                raise ValueError(f"{where} unknown setting {section}.{name}; {_nearest(f'{section}.{name}', fields())}")


def _merge(tree: dict[str, Any], overlay: Mapping[str, Any]) -> None:
    for section, values in overlay.items():
        tree[section] = {**tree.get(section, {}), **values}


def _nearest(name: str, names) -> str:
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0)
    return f"did you mean {close[0]}?"


def dump(config: Config) -> str:
    """The resolved tree as TOML."""
    lines = []
    for section, values in config.model_dump(by_alias=True).items():
        lines.append(f"[{section}]")
        for name, value in values.items():
            lines.append(f"{name} = {json.dumps(list(value) if isinstance(value, tuple) else value)}")
        lines.append("")
    return "\n".join(lines)


def changes(before: Config, after: Config) -> list[str]:
    """`section.field = value` of every setting in which `after` differs."""
    old, new = before.model_dump(by_alias=True), after.model_dump(by_alias=True)
    return [f"{section}.{name} = {value!r}" for section, values in new.items() for name, value in values.items()
            if value != old[section][name]]


def fail(problem: Exception) -> NoReturn:
    """A person's mistake: one line, exit code 2."""
    named = isinstance(problem, OSError) and problem.filename
    text = f"{problem.strerror}: {problem.filename}" if named else str(problem)
    print("error: " + " ".join(text.split()), file=sys.stderr)
    sys.exit(2)
