"""The decoder in plain PyTorch, over packed sequences; parameter names are Hugging Face's for the language model.

T packed tokens, B sequences, D hidden, V vocabulary, E experts.

    x_TD = embed(ids);  for each layer: x += mixer(norm(x)); x += mlp(norm(x));  h_TD = norm(x);  logits = h @ head.T

Over a mesh the ranks of its `sequence` read the T tokens together: each has the stream x of its own, c = T / ranks.
"""

from __future__ import annotations

from typing import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from oprd.core.architecture import ModelConfig
from oprd.core.cache import Cache
from oprd.core.decode import Decoder
from oprd.core.mixers import MIXERS, GatedDeltaNet, Layout, RMSNorm, rope_tables
from oprd.core.moe import MLP, MoE
from oprd.parallel.layers import ColumnLinear, Head, VocabularyEmbedding, cuts, vocabulary_cut
from oprd.parallel.mesh import Mesh


class Block(nn.Module):
    """One layer: a token mixer and a feed-forward, each behind a norm and added to the stream."""

    def __init__(self, config: ModelConfig, layer: int, mesh: Mesh):
        super().__init__()
        mixer = MIXERS[config.layer_types[layer]]
        self.mixer_name = mixer.attribute
        setattr(self, self.mixer_name, mixer(config, mesh))
        sparse = config.is_sparse(layer)
        self.mlp = MoE(config, mesh) if sparse else MLP(config.hidden_size, config.intermediate_size, mesh)
        zero_centred = config.family.zero_centred
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, zero_centred)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, zero_centred)

    @property
    def mixer(self) -> nn.Module:
        return getattr(self, self.mixer_name)

    def forward(self, x: Tensor, layout: Layout, entries: Sequence | None, routers: list[Tensor] | None) -> Tensor:
        x = x + self.mixer(self.input_layernorm(x), layout, entries)
        return x + self.mlp(self.post_attention_layernorm(x), routers)


class Trunk(nn.Module):
    """Everything below the head (what Hugging Face prefixes with `model.`)."""

    def __init__(self, config: ModelConfig, mesh: Mesh):
        super().__init__()
        self.embed_tokens = VocabularyEmbedding(config.vocab_size, config.hidden_size, mesh)
        self.layers = nn.ModuleList(Block(config, i, mesh) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.family.zero_centred)


