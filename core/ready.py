"""A recipe that starts from ready models: they are copied into the run's folder, whole and proved."""

from __future__ import annotations

from pathlib import Path
from typing import Callable, Sequence

from oprd.core import hf, provenance
from oprd.core.plan import ACTS, chat_of, data_file, stage_folder
from oprd.core.settings import Config


def take_ready(config: Config, stages: Sequence[str], resume: bool, make_tasks: Callable[[Path], None]) -> set[str]:
    """Copy what run.ready holds of the models of `stages`, and write the task files. Returns the stages it stands for.

    make_tasks: writes MicroSWE's tasks into a folder. Raises, before anything is written: FileNotFoundError when there
    is no ready model or a stage would lack its rows; ValueError for a model that is not whole, or when the folder
    already holds a run.
    """
    found = {stage: source / "model" if (source / "model").is_dir() else source for stage in stages
             if (source := Path(config.run.ready) / stage_folder(config, stage).name).is_dir()}
    if not found:
        names = ", ".join(stage_folder(config, stage).name for stage in stages)
        raise FileNotFoundError(f"run.ready = {config.run.ready!r} holds none of {names}")
    data = Path(config.run.folder) / "data"
    held = next((place for place in (data, *(stage_folder(config, stage) for stage in stages)) if place.exists()), None)
    if held and not resume:
        raise ValueError(f"{held} exists; add --resume to go on with this run, or choose another run.folder")
    provenance.check_microswe(data, config)
    for source in found.values():
        hf.check_coverage(hf.read_headers(source), hf.load_config(source))
        chat_of(config, source, acts=True)
    for stage in stages:
        if stage not in found and stage not in ACTS:  # the tasks of those that act are made below
            data_file(config, stage)
    for stage, source in found.items():
        if not (stage_folder(config, stage) / "model").exists():
            hf.export(source, stage_folder(config, stage) / "model")
    if not (data / provenance.SETTINGS).exists():
        make_tasks(data)
        provenance.write(data, config, {})
    return set(found)
