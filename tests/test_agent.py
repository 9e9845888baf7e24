"""The agent loop and the pool of attempts, with a scripted engine and a sandbox made of a dictionary."""

import os
import signal
import threading
import time
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest

from oprd.core.chat import Chat
from oprd.core.tokenizer import train_bpe
from oprd.core.types import Ending, Reminder, ToolCall
from oprd.rollout import attempts as pool_module
from oprd.rollout.agent import AgentLimits, Reminding, converse
from oprd.rollout.attempts import Attempt, Attempts
from oprd.rollout.engine import Completion, Sampling
from oprd.rollout.select import Dropped, Selection
from oprd.rollout.views import rows_of, student_row
from oprd.sandbox.box import Broke, Ran
from oprd.sandbox.task import Task
from oprd.sandbox.verify import Verdict

CHAT = Chat(train_bpe(["read edit bash submit path src function parameter <|im_end|>"], 300))
TASK = Task("t", "r", "0" * 40, "Fix it.", "", "", ("f",), (), {})
LIMITS = AgentLimits("sys", max_turns=6, max_context_tokens=2000, max_turn_tokens=200, max_malformed=2, attempt_s=60.0,
                     command_s=5.0)
SAMPLING = Sampling(1.0, 1.0, 200, CHAT.stop_ids)


class Box:
    """Files in a dictionary; a command answers what it was called with."""

    def __init__(self):
        self.files = {"a.py": b"x = 1\n"}

    def run(self, command, seconds=None):
        if command == "die":
            raise Broke("gone")
        return Ran(f"ran {command} in {seconds}\n", 0)

    def read(self, path):
        if path not in self.files:
            raise FileNotFoundError(path)
        return self.files[path]

    def write(self, path, data):
        self.files[path] = data


class Engine:
    """Replies from a list of ids; records every prompt it was given."""

    version = 3

    def __init__(self, replies):
        self.replies = replies
        self.prompts, self.seeds, self.forgotten = [], [], []
        self.announced = 0

    @contextmanager
    def worker(self):
        self.announced += 1
        yield

    def generate(self, session, context_ids, sampling, seed, seconds=None):
        turn = sum(1 for name, _, _ in self.prompts if name == session)
        self.prompts.append((session, tuple(context_ids), sampling))
        self.seeds.append(seed)
        ids = self.replies[turn][: sampling.max_new_tokens]
        return Completion(ids, (-0.5,) * len(ids), self.version, "stop" if ids[-1] == CHAT.end_id else "length")

    def forget(self, session):
        self.forgotten.append(session)


def call(name, **arguments):
    return CHAT.assistant("", [ToolCall(name, arguments)])


def holds(ids, part):
    return any(ids[i : i + len(part)] == part for i in range(len(ids)))


def play(*replies, limits=LIMITS, box=None, **more):
    engine = Engine(replies)
    talk = converse("a", TASK, engine, CHAT, box or Box(), limits, SAMPLING, 5, **more)
    return talk.trajectory, talk.given, engine


def test_every_prompt_is_the_row_so_far_and_nothing_sampled_is_encoded_again():
    trajectory, _, engine = play(call("read", path="a.py"), call("bash", command="ls"), call("submit"))
    assert trajectory.ending is Ending.SUBMITTED and engine.forgotten == ["a"]
    row = student_row(trajectory)
    starts = [len(prompt) for _, prompt, _ in engine.prompts]
    for (_, prompt, _), turn, start in zip(engine.prompts, trajectory.turns, starts):
        assert tuple(row.ids[:start]) == prompt
        assert tuple(row.ids[start : start + len(turn.sampled_ids)]) == turn.sampled_ids
    assert len(row.targets) == sum(len(t.sampled_ids) for t in trajectory.turns)
    assert trajectory.turns[-1].observation is None and trajectory.turns[0].version == 3
    assert len(set(engine.seeds)) == 3


def test_the_rendered_conversation_is_the_chat_frame_of_the_same_messages():
    trajectory, _, _ = play(call("read", path="a.py"), call("submit"))
    messages = [{"role": "system", "content": "sys"}, {"role": "user", "content": "Fix it."}]
    for turn in trajectory.turns:
        messages.append({"role": "assistant", "content": None, "tool_calls": [
            {"function": {"name": turn.call.name, "arguments": dict(turn.call.arguments)}}]})
        if turn.observation:
            messages.append({"role": "tool", "content": turn.observation.output})
    ids, mask = CHAT.render(messages)
    row = student_row(trajectory)
    assert tuple(row.ids) == tuple(ids)
    assert row.targets.tolist() == [i for i, m in enumerate(mask) if m]


