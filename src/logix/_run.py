"""`LogIX`: one run. It watches a model, and turns each batch into rows and statistics.

with run(data_id=ids):          the model is watched
    loss.backward()             records, compressed as they come
# after the block:              records -> statistics, rows -> store
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping
from typing import Any

from ._analysing import Analysing
from ._analysis import Analysis
from ._beside import load_compression
from ._block import Block
from ._compress import Compression, Projector
from ._config import read_config
from ._extracting import Extracting
from ._rows import shown
from ._saved import Saved
from ._settings import parse
from .utils import given_ids

Log = tuple[list[Any], dict[str, dict[str, Any]]]


class LogIX(Extracting, Analysing):
    """A run: what is logged of a model, where it is kept, and what is computed from it.

    >>> import tempfile, torch, logix
    >>> model = torch.nn.Linear(3, 2)
    >>> run = logix.LogIX("example", config={"root_dir": tempfile.mkdtemp()})
    >>> run.setup({"log": "grad", "save": "grad", "statistic": "kfac"})
    >>> run.watch(model)
    logix: watching 1 layer, 8 of 8 parameters (100.0%); a row has 8 values (32 B)
    >>> with run(data_id=["a", "b"]):
    ...     model(torch.ones(2, 3)).sum().backward()
    >>> run.finalize()
    >>> len(run.store())
    2

    Arguments:

    - `project`: the name of the run's folder.
    - `config`: a dict, or the path of a YAML file: `root_dir` (`"./logix"`), and the sections
      `logging` and `lora` (`LoRAConfig`).
    - `logging_config`: the section `logging`, by itself.
    - `resume`: go on with what is saved; ids that are there are passed over. Statistics begin anew,
      for a pass over all data; `initialize_from_log()` goes on with them, for a pass over more.
    - `overwrite`: remove what is saved under this name.
    - `duplicates`: what becomes of an id that is there already: `"error"`, `"keep_first"` or
      `"keep_all"`.
    - `nonfinite`: what becomes of an example whose gradient has NaN or infinity: `"error"`;
      `"skip"` leaves it out; `"keep"` saves its row. `finalize` says how many there were.
    """

    def __init__(
        self,
        project: str,
        config: Any = None,
        logging_config: Mapping[str, Any] | None = None,
        *,
        resume: bool = False,
        overwrite: bool = False,
        duplicates: str = "error",
        nonfinite: str = "error",
    ):
        if logging_config is not None:
            config = {"logging": logging_config} if config is None else config
            config = dataclasses.replace(
                read_config(config), logging=read_config({"logging": logging_config}).logging
            )
        super().__init__(read_config(config), nonfinite)
        self.project = project
        self.path = os.path.join(self.config.root_dir, project)
        how = dict(resume=resume, overwrite=overwrite, duplicates=duplicates)
        how |= dict(nonfinite="keep" if nonfinite == "keep" else "error")
        self._saved = Saved(self.path, self.config.logging, how)
        self.influence = Analysis(self)
        self._open: Any = None
        self._save: bool | None = None

    # --- what to do --------------------------------------------------------------------------

    def setup(self, words: Mapping[str, Any]) -> None:
        """Say what to log, save and accumulate, in either of two forms.

        >>> import logix
        >>> run = logix.LogIX("example")
        >>> run.setup({"log": "grad", "save": "grad", "statistic": "kfac"})
        >>> run.setup({"grad": ["log", "covariance"], "forward": ["mean"]})
        >>> sorted(run.settings.statistics)
        ['forward_mean', 'raw']
        """
        self.settings, self._logging = parse(words), True

    def eval(self) -> None:
        """Log, but save nothing and accumulate nothing, until `setup` or `save`."""
        self._logging = False

    def save(self, enable: bool = True) -> None:
        """Save what is logged from here on, or not."""
        self._logging |= enable
        kinds = (self.settings.log or frozenset({"grad"})) if enable else frozenset()
        self.settings = dataclasses.replace(self.settings, save=kinds)

    def clear(self) -> None:
        """Forget statistics, compression and the last log. What is saved stays."""
        self._forget()
        self.ids, self.records, self._tensors, self._extra = [], [], [], {}
        self.compression, self._logging = Projector(Compression()), True

    # --- one batch ---------------------------------------------------------------------------

    def __call__(
        self,
        data_id: Any,
        mask: Any = None,
        save: bool | None = None,
        *,
        weight_grads: bool = False,
    ) -> Block:
        """Log the examples whose loss goes backward inside.

        Arguments:

        - `data_id`: an id for each example: a list, a tensor of integers, or the batch itself,
          whose content then makes the ids.
        - `mask`: (B, T), true where a position counts.
        - `save`: whether this batch is saved; by default what `setup` says.
        - `weight_grads`: True to have gradients in the parameters too, to train on the same pass.
        """
        if self._program is not None:
            raise TypeError(
                "this run watches a loss of JAX, which has no backward pass to wait for: call "
                "run.extract(batches, ids=…), or run.log(batch, ids=…) for queries."
            )
        if self._model is None:
            raise RuntimeError("there is no model to log from. Call watch(model) first.")
        return Block(self._batch(data_id, mask, save, weight_grads))

    @contextlib.contextmanager
    def _batch(
        self, data_id: Any, mask: Any, save: bool | None, weight_grads: bool
    ) -> Iterator[None]:
        from .torch._context import batch

        self._saved.check()
        ids = given_ids(data_id)
        self.ids, self.records, self._tensors, self._extra, self._save = [], [], [], {}, save
        about = self._model, self._units, len(ids), mask, self.compression.record, weight_grads
        with batch(*about) as capture:
            yield
        records = capture.records()
        self._take(ids, records, self._activations(len(ids), mask, capture.scale), mask, self._save)

    def start(self, data_id: Any, mask: Any = None, save: bool | None = None) -> None:
        """The same as entering `with run(data_id, mask)`; `end` leaves it.

        A batch that was begun and not ended, because of an error in between, is given up.
        """
        if self._open is not None:
            given_up, self._open = self._open, None
            with contextlib.suppress(_GivenUp):
                given_up.__exit__(_GivenUp, _GivenUp(), None)
        self._open = self(data_id, mask, save)
        self._open.__enter__()

    def end(self, save: bool | None = None) -> None:
        """Take what was logged since `start`."""
        if self._open is None:
            raise RuntimeError("end() without start(data_id=…) before")
        opened, self._open = self._open, None
        self._save = self._save if save is None else save
        opened.__exit__(None, None, None)

    def get_log(self, copy: bool = False) -> Log:
        """The ids and logs of the last batch: `(ids, {layer: {"grad": rows}})`.

        Gradients are made when asked for. `copy` gives arrays that no later batch can change.
        """
        kinds = self.settings.log or frozenset({"grad"})
        found = shown([*self.records, *self._tensors], kinds)
        if copy:
            found = {k: {n: x + 0 for n, x in own.items()} for k, own in found.items()}
        return self.ids, found

    # --- afterwards --------------------------------------------------------------------------

    def flush(self) -> None:
        """Wait until all rows so far are with the operating system, which a crash can't undo."""
        self._saved.flush()

    def close(self) -> None:
        """End the run where it is: rows are on the disk, statistics of this pass are forgotten."""
        self._saved.close()
        self._fresh = {}

    def initialize_from_log(
        self, state_path: str | None = None, lora_path: str | None = None
    ) -> None:
        """Statistics and compression as an earlier run has saved them.

        Arguments:

        - `state_path`: the folder of the run whose statistics are read; by default this run's.
        - `lora_path`: the folder of the run whose compression is used; by default this run's.
        """
        self._forget()
        self._earlier = self._saved.statistics(state_path)
        self.compression = load_compression(lora_path or state_path or self.path)


class _GivenUp(BaseException):
    """Ends a batch whose records nobody will ask for."""
