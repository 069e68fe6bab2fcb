"""Runs on disk: Arrow streams while they are written, Parquet files once they are closed.

_columns _frame _table          values as columns; a message with a checksum; keys as a table
_append _lock _small _writer    writing a folder of runs
_scan _parquet _folder          reading one, whatever happened to it
_catalog _run _frames           the runs under a path; one run, as other libraries want it
_replay _verify                 sending a run elsewhere; checking every byte
"""

from ._run import Run as Run
from ._run import Runs as Runs
from ._verify import compact as compact
from ._verify import verify as verify
