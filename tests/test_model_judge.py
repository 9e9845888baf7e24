"""The judge that is a model: what it is shown, what of its answers counts, and that no answer harms a run."""

import json
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from judge_server import drop, garbage, half_a_body, hang, says, serving, status
from oprd.core.chat import Chat
from oprd.core.settings import Config
from oprd.core.types import Ending, Observation, Reminder, ToolCall, Trajectory, Turn
from oprd.rollout.ask import Asker, EngineChat, asker_of
from oprd.rollout.attempts import Attempt, Outcome
from oprd.rollout.endpoint import Counts, Endpoint, EndpointSettings, NoAnswer
from oprd.rollout.engine import Completion
from oprd.rollout.harness import Harness
from oprd.rollout.judge import Case, Probe
from oprd.rollout.judge_cache import Cache
from oprd.rollout.model_judge import MAX_LATEST, RECENT, ModelJudge, cut, instructions, question
from oprd.rollout.rubric import load_rubric
from oprd.rollout.select import SelectSettings, annotate_trajectory, remind, select
from oprd.sandbox.microswe import generate
from oprd.sandbox.verify import Verdict

RUBRIC = load_rubric()
STATEMENT = 'Make `kemi` in `src/zuvo.py` return "lami".'
READ = (ToolCall("read", {"path": "src/bado.py"}), Observation("def  kemi(mode):\n    return 1"))
EDIT = (ToolCall("edit", {"path": "src/zuvo.py", "old_string": "x", "new_string": "y"}), Observation("updated."))
BROKEN = (None, Observation("Invalid reply: no tool call found", is_error=True))
FAILED = (ToolCall("bash", {"command": "python check.py"}), Observation("FAIL test_bolo: 'a' != 'b'", 1, True))
GOOD = {"category": "named_path_over_neighbor", "turn": 0, "evidence": "def kemi(mode):", "confidence": 0.95,
        "slots": {"path": "src/zuvo.py"}}


class Says:
    """A completer with fixed answers, the last for ever; an exception is raised."""

    identity = "model"

    def __init__(self, *answers):
        self.answers, self.asked = list(answers), []

    def complete(self, messages):
        self.asked.append(json.loads(json.dumps(messages)))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def answer(*decisions):
    return json.dumps({"decisions": list(decisions)})


def judge(completer, cache=None):
    return ModelJudge(RUBRIC, Asker(completer, cache, Counts()))


def decide(completer, *turns, **more):
    made = judge(completer)
    return made.decide(Case(STATEMENT, turns or (READ,), **more)), made.asker.counts.take()


# --- what it is shown

def test_the_prompt_holds_every_contextual_category_of_the_rubric_and_no_hard_one():
    text = instructions(RUBRIC)
    for category in RUBRIC.contextual:
        assert all(part in text for part in (category.name, category.class_, category.trigger, category.action))
    assert len(RUBRIC.contextual) == 22 and not any(category.name in text for category in RUBRIC.hard)


