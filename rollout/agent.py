"""The agent loop: one conversation of a model with a sandbox, tokens in, tokens out."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Callable, Sequence

from oprd.core.chat import Chat
from oprd.core.types import Ending, Observation, Reminder, ToolCall, Trajectory, Turn
from oprd.rollout.engine import Engine, Sampling
from oprd.sandbox.box import Sandbox
from oprd.sandbox.repo import state_of
from oprd.sandbox.task import Task
from oprd.sandbox.tools import SCHEMAS, call_tool

Visible = tuple[ToolCall | None, Observation]
Remind = Callable[[Task, Sequence[Visible], Sequence[Reminder]], Reminder | None]


class Diverged(Exception):
    """A replayed turn did not lead to what was recorded; the message says which and how."""


@dataclass(frozen=True)
class AgentLimits:
    """Where a conversation ends. Tokens count the whole context; seconds are wall clock for one attempt."""

    system: str
    max_turns: int
    max_context_tokens: int
    max_turn_tokens: int
    max_malformed: int  # malformed replies in a row
    attempt_s: float
    command_s: float  # one tool call
    tests_s: float = 120.0  # the hidden tests
    tools: bool = False  # whether the system message lists the tools' schemas
    states: bool = False  # whether every turn records the sandbox's state, for a later replay to be compared with


def converse(attempt_id: str, task: Task, engine: Engine, chat: Chat, box: Sandbox, limits: AgentLimits,
             sampling: Sampling, seed: int, remind: Remind | None = None,
             prefix: Sequence[Turn] = ()) -> tuple[Trajectory, tuple[Reminder, ...]]:
    """Let the model work on `task` in `box` until it submits or a limit ends it.

    `remind` (run-time use only) sees what is visible after each observation and may give a reminder that only the
    next turn reads; the time it takes does not count towards `attempt_s`. prefix: turns of an earlier attempt that this
    one begins with: not sampled but executed again, each compared with what was recorded; their time does not count
    either. Returns the trajectory and the reminders that were shown. Raises Broke when the machine fails, Diverged when
    a replayed turn leads elsewhere.
    """
    deadline = time.monotonic() + limits.attempt_s
    turns: list[Turn] = []
    visible: list[Visible] = []
    given: list[Reminder] = []
    history: list[int] = []  # everything earlier turns left visible
    pending = chat.open(limits.system, task.problem_statement, SCHEMAS if limits.tools else None)
    reminder: Reminder | None = None
    malformed = 0
    ending = Ending.TURN_LIMIT
    try:
        for k, recorded in enumerate(prefix):
            turn = _replay(box, recorded, pending, limits, k)
            turns.append(turn)
            visible.append((turn.call, turn.observation))
            malformed = malformed + 1 if turn.call is None else 0
            history += [*pending, *chat.generation_ids, *turn.sampled_ids]
            pending = chat.tool_results([turn.observation.output], ended=turn.sampled_ids[-1] == chat.end_id)
        deadline = time.monotonic() + limits.attempt_s if prefix else deadline
        for k in range(len(prefix), limits.max_turns):
            reminder_ids = chat.reminder(reminder.text) if reminder else ()
            taken = len(history) + len(pending) + len(reminder_ids) + len(chat.generation_ids)
            room = limits.max_context_tokens - taken
            if room <= 0 or time.monotonic() > deadline:
                ending = Ending.CONTEXT_LIMIT if room <= 0 else Ending.TIME_LIMIT
                break
            prompt = [*history, *pending, *reminder_ids, *chat.generation_ids]
            new_tokens = min(room, limits.max_turn_tokens)
            done = engine.generate(attempt_id, prompt, replace(sampling, max_new_tokens=new_tokens), seed * 10_007 + k)
            reply = chat.parse(done.ids)
            turn = Turn(pending, done.ids, done.logprobs, done.version, reminder_ids, chat.tokenizer.decode(done.ids),
                        reply.calls[0] if len(reply.calls) == 1 else None, _problem(reply))
            history += [*pending, *chat.generation_ids, *done.ids]
            if done.finish == "length":
                turns.append(turn)
                ending = Ending.CONTEXT_LIMIT if new_tokens == room else Ending.REPLY_LIMIT
                break
            malformed = malformed + 1 if turn.call is None else 0
            observation, ends = _act(box, turn, limits, deadline)
            if ends or malformed >= limits.max_malformed:
                turns.append(turn)
                ending = Ending.SUBMITTED if ends else Ending.MALFORMED
                break
            turns.append(replace(turn, observation=observation, state=state_of(box) if limits.states else ""))
            visible.append((turn.call, observation))
            pending = chat.tool_results([observation.output], ended=done.ids[-1] == chat.end_id)
            asked = time.monotonic()
            reminder = remind(task, visible, given) if remind else None
            deadline += time.monotonic() - asked  # a judge's delay is not the policy's
            given += [reminder] if reminder else []
    finally:
        engine.forget(attempt_id)
    return Trajectory(attempt_id, task.instance_id, tuple(turns), chat.generation_ids, ending), tuple(given)


def _replay(box: Sandbox, recorded: Turn, pending: Sequence[int], limits: AgentLimits, k: int) -> Turn:
    """Execute a recorded turn again, in the box as it stands now."""
    if recorded.reminder_ids or recorded.observation is None:
        raise ValueError(f"turn {k} cannot be replayed: it was sampled under a reminder, or ended its attempt")
    if tuple(pending) != recorded.context_ids:
        raise Diverged(f"turn {k} is asked in another context than was recorded")
    observation, _ = _act(box, recorded, limits, time.monotonic() + limits.attempt_s)
    if observation != recorded.observation:
        raise Diverged(f"turn {k} was answered otherwise than was recorded")
    state = state_of(box) if limits.states else ""
    if recorded.state and state != recorded.state:
        raise Diverged(f"turn {k} left the sandbox in another state than was recorded")
    return replace(recorded, replayed=True)


def _problem(reply) -> str | None:
    if reply.problem or len(reply.calls) == 1:
        return reply.problem
    n = len(reply.calls)
    return f"{n} tool calls in one reply; send one at a time" if n else "no tool call found"


def _act(box: Sandbox, turn: Turn, limits: AgentLimits, deadline: float) -> tuple[Observation, bool]:
    if turn.call is None:
        return Observation(f"Invalid reply: {turn.problem}", is_error=True), False
    seconds = min(limits.command_s, max(1.0, deadline - time.monotonic()))
    answer = call_tool(box, turn.call.name, turn.call.arguments, seconds)
    return Observation(answer.output, answer.exit_code, answer.is_error), answer.ends
