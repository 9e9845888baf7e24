"""Scoring a failed attempt with the teacher: trunk once and a fork per reminded turn, against one forward per turn.

    python bench/teacher.py [turns] [reminded] [family]

A made-up attempt of 100 turns (about 32 tokens each, and a Global Reminder), 20 of which have a local reminder, and a
tiny model with random weights (default: qwen3_5_text, attention and delta-rule layers). FLOPs are counted as they are
run, causal attention at the pairs it needs. The floor is one forward over the trunk, and what the branches' tokens cost
without attention. The scores of both ways are compared token by token. About a minute on one core.
"""

import sys
import time
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from families_help import randomised  # noqa: E402

from oprd.core.batch import plant  # noqa: E402
from oprd.core.objective import read_forest  # noqa: E402
from oprd.core.types import Example, Row, View  # noqa: E402
from oprd.kernels.cross_entropy import token_nll  # noqa: E402

VOCABULARY = 37


def attempt(turns: int, reminded: int) -> tuple[Row, View, View]:
    """The student's row, the teacher's view (trunk and branches), and the same with one row for every turn."""
    draw = torch.Generator().manual_seed(0)
    ids = lambda n: torch.randint(VOCABULARY, (n,), generator=draw).tolist()  # noqa: E731
    context, student, targets, trunk = ids(40), [], [], []
    student, trunk = list(context), context + ids(30)  # the Global Reminder
    trunk_targets, branches, order, every = [], [], [], []
    with_reminder = {round(i * turns / reminded) for i in range(reminded)}
    for turn in range(turns):
        said, seen, reminder = ids(12), ids(20), ids(24)
        targets += range(len(student), len(student) + len(said))
        read = trunk + (reminder if turn in with_reminder else [])
        row = Row(torch.tensor(read + said).numpy(), torch.arange(len(read), len(read) + len(said)).numpy())
        every.append(row)
        if turn in with_reminder:
            branches.append((turn, row))
        else:
            trunk_targets += range(len(trunk), len(trunk) + len(said))
        student, trunk = student + said + seen, trunk + said + seen
    rows = [Row(torch.tensor(trunk).numpy(), torch.tensor(trunk_targets).numpy()), *(row for _, row in branches)]
    plain = [t for t in range(turns) if t not in with_reminder]
    place = {t: i for i, t in enumerate([*plain, *(t for t, _ in branches)])}
    order = torch.tensor([place[t] * 12 + j for t in range(turns) for j in range(12)]).numpy()
    whole = Row(torch.tensor(student).numpy(), torch.tensor(targets).numpy())
    return whole, View(tuple(rows), order), View(tuple(every), torch.arange(12 * turns).numpy())


def attention_flops(q, k, v, *args, out_shape=None, **kwargs) -> int:
    """Of a causal attention in which n queries are the last of L keys: two products of K for every pair."""
    rows, n, L, size = q[0] * q[1], q[2], k[2], q[3]
    return 4 * rows * size * (n * (L - n) + n * (n + 1) // 2)


COUNTED = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_flops}


def run(score) -> tuple[torch.Tensor, float, float]:
    """What score() gives, its FLOPs, and its CPU seconds."""
    with FlopCounterMode(display=False, custom_mapping=COUNTED) as counter:
        score()
    start = time.process_time()
    found = score()
    return found, counter.get_total_flops(), time.process_time() - start


def main() -> int:
    torch.set_num_threads(1)
    turns, reminded = (int(x) for x in (sys.argv[1:3] or (100, 20)))
    model = randomised(sys.argv[3] if len(sys.argv) > 3 else "qwen3_5_text")
    row, view, slow = attempt(turns, reminded)
    weights = {"kl": torch.ones(len(row.targets)).numpy()}
    forest, index = plant([Example(row, weights, "failure", view, source="made up")])
    wanted = torch.from_numpy(row.ids[row.targets])

    @torch.no_grad()
    def forked():
        return -token_nll(read_forest(model, forest).index_select(0, index), model.head_weight, wanted)

    @torch.no_grad()
    def turn_by_turn():
        found = []
        for one in slow.rows:
            hidden = model.hidden(torch.from_numpy(one.ids), torch.tensor([0, len(one.ids)], dtype=torch.int32))
            at = torch.from_numpy(one.targets)
            found.append(-token_nll(hidden[at - 1], model.head_weight, torch.from_numpy(one.ids)[at]))
        return torch.cat(found)

    @torch.no_grad()
    def trunk(tokens=None):
        ids = torch.from_numpy(view.rows[0].ids)[:tokens]
        return model.hidden(ids, torch.tensor([0, len(ids)], dtype=torch.int32))

    ours, flops, seconds = run(forked)
    theirs, slow_flops, slow_seconds = run(turn_by_turn)
    _, trunk_flops, trunk_seconds = run(trunk)
    branches = view.tokens() - len(view.rows[0].ids)
    floor = trunk_flops + branches * run(lambda: trunk(64))[1] / 64
    far = (ours - theirs).abs().max().item()
    print(f"{turns} turns, {reminded} reminded: trunk {len(view.rows[0].ids)} tokens, branches {branches}, "
          f"one row per turn {sum(len(r.ids) for r in slow.rows)} tokens")
    print(f"scores differ by at most {far:.1e}")
    print(f"FLOPs: forked {flops / 1e9:.2f} G = {flops / floor:.2f} x (trunk + branches); one forward per turn "
          f"{slow_flops / 1e9:.2f} G = {slow_flops / flops:.1f} x forked")
    print(f"CPU time: forked {seconds:.2f} s, trunk alone {trunk_seconds:.2f} s, one forward per turn "
          f"{slow_seconds:.2f} s = {slow_seconds / seconds:.1f} x forked")
    good = far < 1e-3 and flops <= 1.25 * floor and slow_flops >= 10 * flops
    print("within the bars" if good else "OUTSIDE the bars: 1.25 x (trunk + branches), 10 x fewer than turn by turn")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
