"""Rows on the disk: written by one or several processes, mapped when read, checked byte by byte."""

from ._reader import RowStore as RowStore
from ._writer import RowWriter as RowWriter
