"""What a drafting head computes, and what its tensors are called here, whatever its file calls them.

Canonical names of an EAGLE head; H is its width, F the target's, N the number of fused states; products are [out, in]:

- `fc` [H, H + F] in "eagle" (it reads the embedding, then the feature), [H, N F] in "eagle3"; `fc.bias` [H] with
  `fc_bias`
- `fc_norm.{i}` [F], the norm of the i-th fused state before they are joined (EAGLE-3.1), with `fc_norm`
- `input_norm` [N F], one norm of the joined states before `fc`, with `norm_before_fc`
- `embed_norm`, `hidden_norm` [H], the norms of the two halves of the first layer's input, in "eagle3"
- `layers.{l}.{q,k,v,o,gate,up,down}`, shaped as a target's, but q, k, v of layer 0 of "eagle3" read 2 H; `.bias` with
  `biases`
- `layers.{l}.mlp_norm` [H]; `layers.{l}.attn_norm` [H] from layer 1 on, layer 0 has none; `layers.{l}.q_norm` and
  `k_norm` [head_dim] with `qk_norm`
- `norm` [H] before the head, in "eagle3"
- `head` [draft_vocab_size, H] with `own_head`, else the target's
- `embedding` [vocab_size, H] with `own_embedding`, else the rows of the target's, without its multiplier
- `target_ids` int64 [draft_vocab_size], the target's id of each column of the head, with `own_ids`, else column i is
  id i

Of a Medusa head: `heads.{h}.layers.{l}` [H, H], `heads.{h}.layers.{l}.bias` [H], and the product that gives logits:
`heads.{h}.head` or one `head` for all [draft_vocab_size, H], or the target's; `target_ids` as above.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from paceline.targets.spec import ROLES, Activation, RopeSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.targets.spec import ModelSpec

EagleKind = Literal["eagle", "eagle3"]
TARGET_IDS = "target_ids"


def usual_features(target_layers: int) -> tuple[int, int, int]:
    """The states that EAGLE-3 heads usually fuse: the inputs of layers 2, n // 2 and n - 3 of n."""
    return 2, target_layers // 2, target_layers - 3


