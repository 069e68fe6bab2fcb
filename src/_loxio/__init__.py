"""Files that survive: what the stores of lox and logix have in common. Needs neither JAX nor torch.

_naming   errors that name the file; a file that was removed is noticed
_append   a file that only grows, by whole messages
_small    small files of JSON, by rename, with a checksum inside
_lock     locks that die with their process
"""

from ._append import AppendFile as AppendFile
from ._lock import Hold as Hold
from ._lock import exclusive as exclusive
from ._lock import hold as hold
from ._lock import is_held as is_held
from ._naming import Damaged as Damaged
from ._naming import check_there as check_there
from ._naming import naming as naming
from ._small import read_small as read_small
from ._small import sync_folder as sync_folder
from ._small import write_small as write_small
