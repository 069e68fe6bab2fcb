"""What a run logs, saves and accumulates: the words of `setup`, in both of its forms.

{"log": "grad", "save": "grad", "statistic": "kfac"}
{"grad": ["log", "covariance"], "forward": ["covariance"], "backward": ["covariance"]}
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

KINDS = ("forward", "backward", "grad")
STATISTICS = ("none", "mean", "variance", "diagonal", "kfac", "ekfac", "raw")
_BOTH = {"forward", "backward"}  # covariances of both sides are what K-FAC is made of
# What a word of the second form is to the engine, for each kind of log.
WORDS = {
    ("forward", "covariance"): "forward",
    ("backward", "covariance"): "backward",
    ("forward", "mean"): "forward_mean",
    ("forward", "variance"): "forward_variance",
    ("backward", "mean"): "backward_mean",
    ("backward", "variance"): "backward_variance",
    ("grad", "covariance"): "raw",
    ("grad", "corrected_eigval"): "ekfac",
    ("grad", "mean"): "mean",
    ("grad", "variance"): "variance",
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What `get_log` returns, what goes to the store, and what is summed."""

    log: frozenset[str] = frozenset({"grad"})
    save: frozenset[str] = frozenset()
    statistics: frozenset[str] = frozenset()

    @property
    def sums(self) -> frozenset[str]:
        """What is summed in one pass over the data, before EK-FAC has its eigenvectors."""
        return self.statistics - {"ekfac"} | ({"kfac"} if "ekfac" in self.statistics else set())


def parse(words: Mapping[str, Any]) -> Settings:
    """The settings that a dict asks for. A word that is not known is an error that lists those."""
    if not isinstance(words, Mapping):
        raise TypeError(f"setup takes a dict, got {type(words).__name__}: {EXAMPLE}")
    if set(words) <= {"log", "save", "statistic"}:
        saved = _known("save", words.get("save", ()), KINDS)
        logged = _known("log", words.get("log", ()), KINDS)
        summed = _known("statistic", words.get("statistic", ()), STATISTICS) - {"none"}
        return Settings(logged | saved, saved, summed)
    if set(words) <= set(KINDS):
        log: set[str] = set()
        statistics: set[str] = set()
        for kind, several in words.items():
            known = ("log", *(word for k, word in WORDS if k == kind))
            for word in _known(kind, several, known):
                if word == "log":
                    log.add(kind)
                else:
                    statistics.add(WORDS[kind, word])
        if statistics >= _BOTH or "ekfac" in statistics:
            statistics = statistics - _BOTH | {"kfac"}
        return Settings(frozenset(log), frozenset(log), frozenset(statistics))
    unknown = sorted(set(words) - {"log", "save", "statistic", *KINDS})
    what = f"does not know {unknown}" if unknown else f"does not take {sorted(words)} together"
    raise ValueError(
        f"setup {what}. It takes log, save and statistic, or {', '.join(KINDS)}: {EXAMPLE}"
    )


EXAMPLE = 'setup({"log": "grad", "save": "grad", "statistic": "kfac"})'


def _known(name: str, words: str | Iterable[str] | None, known: Iterable[str]) -> frozenset[str]:
    several = [words] if isinstance(words, str) else list(words or ())
    known = tuple(known)
    for word in several:
        if word not in known:
            raise ValueError(f"{name}: {word!r} is not known. Known are: {', '.join(known)}.")
    return frozenset(several)