def test_a_models_mistake_is_an_observation():
    trajectory, _, _ = play(call("read", path="no.py"), call("edit", path="a.py"), call("fly"),
                            call("edit", path="a.py", old_string="y", new_string="z"), call("submit"))
    seen = [t.observation.output for t in trajectory.turns[:-1]]
    assert seen == ["File does not exist: no.py", "edit failed: missing required parameter `old_string`",
                    "No such tool: fly. Available tools: bash, read, edit, submit",
                    "String to replace not found in file.\nString: y"]
    assert all(t.observation.is_error for t in trajectory.turns[:-1])


def test_an_ambiguous_edit_changes_nothing_and_says_how_many():
    box = Box()
    box.files["a.py"] = b"x\nx\n"
    trajectory, _, _ = play(call("edit", path="a.py", old_string="x", new_string="y"), call("submit"), box=box)
    assert trajectory.turns[0].observation.output.startswith("Found 2 matches") and box.files["a.py"] == b"x\nx\n"


def test_malformed_replies_are_answered_then_end_the_attempt():
    junk = (*CHAT.tokenizer.encode("hello"), CHAT.end_id)
    trajectory, _, _ = play(junk, junk)
    assert trajectory.ending is Ending.MALFORMED and len(trajectory.turns) == 2
    assert trajectory.turns[0].observation.output == "Invalid reply: no tool call found"
    two = CHAT.assistant("", [ToolCall("submit", {}), ToolCall("submit", {})])
    trajectory, _, _ = play(two, call("submit"))
    assert trajectory.turns[0].observation.output.startswith("Invalid reply: 2 tool calls in one reply")
    assert trajectory.ending is Ending.SUBMITTED


def test_a_reply_cut_at_its_limit_is_kept_and_never_executed():
    long = call("bash", command="x " * 150)
    box = Box()
    box.run = lambda *_: pytest.fail("a cut call was executed")
    trajectory, _, engine = play(long, box=box, limits=LIMITS.__class__(**{**LIMITS.__dict__, "max_turn_tokens": 20}))
    assert trajectory.ending is Ending.REPLY_LIMIT and len(trajectory.turns[0].sampled_ids) == 20


def test_the_context_limit_is_never_passed_and_nothing_stands_after_the_last_sample():
    first = call("read", path="a.py")
    for room in range(1, 120, 7):
        limits = LIMITS.__class__(**{**LIMITS.__dict__, "max_context_tokens": 40 + room})
        engine = Engine([first, first, first, first, first, first])
        trajectory = converse("a", TASK, engine, CHAT, Box(), limits, SAMPLING, 0).trajectory
        assert trajectory.tokens() <= limits.max_context_tokens
        if trajectory.ending is Ending.CONTEXT_LIMIT and trajectory.turns:
            row = student_row(trajectory)
            assert row.targets[-1] == len(row.ids) - 1


def test_turn_limit_and_time_limit_end_an_attempt():
    again = [call("bash", command="ls")] * 6
    trajectory, _, _ = play(*again)
    assert trajectory.ending is Ending.TURN_LIMIT and len(trajectory.turns) == 6
    late = LIMITS.__class__(**{**LIMITS.__dict__, "attempt_s": -1.0})
    assert play(*again, limits=late)[0].ending is Ending.TIME_LIMIT


def test_the_time_that_reminders_take_is_not_the_attempts():
    short = LIMITS.__class__(**{**LIMITS.__dict__, "attempt_s": 0.5})

    def slow(task, visible, given, probe):
        time.sleep(0.6)
        return Selection(None)

    played = play(call("bash", command="ls"), call("submit"), limits=short, reminding=Reminding(slow))
    assert played[0].ending is Ending.SUBMITTED


def test_a_run_time_reminder_is_read_by_the_next_turn_only():
    trajectory, given, engine = play(call("read", path="a.py"), call("bash", command="ls"), call("submit"),
                                     reminding=Reminding(first_only))
    shown = CHAT.reminder("Look closer.")
    assert [holds(prompt, shown) for _, prompt, _ in engine.prompts] == [False, True, False]
    assert engine.prompts[1][1][-len(CHAT.generation_ids):] == CHAT.generation_ids
    assert len(given) == 1 and len(rows_of(trajectory)) == 2


LOOK = Reminder("c", "R1", "Look closer.", turn=0)


def first_only(task, visible, given, probe):
    return Selection(LOOK if len(visible) == 1 else None, (Dropped("d", len(visible) - 1, "why", "gate"),))


# --- active mode and controls at run time

def asks_for_a_command(task, visible, given, probe):
    """Needs a reminder where the probe reads again."""
    needed = probe is not None and probe.call is not None and probe.call.name == "read"
    return Selection(Reminder("c", "R1", "Look closer.", turn=len(visible) - 1) if needed else None)


