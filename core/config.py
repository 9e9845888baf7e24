"""Reading the settings (core/settings.py): a TOML file first, then `--section.field value` on top.

A file may hold overlays for single stages: `[stages.if-sft.train]` counts for `--stage if-sft` only. Precedence:
command line, stage overlay, file, default. A name that does not exist is an error that names the nearest one; a value
in a file must have its setting's type (`batch = true` is no 1), text from the command line is converted to it.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
import tomllib
from pathlib import Path
from typing import Any, Iterable, Literal, Mapping, NoReturn, get_args, get_origin

from pydantic import TypeAdapter, ValidationError

from oprd.core.settings import FILES, RESUMED, STAGES, Config


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
                     usage="train.py --stage NAME [--config FILE.toml] [--section.field value ...] [--resume] "
                           "[--dry-run]",
                     description="Trains a coding agent: Coding SFT, IF SFT, OPRD, evaluation, one stage at a time.",
                     epilog="Every setting may stand in the TOML file ([section] field = value) or here.")
    parser.add_argument("--stage", required=True, choices=STAGES, help="what to do")
    parser.add_argument("--config", metavar="FILE.toml", help="settings file")
    parser.add_argument("--model", metavar="DIR", dest="model.path", default=argparse.SUPPRESS,
                        help="short for --model.path: the Hugging Face folder to start from")
    parser.add_argument("--input", metavar="PATH",
                        help='score: lines of {"ids": [...]}; annotate, if-data: recorded attempts; match-rules: tool '
                             "calls; parse-log: a test run's output; check-tasks: tasks")
    parser.add_argument("--output", metavar="PATH",
                        help="score, annotate, if-data, check-tasks: file to write; export: folder to write")
    parser.add_argument("--parser", metavar="NAME",
                        help="parse-log: pytest, go, cargo, jest ... or a data set's own, as parse_log_pytest")
    parser.add_argument("--resume", action="store_true", help="go on from the newest complete checkpoint")
    parser.add_argument("--dry-run", action="store_true", help="print settings and derived numbers, then stop")
    groups = {section: parser.add_argument_group(f"[{section}]") for section in Config.model_fields}
    for name, field in fields().items():
        kind, choices = _kind(field.annotation)
        default = field.default if not isinstance(field.default, tuple) else ",".join(map(str, field.default))
        text = f"{field.description}; {choices}" if choices else field.description
        groups[name.split(".")[0]].add_argument(f"--{name}", metavar=kind, dest=name, default=argparse.SUPPRESS,
                                                help=f"{text} (default: {default!r})".replace("%", "%%"))
    try:
        known, rest = parser.parse_known_args(argv)
    except argparse.ArgumentError as problem:
        raise ValueError(str(problem))
    if rest:
        if not rest[0].startswith("-"):
            raise ValueError(f"{rest[0]!r} follows no setting; options are written --section.field value")
        options = [*fields(), "stage", "config", "resume", "dry-run", *FILES, "help"]
        raise ValueError(f"unknown setting {rest[0]}; {_nearest(rest[0].split('=')[0].lstrip('-'), options)}")
    if known.resume and known.stage not in RESUMED:
        raise ValueError(f"--resume means nothing to --stage {known.stage}, which begins anew each time; leave it out")
    for option, stages in FILES.items():
        if getattr(known, option) is not None and known.stage not in stages:
            raise ValueError(f"--{option} means nothing to --stage {known.stage}; it belongs to {' and '.join(stages)}")
    given = {name: value for name, value in vars(known).items() if "." in name}
    return known, given


def _kind(annotation: Any) -> tuple[str, str]:
    """What a setting takes, for --help: (a word, its choices in words or "")."""
    if get_origin(annotation) is tuple:
        return "LIST", _kind(get_args(annotation)[0])[1].replace("one of", "some of")
    if get_origin(annotation) is Literal:
        return "NAME", f"one of {', '.join(get_args(annotation))}"
    return {bool: "true|false", int: "N", float: "X"}.get(annotation, "TEXT"), ""


def load(path: str | None, stage: str, given: Mapping[str, str]) -> Config:
    """The resolved settings of one stage. Raises FileNotFoundError, or ValueError naming file and setting."""
    tree = _read(path) if path else {}
    overlays = tree.pop("stages", {})
    if not isinstance(overlays, Mapping) or not all(isinstance(overlay, Mapping) for overlay in overlays.values()):
        raise ValueError(f"{path}: [stages] must hold tables, such as [stages.oprd.train]")
    for name in overlays:
        if name == "all":
            raise ValueError(f"{path}: [stages.all] would count for no stage, since --stage all runs each with its own "
                             "settings; write [section] for all of them, or [stages.NAME.section] for one")
        if name not in STAGES:
            raise ValueError(f"{path}: [stages.{name}] is no stage; {_nearest(name, STAGES)}")
        _check_names(overlays[name], f"{path}: [stages.{name}]", f"stages.{name}.")
    _check_names(tree, f"{path}:")
    came = {f"{section}.{field}": f"{path}: " for section in tree for field in tree[section]}
    for section, values in overlays.get(stage, {}).items():
        tree[section] = {**tree.get(section, {}), **values}
        came |= {f"{section}.{field}": f"{path}: [stages.{stage}] " for field in values}
    for name, text in given.items():
        section, field = name.split(".")
        tree.setdefault(section, {})[field] = _value(text, name)
        came[name] = "--"
    for name in came:  # TOML and JSON have no tuples
        section, field = name.split(".")
        if isinstance(tree[section][field], list):
            tree[section][field] = tuple(tree[section][field])
    try:
        return Config.model_validate(tree, strict=True)
    except ValidationError as problem:
        raise ValueError(_in_words(problem, came)) from None


def _read(path: str) -> dict[str, Any]:
    data = Path(path).read_bytes()
    try:
        return tomllib.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as problem:
        raise ValueError(f"{path}: not UTF-8 ({problem.reason} at byte {problem.start + 1}); save the file as UTF-8")
    except tomllib.TOMLDecodeError as problem:
        raise ValueError(f"{path}: not TOML: {problem}")


def _value(text: str, name: str) -> Any:
    """Command-line text -> the setting's type; lists are written [a, b] or a,b. ValueError names the setting."""
    kind, value = fields()[name].annotation, text
    if get_origin(kind) is tuple:
        try:
            value = json.loads(text)
        except json.JSONDecodeError:
            value = [part.strip() for part in text.strip("[]").split(",") if part.strip()]
        value = value if isinstance(value, list) else [text]
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as problem:
        raise ValueError(f"--{name} = {text!r}: {problem.errors()[0]['msg']}") from None


