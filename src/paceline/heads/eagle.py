"""The EAGLE networks in plain torch, float32: what is trained, and what the fast path must equal.

Sources: Li et al., EAGLE (arXiv 2401.15077), EAGLE-2 (2406.16858, the same network), EAGLE-3 (2503.01840); what each
computes is written at `EagleSpec`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from paceline.errors import DrafterError
from paceline.heads.network import HeadNetwork, activate, rms_norm, rotate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from paceline.heads.spec import EagleSpec

Cache = list[tuple["Tensor", "Tensor"]]


class EagleNetwork(HeadNetwork):
    """An EAGLE head over whole sequences or, with a cache, over their continuations.

    Rows are as `EagleSpec` says: row i has the token of place i + 1, the state of place i, and position i.
    """

    spec: EagleSpec

    def __init__(
        self,
        spec: EagleSpec,
        tensors: Mapping[str, Tensor],
        *,
        embedding: Tensor | None = None,
        head: Tensor | None = None,
    ) -> None:
        """Make the network from canonical ``tensors``.

        Args:
            embedding: the target's [rows, hidden], used and not trained where the head has none.
            head: the target's [rows, hidden], likewise.

        Raises:
            DrafterError: the head needs one of them and it is not given.
        """
        for name, own, given in (("embedding", spec.own_embedding, embedding), ("head", spec.own_head, head)):
            if not own and given is None:
                raise DrafterError(f"the head has no {name} of its own and needs the target's.")
        super().__init__(spec, tensors, None if spec.own_head else head)
        shared = None if spec.own_embedding or embedding is None else embedding.detach().float()
        self.register_buffer("_target_embedding", shared, persistent=False)

    def embed(self, tokens: Tensor) -> Tensor:
        """The rows [..., hidden] of target ids [...]."""
        table = self.weight("embedding") if self.spec.own_embedding else self.get_buffer("_target_embedding")
        return F.embedding(tokens, table)

    def fuse(self, states: Tensor) -> Tensor:
        """The target's states [..., fused * target_hidden], joined in the order of the taps, as rows read them."""
        spec = self.spec
        if spec.kind == "eagle":
            return states
        if spec.fc_norm:
            parts = torch.split(states, spec.target_hidden, -1)
            normed = [
                rms_norm(part, self.weight(f"fc_norm.{place}"), spec.norm_eps) for place, part in enumerate(parts)
            ]
            states = torch.cat(normed, -1)
        if spec.norm_before_fc:
            states = rms_norm(states, self.weight("input_norm"), spec.norm_eps)
        return self.linear("fc", states)

    def forward(
        self,
        tokens: Tensor,
        states: Tensor,
        positions: Tensor,
        *,
        visible: Tensor | None = None,
        cache: Cache | None = None,
    ) -> tuple[Tensor, Cache]:
        """One pass over T rows of each sequence.

        Args:
            tokens: int64 [..., T], target ids.
            states: float32 [..., T, hidden], from `fuse` or `next_state`.
            positions: int64 [T].
            visible: bool [T, P + T]: which rows each row sees, the P of the cache first; None lets it see the whole
                cache, and of its own pass the rows up to itself.
            cache: keys and values of each layer of the passes before, from the call before; not changed.

        Returns:
            The outputs [..., T, hidden], which `logits` and `next_state` read, and the grown cache.
        """
        rows = tokens.shape[-1]
        past = cache[0][0].shape[-2] if cache else 0
        if visible is None:
            visible = torch.ones(rows, past + rows, dtype=torch.bool, device=tokens.device).tril(past)
        share = self.spec.heads // self.spec.kv_heads
        x, residual = self.entry(tokens, states)
        grown: Cache = []
        for layer in range(self.spec.layers):
            x = self.before(layer, x)
            query, keys, values = (self.project(layer, role, x, positions) for role in ("q", "k", "v"))
            if cache:
                keys, values = torch.cat([cache[layer][0], keys], -2), torch.cat([cache[layer][1], values], -2)
            attended = F.scaled_dot_product_attention(
                query, keys.repeat_interleave(share, -3), values.repeat_interleave(share, -3), attn_mask=visible
            )
            grown.append((keys, values))
            x = residual = self.behind(layer, residual, attended)
        return x, grown

    def entry(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """What the first layer reads [..., H or 2 H], and what its output is added to [..., H], of rows that are given
        as to `forward`."""
        embedded = self.embed(tokens)
        if self.spec.kind == "eagle":
            x = self.linear("fc", torch.cat([embedded, states], -1))
            return x, x
        normed = rms_norm(states, self.weight("hidden_norm"), self.spec.norm_eps)
        x = torch.cat([rms_norm(embedded, self.weight("embed_norm"), self.spec.norm_eps), normed], -1)
        return x, normed if self.spec.norm_before_residual else states

    def before(self, layer: int, x: Tensor) -> Tensor:
        """What the products q, k and v of a layer read: of the first its input, of others the normed output of the
        layer before."""
        return rms_norm(x, self.weight(f"layers.{layer}.attn_norm"), self.spec.norm_eps) if layer else x

    def project(self, layer: int, role: str, x: Tensor, positions: Tensor) -> Tensor:
        """Queries, keys or values ("q", "k", "v") [..., heads, T, head_dim] of rows [..., T, inputs] at positions
        [T]."""
        found = self.linear(f"layers.{layer}.{role}", x)
        heads = self.spec.heads if role == "q" else self.spec.kv_heads
        found = found.reshape(*x.shape[:-1], heads, self.spec.head_dim).transpose(-2, -3)
        if role == "v":
            return found
        if self.spec.qk_norm:
            found = rms_norm(found, self.weight(f"layers.{layer}.{role}_norm"), self.spec.norm_eps)
        return rotate(found, positions, self.spec.rope)

    def behind(self, layer: int, residual: Tensor, attended: Tensor) -> Tensor:
        """A layer's output [..., T, H] from what attention gave [..., heads, T, head_dim]."""
        x = residual + self.linear(f"layers.{layer}.o", attended.transpose(-2, -3).flatten(-2))
        return x + self._mlp(layer, rms_norm(x, self.weight(f"layers.{layer}.mlp_norm"), self.spec.norm_eps))

    def next_state(self, outputs: Tensor) -> Tensor:
        """What stands in for the target's state of the next row [..., hidden]."""
        return self.normed(outputs) if self.spec.norm_output else outputs

    def logits(self, outputs: Tensor) -> Tensor:
        """Logits [..., draft_vocab_size] of the token two places after each row's state."""
        return F.linear(self.normed(outputs), self.product)

    def normed(self, outputs: Tensor) -> Tensor:
        """What the head's product reads [..., hidden]."""
        return rms_norm(outputs, self.weight("norm"), self.spec.norm_eps) if self.spec.kind == "eagle3" else outputs

    @property
    def product(self) -> Tensor:
        """The head's product [draft_vocab_size, hidden], its own or the target's."""
        return self.weight("head") if self.spec.own_head else self.get_buffer("_target_head")

    def _mlp(self, layer: int, x: Tensor) -> Tensor:
        name = f"layers.{layer}"
        gate = activate(self.spec.activation, self.linear(f"{name}.gate", x))
        return self.linear(f"{name}.down", gate * self.linear(f"{name}.up", x))


@torch.no_grad()
def path_logits(network: EagleNetwork, tokens: Sequence[int], states: Tensor, path: Sequence[int]) -> Tensor:
    """The logits along one drafted path, worked out from nothing: what a draft must equal, whatever its tree.

    Args:
        tokens: the committed tokens, the last of them the root; at least two.
        states: float32 [len(tokens) - 1, fused * target_hidden], the target's at every place before the root's.
        path: the drafted tokens below the root.

    Returns:
        float32 [len(path) + 1, draft_vocab_size]: of the token after the root, and after each token of the path.
    """
    places = len(tokens) - 1
    outputs, cache = network(torch.tensor(tokens[1:]), network.fuse(states), torch.arange(places))
    rows = [network.logits(outputs[-1])]
    for depth, token in enumerate(path):
        state = network.next_state(outputs[-1:])
        outputs, cache = network(torch.tensor([token]), state, torch.tensor([places + depth]), cache=cache)
        rows.append(network.logits(outputs[-1]))
    return torch.stack(rows)
