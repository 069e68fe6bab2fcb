"""What a run does with batches of a JAX loss: it starts them, and ends them when they are computed.

    finish = program.begin(run, ids, batch, mask, what, kinds)
    finish()        rows to the store; an example that is not finite is found here

Between the two, others may be started: a device is never waited for but for its oldest batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _statistics
from .._group import group_of_processes
from .._outbox import Fit, Reserved
from .._record import Record
from .._rows import Activation
from .._taking import bases
from ._batches import Batch, Spread, freely, is_here
from ._capture import Capture
from ._coverage import Coverage
from ._ready import Ready, Spare
from ._step import Step, zeros_like

Array = Any


class Program:
    """A loss and its parameters, as a run watches them."""

    def __init__(self, capture: Capture, params: Any):
        own = lambda x: jnp.array(x) if isinstance(x, np.ndarray) else freely(x)
        self.capture, self.params = capture, jax.tree.map(own, params)
        self.shapes: dict[str, tuple[int, ...]] = {}  # of whole gradients, once a batch was seen
        self.coverage: Coverage | None = None
        self._ready: dict[Any, Ready] = {}
        self.arrays = capture.watched.arrays(self.params)
        self._named = Spread.named(self.arrays)
        self.spare = Spare()
        self._step = Step(capture)
        here = [d.platform for x in self.arrays if isinstance(x, jax.Array) for d in x.devices()]
        self._rows = "rows" if {*here, jax.default_backend()} == {"cpu"} else "joined"

    def ready(self, run: Any, batch: Batch) -> Ready:
        """Projections for batches of this shape, made at the first one."""
        key = batch.shape, id(run.compression)
        if key not in self._ready:
            self._check(batch)
            found, made = self._step.shapes(self.arrays, batch.arrays, run.compression)
            whole, stacks, records, logged, grads, parts = found
            given = {spot: jnp.asarray(x) for spot, x in made.items()}
            first = [stack.names[0] for stack in stacks]
            self._ready[key] = Ready(run.compression, given, first, records, logged, grads, parts)
            if not self.shapes:
                self.shapes = {x.layer: x.shape for x in whole}
                self.coverage = self.capture.coverage(self.params, batch.arrays)
                run._tell(f"watching {self.coverage.summary()}; {run._row()}")
        return self._ready[key]

    def _check(self, batch: Batch) -> None:
        if batch.mine is None and not all(map(is_here, self.arrays)):
            raise ValueError(
                "the parameters are spread over several processes, and this batch is not: make it "
                "one of all of them, jax.make_array_from_process_local_data(sharding, array)."
            )
        self.capture.check(self.params, batch.arrays)

    def logged(self, run: Any, batch: Batch, mask: Any) -> tuple[list[Record], list[Activation]]:
        """The records of a batch, on its device; of a batch of several processes, its own."""
        ready = self.ready(run, batch)
        how = dict(settings=ready.how.settings)
        found = self._step.records(self.arrays, batch.arrays, ready.given, mask, **how)
        return found if batch.mine is None else jax.tree.map(batch.local, found)

    def begin(
        self,
        run: Any,
        ids: list[Any],
        batch: Batch,
        mask: Any,
        what: frozenset[str],
        kinds: frozenset[str],
    ) -> Callable[[], None]:
        """Start a batch. What is returned waits for it, and writes its rows."""
        ready = self.ready(run, batch)
        want = "records" if kinds - {"grad"} else self._rows if kinds else "sums"
        reserved, undo = None, lambda: None
        if kinds:
            reserved = self._fit(run, ready, len(ids), want, kinds).reserve(ids)
            reserved.hold()
            undo = reserved.release
            if self._is_there(run, reserved, batch):
                reserved, want = None, "sums"
        if want == "sums" and not what:
            return lambda: None
        alone = Spread.of(batch.arrays, self._named).sharding is None
        old = self.spare.take(ready.parts, batch.devices) if want == "rows" and alone else []
        try:
            out = self._started(run, ready, batch, mask, None, what, want, old)
        except BaseException:
            undo()
            raise

        def finish() -> None:
            try:
                if bool(out["all finite"]):
                    _count(run, out)
                else:
                    self._not_finite(run, ready, ids, batch, mask, what, out, reserved)
                if reserved is None:
                    return
                if want == "joined":
                    [rows] = map(batch.local, out["rows"])
                elif want == "rows":
                    logged = ready.split([batch.local(part) for part in out["rows"]])
                else:
                    records, tensors = jax.tree.map(batch.local, out["records"])
                    logged = [*records, *tensors]
            except BaseException as error:
                undo()
                _lost(run, error)
                raise
            if want == "joined":
                reserved.write_rows(rows)
            else:
                reserved.write(logged)
            if old:
                self.spare.give(out["rows"], batch.devices)

        return finish

    def _fit(self, run: Any, ready: Ready, size: int, want: str, kinds: frozenset[str]) -> Fit:
        """How batches of a size are written: it is found once, since there may be many layers."""
        key, known = (ready, size, want, kinds), run._saved.fits
        if key not in known:
            known[key] = run._saved.fit(size, ready.rows(size, want), kinds, ready.how)
        return known[key]

    def _is_there(self, run: Any, reserved: Reserved, batch: Batch) -> bool:
        """Whether the store has all of a batch. Processes that share it must all say the same."""
        if batch.mine is None:
            return not reserved.keep
        return run._saved.resumes and all(group_of_processes().gathered(not reserved.keep))

    def _not_finite(
        self,
        run: Any,
        ready: Ready,
        ids: list[Any],
        batch: Batch,
        mask: Any,
        what: frozenset[str],
        out: dict[str, Any],
        reserved: Reserved | None,
    ) -> None:
        """Some examples are not finite: they are told, and left out of the sums."""
        good = batch.local(out["finite"]).all(1)
        run._finite.note(ids, good, _layer(ready, batch, out))
        if what:
            every = out["finite"].all(1)
            _count(run, self._started(run, ready, batch, mask, every, what, "sums"))
        if reserved is not None and run._finite.policy == "skip":
            reserved.without(np.flatnonzero(~good).tolist())

    def _started(
        self,
        run: Any,
        ready: Ready,
        batch: Batch,
        mask: Any,
        good: Any,
        what: frozenset[str],
        want: str,
        old: Sequence[Array] = (),
    ) -> dict[str, Any]:
        """Compute a batch, and put what it adds into the run's sums."""
        fixed = bases(run._earlier) if what else {}
        spread = Spread.of(batch.arrays, self._named)
        step = lambda sums: self._step.run(
            self.arrays,
            batch.arrays,
            ready.given,
            sums,
            fixed,
            mask,
            good,
            list(old),
            settings=ready.how.settings,
            want=want,
            what=what,
            spread=spread,
        )
        offload, everywhere = run.config.logging.cpu_offload, batch.mine is not None
        sums = _sums(run._fresh) if what else {}
        if sums and run._everywhere != everywhere:
            raise ValueError(
                "a pass goes over batches of all processes together, or over each process's own, "
                "and not over both: call finalize() in between."
            )
        sums = {} if offload else sums
        if what and not sums:  # zeros first: else the next batch would be compiled again
            sums = zeros_like(jax.eval_shape(lambda: step({}))["sums"], spread)
        try:
            out = step(sums)
        except Exception as error:
            if any(x.is_deleted() for x in jax.tree.leaves(sums)):
                _lost(run, error, True)
            raise
        if what:
            run._everywhere = everywhere
            new = jax.tree.map(np.asarray, out["sums"]) if offload else out["sums"]
            run._fresh = _merged(run._fresh, new) if offload else _replaced(run._fresh, new)
        for x in (out["finite"], *out.get("rows", ())):
            if x.is_fully_addressable:
                x.copy_to_host_async()
        return out


