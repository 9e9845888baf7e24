"""The project's one package: `oprd.core`, `oprd.rollout`, ... are the folders beside this file.

The rooms are never importable as top-level packages (a `kernels` package would shadow the one transformers
imports), so a bare checkout exposes them through this module's `__path__`; an installed wheel maps the same
folders in setup.py and leaves this file out of the way.
"""

from pathlib import Path

__path__ = [str(Path(__file__).resolve().parent)]