def _in_words(problem: ValidationError, came: Mapping[str, str]) -> str:
    """The first mistake, with where its value came from (by `section.field`: what stands before the name)."""
    first = problem.errors()[0]
    name, text = ".".join(map(str, first["loc"][:2])), first["msg"].removeprefix("Value error, ")
    if len(first["loc"]) < 2:  # between the settings of a section
        whose = sorted({where for setting, where in came.items() if setting.startswith(f"{name}.")})
        return f"{next((where for where in whose if where != '--'), '')}[{name}] {text}"
    part = "".join(f"[{i}]" for i in first["loc"][2:])
    return f"{came.get(name, '')}{name}{part} = {first['input']!r}: {text}"


def _check_names(tree: Mapping[str, Any], where: str, prefix: str = "") -> None:
    sections = {name.split(".")[0] for name in fields()}
    for section, values in tree.items():
        if section not in sections and not isinstance(values, Mapping):
            nearest = _closest(section, fields())
            table, _, field = nearest.partition(".")
            raise ValueError(f"{where} {section} = {values!r} stands outside a section; did you mean {field} under "
                             f"[{prefix}{table}]?")
        if section not in sections:
            raise ValueError(f"{where} unknown section [{section}]; {_nearest(section, sections)}")
        if not isinstance(values, Mapping):
            raise ValueError(f"{where} [{section}] must be a table of settings, got {values!r}")
        for name in values:
            if f"{section}.{name}" not in fields():
                raise ValueError(f"{where} unknown setting {section}.{name}; {_nearest(f'{section}.{name}', fields())}")


def _nearest(name: str, names: Iterable[str]) -> str:
    return f"did you mean {_closest(name, names)}?"


def _closest(name: str, names: Iterable[str]) -> str:
    """The name most like `name`, which may lack its section (`lr`) or its end (`res`)."""
    def likeness(known: str) -> float:
        return 1.0 if name == known else 0.9 if known.startswith(name) else difflib.SequenceMatcher(
            None, name, known).ratio()

    def like(known: str) -> tuple[float, float]:
        whole = likeness(known)
        return max(whole, likeness(known.rpartition(".")[2])), whole

    return max(names, key=like)


def dump(config: Config) -> str:
    """The resolved tree as TOML."""
    lines = []
    for section, values in config.model_dump(by_alias=True).items():
        lines.append(f"[{section}]")
        for name, value in values.items():
            text = json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)
            lines.append(f"{name} = {text}".replace("\x7f", "\\u007f"))  # the one other character TOML wants escaped
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
