"""How a module was called: what is needed to call it again, and to give its output a batch axis."""

from __future__ import annotations

import ast
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

_POSITIONS = ("pos", "wpe", "type")  # parts of the names that such embeddings have
_PLAIN = (bool, int, float, str, type(None))


class Call:
    """Arguments of a call, in which the tensors can be replaced.

    In a compiled program only tensors and text reach the backward pass. So there the other
    arguments are known by what `written` has made of them.
    """

    def __init__(self, text: str, arguments: Any):
        self._text, self._arguments = text, arguments

    def with_tensors(self, tensors: list[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with these tensors, in the order of `pytree.tree_flatten`."""
        if not self._text:
            return tuple(tensors), {}
        arguments = self._arguments or ast.literal_eval(self._text)
        leaves, tree = pytree.tree_flatten(arguments)
        rest = iter(tensors)
        return pytree.tree_unflatten([self._leaf(x, rest) for x in leaves], tree)

    def _leaf(self, x: Any, rest: Any) -> Any:
        if x is ... or isinstance(x, Tensor):
            return next(rest)
        if isinstance(x, bytes) and self._arguments is None:
            raise TypeError(
                f"in a compiled program it is called with a {x.decode()}, which is lost when it "
                "has to be called again. Log from the model that is not compiled"
            )
        return x


def written(x: Any) -> str:
    """Arguments as a literal of Python: `...` for a tensor, b"type" for what can't be written."""
    if isinstance(x, Tensor):
        return "..."
    if isinstance(x, _PLAIN):
        return repr(x)
    if isinstance(x, tuple):
        return "(" + "".join([written(y) + "," for y in x]) + ")"
    if isinstance(x, list):
        return "[" + "".join([written(y) + "," for y in x]) + "]"
    if isinstance(x, dict):
        return "{" + "".join([repr(k) + ":" + written(y) + "," for k, y in x.items()]) + "}"
    return "b'" + type(x).__name__ + "'"


class Spreader:
    """Gives the output of what looks up integers an axis for the examples, where it has none.

    Positions are often looked up once for all examples, as (1, T) or (T,), and added to each of
    them. The gradients of the examples would be summed before they can be seen.
    """

    def __init__(self) -> None:
        self.size: int | None = None  # examples in the forward pass that is under way

    def note(self, x: Tensor) -> None:
        if x.ndim > 2 or (x.ndim == 2 and not x.is_floating_point()):
            self.size = x.shape[0]

    def __call__(self, module: nn.Module, out: Tensor, x: Tensor, batch: int, name: str) -> Tensor:
        """`batch` is the number of all examples, `name` that of the module."""
        table = isinstance(module, nn.Embedding)
        if table and x.ndim > 1 and (out.ndim != x.ndim + 1 or len(out) != len(x)):
            return out.expand(len(x), *out.shape[-2:])  # it makes positions of what it is given
        named = any(word in name.rpartition(".")[2] for word in _POSITIONS)
        compiling = torch.compiler.is_compiling()  # neither values nor what came before are known
        if compiling and not named:
            return out
        size = batch if compiling or self.size is None else self.size
        once = x.ndim > 1 and x.shape[0] == 1 != size
        flat = x.ndim == 1 and (named or x.shape[0] != size)
        # Values come last: to see them is to wait for a GPU.
        if (once or flat) and (named or counts(x)):
            return out.expand(size, *(out.shape[1:] if once else out.shape))
        if not compiling:
            self.note(x)
        return out


def counts(x: Tensor) -> bool:
    """Whether these are the numbers of positions, 0 1 2 … or a later part of them."""
    row = x.reshape(-1)
    return len(row) > 0 and bool(((row - row[0]) == torch.arange(len(row), device=x.device)).all())


def versions(arguments: Any) -> list[int] | None:
    """How often each tensor was changed in place. A compiler knows that by itself."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return None
    leaves = pytree.tree_flatten(arguments)[0]
    return [x._version for x in leaves if isinstance(x, Tensor) and not x.is_inference()]


def changed_in_place(module: nn.Module, before: list[int], after: list[int] | None) -> None:
    if before != after:
        raise RuntimeError(
            f"{type(module).__name__} changes its input in place, so it can't be called again with "
            "the same to find the gradients of each example. Leave it out with name_filter, or "
            "teach it with @logix.torch.rule."
        )
