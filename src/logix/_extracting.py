"""Runs over losses of JAX: `extract` takes a whole data set, `log` a batch of queries."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ._progress import progress
from ._taking import Taking
from .store._ids import as_ids, content_ids

AHEAD = 2  # batches that are computed while an earlier one is written


class Extracting(Taking):
    """The part of `LogIX` that goes over data itself."""

    def extract(
        self,
        batches: Iterable[Any] | Callable[[], Iterable[Any]],
        ids: Any = None,
        *,
        mask: Callable[[Any], Any] | None = None,
        save: bool | None = None,
    ) -> int:
        """Log all examples of a data set; returns how many. For a loss of JAX (`watch`).

        >>> import tempfile, jax.numpy as jnp, numpy as np, logix
        >>> loss = lambda w, example: ((example["x"] @ w - example["y"]) ** 2).sum()
        >>> data = {"x": np.eye(6, 3), "y": np.ones((6, 2))}
        >>> run = logix.LogIX("example", config={"root_dir": tempfile.mkdtemp()})
        >>> run.setup({"log": "grad", "save": "grad", "statistic": "kfac"})
        >>> run.watch(loss, jnp.ones((3, 2)))
        >>> run.extract([{k: v[i : i + 2] for k, v in data.items()} for i in (0, 2, 4)], range(6))
        logix: watching 1 parameter array, 6 of 6 values (100.0%); a row has 6 values (24 B)
        6
        >>> run.finalize()
        >>> len(run.store())
        6

        Arguments:

        - `batches`: an iterable of batches, or a function that returns one. A batch is a pytree of
          arrays whose first axis is over its examples. EK-FAC goes over them twice: give it all of
          the data in one call.
        - `ids`: one for each example, in their order; or a function of a batch; or the key of a
          batch's own ids, which the loss does not get. By default they are made of the content.
        - `mask`: a function of a batch: (examples, positions), true where a position counts. The
          others are left out of statistics and of what is saved; the loss leaves them out itself.
        - `save`: whether rows are saved; by default what `setup` says.

        What is saved already is not computed again (`resume=True`), unless for statistics. A batch
        of another size than the others is compiled for itself.
        """
        if self._program is None:
            raise TypeError(
                "extract is for a loss of JAX: run.watch(loss, params) first. A PyTorch model is "
                "logged by `with run(data_id=ids): loss.backward()`."
            )
        if not self._summed() and not self._kinds(save):
            raise ValueError(
                "there is nothing to do with these batches: they are neither saved nor summed. Say "
                'what to do by run.setup({"log": "grad", "save": "grad", "statistic": "kfac"}), '
                "or use run.log(batch) for queries."
            )
        passes = _Passes(batches, ids, mask)
        summed = "ekfac" in self.settings.statistics and self._logging
        twice = summed and not self._has_bases() and not self._scheduled
        if summed and self._own_bases and not self._scheduled:
            raise ValueError(
                "EK-FAC goes over all of the data twice, and an extract before this one has begun "
                "the second time: give all batches in one call, or use statistic='kfac'. "
                "run.clear() begins anew; compression is forgotten with it."
            )
        if twice:
            passes.check_twice()
        count = self._pass(passes, save)
        if twice:
            self.finalize()
            self._own_bases = True
            self._pass(passes, False)  # rows are there
        return count

    def coverage(self) -> Any:
        """Which rule took each parameter of a JAX loss, its share, and what it costs: a table.

        It is known once a batch was logged.
        """
        found = None if self._program is None else self._program.coverage
        if found is None:
            raise RuntimeError(
                "the program of a loss is read at its first batch: call run.extract(batches) or "
                "run.log(batch) before. (Of a PyTorch model, watch tells what it covers.)"
            )
        return found

    def _pass(self, passes: _Passes, save: bool | None) -> int:
        what, kinds, count = self._summed(), self._kinds(save), 0
        if what:
            self._begin_statistics()
        waiting: deque[Any] = deque()
        errors: list[BaseException] = []

        def finish(least: int) -> None:
            while len(waiting) > least:
                try:
                    waiting.popleft()()
                except Exception as error:  # what is computed beside it is logged all the same
                    errors.append(error)

        try:
            for names, batch, mask in passes:
                self._saved.check()
                waiting.append(self._program.begin(self, names, batch, mask, what, kinds))
                count += len(names)
                finish(AHEAD)
                if errors:
                    break
        except BaseException as error:
            finish(0)
            for other in errors:
                error.add_note(f"logix: and of an earlier batch, {type(other).__name__}: {other}")
            raise
        finally:
            finish(0)
            self._program.spare.keep(1)
            if not any(n.endswith("_n") for own in self._fresh.values() for n in own):
                self._fresh = {}  # sums of nothing
        if errors:
            raise errors[0]
        return count

    def log(
        self, data_id: Any = None, mask: Any = None, save: bool | None = None, **how: Any
    ) -> Any:
        """For a loss of JAX: the log of a batch, to ask for its influence. Nothing is saved.

            scores = run.influence.compute_influence_all(run.log(batch, ids=ids))

        For a PyTorch model it is the same as `run(data_id, mask, save)`.

        Arguments:

        - `data_id`: the batch, of JAX; the ids, of PyTorch.
        - `ids`: an id for each example; by default they are made of the content.
        - `mask`: (B, T), true where a position counts.
        """
        if self._program is None:
            return self(data_id, mask, save, **how)  # type: ignore[operator]
        batch = how.pop("batch", data_id)
        names, unknown = how.pop("ids", None), sorted(how)
        if unknown:
            raise TypeError(f"log(batch, ids=…) does not know {unknown}")
        if save:
            raise ValueError("log saves nothing: run.extract([batch], ids=ids) does")
        given = None if mask is None else lambda _: mask
        passes = _Passes([batch], names, given)
        [(found, batch, mask)] = passes
        records, tensors = self._program.logged(self, batch, mask)
        logging, self._logging = self._logging, False
        try:
            self._take(found, records, tensors, mask, False)
            return self.get_log()  # type: ignore[attr-defined]
        finally:
            self._logging = logging


class _Passes:
    """Batches with their ids and masks, once or twice."""

    def __init__(self, batches: Any, ids: Any, mask: Callable[[Any], Any] | None):
        if mask is not None and not callable(mask):
            raise TypeError(
                f"mask is a function of a batch (lambda batch: batch['mask']), not {type(mask)}"
            )
        if isinstance(batches, Mapping):
            raise TypeError(
                f"a dict was given, with the keys {list(batches)}, where an iterable of batches is "
                "needed. One batch alone is given as [batch]."
            )
        self._batches, self._mask = batches, mask
        self._ids = list(ids) if isinstance(ids, Iterator) else ids
        # Some data sets can be called, too.
        self._made = callable(batches) and not hasattr(batches, "__iter__")

    def check_twice(self) -> None:
        if not self._made and iter(self._batches) is self._batches:
            raise ValueError(
                "EK-FAC goes over the data twice, and these batches can be had only once: give a "
                "list of them, or a function that returns an iterator (lambda: iter(loader))."
            )

    def __iter__(self) -> Iterator[tuple[list[Any], Any, Any]]:
        from .jax._batches import as_batch, as_mask

        given = self._ids
        left: Iterator[Any] = iter(())
        if given is not None and not callable(given) and not isinstance(given, str):
            left = iter(as_ids(given))
        batches = self._batches() if self._made else self._batches
        for number, content in enumerate(progress(batches, what="batches")):
            rest, names = content, None
            if isinstance(given, str):
                names, rest = _apart(content, given)
            batch = as_batch(rest)
            if given is None:
                names = content_ids(batch.content())
            elif callable(given):
                names = as_ids(given(content))
            elif names is not None:
                names = as_ids(batch.column(names))
            else:
                names = list(itertools.islice(left, batch.size))
            names = batch.own(names)
            if len(names) != batch.here:
                raise ValueError(
                    f"{len(names)} ids for batch {number}, which has {batch.here} examples: one "
                    "is needed for each of them."
                )
            yield names, batch, None if self._mask is None else as_mask(self._mask(content), batch)
        if more := sum(1 for _ in left):
            raise ValueError(f"the ids are too many: {more} were left when the batches ended")


def _apart(batch: Any, key: str) -> tuple[Any, Any]:
    """The ids of a batch that has them under a key, and the rest of it."""
    if not isinstance(batch, Mapping) or key not in batch:
        found = f"its keys are {list(batch)}" if isinstance(batch, Mapping) else "it is no dict"
        raise ValueError(f"ids={key!r}: the batch has no such key; {found}.")
    return batch[key], {k: x for k, x in batch.items() if k != key}
