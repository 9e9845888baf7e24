"""The rollout engine as the judge, with the real engine and a model that has really learnt to answer."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch
import torch.nn.functional as F

from oprd.core.chat import Chat
from oprd.core.model import Model, ModelConfig
from oprd.core.settings import Config
from oprd.core.tokenizer import train_bpe
from oprd.core.types import Observation, ToolCall
from oprd.rollout.ask import Asker, EngineChat
from oprd.rollout.endpoint import Counts
from oprd.rollout.engine import Sampling
from oprd.rollout.harness import Harness
from oprd.rollout.judge import Case
from oprd.rollout.model_judge import ModelJudge, instructions, question
from oprd.rollout.native import NativeEngine
from oprd.rollout.rubric import Rubric, load_rubric

torch.set_num_threads(1)
pytestmark = pytest.mark.timeout(300)
WHOLE = load_rubric()
RUBRIC = Rubric({"named_path_over_neighbor": WHOLE["named_path_over_neighbor"]})  # a short prompt
STATEMENT = 'Make `kemi` in `src/zuvo.py` return "lami".'
CASE = Case(STATEMENT, ((ToolCall("read", {"path": "src/bado.py"}), Observation("def kemi(mode): ...")),))
ANSWER = json.dumps({"decisions": [{"category": "named_path_over_neighbor", "turn": 0, "evidence": "def kemi(mode)",
                                    "confidence": 0.95, "slots": {"path": "src/zuvo.py"}}]})
SHOWN = json.dumps(question(CASE), ensure_ascii=False, indent=1)
CHAT = Chat(train_bpe([instructions(RUBRIC), SHOWN, ANSWER] * 3, 900))
NEW_TOKENS = len(CHAT.assistant(ANSWER)) + 8


@pytest.fixture(scope="module")
def model():
    """Two layers that have learnt by heart what to answer to this one question."""
    prompt = (*CHAT.open(instructions(RUBRIC), SHOWN), *CHAT.generation_ids)
    said = CHAT.assistant(ANSWER)
    made = Model(ModelConfig(vocab_size=CHAT.tokenizer.vocab_size, hidden_size=64, intermediate_size=96,
                             num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16)).init(0)
    ids, ends = torch.tensor([*prompt, *said]), torch.tensor([0, len(prompt) + len(said)])
    optimizer = torch.optim.AdamW(made.parameters(), lr=4e-3)
    for _ in range(300):
        loss = F.cross_entropy(made.logits(ids, ends)[len(prompt) - 1 : -1], ids[len(prompt):])
        if loss.item() < 0.01:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.05
    return made


def judging(engine, context=3000):
    return ModelJudge(RUBRIC, Asker(EngineChat(CHAT, context, NEW_TOKENS, engine), None, Counts()))


def test_a_policy_that_has_learnt_to_answer_judges_through_its_own_engine(model):
    engine = NativeEngine(model, 0)
    try:
        judge = judging(engine)
        [found] = judge.decide(CASE)
        assert (found.category, found.evidence, found.confidence) == ("named_path_over_neighbor", "def kemi(mode)", 0.95)
        assert "src/zuvo.py" in found.text and judge.asker.counts.take() == {"asked": 1, "answered": 1}
        deadline = time.monotonic() + 20
        while engine._sessions and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not engine._sessions  # nothing of a question stays cached
        short = judging(engine, context=100)
        assert short.decide(CASE) == [] and short.asker.counts.take() == {"asked": 1, "too_long": 1, "no_decision": 1}
    finally:
        engine.close()


def test_an_untrained_policy_answers_nothing_that_can_be_read_and_the_counts_say_so(model):
    engine = NativeEngine(Model(model.config).init(1), 0)
    try:
        judge = judging(engine)
        assert judge.decide(CASE) == []
        assert judge.asker.counts.take() == {"asked": 1, "malformed": 2, "no_decision": 1}
    finally:
        engine.close()


def test_questions_in_the_midst_of_lock_step_rollouts_neither_hang_nor_change_a_sample(model):
    """Announced workers ask between their turns, as reminders at run time do; twice the same to the bit."""
    def play():
        engine = NativeEngine(model, 0, rows=4)
        judge, how = judging(engine), Sampling(1.0, 1.0, 12, (CHAT.end_id,))

        def attempt(i, announced):
            with announced:
                context, said = [5 + i, 6, 7], []
                for turn in range(3):
                    done = engine.generate(f"a{i}", context, how, seed=i * 10 + turn)
                    said.append((done.ids, done.logprobs))
                    context = [*context, *done.ids, 9]
                    if (i + turn) % 2:  # not all of them ask at every turn
                        assert len(judge.decide(CASE)) == 1
                return said

        announced = [ExitStack() for _ in range(3)]
        for stack in announced:
            stack.enter_context(engine.worker())
        try:
            with ThreadPoolExecutor(3) as pool:
                return [f.result(timeout=120) for f in [pool.submit(attempt, i, announced[i]) for i in range(3)]]
        finally:
            engine.close()

    assert play() == play()


def test_after_the_rollouts_a_harness_asks_the_engine_from_announced_threads(model):
    config = Config.model_validate({"reminders": {"judge": "model", "judge_url": "engine", "judge_concurrency": 3,
                                                  "judge_body": json.dumps({"max_tokens": NEW_TOKENS})},
                                    "rollout": {"max_context_tokens": 3000}})
    made, engine = Harness(config, CHAT), NativeEngine(model, 0)
    try:
        made.pool(engine, config.rollout)
        seen, lock = [], threading.Lock()

        def ask(i):
            with lock:
                seen.append(engine._workers)
            return len(ModelJudge(RUBRIC, made.asker).decide(CASE))

        assert made.each(ask, range(7)) == [1] * 7 and max(seen) == 3 and engine._workers == 0
        assert made.judge_counts() == {"judge/asked": 7, "judge/answered": 7}
    finally:
        engine.close()
