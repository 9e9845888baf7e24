"""SGLang's /generate on the wire: a request that leaves nothing to a server's defaults, what a reply must hold."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, Sequence

from oprd.rollout.engine import Sampling


class Strange(Exception):
    """A reply with status 200 that holds no usable tokens; the message says what is wrong with it."""


@dataclass(frozen=True)
class Piece:
    """What one request sampled, a turn or a part of it. finish: `stop`, `length` or `abort` (ended from outside; a
    finish reason that is null or new counts as that). label: the server's name for the weights."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: str
    label: str


def sampling_fields(s: Sampling, new_tokens: int, seed: int) -> dict[str, Any]:
    """Every field, those that switch something off too: what is left out a server takes from the model's
    generation_config.json or from its own defaults (128 new tokens). ignore_eos would switch our stop ids off."""
    return {
        "temperature": s.temperature, "top_p": s.top_p, "top_k": -1, "min_p": 0.0, "max_new_tokens": new_tokens,
        "min_new_tokens": 0, "n": 1, "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0,
        "stop": [], "stop_regex": [], "stop_token_ids": list(s.stop_ids), "ignore_eos": False, "logit_bias": None,
        "json_schema": None, "regex": None, "ebnf": None, "structural_tag": None, "skip_special_tokens": False,
        "spaces_between_special_tokens": False, "no_stop_trim": True, "sampling_seed": seed % 2**31,
    }


def generate_body(request_id: str, ids: Sequence[int], s: Sampling, new_tokens: int, seed: int) -> dict[str, Any]:
    return {"rid": request_id, "input_ids": list(ids), "sampling_params": sampling_fields(s, new_tokens, seed),
            "return_logprob": True, "logprob_start_len": -1, "top_logprobs_num": 0, "return_text_in_logprobs": False,
            "stream": False}


def score_body(ids: Sequence[int]) -> dict[str, Any]:
    """Asks for the log-probabilities of given ids; nothing is sampled."""
    body = generate_body("", ids, Sampling(1.0, 1.0, 1, ()), 0, 0)
    return {**{k: v for k, v in body.items() if k != "rid"}, "logprob_start_len": 0}


def read_piece(body: bytes, sampling: Sampling, new_tokens: int, vocab: int) -> Piece:
    """The tokens of a reply, cut at the first stop id. Raises Strange."""
    meta = _meta(body)
    rows = meta.get("output_token_logprobs")
    if not isinstance(rows, list):
        raise Strange("it holds no output_token_logprobs")
    ids, logprobs = _columns(rows, vocab)
    said = meta.get("completion_tokens")
    if said is not None and said != len(ids):
        raise Strange(f"it holds {len(ids)} log-probabilities for {said} tokens")
    if len(ids) > new_tokens:
        raise Strange(f"it holds {len(ids)} tokens, {new_tokens} were asked for")
    stop = next((i + 1 for i, token in enumerate(ids) if token in sampling.stop_ids), None)
    reason = meta.get("finish_reason")
    kind = reason.get("type") if isinstance(reason, dict) else None
    finish = "stop" if stop else "length" if len(ids) == new_tokens else "abort"
    if kind == "abort" and isinstance(reason.get("status_code"), int) and reason["status_code"] >= 400 and not ids:
        raise Strange(f"it says {str(reason.get('message'))[:120]!r}")
    return Piece(tuple(ids[:stop]), tuple(logprobs[:stop]), finish, str(meta.get("weight_version")))


def read_scores(body: bytes, ids: Sequence[int], vocab: int) -> tuple[list[float], str]:
    """(log p(ids[i] | ids[:i]) for i >= 1, the server's name for the weights). Raises Strange."""
    meta = _meta(body)
    rows = meta.get("input_token_logprobs")
    if not isinstance(rows, list) or [row[1] for row in rows] != list(ids):
        raise Strange("its input_token_logprobs are not those of the ids sent")
    return _columns(rows[1:], vocab)[1], str(meta.get("weight_version"))


def _meta(body: bytes) -> dict[str, Any]:
    try:
        meta = json.loads(body)["meta_info"]
    except (ValueError, LookupError, TypeError, RecursionError):
        raise Strange("it is no reply of /generate") from None
    if not isinstance(meta, dict):
        raise Strange("its meta_info is no object")
    return meta


def _columns(rows: list, vocab: int) -> tuple[list[int], list[float]]:
    """ids and log-probabilities of rows [log-probability, id, text or null]."""
    ids, logprobs = [], []
    for row in rows:
        value, token = row[0], row[1]
        if type(token) is not int or not 0 <= token < vocab:
            raise Strange(f"it holds the token id {token!r}, the vocabulary is 0..{vocab - 1}")
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            raise Strange(f"the log-probability of its token {len(ids)} is {value!r}")
        ids.append(token)
        logprobs.append(float(value))
    return ids, logprobs
