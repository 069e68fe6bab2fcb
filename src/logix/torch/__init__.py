"""logix for PyTorch: gradients of each example from the model's own backward pass.

`rule` teaches it a type of module. The records that a rule may give are `Outer`, `Lookup` and
`Whole`; a tensor is taken as `Whole`.
"""

from .._record import Lookup as Lookup
from .._record import Outer as Outer
from .._record import Whole as Whole
from ._layers import rule as rule
