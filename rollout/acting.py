"""What an agent's reply does in its sandbox, and what the agent reads of it."""

from __future__ import annotations

import time

from oprd.core.types import Observation, Turn
from oprd.sandbox.box import Sandbox
from oprd.sandbox.repo import state_of
from oprd.sandbox.toolbox import toolbox


class Acting:
    """One attempt's tools at work. command_s: seconds of one call; states: see AgentLimits. Raises Broke."""

    def __init__(self, box: Sandbox, tokenizer, tool_set: str, output_tokens: int, command_s: float, states: bool):
        self.box, self.command_s, self.states = box, command_s, states
        self.call, self.cap = toolbox(tool_set, box), Cap(tokenizer, output_tokens)

    def __call__(self, turn: Turn, deadline: float) -> tuple[Observation, bool]:
        """(the answer, whether the agent submitted)."""
        if turn.call is None:
            return Observation(f"Invalid reply: {turn.problem}", is_error=True), False
        seconds = min(self.command_s, max(1.0, deadline - time.monotonic()))
        answer = self.call(turn.call.name, turn.call.arguments, seconds)
        return Observation(self.cap(answer.output), answer.exit_code, answer.is_error), answer.ends

    def state(self) -> str:
        """See Turn.state; "" where states are not recorded."""
        return state_of(self.box) + getattr(self.call, "folder", "") if self.states else ""


class Cap:
    """Cuts a tool's answer to a number of tokens, head and tail. No text has more tokens than UTF-8 bytes, so a short
    one is never tokenised for it.

    Example, most = 4: "a b c d e f" -> "a b\\n[... 2 tokens left out ...]\\n e f".
    """

    def __init__(self, tokenizer, most: int):
        self.tokenizer, self.most = tokenizer, most

    def __call__(self, text: str) -> str:
        if len(text.encode("utf-8", "replace")) <= self.most:
            return text
        ids = self.tokenizer.encode(text)
        if len(ids) <= self.most:
            return text
        half = self.most // 2
        head, tail = (self.tokenizer.decode(part).strip("\ufffd") for part in (ids[:half], ids[len(ids) - half:]))
        return f"{head}\n[... {len(ids) - 2 * half} tokens left out ...]\n{tail}"