@dataclass(frozen=True)
class EagleSpec:
    """A head that drafts from the target's states, one token after another (EAGLE: arXiv 2401.15077, 2503.01840).

    A row pairs the state at place i with the token at place i + 1, stands at position i, and predicts the token at
    place i + 2. Its state is the target's (fused) where the target has been, else the output of the row before it.
    A norm is x * rsqrt(mean(x^2) + norm_eps) * w; queries are scaled by head_dim ** -0.5.

    "eagle" (EAGLE-1 and 2): x = fc([embedding; feature]) and one pass through the layers, the first of them without
    a norm before its attention; the output is the next feature, and the head reads it as it is. The feature is the
    target's state after its final norm.

    "eagle3": g = fc(fused states) where the target has been. The first layer's attention reads
    [embed_norm(embedding); hidden_norm(g)], its residual is g (with `norm_before_residual` the normed g). With a the
    output of the layers, the head reads norm(a), and the next row's g is a (with `norm_output` norm(a)).

    Attributes:
        hidden: H, the width of the head's own layers.
        target_hidden: F, the width of the target's states.
        rope: positions of every layer.
        max_positions: what its file says; rotary positions go on beyond it, so it limits nothing by itself.
        vocab_size: the target's ids.
        draft_vocab_size: columns of the head.
        features: the fused states by the number of target layers that were executed before each (what `Needs` calls
            features); None where the file leaves that to the target, see `taps`. () for "eagle".
        fused: how many states are fused; 1 for "eagle".
        biases: which of q, k, v, o, gate, up, down have a bias, in every layer.
    """

    kind: EagleKind
    hidden: int
    target_hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    activation: Activation
    rope: RopeSpec
    max_positions: int
    vocab_size: int
    draft_vocab_size: int
    features: tuple[int, ...] | None
    fused: int = 3
    layers: int = 1
    biases: tuple[str, ...] = ()
    fc_bias: bool = False
    qk_norm: bool = False
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    own_embedding: bool = False
    own_head: bool = True
    own_ids: bool = False

    @classmethod
    def like(cls, kind: EagleKind, model: ModelSpec, rope: RopeSpec) -> EagleSpec:
        """A head whose layers are those of ``model``, all of them with ``rope``, and that fuses one state of its own
        width."""
        return cls(
            kind=kind,
            hidden=model.hidden,
            target_hidden=model.hidden,
            intermediate=model.intermediate,
            heads=model.heads,
            kv_heads=model.kv_heads,
            head_dim=model.head_dim,
            norm_eps=model.norm_eps,
            activation=model.activation,
            rope=rope,
            max_positions=model.max_positions,
            vocab_size=model.vocab_size,
            draft_vocab_size=model.vocab_size,
            features=(),
            fused=1,
            layers=len(model.layers),
        )

    def taps(self, target_layers: int) -> tuple[int, ...]:
        """The layers whose input the target must deliver, in the order in which `fc` reads them.

        For "eagle" the input of the target's final norm, which the drafter applies; for "eagle3" without layers of
        its own the usual ones.
        """
        if self.kind == "eagle":
            return (target_layers,)
        if self.features is not None:
            return self.features
        return usual_features(target_layers)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every canonical tensor that this head has, with its shape."""
        found: dict[str, tuple[int, ...]] = {}
        joined = self.fused * self.target_hidden
        found["fc"] = (self.hidden, joined if self.kind == "eagle3" else self.hidden + self.target_hidden)
        if self.fc_bias:
            found["fc.bias"] = (self.hidden,)
        if self.fc_norm:
            found.update({f"fc_norm.{place}": (self.target_hidden,) for place in range(self.fused)})
        if self.norm_before_fc:
            found["input_norm"] = (joined,)
        if self.kind == "eagle3":
            found.update(dict.fromkeys(("embed_norm", "hidden_norm", "norm"), (self.hidden,)))
        for layer in range(self.layers):
            found.update({f"layers.{layer}.{name}": shape for name, shape in self._layer_shapes(layer)})
        if self.own_head:
            found["head"] = (self.draft_vocab_size, self.hidden)
        if self.own_embedding:
            found["embedding"] = (self.vocab_size, self.hidden)
        if self.own_ids:
            found[TARGET_IDS] = (self.draft_vocab_size,)
        return found

    def _layer_shapes(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        rows, kv_rows, hidden, inner = (
            self.heads * self.head_dim,
            self.kv_heads * self.head_dim,
            self.hidden,
            self.intermediate,
        )
        read = 2 * hidden if self.kind == "eagle3" and layer == 0 else hidden
        outputs = (rows, kv_rows, kv_rows, hidden, inner, inner, hidden)
        inputs = (read, read, read, rows, hidden, hidden, inner)
        for role, n, k in zip(ROLES, outputs, inputs, strict=True):
            yield role, (n, k)
            if role in self.biases:
                yield f"{role}.bias", (n,)
        if layer:
            yield "attn_norm", (hidden,)
        yield "mlp_norm", (hidden,)
        if self.qk_norm:
            yield from (("q_norm", (self.head_dim,)), ("k_norm", (self.head_dim,)))


@dataclass(frozen=True)
class MedusaSpec:
    """Heads that each guess one later token from the same state (Medusa, arXiv 2401.10774, section 2.1).

    Head h reads the state after the target's final norm from which the target predicts the next token, and guesses
    the token h + 2 places on: `layers` times x = x + silu(W x + b), then a product that gives logits.

    Attributes:
        hidden: the target's width.
        vocab_size: the target's ids.
        draft_vocab_size: columns of the heads.
        heads: how many tokens are guessed beyond the target's own.
        layers: residual blocks of each head.
        bias: whether the blocks have biases.
        head: the product that gives logits: one for each head, one for all of them, or the target's.
    """

    hidden: int
    vocab_size: int
    draft_vocab_size: int
    heads: int
    layers: int = 1
    bias: bool = True
    head: Literal["each", "shared", "target"] = "each"
    own_ids: bool = False

    @property
    def kind(self) -> Literal["medusa"]:
        """The method that drafts with it."""
        return "medusa"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every canonical tensor that these heads have, with its shape."""
        found: dict[str, tuple[int, ...]] = {}
        logits = (self.draft_vocab_size, self.hidden)
        for head in range(self.heads):
            for layer in range(self.layers):
                found[f"heads.{head}.layers.{layer}"] = (self.hidden, self.hidden)
                if self.bias:
                    found[f"heads.{head}.layers.{layer}.bias"] = (self.hidden,)
            if self.head == "each":
                found[f"heads.{head}.head"] = logits
        if self.head == "shared":
            found["head"] = logits
        if self.own_ids:
            found[TARGET_IDS] = (self.draft_vocab_size,)
        return found


HeadSpec = EagleSpec | MedusaSpec
