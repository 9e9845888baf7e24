"""Pools of gloo workers, one per size, started once: ranks(2).run(function, *arguments) runs it on every rank."""

import atexit
import functools
import multiprocessing
import os
import tempfile
import traceback

import torch
import torch.distributed as dist

SECONDS = 170  # a starved machine needs them
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "numpy"])


class Ranks:
    def __init__(self, size: int):
        handle, self._file = tempfile.mkstemp()
        os.close(handle)
        os.remove(self._file)  # the rendezvous makes it
        self._pipes, self._workers = [], []
        for rank in range(size):
            here, there = CONTEXT.Pipe()
            worker = CONTEXT.Process(target=_serve, args=(there, rank, size, self._file), daemon=True)
            worker.start()
            there.close()
            self._pipes.append(here)
            self._workers.append(worker)

    def run(self, function, *arguments) -> list:
        """What function(*arguments) returns on every rank, in their order. An error on one is an AssertionError here,
        with its traceback; the pool is then of no more use."""
        for pipe in self._pipes:
            pipe.send((function, arguments))
        found, waiting = [None] * len(self._pipes), dict(enumerate(self._pipes))
        while waiting:
            ready = multiprocessing.connection.wait(waiting.values(), timeout=SECONDS)
            if not ready:
                self._end(f"ranks {sorted(waiting)} gave no answer within {SECONDS} s")
            for rank in [r for r, pipe in waiting.items() if pipe in ready]:
                try:
                    good, value = waiting.pop(rank).recv()
                except EOFError:
                    self._end(f"rank {rank} died")
                if not good:
                    self._end(f"rank {rank}:\n{value}")
                found[rank] = value
        return found

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.join()
        if os.path.exists(self._file):
            os.remove(self._file)

    def _end(self, why: str):
        self.close()
        ranks.cache_clear()
        raise AssertionError(why)


@functools.cache
def ranks(size: int) -> Ranks:
    """The pool of this many workers."""
    pool = Ranks(size)
    atexit.register(pool.close)
    return pool


def _serve(pipe, rank: int, size: int, file: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=size)
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(*arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
