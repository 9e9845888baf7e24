"""The agent's tool sets by name (setting sandbox.tools)."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Mapping

from oprd.sandbox import coder_tools, tools
from oprd.sandbox.box import Sandbox
from oprd.sandbox.coder_tools import Coder

SCHEMAS: dict[str, list[dict[str, Any]]] = {"micro": tools.SCHEMAS, "coder": coder_tools.SCHEMAS}


def toolbox(name: str, box: Sandbox) -> Callable[[str, Mapping[str, str], float | None], tools.Answer]:
    """A function (tool, arguments, seconds) -> Answer for one attempt in `box`. It raises Broke, and nothing else."""
    return Coder(box) if name == "coder" else partial(tools.call_tool, box)
