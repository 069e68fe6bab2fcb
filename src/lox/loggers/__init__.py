"""Loggers: runs on disk, in the terminal and in trackers, from what programs log."""

from ._base import Logger as Logger
from ._multi import MultiLogger as MultiLogger
from ._names import RunExists as RunExists
from ._names import RunInfo as RunInfo
from ._save import SaveLogger as SaveLogger
from ._state import LoggerState as LoggerState
