"""Ids of rows: any str, any integer of 64 bits; or made of the content of an example.

In a file, an id is a uint32 and what it announces: that many bytes of UTF-8, or, if all its bits
are set, an int64. The integer 1 and the string "1" are two ids.
"""

from __future__ import annotations

import operator
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

Id = str | int
DUPLICATES = ("error", "keep_first", "keep_all")

_INT = 0xFFFFFFFF
_HEADER = struct.Struct("<I")
_INTS = np.dtype([("header", "<u4"), ("value", "<i8")])


def as_ids(ids: Iterable[Any]) -> list[Id]:
    """Plain ids of a list, an array or a tensor of them."""
    if isinstance(ids, str | bytes | Mapping):
        raise TypeError(f"ids must be a list, one for each row; {type(ids).__name__} was given")
    ids = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    kinds = set(map(type, ids))
    if kinds == {str} or (kinds == {int} and min(ids) >= -(2**63) and max(ids) < 2**63):
        return ids  # one by one would cost as much as writing them
    return [as_id(i) for i in ids]


def as_id(one: Any) -> Id:
    if isinstance(one, str):
        return str(one)
    try:
        if isinstance(one, bool | np.bool_):
            raise TypeError
        number = operator.index(one)
    except TypeError:
        raise TypeError(
            f"an id must be a str or an integer, and {one!r} is {type(one).__name__}: "
            "use str(…), or content_ids(batch)"
        ) from None
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"the id {number} does not fit into 64 bits: use str({number})")
    return number


def encode_ids(ids: Sequence[Id]) -> bytes:
    if ids and all(type(i) is int for i in ids):
        block = np.empty(len(ids), _INTS)
        block["header"], block["value"] = _INT, ids
        return block.tobytes()
    out = bytearray()
    for i in ids:
        if isinstance(i, int):
            out += struct.pack("<Iq", _INT, i)
        else:
            text = i.encode("utf-8", "surrogatepass")  # as in names of files
            out += _HEADER.pack(len(text)) + text
    return bytes(out)


def decode_ids(data: bytes, count: int) -> list[Id]:
    """The `count` ids in `data`. Raises ValueError if there are more or fewer."""
    if len(data) == count * _INTS.itemsize:
        block = np.frombuffer(data, _INTS)
        if (block["header"] == _INT).all():
            return block["value"].tolist()
    out: list[Id] = []
    at = 0
    for _ in range(count):
        if at + 4 > len(data):
            raise ValueError("too few ids")
        size = _HEADER.unpack_from(data, at)[0]
        at += 4
        end = at + (8 if size == _INT else size)
        one = data[at:end]
        out.append(
            int.from_bytes(one, "little", signed=True)
            if size == _INT
            else one.decode("utf-8", "surrogatepass")
        )
        at = end
    if at != len(data):
        raise ValueError("the ids end elsewhere")
    return out


class Known:
    """Which rows of a batch are new, by the policy for duplicates.

    `before`: the ids of a store that is resumed. A run that begins anew gives them again, and as
    often as they are there they are passed over, whatever the policy; after that it holds. Without
    `again` they are ids like any other that is there.
    """

    def __init__(self, policy: str, before: Iterable[Id] = (), again: bool = True):
        if policy not in DUPLICATES:
            raise ValueError(f"duplicates={policy!r} is not one of {', '.join(DUPLICATES)}")
        self.policy = policy
        before = list(before)
        self._replay = Counter(before if again else ())
        self._seen: set[Id] = set() if policy == "keep_all" else set(before)

    def new(self, ids: Sequence[Id]) -> tuple[list[int], Counter[Id]]:
        """The places of the rows to write, and what was passed over. Give both to `accept`."""
        keep: list[int] = []
        passed: Counter[Id] = Counter()
        here: set[Id] = set()
        if not self._replay and (self.policy == "keep_all" or self._all_new(ids)):
            return list(range(len(ids))), passed
        for place, i in enumerate(ids):
            if self._replay and self._replay[i] > passed[i]:
                passed[i] += 1
            elif self.policy == "keep_all":
                keep.append(place)
            elif i not in self._seen and i not in here:
                here.add(i)
                keep.append(place)
            elif self.policy == "error":
                raise ValueError(
                    f"the id {i!r} is there already; nothing of this batch was written. Give every "
                    "row its own id, or pass duplicates='keep_first' or 'keep_all'"
                )
        return keep, passed

    def _all_new(self, ids: Sequence[Id]) -> bool:
        return len(set(ids)) == len(ids) and self._seen.isdisjoint(ids)

    def accept(self, ids: Iterable[Id], passed: Counter[Id]) -> None:
        """These were written: only now, so that a write that failed can be done again."""
        if passed:
            self._replay -= passed
        if self.policy != "keep_all":
            self._seen.update(ids)

    def forget(self, ids: Iterable[Id], passed: Counter[Id] | None = None) -> None:
        """These were accepted, and not written after all."""
        self._seen.difference_update(ids)
        self._replay.update(passed or {})


