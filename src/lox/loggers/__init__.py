"""Loggers: runs on disk, in the terminal and in trackers, from what programs log."""

from ._base import Logger as Logger
from ._console import ConsoleLogger as ConsoleLogger
from ._csv import CSVLogger as CSVLogger
from ._mlflow import MLflowLogger as MLflowLogger
from ._multi import MultiLogger as MultiLogger
from ._names import RunExists as RunExists
from ._names import RunInfo as RunInfo
from ._save import SaveLogger as SaveLogger
from ._state import LoggerState as LoggerState
from ._tensorboard import TensorBoardLogger as TensorBoardLogger
from ._wandb import WandbLogger as WandbLogger