def test_an_active_reminder_throws_the_probe_away_and_the_action_is_sampled_anew_from_the_same_state():
    again, other, end = call("read", path="b.py"), call("bash", command="ls"), call("submit")
    engine = Engine([call("read", path="a.py"), again, other, end])
    box = Box()
    talk = converse("a", TASK, engine, CHAT, box, LIMITS, SAMPLING, 5, Reminding(asks_for_a_command, active=True))
    prompts, shown = [prompt for _, prompt, _ in engine.prompts], CHAT.reminder("Look closer.")
    generation = CHAT.generation_ids
    assert prompts[2] == prompts[1][: -len(generation)] + shown + generation  # the same state and the reminder
    turns = talk.trajectory.turns
    assert [t.call.name for t in turns] == ["read", "bash", "submit"] and talk.probes == 2
    assert turns[1].probe == CHAT.tokenizer.decode(again) and turns[1].reminder_ids == shown
    assert turns[2].probe == "" and turns[2].reminder_ids == () and len(talk.given) == 1
    # the probe is in no later prompt, and the reminder was read by one turn only
    assert not holds(prompts[3], again) and not holds(prompts[3], shown) and holds(prompts[3], other)
    assert len(set(engine.seeds)) == 4  # a rerolled action has a seed of its own


def test_an_active_run_without_an_intervention_is_the_reminder_free_run():
    replies = [call("bash", command="ls"), call("bash", command="pwd"), call("submit")]
    free, active = Engine(replies), Engine(replies)
    one = converse("a", TASK, free, CHAT, Box(), LIMITS, SAMPLING, 5)
    other = converse("a", TASK, active, CHAT, Box(), LIMITS, SAMPLING, 5, Reminding(asks_for_a_command, active=True))
    assert one.trajectory == other.trajectory and (free.prompts, free.seeds) == (active.prompts, active.seeds)
    assert other.probes == 2 and other.given == ()


def test_a_withheld_reminder_is_given_and_shown_to_nobody_and_another_text_can_stand_for_it():
    replies = [call("bash", command="ls"), call("bash", command="pwd"), call("submit")]
    free = converse("a", TASK, Engine(replies), CHAT, Box(), LIMITS, SAMPLING, 5)
    held = converse("a", TASK, Engine(replies), CHAT, Box(), LIMITS, SAMPLING, 5,
                    Reminding(first_only, shown=lambda task, reminder: None))
    assert held.trajectory == free.trajectory and held.given == (LOOK,)
    other = converse("a", TASK, Engine(replies), CHAT, Box(), LIMITS, SAMPLING, 5,
                     Reminding(first_only, shown=lambda task, reminder: "Something else."))
    assert other.trajectory.turns[1].reminder_ids == CHAT.reminder("Something else.") and other.given == (LOOK,)
    assert [d.turn for d in other.dropped] == [0, 1]


def test_a_retry_sees_the_global_reminder_after_the_task_in_every_turn():
    whole = Reminder("test_outcome_feedback", "G", "Rejected: 1 failed.")
    engine = Engine([call("bash", command="ls"), call("submit")])
    talk = converse("a", TASK, engine, CHAT, Box(), LIMITS, SAMPLING, 5, start=whole)
    beginning = CHAT.open("sys", "Fix it.") + CHAT.reminder(whole.text)
    assert all(prompt[: len(beginning)] == beginning for _, prompt, _ in engine.prompts)
    assert engine.prompts[0][1] == beginning + CHAT.generation_ids and len(rows_of(talk.trajectory)) == 1


# --- the pool

def pool(engine, monkeypatch, broken=0, verdict=Verdict(True), workers=4):
    opened = []

    def open_box(task):
        opened.append(task)
        if len(opened) <= broken:
            raise Broke("no machine")
        return nullcontext(Box())

    monkeypatch.setattr(pool_module, "extract_patch", lambda box: b"p")
    monkeypatch.setattr(pool_module, "verify", lambda task, patch, box, seconds: verdict)
    return Attempts(engine, CHAT, open_box, LIMITS, SAMPLING, workers=workers, verifiers=2)


def test_outcomes_come_back_in_order_one_for_each_attempt(monkeypatch):
    engine = Engine([call("submit")])
    heard = []
    outcomes = pool(engine, monkeypatch).run([Attempt(f"a{i}", TASK, i) for i in range(11)], on_done=heard.append)
    assert [o.attempt.id for o in outcomes] == [f"a{i}" for i in range(11)] and len(heard) == 11
    assert all(o.trouble is None and o.verdict.resolved for o in outcomes)
    assert engine.announced == 4


