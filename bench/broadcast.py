"""What bringing new weights to a real SGLang server costs, over what gloo needs for the same bytes in the same run.

    OPRD_SGLANG=FOLDER python bench/broadcast.py [MB of weights] [MiB of a bucket] [updates]

The floor: a process of our own takes part in a group made in the same way and receives the same buckets. The cost: the
time from the first bucket to the server's word on the last one; beside it, a whole update from pause to proof. Both sides
share this machine's cores. Memory: the largest growth of this process while buckets are sent.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from oprd.core import hf
from oprd.core.model import Model, ModelConfig
from oprd.core.publish import Publisher
from oprd.core.settings import Config
from oprd.parallel.broadcast import Group
from oprd.rollout.serve import serve

MIB = 2**20


def peer(port: int, count: int, *sizes: int) -> None:
    """The other side of the floor: receives buckets of these sizes, `count` times."""
    limit = timedelta(seconds=120)
    store, _, _ = next(c10d.rendezvous(f"tcp://127.0.0.1:{port}", 1, 2, timeout=limit))
    group, _ = c10d._new_process_group_helper(2, 1, [], dist.Backend("gloo"), dist.PrefixStore("floor", store),
                                              group_name="floor", timeout=limit)
    buffers = [torch.ones(size, dtype=torch.uint8) for size in sizes]  # pages in place: the wire alone is measured
    for _ in range(count):
        for buffer in buffers:
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = 0, 0
            group.broadcast([buffer], options).wait()


def floor(publisher, model, count: int) -> float:
    """Seconds to bring all buckets to a process that does nothing else: the median."""
    data = [bucket.data.clone() for bucket in publisher.buckets(model)]
    group = Group("gloo", 2, "floor", 120.0)
    other = subprocess.Popen([sys.executable, __file__, "peer", str(group.port), str(count),
                              *(str(len(d)) for d in data)])
    group.join()
    taken = []
    for _ in range(count):
        began = time.perf_counter()
        for part in data:
            group.send(part).wait()
        taken.append(time.perf_counter() - began)
    other.wait()
    group.close()
    return statistics.median(taken)


class Memory:
    """Largest resident memory of this process above what it was at the start, bytes."""

    def __enter__(self):
        self._page, self.most, self._end = os.sysconf("SC_PAGE_SIZE"), 0, threading.Event()
        self._start = self._now()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _now(self) -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * self._page

    def _watch(self) -> None:
        while not self._end.wait(0.002):
            self.most = max(self.most, self._now() - self._start)

    def __exit__(self, *_):
        self._end.set()
        self._thread.join()


def main(megabytes: float, bucket_mib: int, updates: int) -> None:
    torch.set_num_threads(1)
    layers = max(1, round(megabytes * 1e6 / 4 / 6.2e6) - 1)
    config = ModelConfig(vocab_size=4096, hidden_size=640, intermediate_size=2560, num_hidden_layers=layers,
                         num_attention_heads=10, num_key_value_heads=5, head_dim=64, tie_word_embeddings=False,
                         max_position_embeddings=512)
    model = Model(config).init(0).requires_grad_(False)
    python = Path(os.environ["OPRD_SGLANG"]) / "bin" / "python"
    os.environ["SGLANG_PYTHON"], os.environ["SGLANG_CPU"] = str(python), "1"
    with tempfile.TemporaryDirectory() as folder:
        hf.save(model, Path(folder) / "model")
        command = "launch/sglang.sh {model} {port} --dtype float32 --max-total-tokens 4096"
        settings = Config.model_validate({"run": {"folder": folder}, "rollout": {"max_context_tokens": 256},
                                          "sglang": {"command": command, "bucket_mib": bucket_mib, "ready_s": 900,
                                                     "probe_tolerance": 1e-4}})
        publisher = Publisher(Path(folder) / "model", "", bucket_mib * MIB, "gloo", 120.0)
        size = sum(len(bucket.data) for bucket in publisher.buckets(model))
        engine = serve(settings, publisher, Path(folder) / "model", model, 0)
        try:
            updater, sent, whole, grown = engine._updater, [], [], []
            plain = updater._broadcast

            def timed(*given):
                with Memory() as memory:
                    began = time.perf_counter()
                    plain(*given)
                    sent.append(time.perf_counter() - began)
                grown.append(memory.most)

            updater._broadcast = timed
            floors = []
            for version in range(1, updates + 1):
                floors.append(floor(publisher, model, 3))
                engine.load(model, version)
                whole.append(updater.last_s)
        finally:
            engine.close()
    least, cost = statistics.median(floors), statistics.median(sent)
    print(f"{size / 1e6:.0f} MB in buckets of {bucket_mib} MiB, {updates} updates, medians:")
    print(f"floor    {least:.3f} s ({size / least / 1e9:.2f} GB/s)")
    print(f"weights  {cost:.3f} s: {cost / least:.2f}x (each: "
          + ", ".join(f"{a / b:.2f}" for a, b in zip(sent, floors)) + ")")
    print(f"update   {statistics.median(whole):.3f} s from pause to proof: {statistics.median(whole) / least:.2f}x")
    print(f"memory   {max(grown) / MIB:.0f} MiB more at most, {max(grown) / MIB / bucket_mib:.2f} buckets")


if __name__ == "__main__":
    if sys.argv[1:2] == ["peer"]:
        peer(*map(int, sys.argv[2:]))
    else:
        given = [float(a) for a in sys.argv[1:]] + [200.0, 32.0, 5.0][len(sys.argv) - 1:]
        main(given[0], int(given[1]), int(given[2]))
