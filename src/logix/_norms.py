"""Squared norms of per-sample gradients, from records: the gradients themselves are never made.

With G = Σ_t l_t ⊗ r_t, ‖G‖² = Σ_ts (l_t·l_s)(r_t·r_s): the positions' products with each other,
which for short sequences are far fewer than the entries of G.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ._array import Array, as_float, namespace, precise
from ._compress import gradients
from ._record import Lookup, Outer, Record


def squared_norms(records: Sequence[Record]) -> Array:
    """(examples,): the influence of each example on itself, exactly, without a row.

    >>> import numpy as np
    >>> from logix._norms import squared_norms
    >>> from logix._record import Outer
    >>> squared_norms([Outer("fc", np.ones((2, 1, 3)), np.ones((2, 1, 4)))]).tolist()
    [12.0, 12.0]
    """
    layers: dict[str, list[Any]] = {}
    for record in records:
        layers.setdefault(record.layer, []).append(record)
    total: Any = 0.0
    for uses in layers.values():
        total = total + _norm(uses)
    return total


def _norm(uses: Sequence[Any]) -> Array:
    first = uses[0]
    if isinstance(first, Outer | Lookup):
        with precise(first.g):
            if len(uses) == 1 and isinstance(first, Outer) and first.g.shape[1] == 1:
                return (as_float(first.a) ** 2).sum((1, 2)) * (as_float(first.g) ** 2).sum((1, 2))
            (left, right), places = first.shape, sum(r.g.shape[1] for r in uses)
            kinds = {type(r) for r in uses}
            # Either the products of all positions, or the gradient: what has fewer multiplications.
            if len(kinds) == 1 and places * (left + right) < 2 * left * right:
                xp = namespace(first.g)
                g = xp.concatenate([as_float(r.g) for r in uses], 1)
                alike = xp.einsum("bto,bso->bts", g, g)
                if isinstance(first, Lookup):
                    i = xp.concatenate([r.i for r in uses], 1)
                    return (alike * (i[:, :, None] == i[:, None, :])).sum((1, 2))
                a = xp.concatenate([as_float(r.a) for r in uses], 1)
                return (alike * xp.einsum("bti,bsi->bts", a, a)).sum((1, 2))
    [grad] = gradients(uses).values()
    return (grad.reshape(len(grad), -1) ** 2).sum(1)
