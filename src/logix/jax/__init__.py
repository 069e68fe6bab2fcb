"""logix for JAX: the records of any loss, by reading its program.

    capture = logix.jax.capture(loss, params)
    records = jax.jit(capture)(params, batch)

`run.watch(loss, params)` uses it.
"""

from __future__ import annotations

import jax

from .._norms import squared_norms as squared_norms
from .._record import Lookup as Lookup
from .._record import Outer as Outer
from .._record import Whole as Whole
from .._rows import Activation as Activation
from ._capture import Capture as Capture
from ._capture import capture as capture

__all__ = ["capture", "squared_norms"]  # records and Capture are told by `capture`

_register = jax.tree_util.register_dataclass
_register(Outer, data_fields=["a", "g", "real"], meta_fields=["layer"])
_register(Lookup, data_fields=["i", "g"], meta_fields=["layer", "rows"])
_register(Whole, data_fields=["value"], meta_fields=["layer"])
_register(Activation, data_fields=["forward", "backward"], meta_fields=["layer"])
