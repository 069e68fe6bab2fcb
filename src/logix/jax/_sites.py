"""The operations whose gradient for a parameter is known, by name of their primitive."""

from __future__ import annotations

from collections.abc import Callable

from ._convolution import Convolution
from ._custom import Custom
from ._lookup import LookUp
from ._products import Product, RaggedProduct
from ._site import Site

SITES: dict[str, Callable[..., Site]] = {
    "dot_general": Product,
    "ragged_dot_general": RaggedProduct,
    "conv_general_dilated": Convolution,
    "gather": LookUp,
    "dynamic_slice": LookUp,
    "custom_jvp_call": Custom,
    "custom_vjp_call": Custom,
}
