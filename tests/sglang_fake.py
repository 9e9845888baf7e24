"""A scripted SGLang server: the real wire, a real small model behind it, and as badly behaved as a test asks.

It keeps a prefix cache (of logits, by whole prefix) that only a flush empties, takes hostile defaults for every field
that a request leaves out, and has the weight-update calls of a version before or after 0.5.21 (`sessions`). `script`
holds what becomes of the next generate requests, one word each: see `Fake.generate`.
"""

import copy
import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

from oprd.core import hf

HOSTILE = {"temperature": 9.0, "top_p": 0.01, "top_k": 1, "min_p": 0.9, "max_new_tokens": 1, "min_new_tokens": 0,
           "n": 2, "frequency_penalty": 2.0, "presence_penalty": 2.0, "repetition_penalty": 9.0, "stop": ["e"],
           "stop_regex": None, "stop_token_ids": list(range(0, 512, 2)), "ignore_eos": True, "logit_bias": {"5": 50.0},
           "json_schema": "{}", "regex": "a", "ebnf": "a", "structural_tag": "a", "skip_special_tokens": True,
           "spaces_between_special_tokens": True, "no_stop_trim": False, "sampling_seed": 0}


class Fake(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, model, sessions=False, token_s=0.0):
        self.model, self.sessions, self.token_s = copy.deepcopy(model).requires_grad_(False), sessions, token_s
        self.cache, self.label, self.script, self.seen = {}, "default", [], []
        self.paused, self.in_session, self.running, self.aborted = False, False, {}, set()
        self.refuse = {}  # path -> how often it is refused
        self.groups, self.lock, self.changed = {}, threading.RLock(), threading.Condition()
        self.ignored = set()  # parameter names that it does not know
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def handle_error(self, request, client_address):
        pass

    def kill(self):
        """As a killed process: connections break, nothing listens any more."""
        with self.changed:
            self.script = ["killed"] * 1000
            self.aborted |= set(self.running)
            self.changed.notify_all()
        self.shutdown()
        self.server_close()

    # --- calls

    def answer(self, path, body):
        """(status, object) for a control call; None: no such path."""
        if self.refuse.get(path, 0) > 0:
            self.refuse[path] -= 1
            return 400, {"success": False, "message": f"{path} refused"}
        name = path.strip("/")
        if name in ("begin_weight_update", "end_weight_update") and not self.sessions:
            return None
        do = getattr(self, f"do_{name}", None)
        return None if do is None else do(body)

    def do_health(self, body):
        """As the real one: it samples a token, so a paused server is not healthy."""
        with self.changed:
            well = self.changed.wait_for(lambda: not self.paused, 20)
        return (200 if well else 503), {}

    def do_model_info(self, body):
        return 200, {"model_path": "fake"}

    def do_server_info(self, body):
        return 200, {"tp_size": 1, "dp_size": 1, "pp_size": 1, "dtype": "float32", "max_req_input_len": 4096}

    def do_pause_generation(self, body):
        with self.changed:
            assert body["mode"] == "abort"
            self.paused = True
            self.aborted |= set(self.running)
            self.changed.wait_for(lambda: not self.running, 10)
        return 200, {"status": "ok"}

    def do_continue_generation(self, body):
        with self.changed:
            self.paused = False
            self.changed.notify_all()
        return 200, {"status": "ok"}

    def do_abort_request(self, body):
        with self.changed:
            self.aborted |= {rid for rid in self.running if rid.startswith(body["rid"])}
        return 200, {}

    def do_flush_cache(self, body):
        if self.running:
            return 400, {"message": "Flush cache failed."}
        self.cache.clear()
        return 200, {}

    def do_begin_weight_update(self, body):
        if self.in_session:
            return 400, {"success": False, "message": "already begun"}
        self.in_session = True
        return 200, {"success": True}

    def do_end_weight_update(self, body):
        if not self.in_session:
            return 400, {"success": False, "message": "not begun"}
        self.in_session = False
        return 200, {"success": True}

    def do_init_weights_update_group(self, body):
        self.groups[body["group_name"]] = PIPES[body["group_name"]]
        return 200, {"success": True}

    def do_destroy_weights_update_group(self, body):
        return 200, {"success": self.groups.pop(body["group_name"], None) is not None}

    def do_update_weights_from_distributed(self, body):
        if self.sessions and not self.in_session:
            return 400, {"success": False, "message": "must run between begin_weight_update() and end_weight_update()"}
        flat, state, at = self.groups[body["group_name"]].receive(), self.model.state_dict(), 0
        for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"]):
            size = torch.Size(shape).numel() * getattr(torch, dtype).itemsize
            tensor, at = flat[at : at + size].view(getattr(torch, dtype)).view(shape), at + size
            if name in self.ignored or name not in state:
                continue  # as the real one: no word about it
            if list(state[name].shape) != list(shape):
                return 400, {"success": False, "message": f"{name}: shape {shape}; weights are partially updated"}
            state[name].copy_(tensor)
        self.label = body.get("weight_version") or self.label
        if body["flush_cache"]:
            self.cache.clear()
        return 200, {"success": True}

    def do_update_weights_from_disk(self, body):
        try:
            self.model.load_state_dict(hf.load(body["model_path"]).state_dict())
        except (ValueError, OSError) as problem:
            return 400, {"success": False, "message": str(problem)}
        self.label = body["weight_version"]
        return 200, {"success": True}

    # --- tokens

    def logprobs(self, prefix):
        with self.lock:
            if tuple(prefix) not in self.cache:
                with torch.inference_mode():
                    logits = self.model.logits(torch.tensor(prefix), torch.tensor([0, len(prefix)]))
                for end, row in enumerate(logits, start=1):
                    self.cache.setdefault(tuple(prefix[:end]), row)  # what is there already stays
            return self.cache[tuple(prefix)]

    def generate(self, body):
        """(status, object). Words of the script: `ok`; `abort:n`, `null:n` (finish reason null): ends after n tokens;
        `500`, `503`; `drop`, `killed`: the connection breaks; `hang`; `label`: names other weights; `short`: a
        log-probability is missing; `nan`; `foreign`: an id outside the vocabulary; `eos:n`: a stop id of its own."""
        with self.changed:
            word = self.script.pop(0) if self.script else "ok"
            self.seen.append(body)
        word, _, count = word.partition(":")
        if word in ("500", "503"):
            return int(word), {"error": {"message": "out of order"}}
        if word in ("drop", "killed"):
            return None
        if word == "hang":
            time.sleep(20)
        with self.changed:
            self.changed.wait_for(lambda: not self.paused, 20)
        if body["logprob_start_len"] == 0:
            return 200, self.scored(body["input_ids"])
        rid, given = body["rid"], {**HOSTILE, **body["sampling_params"]}
        if unknown := body["sampling_params"].keys() - HOSTILE.keys():
            return 400, {"error": {"message": f"unknown sampling field {unknown}"}}
        with self.changed:
            self.running[rid] = True
        try:
            return self.sampled(body, given, rid, word, int(count or -1))
        finally:
            with self.changed:
                self.running.pop(rid, None)
                self.aborted.discard(rid)
                self.changed.notify_all()

    def sampled(self, body, given, rid, word, count):
        ids, rows, label = list(body["input_ids"]), [], self.label
        assert given["n"] == 1 and given["top_k"] == -1 and not given["logit_bias"] and not given["stop"], given
        generator = torch.Generator().manual_seed(given["sampling_seed"])
        reason = {"type": "length", "length": given["max_new_tokens"]}
        while len(rows) < given["max_new_tokens"]:
            if rid in self.aborted or len(rows) == count:
                if self.script[:1] == ["killed"]:
                    return None
                reason = None if word == "null" else {"type": "stop", "matched": 7} if word == "eos" else {
                    "type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
                break
            logits = self.logprobs(ids)
            greedy = given["temperature"] == 0
            logprobs = torch.log_softmax(logits / (1.0 if greedy else given["temperature"]), -1)
            token = int(logits.argmax()) if greedy else nucleus(logprobs.exp(), given["top_p"], generator)
            ids.append(token)
            rows.append([logprobs[token].item(), token, None])
            time.sleep(self.token_s)
            if token in given["stop_token_ids"]:
                reason = {"type": "stop", "matched": token}
                break
        if word == "short":
            rows = rows[:-1]
            return 200, reply(rows, reason, label, len(rows) + 1)
        if word == "nan":
            rows[-1][0] = float("nan")
        if word == "foreign":
            rows[-1][1] = 10**6
        return 200, reply(rows, reason, "somebody else's" if word == "label" else label, len(rows))

    def scored(self, ids):
        rows = [[None, ids[0], None]]
        self.logprobs(ids)
        for i in range(1, len(ids)):
            rows.append([torch.log_softmax(self.logprobs(ids[:i]), -1)[ids[i]].item(), ids[i], None])
        return {"meta_info": {"input_token_logprobs": rows, "output_token_logprobs": [], "weight_version": self.label}}


def reply(rows, reason, label, said):
    return {"output_ids": [row[1] for row in rows],
            "meta_info": {"finish_reason": reason, "output_token_logprobs": rows, "completion_tokens": said,
                          "weight_version": label}}


def nucleus(probabilities, top_p, generator):
    sorted_, order = probabilities.sort(descending=True)
    kept = sorted_ * (sorted_.cumsum(0) - sorted_ < top_p)
    return int(order[torch.multinomial(kept, 1, generator=generator)])


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.do_POST()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        found = self.server.generate(body) if self.path == "/generate" else self.server.answer(self.path, body)
        if found is None and self.path == "/generate":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")  # a reset
            self.connection.close()
            return
        status, value = found or (404, {"detail": "Not Found"})
        payload = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *args):
        pass


PIPES = {}  # group name -> Pipe: what stands for a process group where both sides are in one process


class Pipe:
    """The trainer's end of a group to a fake server; `broken`: after so many buckets the connection is lost."""

    def __init__(self, size, name, broken=None):
        self.size, self.name, self.port, self.broken, self.sent = size, name, 1, broken, 0
        self._data, self._ready = None, threading.Semaphore(0)
        PIPES[name] = self

    def join(self):
        pass

    def send(self, data):
        if self.broken is not None and self.sent >= self.broken:
            raise RuntimeError("Connection closed by peer")
        self.sent += 1
        self._data = data.clone()
        self._ready.release()
        return self

    def receive(self):
        assert self._ready.acquire(timeout=5), "nothing was sent"
        return self._data

    def is_completed(self):
        return True

    def wait(self):
        pass

    def close(self):
        PIPES.pop(self.name, None)
