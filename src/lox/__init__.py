"""Log inside compiled JAX programs, and decide from outside what becomes of it.

`log` costs nothing by itself. `spool` returns what was logged, `tap` streams it, `nolog` removes
it. All of them work through jit, vmap, grad, scan, while_loop, cond, remat, custom derivatives and
shard_map. `loggers` turn it into runs: on disk, in the terminal, in trackers.
"""

from _loxio import Damaged as Damaged

from . import loggers as loggers
from ._errors import LogError as LogError
from ._host import flush as flush
from ._log import log as log
from ._log import log_grad as log_grad
from ._logdict import logdict as logdict
from ._reduce import Reduction as Reduction
from ._runs import replay as replay
from ._runs import runs as runs
from ._save import load as load
from ._save import save as save
from ._transform import nolog as nolog
from ._transform import spool as spool
from ._transform import tap as tap
from .loggers import ConsoleLogger as ConsoleLogger
from .loggers import CSVLogger as CSVLogger
from .loggers import Logger as Logger
from .loggers import LoggerState as LoggerState
from .loggers import MLflowLogger as MLflowLogger
from .loggers import MultiLogger as MultiLogger
from .loggers import SaveLogger as SaveLogger
from .loggers import TensorBoardLogger as TensorBoardLogger
from .loggers import WandbLogger as WandbLogger

__version__ = "0.1.0"
