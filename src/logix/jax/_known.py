"""Numbers in a program that are known before it is run: constants, and the counters of loops.

`ws[i]` in a loop over i, or `w * 0.5`, is a view of a parameter only because i and the scale are
known. What is known is one number for each iteration of the loops around it, or the numbers that a
loop is to go over (`vector`, as of `jnp.arange`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from lox import _compat

from ._entrywise import CALLS, inner


@dataclasses.dataclass(frozen=True)
class Known:
    """`value`: an axis for each loop, outermost first, of length 1 where it does not change."""

    value: np.ndarray
    vector: bool = False  # the last axis is one of its own

    def among(self, loops: int) -> np.ndarray:
        return self.value.reshape((*self.value.shape, *[1] * (loops - self.value.ndim)))

    @property
    def constant(self) -> float | None:
        """The number it is, if it is the same everywhere."""
        values = self.value.reshape(-1)
        if self.vector or not values.size or (values != values[0]).any():
            return None
        return float(values[0])


Env = dict[Any, Known | None]


def read(env: Env, var: Any) -> Known | None:
    return constant(var.val) if isinstance(var, jex.Literal) else env.get(var)


def constant(x: Any) -> Known | None:
    """A number that a program holds."""
    if np.ndim(x) or isinstance(x, jax.core.Tracer) or not _is_number(x):
        return None
    return Known(np.asarray(x))


def _is_number(x: Any) -> bool:
    kind = jnp.result_type(x)
    return jnp.issubdtype(kind, jnp.number) and not jnp.issubdtype(kind, jnp.complexfloating)


def carried(eqn: Any, number: int, first: Known | None, loops: int) -> Known | None:
    """What a scan inside of `loops` others carries, if all it does is to add a constant to it."""
    params = eqn.params
    body = inner(params["jaxpr"])
    new = body.outvars[number]
    old = body.invars[_compat.scan_arity(params)[0] + number]
    made = next((e for e in body.eqns if new in e.outvars), None)
    if first is None or first.vector or made is None or made.primitive.name != "add":
        return None
    if not np.issubdtype(old.aval.dtype, np.integer):
        return None  # what is rounded at each step is no multiple
    step = [v.val for v in made.invars if isinstance(v, jex.Literal)]
    if old not in made.invars or len(step) != 1 or np.ndim(step[0]):
        return None
    times = np.arange(params["length"])
    times = times[::-1] if params["reverse"] else times
    return Known((first.among(loops)[..., None] + step[0] * times).astype(old.aval.dtype))


def iterated(vector: Known | None, loops: int) -> Known | None:
    """What the iterations of a scan inside of `loops` others get, of what it goes over."""
    if vector is None or not vector.vector or vector.value.ndim != 1:
        return None
    return Known(vector.value.reshape(*[1] * loops, -1))


def evaluate(eqn: Any, ins: Sequence[Known | None], loops: int) -> list[Known | None]:
    """The outputs of an equation inside of so many loops, as far as they are known."""
    nothing: list[Known | None] = [None] * len(eqn.outvars)
    name = eqn.primitive.name
    known = [x for x in ins if x is not None]
    vector = any(x.vector for x in known)
    if len(known) < len(ins):
        return nothing
    if name in CALLS and name != "shard_map":
        return _call(inner(eqn.params[CALLS[name]]), known, loops)
    if name == "iota" and len(eqn.params["shape"]) == 1:
        return [Known(np.arange(eqn.params["shape"][0], dtype=eqn.params["dtype"]), True)]
    if name not in NUMPY or (vector and (loops or name in SHAPED)):
        return nothing
    values = [x.value if vector else x.among(loops) for x in known]
    kind = eqn.outvars[0].aval.dtype
    # Where NumPy and XLA do not agree, or may not.
    rounds = not jnp.issubdtype(kind, jnp.inexact) and any(
        x.dtype.kind not in "iub" for x in values
    )
    odd = (name == "convert_element_type" and rounds) or (name == "select_n" and len(values) > 3)
    if odd or (name in ("div", "rem") and not values[1].all()):
        return nothing
    with np.errstate(all="ignore"):
        out = np.asarray(NUMPY[name](*values))
    return [Known(out.astype(kind), vector)]


def _call(body: Any, ins: Sequence[Known], loops: int) -> list[Known | None]:
    env: Env = dict(zip(body.invars, ins))
    for eqn in body.eqns:
        env.update(zip(eqn.outvars, evaluate(eqn, [read(env, v) for v in eqn.invars], loops)))
    return [read(env, v) for v in body.outvars]


def _select(which: np.ndarray, *cases: np.ndarray) -> np.ndarray:
    which, *cases = np.broadcast_arrays(which, *cases)  # type: ignore[assignment]
    return np.choose(which.astype(int), cases)


def _div(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    if not np.issubdtype(x.dtype, np.integer):
        return x / y
    return np.sign(x) * np.sign(y) * (np.abs(x) // np.abs(y))  # towards zero


def _same(x: np.ndarray) -> np.ndarray:
    return x


SHAPED = ("broadcast_in_dim", "reshape", "squeeze")  # of one number, nothing is changed by them
NUMPY: dict[str, Callable] = {
    **dict.fromkeys((*SHAPED, "convert_element_type", "stop_gradient", "copy"), _same),
    **{"add": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative, "div": _div},
    **{"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal},
    **{"eq": np.equal, "ne": np.not_equal, "max": np.maximum, "min": np.minimum, "rem": np.fmod},
    **{"sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "select_n": _select},
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
}