def test_a_users_rubric_file_changes_the_prompt(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('[one_condition_repair]\nenabled = false\n[mine]\nclass = "R2"\nfamily = "source_path_slot"\n'
                    'provenance = "ours"\ntrigger = "It rains."\naction = "Wait."\n')
    text = instructions(load_rubric(file))
    assert "one_condition_repair" not in text and "It rains." in text


def test_a_question_holds_the_task_the_recent_turns_the_latest_result_and_earlier_reminders():
    given = Reminder("one_condition_repair", "R3", "one only", "seen", 0)
    shown = question(Case(STATEMENT, (READ, BROKEN, FAILED), (given,)))
    assert set(shown) == {"task", "earlier_turns", "latest", "reminders_before"}
    assert shown["task"] == STATEMENT and shown["earlier_turns"][1]["call"] is None
    assert shown["latest"] == {"turn": 2, "call": {"tool": "bash", "arguments": {"command": "python check.py"}},
                               "exit_code": 1, "is_error": True, "output": "FAIL test_bolo: 'a' != 'b'"}
    assert shown["reminders_before"] == [{"after_turn": 0, "category": "one_condition_repair", "text": "one only"}]
    assert [t["turn"] for t in question(Case("s", (READ,) * 30))["earlier_turns"]] == list(range(29 - RECENT, 29))


def test_a_long_text_keeps_its_head_and_its_tail():
    assert cut("a" * MAX_LATEST, MAX_LATEST) == "a" * MAX_LATEST
    text = cut("head" + "x" * 10_000 + "tail", 100)
    assert text.startswith("head") and text.endswith("tail") and "9908 characters left out" in text and len(text) < 150


def trajectory(turns, submits=False):
    made = tuple(Turn((1,), (2,), call=call, observation=seen, text="SECRET") for call, seen in turns)
    made += (Turn((1,), (2,), call=ToolCall("submit", {})),) if submits else ()
    return Trajectory("a", "t", made, (9,), Ending.SUBMITTED)


def numbered(i, rng):
    call, seen = rng.choice([READ, EDIT, FAILED, BROKEN])
    return call, Observation(f"{seen.output} mark{i}.", seen.exit_code, seen.is_error)


@pytest.mark.parametrize("seed", range(40))
def test_removing_everything_after_observation_k_never_changes_the_request_at_k(seed):
    rng = random.Random(seed)
    turns = [numbered(i, rng) for i in range(rng.randint(2, 14))]

    def requests(kept):
        names = [c.name for c in RUBRIC.contextual]
        model = Says(answer(*({**GOOD, "category": rng.choice(names), "turn": -1, "evidence": "kemi", "slots": {}}
                              for rng in [random.Random(seed)])))
        annotation = annotate_trajectory(STATEMENT, trajectory(kept), RUBRIC, judge(model))
        return {json.loads(m[1]["content"])["latest"]["turn"]: m for m in model.asked}, annotation.reminders

    (whole, reminders), k = requests(turns), rng.randrange(len(turns))
    part, some = requests(turns[: k + 1])
    assert part == {i: m for i, m in whole.items() if i <= k}
    assert some == {i: r for i, r in reminders.items() if i <= k}
    for i, messages in whole.items():
        assert not any(f"mark{later}." in json.dumps(messages) for later in range(i + 1, len(turns)))


class Whimsical:
    """A model whose answer is a pure function of what it is shown: some decisions, of any confidence and phase."""

    identity = "whim"

    def complete(self, messages):
        rng = random.Random(Cache.key([dict(m) for m in messages]))
        names = [c.name for c in RUBRIC.contextual]
        return answer(*({**GOOD, "category": rng.choice(names), "turn": -1, "evidence": "kemi", "slots": {},
                         "confidence": rng.choice([0.5, 0.9, 0.95, 1.0])} for _ in range(rng.randint(0, 4))))


@pytest.mark.parametrize("seed", range(60))
def test_removing_everything_after_observation_k_never_changes_what_is_decided_or_dropped_at_k(seed):
    rng = random.Random(seed)
    turns = [numbered(i, rng) for i in range(rng.randint(2, 14))]
    settings = SelectSettings(budget=rng.choice([1, 3, 20]), family_cap=rng.choice([1, 3]))
    whole = annotate_trajectory(STATEMENT, trajectory(turns, rng.random() < 0.5), RUBRIC, judge(Whimsical()), settings)
    k = rng.randrange(len(turns))
    part = annotate_trajectory(STATEMENT, trajectory(turns[: k + 1]), RUBRIC, judge(Whimsical()), settings)
    assert part.reminders == {i: r for i, r in whole.reminders.items() if i <= k}
    assert part.dropped == tuple(d for d in whole.dropped if d.turn <= k)


def test_in_active_mode_the_model_sees_the_planned_action_and_may_quote_it():
    plan = Probe(ToolCall("edit", {"path": "src/bado.py", "old_string": "alpha", "new_string": "beta"}))
    model = Says(answer({**GOOD, "turn": 1, "evidence": "alpha"}))
    [found] = judge(model).decide(Case(STATEMENT, (READ,), probe=plan))
    shown = json.loads(model.asked[0][1]["content"])
    assert shown["planned"] == {"turn": 1, "call": {"tool": "edit", "arguments": dict(plan.call.arguments)}}
    assert found.evidence == "alpha" and "planned" not in question(Case(STATEMENT, (READ,)))
    assert question(Case(STATEMENT, (READ,), probe=Probe(None)))["planned"]["call"] is None


def test_nothing_of_the_verifier_or_of_the_task_beside_its_statement_is_shown():
    task = SimpleNamespace(problem_statement=STATEMENT, patch="SECRET", test_patch="SECRET", meta={"right": "SECRET"},
                           fail_to_pass=("SECRET",), pass_to_pass=("SECRET",), instance_id="SECRET", repo="SECRET")
    model = Says(answer(GOOD))
    assert remind(RUBRIC, judge(model))(task, [READ, EDIT], []).category == GOOD["category"]
    annotate_trajectory(STATEMENT, trajectory([READ, FAILED]), RUBRIC, judge(model))
    assert len(model.asked) == 3 and "SECRET" not in json.dumps(model.asked)


# --- what of an answer counts

def test_a_grounded_decision_becomes_a_candidate_with_the_rubrics_text():
    [found], counts = decide(Says(answer(GOOD)))
    assert found.text == RUBRIC[found.category].action.replace("{path}", "src/zuvo.py")
    assert (found.category, found.evidence, found.confidence) == (GOOD["category"], "def kemi(mode):", 0.95)
    assert counts == {"asked": 1, "answered": 1}
    [bare], _ = decide(Says(answer({k: v for k, v in GOOD.items() if k != "slots"})))
    assert "the named path" in bare.text


@pytest.mark.parametrize("wrap", ["{}", "```json\n{}\n```", "```\n{}\n```", "<think>\nhm {{\n</think>\n\n{}", " {}\n"])
def test_a_think_block_and_a_code_fence_are_taken_off(wrap):
    text = wrap.replace("{{", "(").replace("{}", answer(GOOD))
    assert len(decide(Says(text))[0]) == 1


@pytest.mark.parametrize("change", [{"evidence": "def kemo"}, {"turn": -1}, {"turn": 1}, {"turn": 99}, {"turn": -2},
                                    {"slots": {"path": "src/made_up.py"}}])
def test_a_decision_with_an_invented_quote_is_left_out_and_counted(change):
    found, counts = decide(Says(answer({**GOOD, **change}, {**GOOD, "confidence": 1})), READ, EDIT)
    assert [c.confidence for c in found] == [1.0]
    assert counts == {"asked": 1, "answered": 1, "invented_quote": 1}


MALFORMED = [
    "", "yes", "null", "[]", "{}", '{"decisions": {}}', '{"decisions": null}', '{"decisions": [1]}', "[" * 100_000,
    '{"decisions": [], "why": "x"}', answer() + answer(), "Here: " + answer(GOOD), answer(GOOD)[:-5],
    answer({**GOOD, "reminder": "x"}), answer({k: v for k, v in GOOD.items() if k != "turn"}),
    *(answer({**GOOD, **change}) for change in (
        {"category": "made_up"}, {"category": "hard_malformed_search"}, {"category": None}, {"category": ["a"]},
        {"turn": "0"}, {"turn": True}, {"turn": 0.5}, {"confidence": 1.5}, {"confidence": -0.1}, {"confidence": "0.9"},
        {"confidence": True}, {"confidence": float("nan")}, {"confidence": float("inf")}, {"evidence": ""},
        {"evidence": " \n"}, {"evidence": 3}, {"evidence": "x" * 301}, {"slots": None}, {"slots": []},
        {"slots": {"file": "a"}}, {"slots": {"path": 3}}, {"slots": {"path": ""}})),
]


@pytest.mark.parametrize("text", MALFORMED, ids=range(len(MALFORMED)))
def test_a_malformed_answer_is_asked_for_once_more_and_is_then_no_decision(text):
    model = Says(text)
    assert decide(model) == ([], {"asked": 1, "malformed": 2, "no_decision": 1})
    assert len(model.asked) == 2
    model = Says(text, answer(GOOD))
    found, counts = decide(model)
    assert len(found) == 1 and counts == {"asked": 1, "malformed": 1, "answered": 1}
    first, second = model.asked
    assert second[: 2] == first and (not text or second[-1]["content"].startswith("That answer cannot be used: "))


def test_an_empty_list_is_a_decision():
    assert decide(Says(answer())) == ([], {"asked": 1, "answered": 1})


def test_a_turn_without_a_call_is_not_asked_about():
    assert decide(Says(NoAnswer("failed")), READ, BROKEN) == ([], {})
    assert decide(Says(NoAnswer("failed")), READ) == ([], {"asked": 1, "no_decision": 1})


def test_gates_of_the_selection_hold_for_a_model_too():
    unsure, early = {**GOOD, "confidence": 0.89}, {**GOOD, "category": "change_surface_budget_guard", "slots": {}}
    chosen = select(Case(STATEMENT, (READ,)), RUBRIC, judge(Says(answer(unsure, early))))
    assert chosen.reminder is None
    assert [d.reason for d in chosen.dropped] == ["phase after_edit is not visible", "confidence 0.89 below 0.90"]


# --- the cache

def test_a_rerun_asks_nothing_and_an_answer_that_could_not_be_read_is_not_kept(tmp_path):
    case = Case(STATEMENT, (READ,))
    first = judge(Says("nonsense"), Cache(tmp_path))
    assert first.decide(case) == [] and not list(tmp_path.glob("*/*"))
    second = judge(Says("nonsense", answer(GOOD)), Cache(tmp_path))
    decided = second.decide(case)
    again = judge(Says(AssertionError("asked")), Cache(tmp_path))
    assert again.decide(case) == decided != [] and again.asker.counts.take() == {"asked": 1, "cached": 1}
    other = Says(answer())
    other.identity = "another model"
    assert judge(other, Cache(tmp_path)).decide(case) == [] and len(other.asked) == 1


def test_a_kept_answer_that_is_no_longer_readable_is_asked_for_again_and_replaced(tmp_path):
    case = Case(STATEMENT, (READ,))
    judge(Says(answer(GOOD)), Cache(tmp_path)).decide(case)
    [file] = tmp_path.glob("*/*.json")
    file.write_text(json.dumps({"request": file.stem, "answer": "damaged"}))
    made = judge(Says(answer(GOOD)), Cache(tmp_path))
    assert len(made.decide(case)) == 1 and made.asker.counts.take() == {"asked": 1, "answered": 1}
    assert json.loads(file.read_text())["answer"] == answer(GOOD)


# --- against a server, and in a run

@pytest.mark.parametrize("trouble", [garbage, hang, drop, half_a_body, status(429), status(500), status(404),
                                     says("no JSON"), says('{"decisions": "wrong shape"}')])
def test_whatever_the_server_does_a_trajectory_is_annotated_and_the_counts_add_up(trouble):
    counts = Counts()
    told = trajectory([READ, FAILED, (READ[0], Observation("File does not exist: src/bado.py", None, True))])
    with serving(trouble) as server:
        settings = EndpointSettings(server.url, "m", request_s=0.15, total_s=0.3, backoff_s=0.05)
        made = ModelJudge(RUBRIC, Asker(Endpoint(settings, counts), None, counts))
        reminders = annotate_trajectory(STATEMENT, told, RUBRIC, made).reminders
    assert [r.category for r in reminders.values()] == ["hard_missing_file_path_narrow"]  # hard rules need no judge
    seen = counts.take()
    assert seen["asked"] == seen["no_decision"] == 2 and len(seen) > 2


def config(tmp_path, **reminders):
    return Config.model_validate({"run": {"folder": str(tmp_path)}, "reminders": {"judge": "model", **reminders}})


def test_a_harness_asks_the_endpoint_of_its_settings_and_its_counts_are_metrics(tmp_path):
    with serving(says(answer(GOOD))) as server:
        made = Harness(config(tmp_path, judge_url=server.url, judge_model="m", micro_texts=False), chat=None)
        told = trajectory([READ])
        found = made.each(lambda t: annotate_trajectory(STATEMENT, t, made.rubric, made.judge), [told, told])
        assert [list(a.reminders) for a in found] == [[0], [0]]
        assert server.seen[0] == {**server.seen[0], "model": "m", "temperature": 0, "max_tokens": 1024}
    counts = made.judge_counts()
    assert counts["judge/asked"] == 2 and counts.get("judge/cached", 0) + counts["judge/answered"] == 2
    assert made.judge_counts() == {} and list((tmp_path / "judge").glob("*/*.json"))


def test_a_failed_attempt_gets_its_reminders_from_the_model_and_from_the_patterns_where_it_says_nothing(tmp_path):
    task = generate(3, 0)
    verdict = Verdict(False, patch_applied=True, touched=("src/a.py",), failed_f2p=task.fail_to_pass, log="Killed")
    outcome = Outcome(Attempt("a", task, 0), trajectory([READ], submits=True), verdict=verdict)
    with serving(says(answer(GOOD))) as server:  # which is no answer to the evidence judge's question
        made = Harness(config(tmp_path, judge_url=server.url, judge_model="m"), chat=None)
        told = trajectory([(READ[0], Observation("def kemi(mode): src/zuvo.py"))], submits=True)
        shown = made.reminded(replace(outcome, trajectory=told))
        assert shown.local[0].category == GOOD["category"] and "did not pass" in shown.global_.text
    assert made.judge_counts() == {"judge/asked": 2, "judge/answered": 1, "judge/malformed": 2, "judge/no_decision": 1}
    with serving(status(500)) as server:
        gone = Harness(config(tmp_path, judge_url=server.url, judge_model="other", judge_total_s=0.3), chat=None)
        shown = gone.reminded(outcome)
        assert shown.local == {} and "did not pass" in shown.global_.text
    assert gone.judge_counts() == {"judge/asked": 2, "judge/no_decision": 2, "judge/failed": 2}


def test_the_scripted_judge_has_no_counts_and_no_threads():
    made = Harness(Config(), chat=None)
    assert made.asker is None and made.judge_counts() == {} and made.each(str, [1, 2]) == ["1", "2"]


@pytest.mark.parametrize("settings, message", [
    ({}, "must look like http"), ({"judge_url": "http://h/v1"}, "reminders.judge_model"),
    ({"judge_url": "http://h/v1", "judge_model": "m", "judge_body": "[]"}, "judge_body = '\\[\\]' must be a JSON"),
    ({"judge_url": "http://h/v1", "judge_model": "m", "judge_body": '{"stream": true}'}, "without model"),
    ({"judge_url": "http://h/v1", "judge_model": "m", "judge_key_variable": "NO_SUCH_KEY"}, "NO_SUCH_KEY")])
def test_settings_that_cannot_work_are_an_error_before_the_run(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        asker_of(config(tmp_path, **settings), None)


# --- the rollout engine as the judge

class Engine:
    """Replies with fixed ids and remembers the contexts."""

    def __init__(self, *replies):
        self.replies, self.contexts, self.open = list(replies), [], set()

    def generate(self, session, ids, sampling, seed, seconds=None):
        self.contexts.append(tuple(ids))
        self.open.add(session)
        assert sampling.temperature == 0
        ids, finish = self.replies.pop(0)
        return Completion(ids, (0.0,) * len(ids), 0, finish)

    def forget(self, session):
        self.open.remove(session)


@pytest.fixture(scope="module")
def chat():
    from oprd.core.tokenizer import train_bpe
    return Chat(train_bpe(["a text about nothing in particular"] * 3, 300))


def test_the_engine_answers_in_the_policys_own_frame(chat):
    said = chat.assistant(answer(GOOD))
    engine = Engine((chat.assistant("no"), "stop"), (said, "stop"))
    completer = EngineChat(chat, 100_000, 1000, engine)
    found, counts = decide(completer)
    assert len(found) == 1 and counts == {"asked": 1, "malformed": 1, "answered": 1}
    first, second = engine.contexts
    assert first[-len(chat.generation_ids):] == chat.generation_ids and not engine.open
    assert second[: len(first)] == first and second[len(first):][: len(chat.assistant("no"))] == chat.assistant("no")
    assert chat.open(instructions(RUBRIC), "")[:50] == first[:50]


def test_an_engine_reply_that_is_cut_is_malformed_and_a_question_too_long_for_it_is_refused(chat):
    cut_short = chat.assistant(answer(GOOD))[:-1]
    engine = Engine((cut_short, "length"), (cut_short, "length"))
    assert decide(EngineChat(chat, 100_000, 1000, engine))[1] == {"asked": 1, "malformed": 2, "no_decision": 1}
    assert decide(EngineChat(chat, 500, 100, engine))[1] == {"asked": 1, "too_long": 1, "no_decision": 1}
    assert decide(EngineChat(chat, 100_000, 1000))[1] == {"asked": 1, "no_decision": 1}
