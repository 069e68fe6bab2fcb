"""The part of a logger that runs inside of programs: beginning a run, and sending a logdict."""

from __future__ import annotations

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from .._event import Spec
from .._host import Receive, Sink
from .._logdict import iterate_entries, logdict
from .._primitive import emit
from .._stream import message
from .._transform import Eager
from ._names import split_config
from ._state import LoggerState, identity, words_of

_config: Any = jax.config
_latest = threading.local()  # the trace in which a message was sent last, and its token
_SPEC = Spec((), (), (), (), False, None, "a call of a logger")


def is_eager(*trees: Any) -> bool:
    """Are all arrays known, and does nothing trace?"""
    leaves = jax.tree.leaves(trees)
    return isinstance(jex.find_top_trace(leaves), Eager)


def init(logger: Any, key: Any, name: str | None, config: Any) -> LoggerState:
    words, kind = words_of(key)
    arrays, restore = split_config(config)
    if is_eager(words, arrays):
        row = np.append(np.asarray(words), np.zeros(2, np.uint32)).astype(np.uint32)
        logger.host_open(name, kind, row[None], [restore(arrays)])
        return LoggerState(jnp.asarray(row), name, kind)
    ids = identity(words, arrays)

    def receive(logs: logdict, configs: list[np.ndarray]) -> None:
        [(_, entry)] = iterate_entries(logs)
        batch = entry.value.shape[:-1]
        rows = entry.value.reshape(-1, entry.value.shape[-1])
        taken = np.ones(len(rows), bool) if entry.mask is None else entry.mask.reshape(-1)
        flat = [c.reshape(-1, *c.shape[len(batch) :]) for c in configs]
        per_run = [restore([c[i] for c in flat]) for i in np.flatnonzero(taken)]
        logger.host_open_later(name, kind, rows[taken], per_run)

    logs = logdict.one_event({"id": ids}, {}, {"id": (1,)}, ())
    token = send(logs, arrays, receive)
    # The runs are open before anything that uses the state.
    ids, _ = jax.lax.optimization_barrier((ids, token))
    return LoggerState(ids, name, kind)


def send(logs: logdict, context: Any, receive: Receive) -> Any:
    """One host call with a logdict and its context. Returns a token that is there afterwards.

    Calls after one another in the same function keep their order: each takes the token of the last.
    """
    trace = jex.find_top_trace(())
    known, start = getattr(_latest, "sent", (None, None))
    if known is not trace:
        start = jnp.int32(0)
    _, token = emit(message(logs, context, _SPEC), sink=Sink(receive), token=start)
    if not _config.jax_check_tracer_leaks:
        _latest.sent = (trace, token)
    return token


def forget_trace() -> None:
    """Keep no trace alive that has ended: nothing is being traced now."""
    _latest.sent = (None, None)