def stretches(ids: Iterable[Id], policy: str, seen: set[Id]) -> Iterator[tuple[int, int]]:
    """Where the rows are, from … to, that are not of an id in `seen`, to which all are added."""
    begin = row = -1
    for row, i in enumerate(ids):
        if i not in seen:
            seen.add(i)
            begin = row if begin < 0 else begin
            continue
        if policy == "error":
            raise ValueError(
                f"more than one row has the id {i!r}: open the store with "
                "duplicates='keep_first' or 'keep_all'"
            )
        if begin >= 0:
            yield begin, row
        begin = -1
    if begin >= 0:
        yield begin, row + 1


def content_ids(batch: Any) -> list[str]:
    """Ids made of the examples themselves: the same example has the same id, in any batch and run.

    `batch` is an array whose first axis is over examples, or a dict, list or tuple of such. An id
    is the xxh3 (128 bits, hexadecimal) of each part's name, dtype, shape and bytes. Padding is
    content: pad to a fixed length, or leave padded parts out.

    >>> import numpy as np
    >>> from logix.store._ids import content_ids
    >>> x = np.arange(6.0).reshape(3, 2)
    >>> content_ids(x)[1:] == content_ids(x[1:])
    True
    """
    parts = list(_parts(batch, ""))
    sizes = {len(values) for _, _, values in parts}
    if len(sizes) != 1:
        raise ValueError(
            "a batch needs arrays with one first axis over its examples, and this one has "
            + (", ".join(f"{n or 'an array'}: {len(v)}" for n, _, v in parts) or "none")
        )
    out = []
    for example in range(sizes.pop()):
        digest = xxhash.xxh3_128()
        for _, head, values in parts:
            one = values[example]
            # The sizes keep what is next to each other apart.
            digest.update(struct.pack("<QQ", len(head), len(one)) + head)
            digest.update(one)
        out.append(digest.hexdigest())
    return out


def _parts(batch: Any, name: str) -> Iterable[tuple[str, bytes, Any]]:
    """Name, description and bytes of each array in a batch."""
    if isinstance(batch, Mapping):
        for key in sorted(batch, key=str):
            yield from _parts(batch[key], f"{name}/{key}")
        return
    plain = (str, int, float, np.generic)
    if isinstance(batch, list | tuple) and not all(isinstance(x, plain) for x in batch):
        for place, item in enumerate(batch):
            yield from _parts(item, f"{name}/{place}")
        return
    array = np.asarray(batch)
    if array.ndim == 0 or array.dtype.kind == "O":
        raise TypeError(f"{name or 'the batch'} is not an array with an axis over examples")
    if array.dtype.kind in "US":  # its width is that of the longest in this batch: not content
        texts = [[_text(t) for t in np.ravel(row)] for row in array]
        head = f"{name}|{array.dtype.type.__name__}|{array.shape[1:]}".encode()
        yield name, head, [b"".join(_HEADER.pack(len(t)) + t for t in row) for row in texts]
        return
    array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    head = f"{name}|{array.dtype.name}|{array.shape[1:]}".encode()
    flat = np.ascontiguousarray(array).reshape(len(array), int(np.prod(array.shape[1:])))
    yield name, head, flat.view(np.uint8)


def _text(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode("utf-8", "surrogatepass")
