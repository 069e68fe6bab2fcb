"""Statistics of records: sums with their counts, so that merging them is addition.

The state is `{layer: {name: array}}`; every sum `x` has its count `x_n` beside it, and is divided
only in what `finalize` returns. With G = Σ_t l_t ⊗ r_t the gradient of an example:

    sum, square   Σ_b G, Σ_b G²                          examples     mean, variance, diagonal
    left          Σ_bt l lᵀ                              examples  ┐  K-FAC: E[vec G vec Gᵀ] is
    right         Σ_bt r rᵀ                              positions ┘  about left ⊗ right
    eigen         Σ_b (Q_leftᵀ G Q_right)²               examples     EK-FAC, in K-FAC's eigenbasis
    raw           Σ_b vec G vec Gᵀ                       examples     the covariance itself
    forward_sum, …_square, backward_…                    positions    of what goes into a layer, and
                                                                      of its output's gradient

Those of a table that is looked up are `lookup_forward_…`, of one-hot vectors, and
`lookup_backward_…`: it may be multiplied too, with inputs of another size.

With one position each, or independent ones, `left` over examples times `right` over positions is
the second moment of G itself, scale included. What is no matrix (biases, norms) has under K-FAC its
own covariance if it is short, else its squares.

A vector in place of a matrix is a diagonal: that of an embedding's one-hot side, which has nothing
else, and of a side of more than `_sums.LARGEST_SIDE` entries (the vocabulary of a language model's
output), of which no more is kept: `left_cut_n` or `right_cut_n` then says for how many positions.
As a basis it is the identity.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import numpy as np

from . import _sums
from ._array import Array, copied, like, namespace, precise, to_numpy
from ._array import eigh as eigh
from ._array import load as load
from ._array import save as save
from ._progress import progress
from ._record import Record, Whole

State = Mapping[str, Mapping[str, Array]]
WORDS = (
    *("mean", "variance", "diagonal", "kfac", "ekfac", "raw", "forward", "backward"),
    *("forward_mean", "forward_variance", "backward_mean", "backward_variance"),
)
BASES = ("left_basis", "right_basis")


def update(
    state: dict[str, dict[str, Array]],
    records: Iterable[Record],
    what: Collection[str],
    *,
    mask: Array | None = None,
    double: bool = False,
    cpu: bool = False,
) -> dict[str, dict[str, Array]]:
    """Adds one more batch to the state, and returns it.

    The state that is given is changed, and so are its arrays, except for JAX's: sums of one batch
    would cost as much memory again. Give `merge({}, state)` to keep it as it is. A batch that can
    not be added is an error before anything has changed.

    >>> from logix._record import Whole
    >>> state = update({}, [Whole("bias", np.ones((4, 2)))], ["mean"])
    >>> state = update(state, [Whole("bias", np.zeros((4, 2)))], ["mean"])
    >>> finalize(state)["bias"]["mean"].tolist()
    [0.5, 0.5]

    Arguments:

    - `what`: words of `WORDS`. "ekfac" needs the bases of `with_bases` in the state.
    - `mask`: (B, T), the positions that count. What records hold at others must be zero. A layer
      that was called k times may have its k·T places in one record.
    - `double`: sums are kept in float64, where the library has it.
    - `cpu`: sums are kept on the host, as NumPy arrays; else where the data are.
    """
    unknown = sorted(set(what) - set(WORDS))
    if unknown:
        raise ValueError(f"unknown statistics {unknown}. Known are: {', '.join(WORDS)}")
    wanted, real = frozenset(what), _sums.Real(mask)
    layers: dict[str, list[Record]] = {}
    for record in records:
        layers.setdefault(record.layer, []).append(record)
    for layer, uses in layers.items():
        _sums.check(layer, uses, wanted, state.get(layer, {}))
    for layer, uses in layers.items():
        first = uses[0].value if isinstance(uses[0], Whole) else uses[0].g
        with precise(first):
            sums = _sums.Sums(state.get(layer, {}), first, double, cpu)
            _sums.add_layer(sums, uses, wanted, real)
        if sums.own:  # a bias has no activations
            state[layer] = sums.own
    return state


def merge(a: State, b: State) -> dict[str, dict[str, Array]]:
    """The state of what both have seen. Neither is changed, then or by a later `update` of it."""
    out: dict[str, dict[str, Array]] = {}
    for layer, stats in (*a.items(), *b.items()):
        own = out.setdefault(layer, {})
        for name, value in stats.items():
            if name not in own:
                own[name] = value if name in BASES else copied(value)
            elif name.endswith("_n"):
                own[name] = own[name] + value
            elif name not in BASES:
                value = like(value, own[name], cast=False)
                if value.ndim != own[name].ndim:
                    own[name], value = _both(own[name], value, {*own, *stats}, f"{name}_cut_n")
                own[name] = own[name] + value
            elif own[name] is value:
                continue
            elif not np.array_equal(to_numpy(own[name]), to_numpy(value)):
                raise ValueError(
                    f"layer {layer!r}: EK-FAC sums in different eigenbases can not be added. "
                    "Fit K-FAC, merge it, and give `with_bases` of it to all who continue."
                )
    return out


def _both(a: Array, b: Array, names: Collection[str], cut: str) -> tuple[Array, Array]:
    """A matrix and a vector, which is its diagonal: as vectors if one has lost more than that."""
    ndim = 1 if cut in names else 2
    return tuple(x if x.ndim == ndim else namespace(x).diag(x) for x in (a, b))  # type: ignore


def average(stats: Mapping[str, Array], name: str) -> Array:
    """One of a layer's sums, divided by its count."""
    return stats[name] / max(1, int(stats[f"{name}_n"]))


def finalize(state: State) -> dict[str, dict[str, Array]]:
    """Averages, as new arrays: mean, variance, square, left, right, eigen, raw, and the bases."""
    out: dict[str, dict[str, Array]] = {}
    for layer, stats in state.items():
        found = {n: average(stats, n) for n in stats if f"{n}_n" in stats}
        ends = ("forward_", "backward_")
        for kind in ("", *ends, *(f"lookup_{end}" for end in ends)):
            if f"{kind}sum" in found:
                mean = found[f"{kind}mean"] = found.pop(f"{kind}sum")
                if f"{kind}square" in found:
                    spread = found[f"{kind}square"] - mean**2
                    found[f"{kind}variance"] = namespace(spread).clip(spread, 0, None)  # rounding
        out[layer] = found | {n: stats[n] for n in BASES if n in stats}
    return out


def with_bases(state: State) -> dict[str, dict[str, Array]]:
    """The state with the eigenvectors of K-FAC's covariances, in which EK-FAC is summed.

    They are part of the state because they can not be computed twice: equal eigenvalues have no
    eigenvectors of their own. Sums in an earlier basis are dropped, the others are shared with the
    state that is given.
    """
    out = {}
    for layer, stats in progress(state.items(), what="eigenvectors"):
        kept = {n: x for n, x in stats.items() if n not in (*BASES, "eigen", "eigen_n")}
        for side in ("left", "right"):
            if side in stats:
                x = stats[side]
                kept[f"{side}_basis"] = eigh(x)[1] if x.ndim == 2 else namespace(x).ones_like(x)
        out[layer] = kept
    return out


def diagonal_sides(state: State) -> list[str]:
    """The large sides of which only the diagonal of the covariance is kept, as "layer (left)".

    Not those of embeddings: one-hot vectors have nothing beside it.
    """
    return [
        f"{layer} ({side})"
        for layer, stats in state.items()
        for side in ("left", "right")
        if f"{side}_cut_n" in stats
    ]
