"""A tool call's arguments, which are text as the model wrote it, read by the types its schema names."""

from __future__ import annotations

import json
from typing import Any, Mapping


class WrongArguments(Exception):
    """The model's mistake, in words it can act on."""


def schema(name: str, what: str, required: Mapping[str, Any], optional: Mapping[str, Any]) -> dict[str, Any]:
    """A tool in the form that chat templates list."""
    properties = {p: {**kind, "description": text} for p, (kind, text) in {**required, **optional}.items()}
    return {"type": "function", "function": {"name": name, "description": what, "parameters": {
        "type": "object", "properties": properties, "required": list(required)}}}


class Arguments:
    """The arguments of one call. Raises WrongArguments for what is missing, unknown or of another type."""

    def __init__(self, tool: str, spec: tuple[str, Mapping[str, Any], Mapping[str, Any]], given: Mapping[str, str]):
        self.tool, self.given = tool, given
        _, required, optional = spec
        for name in required:
            if name not in given:
                self._fail(f"The required parameter `{name}` is missing")
        for name in given:
            if name not in required and name not in optional:
                self._fail(f"An unexpected parameter `{name}` was provided")
        for name, (kind, _) in {**required, **optional}.items():
            if name in given and given[name] not in kind.get("enum", (given[name],)):
                self._fail(f"The parameter `{name}` must be one of {', '.join(kind['enum'])}")
            if name in given and kind["type"] in ("number", "boolean"):
                self.number(name) if kind["type"] == "number" else self.truth(name)

    def _fail(self, issue: str) -> None:
        raise WrongArguments(f"InputValidationError: {self.tool} failed due to the following issue:\n{issue}")

    def text(self, name: str, default: str = "") -> str:
        return self.given.get(name, default)

    def number(self, name: str) -> float | None:
        """A number not below 0; None where it was not given (or given as nothing)."""
        text = self.given.get(name, "").strip()
        if text in ("", "null", "None"):
            return None
        try:
            value = float(text)
            if 0 <= value < 1e12:
                return value
        except ValueError:
            pass
        self._fail(f"The parameter `{name}` type is expected as `number` but provided as `string`")

    def truth(self, name: str) -> bool:
        text = self.given.get(name, "").strip().lower()
        if text not in ("", "true", "false", "null", "none", "1", "0"):
            self._fail(f"The parameter `{name}` type is expected as `boolean` but provided as `string`")
        return text in ("true", "1")

    def edits(self, name: str) -> list[tuple[str, str, bool]]:
        """(old_string, new_string, replace_all) of each edit."""
        try:
            found = json.loads(self.given[name])
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, list) or not found or not all(isinstance(edit, dict) for edit in found):
            self._fail(f"The parameter `{name}` type is expected as `array` of objects but provided as `string`")
        for i, edit in enumerate(found):
            for key in ("old_string", "new_string"):
                if not isinstance(edit.get(key), str):
                    self._fail(f"The required parameter `{name}[{i}].{key}` is missing")
        return [(edit["old_string"], edit["new_string"], str(edit.get("replace_all", "")).lower() == "true")
                for edit in found]
