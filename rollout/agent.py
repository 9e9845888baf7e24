"""The agent loop: one conversation of a model with a sandbox, tokens in, tokens out."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Callable, Sequence

from oprd.core.chat import Chat
from oprd.core.types import Ending, Observation, Reminder, ToolCall, Trajectory, Turn
from oprd.rollout.acting import Acting
from oprd.rollout.engine import Engine, Sampling
from oprd.rollout.judge import Probe
from oprd.rollout.select import Dropped, Selection
from oprd.sandbox.box import Sandbox
from oprd.sandbox.task import Task
from oprd.sandbox.toolbox import SCHEMAS

Visible = tuple[ToolCall | None, Observation]
Remind = Callable[[Task, Sequence[Visible], Sequence[Reminder]], Reminder | None]
Decide = Callable[[Task, Sequence[Visible], Sequence[Reminder], Probe | None], Selection]
REROLL = 5003  # seeds of rerolled turns stand this far from those of first samples


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
    tool_set: str = "micro"  # see sandbox/toolbox.py
    output_tokens: int = 16384  # of one tool's answer, head and tail
    states: bool = False  # whether every turn records the sandbox's state, for a later replay to be compared with


@dataclass(frozen=True)
class Reminding:
    """Turn-local reminders while an agent runs.

    decide: what is inserted after the latest observation, and what was dropped; it never sees a later turn.
    active: the next action is sampled first, as a probe that decides whether an intervention is needed; where one is,
    the probe is thrown away, the reminder inserted into the same state and the action sampled anew. False: passive, the
    reminder is inserted right after the observation that fired it.
    shown: the text that stands for a chosen reminder; None shows nothing (a control: it is chosen and counted).
    """

    decide: Decide
    active: bool = False
    shown: Callable[[Task, Reminder], str | None] = lambda task, reminder: reminder.text


@dataclass(frozen=True)
class Talk:
    """One finished conversation and what reminders did to it. given: chosen reminders, in order. dropped: candidates
    that a gate dropped. probes: actions sampled only to decide (active mode), thrown away or kept."""

    trajectory: Trajectory
    given: tuple[Reminder, ...] = ()
    dropped: tuple[Dropped, ...] = ()
    probes: int = 0


def converse(attempt_id: str, task: Task, engine: Engine, chat: Chat, box: Sandbox, limits: AgentLimits,
             sampling: Sampling, seed: int, reminding: Reminding | None = None, prefix: Sequence[Turn] = (),
             start: Reminder | None = None) -> Talk:
    """Let the model work on `task` in `box` until it submits or a limit ends it.

    prefix: turns of an earlier attempt that this one begins with: not sampled but executed again, each compared with
    what was recorded. start: a Global Reminder that stands after the task for the whole conversation (a retry). Neither
    the time of a replay nor that of decisions about reminders counts towards `attempt_s`. Raises Broke when the machine
    fails, Diverged when a replayed turn leads elsewhere.
    """
    talk = _Talk(attempt_id, task, engine, chat, limits, sampling, seed, start)
    act = Acting(box, chat.tokenizer, limits.tool_set, limits.output_tokens, limits.command_s, limits.states)
    malformed, ending = 0, Ending.TURN_LIMIT
    try:
        for k, recorded in enumerate(prefix):
            turn = _replay(act, recorded, talk.pending, limits, k)
            malformed = malformed + 1 if turn.call is None else 0
            talk.observe(turn, turn.observation)
        talk.deadline = time.monotonic() + limits.attempt_s
        for k in range(len(prefix), limits.max_turns):
            turn, finish = talk.next_turn(k, reminding)
            if turn is None:
                ending = finish
                break
            if finish is not None:
                talk.turns.append(turn)
                ending = finish
                break
            malformed = malformed + 1 if turn.call is None else 0
            observation, ends = act(turn, talk.deadline)
            if ends or malformed >= limits.max_malformed:
                talk.turns.append(turn)
                ending = Ending.SUBMITTED if ends else Ending.MALFORMED
                break
            talk.observe(replace(turn, state=act.state()), observation)
    finally:
        engine.forget(attempt_id)
    told = Trajectory(attempt_id, task.instance_id, tuple(talk.turns), chat.generation_ids, ending)
    return Talk(told, tuple(talk.given), tuple(talk.dropped), talk.probes)


class _Talk:
    """A conversation under way."""

    def __init__(self, attempt_id: str, task: Task, engine: Engine, chat: Chat, limits: AgentLimits,
                 sampling: Sampling, seed: int, start: Reminder | None):
        self.id, self.task, self.engine, self.chat = attempt_id, task, engine, chat
        self.limits, self.sampling, self.seed = limits, sampling, seed
        self.deadline = time.monotonic() + limits.attempt_s
        self.turns: list[Turn] = []
        self.visible: list[Visible] = []
        self.given: list[Reminder] = []
        self.dropped: list[Dropped] = []
        self.probes = 0
        self.history: list[int] = []  # everything earlier turns left visible
        schemas = SCHEMAS[limits.tool_set] if limits.tools else None
        self.pending = chat.open(limits.system, task.problem_statement, schemas)
        if start is not None:
            self.pending += chat.reminder(start.text)

    def next_turn(self, k: int, reminding: Reminding | None) -> tuple[Turn | None, Ending | None]:
        """The next reply, and the ending it brings by itself (its limit, or none: it is to be acted on). Without room
        or time for one: None and why."""
        if reminding is None or not self.visible:
            return self._sample(k)
        probe, finish = None, None
        if reminding.active:
            probe, finish = self._sample(k)
            if probe is None:
                return None, finish
            self.probes += 1
        asked = time.monotonic()
        chosen = reminding.decide(self.task, self.visible, self.given, Probe(probe.call) if probe else None)
        text = reminding.shown(self.task, chosen.reminder) if chosen.reminder else None
        self.deadline += time.monotonic() - asked  # a judge's delay is not the policy's
        self.dropped += chosen.dropped
        self.given += [chosen.reminder] if chosen.reminder else []
        if probe and text is None:
            return probe, finish
        if probe:
            return self._sample(k + REROLL, text, probe.text)
        return self._sample(k, text)

    def _sample(self, k: int, reminder: str | None = None, probe: str = "") -> tuple[Turn | None, Ending | None]:
        reminder_ids = self.chat.reminder(reminder) if reminder is not None else ()
        prompt = [*self.history, *self.pending, *reminder_ids, *self.chat.generation_ids]
        room = self.limits.max_context_tokens - len(prompt)
        if room <= 0 or time.monotonic() > self.deadline:
            return None, Ending.CONTEXT_LIMIT if room <= 0 else Ending.TIME_LIMIT
        new_tokens = min(room, self.limits.max_turn_tokens)
        sampling = replace(self.sampling, max_new_tokens=new_tokens)
        done = self.engine.generate(self.id, prompt, sampling, self.seed * 10_007 + k,
                                    max(0.0, self.deadline - time.monotonic()))
        if not done.ids:  # its time was over before the first token
            return None, Ending.TIME_LIMIT
        reply = self.chat.parse(done.ids)
        turn = Turn(self.pending, done.ids, done.logprobs, done.version, reminder_ids,
                    self.chat.tokenizer.decode(done.ids), reply.calls[0] if len(reply.calls) == 1 else None,
                    _problem(reply), probe=probe, spans=done.spans)
        if done.finish == "time":
            return turn, Ending.TIME_LIMIT
        if done.finish == "length":
            return turn, Ending.CONTEXT_LIMIT if new_tokens == room else Ending.REPLY_LIMIT
        return turn, None

    def observe(self, turn: Turn, observation: Observation) -> None:
        """Take a turn that was acted on into what the next one sees."""
        self.history += [*turn.context_ids, *self.chat.generation_ids, *turn.sampled_ids]
        self.turns.append(replace(turn, observation=observation))
        self.visible.append((turn.call, observation))
        self.pending = self.chat.tool_results([observation.output], ended=turn.sampled_ids[-1] == self.chat.end_id)


def _replay(act: Acting, recorded: Turn, pending: Sequence[int], limits: AgentLimits, k: int) -> Turn:
    """Execute a recorded turn again, in the box as it stands now."""
    if recorded.reminder_ids or recorded.observation is None:
        raise ValueError(f"turn {k} cannot be replayed: it was sampled under a reminder, or ended its attempt")
    if tuple(pending) != recorded.context_ids:
        raise Diverged(f"turn {k} is asked in another context than was recorded")
    observation, _ = act(recorded, time.monotonic() + limits.attempt_s)
    if observation != recorded.observation:
        raise Diverged(f"turn {k} was answered otherwise than was recorded")
    state = act.state()
    if recorded.state and state != recorded.state:
        raise Diverged(f"turn {k} left the sandbox in another state than was recorded")
    return replace(recorded, replayed=True)


def _problem(reply) -> str | None:
    if reply.problem or len(reply.calls) == 1:
        return reply.problem
    n = len(reply.calls)
    return f"{n} tool calls in one reply; send one at a time" if n else "no tool call found"
