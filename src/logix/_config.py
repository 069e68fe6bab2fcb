"""A run's configuration: a dict, a YAML file, or nothing.

root_dir: ./logix
logging: {flush_threshold: 67108864, num_workers: 1, cpu_offload: false, log_dtype: none}
lora: {init: random, rank: 64, parameter_sharing: false, parameter_sharing_groups: null}
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from ._compress import Compression

INITS = ("random", "pca", "sparse")
DTYPES = ("none", "float32", "float16", "bfloat16", "int8")


@dataclasses.dataclass(frozen=True)
class LoggingConfig:
    """How logs go to the disk.

    Attributes:

    - `flush_threshold`: bytes that may wait to be written; -1 for 64 MiB.
    - `num_workers`: 0 to write in the caller's own thread, else one thread writes beside it.
    - `cpu_offload`: statistics are kept on the host.
    - `log_dtype`: of the rows in the store; `"none"` is float32.
    """

    flush_threshold: int = -1
    num_workers: int = 1
    cpu_offload: bool = False
    log_dtype: str = "none"

    def __post_init__(self) -> None:
        if self.log_dtype not in DTYPES:
            raise ValueError(f"log_dtype={self.log_dtype!r} is not one of {', '.join(DTYPES)}")

    @property
    def dtype(self) -> str:
        return "float32" if self.log_dtype == "none" else self.log_dtype

    @property
    def waiting(self) -> int:
        return 1 << 26 if self.flush_threshold < 0 else self.flush_threshold


@dataclasses.dataclass(frozen=True)
class LoRAConfig:
    """The compression that `add_lora` adds.

    >>> from logix import LoRAConfig
    >>> LoRAConfig(rank=8).rank
    8

    Attributes:

    - `init`: `"random"`; `"pca"`, of the covariances of a pass before; `"sparse"`, signed sums.
    - `rank`: of either side of each layer.
    - `seed`: of what is random. It is saved with the rows.
    - `parameter_sharing`: layers with equal sizes use the same projection, which saves memory.
    - `parameter_sharing_groups`: words; only layers whose names contain the same word share.
    """

    init: str = "random"
    rank: int = 64
    parameter_sharing: bool = False
    parameter_sharing_groups: Sequence[str] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.init not in INITS:
            raise ValueError(f"init={self.init!r} is not one of {', '.join(INITS)}")
        if isinstance(self.parameter_sharing_groups, str):
            raise TypeError(f"parameter_sharing_groups=[{self.parameter_sharing_groups!r}]: a list")

    def compression(self) -> Compression:
        shared: tuple[str, ...] | None = None
        if self.parameter_sharing:
            shared = tuple(self.parameter_sharing_groups or ("",))
        kind, init = ("sparse", "random") if self.init == "sparse" else ("logra", self.init)
        return Compression(kind, init, self.rank, self.seed, shared)


@dataclasses.dataclass(frozen=True)
class Config:
    root_dir: str = "./logix"
    logging: LoggingConfig = LoggingConfig()
    lora: LoRAConfig = LoRAConfig()


def read_config(config: Any) -> Config:
    """The configuration that a dict or the path of a YAML file gives; defaults for the rest."""
    if isinstance(config, Config):
        return config
    if isinstance(config, str | os.PathLike):
        try:
            import yaml
        except ImportError:
            raise ImportError(
                f"config={os.fspath(config)!r} is a YAML file, which needs PyYAML: "
                "pip install pyyaml, or pass a dict"
            ) from None
        with open(config) as file:
            config = yaml.safe_load(file)
    if config is None:
        return Config()
    if not isinstance(config, Mapping):
        raise TypeError(f"config is a dict or the path of a YAML file, not {type(config).__name__}")
    known = _checked("config", config, Config)
    if "root_dir" in known:
        known["root_dir"] = os.fspath(known["root_dir"])
    if "logging" in known:
        known["logging"] = read_section("logging", known["logging"], LoggingConfig)
    if "lora" in known:
        known["lora"] = read_section("lora", known["lora"], LoRAConfig)
    return Config(**known)


def read_section(name: str, content: Any, kind: type) -> Any:
    """A section of it: a dict, or what it becomes."""
    return content if isinstance(content, kind) else kind(**_checked(name, content, kind))


def _checked(name: str, content: Any, kind: Any) -> dict[str, Any]:
    """The values that are given, under names that are known and of the types of the defaults."""
    if not isinstance(content, Mapping):
        raise TypeError(f"{name} is a dict of settings, not {content!r}")
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    unknown = sorted(map(str, set(content) - set(defaults)))
    if unknown:
        raise ValueError(f"{name} does not know {unknown}. Known are: {', '.join(defaults)}")
    found = {key: value for key, value in content.items() if value is not None}
    for key, value in found.items():
        plain = type(defaults[key])
        path = key == "root_dir" and isinstance(value, os.PathLike)
        if plain in (int, str, bool) and type(value) is not plain and not path:
            raise TypeError(f"{name}: {key}={value!r} should be of the type {plain.__name__}")
    return found