def _layer(ready: Ready, batch: Batch, out: dict[str, Any]) -> str:
    """One in which an example of this process is not finite."""
    fine: Any = batch.local(out["finite"]).all(0)
    if len(fine) == len(ready.first):
        return ready.first[int(np.argmin(fine))]
    layers = ready.split([batch.local(part) for part in out["rows"]])
    return next(x.layer for x in layers if not np.isfinite(x.grad()).all())


def _lost(run: Any, error: BaseException, deleted: bool = False) -> None:
    """Sums that were given to a computation that failed are gone with it."""
    try:
        jax.block_until_ready(_sums(run._fresh))
    except Exception:
        deleted = True
    if deleted and run._fresh:
        run._fresh = {}
        error.add_note(
            "logix: the statistics of this pass are lost with it: go over all of the data again, "
            "in a run with resume=True, which passes over rows that are there."
        )


def _sums(state: Mapping[str, Mapping[str, Array]]) -> dict[str, dict[str, Array]]:
    """What a batch adds to: neither counts nor bases."""
    kept = lambda name: not name.endswith("_n") and name not in _statistics.BASES
    out = {k: {n: x for n, x in stats.items() if kept(n)} for k, stats in state.items()}
    return {layer: stats for layer, stats in out.items() if stats}


def _replaced(state: Mapping[str, Mapping[str, Array]], new: Any) -> dict[str, dict[str, Array]]:
    return {k: {**state.get(k, {}), **new.get(k, {})} for k in {**state, **new}}


def _merged(state: Mapping[str, Mapping[str, Array]], new: Any) -> dict[str, dict[str, Array]]:
    """Sums on the host."""
    grown = {
        k: {n: state[k][n] + x if n in state.get(k, {}) else x for n, x in stats.items()}
        for k, stats in new.items()
    }
    return _replaced(state, grown)


def _count(run: Any, out: dict[str, Any]) -> None:
    """Add what a batch has counted."""
    if (counts := out.get("counts")) is None:
        return
    for (layer, name), n in zip(counts.names, np.asarray(counts.values).tolist()):
        if (own := run._fresh.get(layer)) is not None:  # else they are lost, and that was told
            own[name] = np.asarray(own.get(name, 0) + n)
