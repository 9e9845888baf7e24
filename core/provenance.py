"""What a stage's results were made from: its settings and the files it read, written before step 0 beside the results
and compared by a resume, so that one run never mixes two.

    FOLDER/settings.toml    the resolved settings
    FOLDER/inputs.json      {name: sha256 of the file's bytes}: training data or tasks, the tokenizer and chat template
                            of the starting point, a rubric of the user's own
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from pathlib import Path
from typing import Any, Mapping

from oprd.core import config as configuration
from oprd.core import sources
from oprd.core.disk import sync
from oprd.core.settings import Config

log = logging.getLogger("oprd.provenance")

SETTINGS, INPUTS = "settings.toml", "inputs.json"
START = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json")
REPORTS = ("run.folder", "run.threads", "run.ready", "rollout.verifiers", "rollout.record", "rollout.check_attempts",
           "rollout.difference_alarm", "parallel", "sglang", *(
               f"{who}{name}" for who in ("reminders.judge_", "verifier.")
               for name in ("url", "key_variable", "request_s", "total_s", "concurrency", "cache")))
# Settings (a name, or all of a section) that a resume may change: what they say decides nothing in the results.
TRAINING_MAY_CHANGE = (*REPORTS, "train.keep", "train.checkpoint_every", "eval", "microswe")
EVALUATION_MAY_CHANGE = (*REPORTS, "model", "data.rows", "data.tasks", "train", "oprd", "rl", "rft",
                         "prefix", "microswe")
MICROSWE_MUST_STAY = ("microswe", "run.seed", "chat.system")


def input_files(data: Path, start: Path | None, config: Config) -> dict[str, Path]:
    """The files a stage reads beside weights, by a name that does not depend on where they lie; absent ones are left
    out. data: a file, or a folder of rows."""
    found = {f"data/{file.name}": file for file in (sources.files(data) if data.exists() else ())}
    found |= {f"start/{name}": start / name for name in (START if start else ())}
    found |= {"rubric": Path(config.reminders.rubric)} if config.reminders.rubric else {}
    return {name: file for name, file in found.items() if file.is_file()}


def digests(files: Mapping[str, Path]) -> dict[str, str]:
    """sha256 of every file, by the same names. About a second a gigabyte."""
    return {name: _sha256(file, (seen := file.stat()).st_size, seen.st_mtime_ns) for name, file in files.items()}


def write(folder: Path, config: Config, inputs: Mapping[str, str]) -> None:
    """Both files, each written aside and renamed; makes the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in ((INPUTS, json.dumps(inputs, indent=1) + "\n"), (SETTINGS, configuration.dump(config))):
        aside = folder / f"{name}.tmp"
        aside.write_text(text, encoding="utf-8")
        sync(aside)
        aside.rename(folder / name)


def check_settings(folder: Path, stage: str, config: Config) -> None:
    """ValueError when a training stage's folder was made with other settings; nothing to compare is no difference."""
    if (folder / SETTINGS).exists():
        before = configuration.load(str(folder / SETTINGS), stage, {})
        if new := changed_settings(_flat(before), _flat(config), TRAINING_MAY_CHANGE):
            raise ValueError(f"{folder} was started with other settings than {', '.join(new)}; resume with the same "
                             "ones or choose another run.folder")


def check_microswe(folder: Path, config: Config) -> None:
    """ValueError when MicroSWE's files were made with other settings."""
    if (folder / SETTINGS).exists():
        before, now = _flat(configuration.load(str(folder / SETTINGS), "microswe", {})), _flat(config)
        if new := [name for name in changed_settings(before, now, ()) if _among(name, MICROSWE_MUST_STAY)]:
            raise ValueError(f"{folder} was made with other settings than {', '.join(new)}; resume with the same ones "
                             "or choose another run.folder")


def check_inputs(folder: Path, inputs: Mapping[str, str], files: Mapping[str, Path], finished: bool = False) -> None:
    """ValueError when a file is not what it was at the start, is new, or is gone (a finished stage needs none)."""
    file = folder / INPUTS
    if not file.exists():
        return
    try:
        before = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(before, dict):
            raise ValueError("it must hold a JSON object")
    except ValueError as problem:
        raise ValueError(f"{file} is damaged: {problem}; choose another run.folder") from None
    for name in sorted(before.keys() | inputs.keys()):
        if before.get(name) != inputs.get(name) and not (finished and name not in inputs):
            how = ("is no longer what it was when" if name in before and name in inputs else
                   "was not there when" if name in inputs else "is gone that was there when")
            raise ValueError(f"{files.get(name, name)} {how} {folder} was started; put back what it was started with, "
                             "or choose another run.folder")


def made_from(config: Config, inputs: Mapping[str, str]) -> dict[str, Any]:
    """What an evaluation was made from, as JSON, for `evaluated_otherwise`."""
    return json.loads(json.dumps({"settings": _flat(config), "inputs": inputs}))


def evaluated_otherwise(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """In what an evaluation made from `before` differs from one made from `now`: settings and files, in words."""
    files = [name for name in sorted(before["inputs"].keys() | now["inputs"].keys())
             if before["inputs"].get(name) != now["inputs"].get(name)]
    return changed_settings(before["settings"], now["settings"], EVALUATION_MAY_CHANGE) + files


def still_holds(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether an evaluation kept in `folder` is the one that would be made now; the log says what differs."""
    if other := evaluated_otherwise(before, now):
        log.warning("%s was evaluated with other settings or files than %s: evaluating anew", folder.parent,
                    ", ".join(other))
    return not other


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any], may_change: tuple[str, ...]) -> list[str]:
    """`section.field = value` of every setting that is now another one."""
    return [f"{name} = {value!r}" for name, value in now.items()
            if (name not in before or before[name] != value) and not _among(name, may_change)]


def _among(name: str, names: tuple[str, ...]) -> bool:
    return name in names or name.partition(".")[0] in names


def _flat(config: Config) -> dict[str, Any]:
    return {f"{section}.{name}": list(value) if isinstance(value, tuple) else value
            for section, values in config.model_dump(by_alias=True).items() for name, value in values.items()}


@functools.lru_cache(maxsize=None)
def _sha256(file: Path, size: int, changed_ns: int) -> str:
    """size, changed_ns: of the file now, so that what was read before is not read again."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
