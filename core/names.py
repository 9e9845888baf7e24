"""Which numbers of a checkpoint's tensors are which of the model's parameters.

Checkpoints of one architecture differ in names and layout: a prefix, experts one by one or fused, projections grouped
by key head. `pairs` gives, for one stored tensor, matching views of it and of our parameters; copying one way loads,
the other way saves. The same views of meta tensors prove that nothing is missing or left over before a byte is touched.

E experts, F their width, D hidden, G key heads of size K, R value heads per key head of size V.
"""

from __future__ import annotations

import re
from typing import Iterator, Mapping

from torch import Tensor

from oprd.core.architecture import ModelConfig

UNTOUCHED = ("model.visual.", "visual.", "mtp.", "model.mtp.")  # vision tower and multi-token prediction: carried along
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_EXPERT = re.compile(r"(?P<experts>.+\.mlp\.experts)\.(?P<e>\d+)\.(?P<what>gate|up|down)_proj\.weight")


def is_untouched(stored: str) -> bool:
    """Whether a stored tensor belongs to no parameter of ours and is carried through as it is."""
    return stored.startswith(UNTOUCHED)


def own_name(stored: str) -> str:
    """A stored name without the prefix that it has in a multi-modal model."""
    return re.sub(r"^model\.language_model\.", "model.", stored)


def is_extra_head(stored: str, config: ModelConfig) -> bool:
    """Whether a stored tensor is the head of a model whose head is the embedding: it must then be equal to it."""
    return stored == HEAD and config.tie_word_embeddings


def own_form(parameters: Mapping[str, Tensor], config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the language model as transformers' class of the family stores it: ours, but Qwen3-Next's
    linear attention in its own grouped projections."""
    form = {}
    for name, p in parameters.items():
        shape = tuple(p.shape)
        if config.model_type == "qwen3_next" and ".linear_attn.in_proj_" in name:
            prefix, part = name.removesuffix(".weight").rsplit("_", 1)
            name, partner = {"qkv": ("qkvz", "z"), "b": ("ba", "a")}.get(part, (None, None))
            if name is None:  # stored together with its partner
                continue
            rows = shape[0] + len(parameters[f"{prefix}_{partner}.weight"])
            name, shape = f"{prefix}_{name}.weight", (rows, shape[1])
        form[name] = shape
    return form


def pairs(stored: str, tensor: Tensor, parameters: Mapping[str, Tensor],
          config: ModelConfig) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(parameter, view of the stored tensor, equally shaped view of the parameter) for all of a stored tensor.

    KeyError: the model has no such parameter. ValueError: the shapes do not fit, "has shape ..., config.json asks for".
    """
    name = EMBEDDING if is_extra_head(stored, config) else own_name(stored)
    if match := _EXPERT.fullmatch(name):
        yield _expert(match, tensor, parameters, config)
    elif name.endswith(".in_proj_qkvz.weight"):
        yield from _grouped(name.removesuffix("qkvz.weight"), tensor, parameters, config)
    elif name.endswith(".in_proj_ba.weight"):
        prefix, groups = name.removesuffix("ba.weight"), config.linear_num_key_heads
        ours = {own: parameters[own] for own in (prefix + "b.weight", prefix + "a.weight")}
        _check(tensor, (2 * config.linear_num_value_heads, config.hidden_size))
        parts = tensor.unflatten(0, (groups, -1)).chunk(2, dim=1)
        for (own, p), part in zip(ours.items(), parts, strict=True):
            yield own, part, p.unflatten(0, (groups, -1))
    else:
        _check(tensor, parameters[name].shape)
        yield name, tensor, parameters[name]


def _expert(match: re.Match, tensor: Tensor, parameters: Mapping[str, Tensor],
            config: ModelConfig) -> tuple[str, Tensor, Tensor]:
    """One projection of one expert."""
    e, what, width = int(match["e"]), match["what"], config.moe_intermediate_size
    name = f"{match['experts']}.{'down' if what == 'down' else 'gate_up'}_proj"
    if e >= len(parameters[name]):
        raise KeyError(name)
    view = parameters[name][e]
    view = view if what == "down" else view[:width] if what == "gate" else view[width:]
    _check(tensor, view.shape)
    return name, tensor, view


def _grouped(prefix: str, tensor: Tensor, parameters: Mapping[str, Tensor],
             config: ModelConfig) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Qwen3-Next's in_proj_qkvz: rows [q K | k K | v R V | z R V] for every key head; ours are q, k, v and z apart."""
    qkv, z_own = parameters[prefix + "qkv.weight"], parameters[prefix + "z.weight"]
    groups, size = config.linear_num_key_heads, config.linear_key_head_dim
    values = config.linear_num_value_heads // groups * config.linear_value_head_dim
    _check(tensor, (groups * (2 * size + 2 * values), config.hidden_size))
    q, k, v, z = tensor.unflatten(0, (groups, -1)).split([size, size, values, values], dim=1)
    ours = qkv.split([groups * size, groups * size, groups * values])
    for part, own in zip((q, k, v), ours, strict=True):
        yield prefix + "qkv.weight", part, own.unflatten(0, (groups, -1))
    yield prefix + "z.weight", z, z_own.unflatten(0, (groups, -1))


def _check(tensor: Tensor, wanted) -> None:
    if tuple(tensor.shape) != tuple(wanted):
        raise ValueError(f"has shape {list(tensor.shape)}, config.json asks for {list(wanted)}")
