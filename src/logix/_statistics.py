"""Statistics of records: sums with their counts, so that merging them is addition.

The state is `{layer: {name: array}}`; every sum `x` has its count `x_n` beside it, and is divided
only in what `finalize` returns. With G = Σ_t l_t ⊗ r_t the gradient of an example:

    sum, square   Σ_b G, Σ_b G²                          examples     mean, variance, diagonal
    left          Σ_bt l lᵀ                              examples  ┐  K-FAC: E[vec G vec Gᵀ] is
    right         Σ_bt r rᵀ                              positions ┘  about left ⊗ right
    eigen         Σ_b (Q_leftᵀ G Q_right)²               examples     EK-FAC, in K-FAC's eigenbasis
    raw           Σ_b vec G vec Gᵀ                       examples     the covariance itself

With one position each, or independent ones, `left` over examples times `right` over positions is
the second moment of G itself, scale included. The one-hot side of an embedding has a diagonal
covariance, which is kept as a vector. What is no matrix (biases, norms) has under K-FAC its own
covariance if it is short, else its squares.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

from ._array import Array, add_rows, as_double, as_float, like, namespace, precise, to_numpy
from ._array import load as load
from ._array import save as save
from ._compress import gradients
from ._record import Lookup, Outer, Record, Whole

State = Mapping[str, Mapping[str, Array]]
WORDS = ("mean", "variance", "diagonal", "kfac", "ekfac", "raw")
BASES = ("left_basis", "right_basis")
_SHORT = 256  # entries of a bias whose covariance is kept: n² numbers, and n² work per example
_CHUNK = 2**24  # entries of per-sample gradients that exist at a time
_LARGEST = 2**15  # of a raw covariance: 4 GiB


def update(
    state: State,
    records: Iterable[Record],
    what: Collection[str],
    *,
    mask: Array | None = None,
    double: bool = False,
    cpu: bool = False,
) -> dict[str, dict[str, Array]]:
    """The state after one more batch.

    Arguments:

    - `what`: words of `WORDS`. "ekfac" needs the bases of `with_bases` in the state.
    - `mask`: (B, T), the positions that count. What records hold at others must be zero.
    - `double`: sums are kept in float64, where the library has it.
    - `cpu`: sums are kept on the host, as NumPy arrays.
    """
    unknown = sorted(set(what) - set(WORDS))
    if unknown:
        raise ValueError(f"unknown statistics {unknown}. Known are: {', '.join(WORDS)}")
    by_layer: dict[str, list[Record]] = {}
    for record in records:
        by_layer.setdefault(record.layer, []).append(record)
    batch: dict[str, dict[str, Array]] = {}
    for layer, several in by_layer.items():
        x = several[0].value if isinstance(several[0], Whole) else several[0].g
        with precise(x):
            found = _sums(_one(several), frozenset(what), state.get(layer, {}), mask)
            for name, value in found.items():
                if not name.endswith("_n"):
                    value = to_numpy(value) if cpu else value
                    found[name] = as_double(value) if double else value
            batch[layer] = found
    return merge(state, batch)


def merge(a: State, b: State) -> dict[str, dict[str, Array]]:
    """The state of what both have seen. Neither is changed."""
    out = {layer: dict(stats) for layer, stats in a.items()}
    for layer, stats in b.items():
        own = out.setdefault(layer, {})
        for name, value in stats.items():
            if name not in own:
                own[name] = value
            elif name not in BASES:
                own[name] = own[name] + (value if name.endswith("_n") else like(value, own[name]))
            elif not np.array_equal(to_numpy(own[name]), to_numpy(value)):
                raise ValueError(
                    f"layer {layer!r}: EK-FAC sums in different eigenbases can not be added. "
                    "Fit K-FAC, merge it, and give `with_bases` of it to all who continue."
                )
    return out


def finalize(state: State) -> dict[str, dict[str, Array]]:
    """Averages, as new arrays: mean, variance, square, left, right, eigen, raw, and the bases."""
    out: dict[str, dict[str, Array]] = {}
    for layer, stats in state.items():
        found = {n: stats[n] / int(stats[f"{n}_n"]) for n in stats if f"{n}_n" in stats}
        if "sum" in found:
            found["mean"] = found.pop("sum")
            if "square" in found:
                spread = found["square"] - found["mean"] ** 2
                found["variance"] = namespace(spread).clip(spread, 0, None)  # of rounding
        out[layer] = found | {n: stats[n] for n in BASES if n in stats}
    return out


def with_bases(state: State) -> dict[str, dict[str, Array]]:
    """The state with the eigenvectors of K-FAC's covariances, in which EK-FAC is summed.

    They are part of the state because they can not be computed twice: equal eigenvalues have no
    eigenvectors of their own. Sums in an earlier basis are dropped.
    """
    out = {}
    for layer, stats in finalize(state).items():
        kept = {n: x for n, x in state[layer].items() if n not in (*BASES, "eigen", "eigen_n")}
        for side in ("left", "right"):
            if side in stats and stats[side].ndim == 2:
                kept[f"{side}_basis"] = eigh(stats[side])[1]
        out[layer] = kept
    return out


def eigh(x: Array) -> tuple[Array, Array]:
    """Eigenvalues, not negative, and eigenvectors of a covariance, in its own dtype."""
    values, vectors = namespace(x).linalg.eigh(as_double((x + x.T) / 2))
    return like(namespace(x).clip(values, 0, None), x), like(vectors, x)


def _one(records: list[Record]) -> Record:
    """One record for all uses of a layer, in float32 or better: their positions are side by side.

    Written out only where they must be: an embedding that is also the output's matrix.
    """
    if len({type(r) for r in records}) > 1:
        records = [r.outer() if isinstance(r, Lookup) else r for r in records]
    first = records[0]
    if any(isinstance(r, Whole) for r in records):
        return Whole(first.layer, gradients(records)[first.layer])
    join = lambda xs: xs[0] if len(xs) == 1 else namespace(xs[0]).concatenate(xs, 1)
    arrays: dict[str, Any] = {"g": join([as_float(r.g) for r in records])}  # type: ignore[union-attr]
    if isinstance(first, Lookup):
        arrays["i"] = join([r.i for r in records])  # type: ignore[union-attr]
    else:
        arrays["a"] = join([as_float(r.a) for r in records])  # type: ignore[union-attr]
    return dataclasses.replace(first, **arrays)


def _sums(
    record: Record, what: frozenset[str], before: Mapping[str, Array], mask: Array | None
) -> dict[str, Array]:
    out: dict[str, Array] = {}
    whole = isinstance(record, Whole)
    short = whole and math.prod(record.shape) <= _SHORT
    examples = len(record.value if isinstance(record, Whole) else record.g)
    if what & {"mean", "variance"}:
        out["sum"] = _total(record)
    if what & {"variance", "diagonal"} or ("kfac" in what and whole and not short):
        out["square"] = _squares(record)
    if "raw" in what or ("kfac" in what and short):
        size = math.prod(record.shape)
        if size > _LARGEST:
            raise ValueError(
                f"layer {record.layer!r}: the raw covariance of a gradient of {size:,} entries "
                f"would take {size**2 * 4 / 2**30:,.0f} GiB. Compress it first "
                '(kind="logra"), or use "kfac" or "ekfac".'
            )
        rows = gradients([record])[record.layer].reshape(examples, size)
        out["raw"] = rows.T @ rows
    if "ekfac" in what and not whole:
        if "right_basis" not in before:
            raise ValueError(
                f"layer {record.layer!r}: EK-FAC is summed in K-FAC's eigenbasis, which is not "
                "there. First pass: update(…, ['kfac']); then with_bases(state); then ['ekfac']."
            )
        out["eigen"] = _squares(_rotated(record, before))
    counts = {f"{name}_n": np.asarray(examples) for name in out}
    if "kfac" in what and not whole:
        out["left"], out["right"], positions = _sides(record, mask)
        counts |= {"left_n": np.asarray(examples), "right_n": np.asarray(positions)}
    return out | counts


def _sides(record: Record, mask: Array | None) -> tuple[Array, Array, int]:
    assert not isinstance(record, Whole)
    gram = lambda x: (flat := x.reshape(-1, x.shape[-1])).T @ flat
    where = tuple(record.g.shape[:2])
    known = mask is not None and tuple(mask.shape) == where
    positions = int((mask != 0).sum()) if mask is not None and known else math.prod(where)
    if isinstance(record, Outer):
        return gram(record.g), gram(record.a), positions
    # Σ of one-hot vectors' squares: how often each row was used.
    used = namespace(record.g).ones_like(record.g[..., :1])
    if mask is not None and known:
        used = used * like(mask != 0, record.g)[..., None]
    left = add_rows(record.rows, record.i.reshape(-1), used.reshape(-1, 1))[:, 0]
    return left, gram(record.g), positions


def _total(record: Record) -> Array:
    if isinstance(record, Whole):
        return as_float(record.value).sum(0)
    flat = record.g.reshape(-1, record.g.shape[-1])
    if isinstance(record, Lookup):
        return add_rows(record.rows, record.i.reshape(-1), flat)
    return flat.T @ record.a.reshape(-1, record.a.shape[-1])


def _squares(record: Record) -> Array:
    """Σ_b G²."""
    if isinstance(record, Whole):
        return (as_float(record.value) ** 2).sum(0)
    examples, places = record.g.shape[:2]
    if isinstance(record, Lookup):
        # A row used at several positions of an example gets the square of its sum, once: each of
        # the positions gets an equal share of it.
        same = like(record.i[:, :, None] == record.i[:, None, :], record.g)
        sums = same @ record.g
        share = sums**2 / same.sum(-1)[..., None]
        return add_rows(record.rows, record.i.reshape(-1), share.reshape(-1, share.shape[-1]))
    if places == 1:
        return (record.g[:, 0] ** 2).T @ (record.a[:, 0] ** 2)
    step = max(1, _CHUNK // math.prod(record.shape))
    cuts = [slice(b, b + step) for b in range(0, examples, step)]
    return sum((Outer("", record.a[b], record.g[b]).grad() ** 2).sum(0) for b in cuts)


def _rotated(record: Record, bases: Mapping[str, Array]) -> Record:
    """The record whose gradient is Q_leftᵀ G Q_right."""
    if isinstance(record, Outer):
        left, right = (like(bases[n], record.g) for n in BASES)
        return Outer(record.layer, record.a @ right, record.g @ left)
    assert isinstance(record, Lookup)
    return dataclasses.replace(record, g=record.g @ like(bases["right_basis"], record.g))
