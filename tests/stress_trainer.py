"""The trainer of tests/test_docker_stress.py: attempts with a scripted agent, one line of JSON for each one judged.

    python stress_trainer.py FOLDER IMAGE ATTEMPTS

It goes on after a kill: attempts whose line is in FOLDER/fates.jsonl are not made again.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from oprd.core.chat import Chat  # noqa: E402
from oprd.core.tokenizer import train_bpe  # noqa: E402
from oprd.core.types import ToolCall  # noqa: E402
from oprd.rollout.agent import AgentLimits  # noqa: E402
from oprd.rollout.attempts import Attempt, Attempts  # noqa: E402
from oprd.rollout.engine import Completion, Sampling  # noqa: E402
from oprd.sandbox.box import Broke, Limits  # noqa: E402
from oprd.sandbox.docker_host import DockerSettings  # noqa: E402
from oprd.sandbox.opener import opener  # noqa: E402
from oprd.sandbox.sweep import run_label  # noqa: E402
from sandbox_help import TASK  # noqa: E402

CHAT = Chat(train_bpe(["bash edit submit file_path command old_string <|im_end|>"], 300))


def expected(number: int) -> bool:
    """Two of three scripted agents solve the task."""
    return number % 3 != 0


class Script:
    """An engine whose replies are written beforehand: daemons, a wait, the edit, and it submits."""

    version = 0

    def __init__(self):
        self.turns: dict[str, int] = {}

    @contextmanager
    def worker(self):
        yield

    def generate(self, session, context_ids, sampling, seed, *deadline, **more):
        turn = self.turns[session] = self.turns.get(session, -1) + 1
        right = "a + b" if expected(int(session)) else "a * b"
        calls = [ToolCall("bash", {"command": "setsid sleep 300 & (sleep 301 &) ; sleep 0.3; cat src/words.py"}),
                 ToolCall("edit", {"file_path": "src/words.py", "old_string": "return a - b",
                                   "new_string": f"return {right}"}),
                 ToolCall("bash", {"command": "sleep 0.2; git status --short"}), ToolCall("submit", {})]
        ids = CHAT.assistant("", [calls[turn]])
        return Completion(ids, (-0.5,) * len(ids), 0, "stop")

    def forget(self, session):
        self.turns.pop(session, None)


def main(folder: Path, image: str, number: int) -> None:
    fates = folder / "fates.jsonl"
    done = {json.loads(line)["id"] for line in fates.read_text().splitlines()} if fates.exists() else set()
    limits = AgentLimits("", 6, 4000, 400, 2, 120.0, 30.0, 60.0, tool_set="coder")
    with open(fates, "a", buffering=1, encoding="utf-8") as out:
        def judged(outcome) -> None:
            out.write(json.dumps({"id": outcome.attempt.id, "trouble": outcome.trouble, "why": outcome.why[:300],
                                  "resolved": outcome.verdict.resolved if outcome.verdict else None,
                                  "reason": outcome.verdict.reason if outcome.verdict else None}) + "\n")

        while len(done) < number:
            open_box = opener("docker", Limits(command_s=30), run_label(folder), image, DockerSettings(warm=1))
            print(open_box.label, flush=True)
            try:
                open_box.sweep()
                sampling = Sampling(1.0, 1.0, 400, CHAT.stop_ids)
                pool = Attempts(Script(), CHAT, open_box, limits, sampling, 6, 3, retries=4)
                pool.run([Attempt(str(i), replace(TASK, instance_id=f"t{i}"), i) for i in range(number)
                          if str(i) not in done], on_done=judged)
            except Broke as problem:  # the engine is down just now
                print(problem, file=sys.stderr, flush=True)
                time.sleep(1)
            finally:
                open_box.close()
            done = {json.loads(line)["id"] for line in fates.read_text().splitlines()}


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