def test_a_task_that_cannot_be_opened_is_named_and_not_tried_again(monkeypatch):
    from oprd.sandbox.box import Unusable

    opened = []

    def refuse(task):
        opened.append(task.instance_id)
        if task.instance_id == "bad":
            raise Unusable("bad: an agent could find the solution: /home/fix.patch exists")
        return nullcontext(Box())

    runner = pool(Engine([call("submit")]), monkeypatch, workers=1)
    runner.open_box = refuse
    bad = replace(TASK, instance_id="bad")
    outcomes = runner.run([Attempt("a", bad, 0), Attempt("b", TASK, 0)])
    assert [o.trouble for o in outcomes] == ["unusable_task", None] and opened.count("bad") == 1
    assert "fix.patch" in outcomes[0].why and outcomes[0].trajectory is None
    with pytest.raises(ValueError, match="none of the tasks can be attempted: bad: an agent"):
        runner.open_box = lambda task: refuse(bad)
        runner.run([Attempt("a", bad, 0), Attempt("b", TASK, 0)])


def test_tests_that_somebody_killed_are_graded_again_and_a_patch_that_kills_them_is_a_failure(monkeypatch):
    killed, good = Verdict(False, reason="no test result", valid=False, exit_code=137), Verdict(True, exit_code=0)
    given = iter([killed, good])
    runner = pool(Engine([call("submit")]), monkeypatch)
    monkeypatch.setattr(pool_module, "verify", lambda task, patch, box, seconds: next(given))
    assert runner.run([Attempt("a", TASK, 0)])[0].verdict.resolved
    failed = Verdict(False, reason="1 test did not pass", exit_code=137)
    given = iter([failed, failed])
    outcome = runner.run([Attempt("b", TASK, 0)])[0]
    assert outcome.trouble is None and not outcome.verdict.resolved
    given = iter([replace(failed, timed_out=True)])  # our own limit: once is enough
    assert not runner.run([Attempt("c", TASK, 0)])[0].verdict.resolved


def test_a_tools_answer_is_cut_to_a_number_of_tokens():
    from oprd.rollout.acting import Cap

    text = " ".join(f"word{i}" for i in range(400))
    cut = Cap(CHAT.tokenizer, 100)(text)
    head, _, rest = cut.partition("\n[... ")
    left, _, tail = rest.partition(" tokens left out ...]\n")
    assert text.startswith(head) and text.endswith(tail) and len(CHAT.tokenizer.encode(head + tail)) <= 102
    assert int(left) == len(CHAT.tokenizer.encode(text)) - 100
    assert Cap(CHAT.tokenizer, 10**6)(text) == text and Cap(CHAT.tokenizer, 100)("caf\u00e9" * 20) == "caf\u00e9" * 20


def test_a_broken_machine_is_tried_again_then_named_and_never_a_reward_of_0(monkeypatch):
    outcomes = pool(Engine([call("submit")]), monkeypatch, broken=1).run([Attempt("a", TASK, 0)])
    assert outcomes[0].trouble is None
    both = [Attempt("a", TASK, 0), Attempt("b", TASK, 0)]
    outcomes = pool(Engine([call("submit")]), monkeypatch, broken=2, workers=1).run(both)
    assert outcomes[0].trouble == "infra_sandbox" and outcomes[0].verdict is None and outcomes[1].trouble is None
    with pytest.raises(Broke, match="none of 2 attempts could be judged"):
        pool(Engine([call("submit")]), monkeypatch, broken=99).run(both)
    outcomes = pool(Engine([call("submit")]), monkeypatch, verdict=Verdict(False, valid=False)).run([Attempt("a", TASK, 0)])
    assert outcomes[0].trouble == "invalid_verdict"


def test_an_engine_that_breaks_ends_the_run_with_its_own_error(monkeypatch):
    engine = Engine([call("submit")])
    engine.generate = lambda *_: (_ for _ in ()).throw(RuntimeError("engine gone"))
    with pytest.raises(RuntimeError, match="engine gone"):
        pool(engine, monkeypatch).run([Attempt(f"a{i}", TASK, i) for i in range(6)])
    assert threading.active_count() < 20


def test_ctrl_c_ends_the_run_after_the_conversations_in_hand(monkeypatch):
    engine, said = Engine([call("submit")]), []

    def generate(session, *rest):
        if not said:
            os.kill(os.getpid(), signal.SIGINT)
        said.append(session)
        time.sleep(0.02)
        return Engine.generate(engine, session, *rest)

    engine.generate = generate
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background is born ignoring it
    try:
        with pytest.raises(KeyboardInterrupt):
            pool(engine, monkeypatch, workers=1).run([Attempt(f"a{i}", TASK, i) for i in range(100)])
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(said) < 50


def test_two_attempts_may_not_share_a_name(monkeypatch):
    with pytest.raises(ValueError, match="unique"):
        pool(Engine([]), monkeypatch).run([Attempt("a", TASK, 0), Attempt("a", TASK, 1)])