class Model(nn.Module):
    """The decoder. Weights are uninitialised until init(seed) or a checkpoint is loaded.

    recompute: in training keep each layer's input alone and run the layer again in the backward pass. cuts: which part
    of every whole parameter this rank has.
    """

    def __init__(self, config: ModelConfig, mesh: Mesh = Mesh(), recompute: bool = False):
        super().__init__()
        self.config, self.mesh, self.recompute = config, mesh, recompute
        self.model = Trunk(config, mesh)
        if not config.tie_word_embeddings:
            self.lm_head = ColumnLinear(config.hidden_size, vocabulary_cut(config.vocab_size, mesh))
        self.cuts = {}  # a module's `cuts` are of its own parameters, and this one has none
        self.cuts = cuts(self, mesh)

    @property
    def head_weight(self) -> Tensor:
        """The output matrix [V, D]: the embedding itself when tied. On a mesh a padded part; losses use `head`."""
        return self.model.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight

    @property
    def head(self) -> Head:
        """The output matrix as the losses read it, whole or cut."""
        return Head.of(self.head_weight, vocabulary_cut(self.config.vocab_size, self.mesh))

    @torch.no_grad()
    def init(self, seed: int) -> "Model":
        """Random weights as transformers draws them: matrices normal(0, initializer_range), norms that scale by 1, no
        biases, decays A uniform in (0.01, 16), convolutions uniform within W^-0.5. Same seed, same weights."""
        generator = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():  # drawn whole, so that a rank's part is the same on every mesh
            shape = self.cuts[name].whole_shape(p.shape)
            p.copy_(self.cuts[name].take(torch.zeros(shape) if p.dim() < 2 else torch.empty(shape).normal_(
                0.0, self.config.initializer_range, generator=generator)))
        for name, module in self.named_modules():
            if isinstance(module, RMSNorm) and not module.zero_centred:
                module.weight.fill_(1.0)
            elif isinstance(module, GatedDeltaNet):
                bound = module.conv1d.kernel_size[0] ** -0.5
                module.dt_bias.fill_(1.0)
                for own, p, low, high in (("A_log", module.A_log, 0.01, 16.0),
                                          ("conv1d.weight", module.conv1d.weight, -bound, bound)):
                    cut = self.cuts[f"{name}.{own}"]
                    drawn = torch.empty(cut.whole_shape(p.shape)).uniform_(low, high, generator=generator)
                    p.copy_(cut.take(drawn.log() if own == "A_log" else drawn))
        return self

    def new_cache(self) -> Cache:
        """An empty cache for one conversation."""
        return Cache([MIXERS[kind].new_entry() for kind in self.config.layer_types])

    def decoder(self, rows: int) -> Decoder:
        """A batched decoder of up to `rows` conversations; the weights must not change while it is used."""
        return Decoder(self, rows)

    def hidden(self, ids: Tensor, cu_seqlens: Tensor, positions: Tensor | None = None,
               caches: Sequence[Cache] | None = None, routers: list[Tensor] | None = None) -> Tensor:
        """Final-normed hidden states [T, D] of packed ids [T]; on a mesh [c, D], of this rank's tokens of them.

        cu_seqlens: int [B + 1], boundaries from 0 to T. positions: int [T]; default: each sequence counts from 0, or
        from the length of its cache. caches: one per sequence; its tokens go on after the cached ones and are appended.
        routers: a list to which every mixture-of-experts layer appends its router logits [T, E].
        """
        lengths = cu_seqlens.diff()
        if positions is None:
            positions = torch.arange(len(ids), device=ids.device) - cu_seqlens[:-1].repeat_interleave(lengths)
            if caches is not None:
                past = torch.tensor([cache.length for cache in caches], device=ids.device)
                positions = positions + past.repeat_interleave(lengths)
        if padding := -len(ids) % self.mesh.sequence.size:  # a sequence of its own, which nothing reads
            ids, positions = (F.pad(t, (0, padding)) for t in (ids, positions))
            cu_seqlens = torch.cat([cu_seqlens, cu_seqlens[-1:] + padding])
            caches = None if caches is None else [*caches, self.new_cache()]
        x = self.model.embed_tokens(ids)
        cos, sin = rope_tables(positions, self.config.rotary_dim, self.config.rope_theta, x.dtype)
        layout = Layout(cu_seqlens, cos[:, None], sin[:, None])
        for i, block in enumerate(self.model.layers):
            entries = None if caches is None else [cache.entries[i] for cache in caches]
            x = (self._again(block, x, layout, routers) if self.recompute and x.requires_grad else
                 block(x, layout, entries, routers))
        return self.model.norm(x)

    @staticmethod
    def _again(block: Block, x: Tensor, layout: Layout, routers: list[Tensor] | None) -> Tensor:
        """block(x), of which only x is kept for the backward pass."""
        def run(x: Tensor) -> tuple[Tensor, ...]:
            logits: list[Tensor] = []
            return block(x, layout, None, logits), *logits

        x, *logits = checkpoint(run, x, use_reentrant=False, preserve_rng_state=False)
        if routers is not None:
            routers += logits
        return x

    def logits(self, ids: Tensor, cu_seqlens: Tensor, positions: Tensor | None = None, caches=None) -> Tensor:
        """Logits [T, V]; arguments as hidden(). Training uses hidden() and head_weight and never holds this."""
        return F.linear(self.hidden(ids, cu_seqlens, positions, caches), self.head_weight)


def stays_float32(name: str) -> bool:
    """Whether a parameter is kept in float32 in a model of another precision: decays and norms, which bfloat16 rounds
    too coarsely to train (and Qwen3.5 stores the decays so)."""
    return name.endswith((".A_log", ".dt_bias")) or "norm" in name.split(".")[-2]
