"""A message of an Arrow stream with a checksum that covers every byte of it.

Arrow lets a message carry metadata of its own. There a fixed text is put, `lox-xxh3:HASH:SIZE`, and
filled in once the message is complete: its size, then the xxh3 hash of all its bytes (the hash's
own digits taken as zeros). Any reader of Arrow reads the stream; ours also finds what is damaged.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import xxhash

MARK = "lox-xxh3"
BLANK = f"{MARK}:{0:016x}:{0:010x}"
_TEXT = re.compile(rf"{MARK}:([0-9a-f]{{16}}):([0-9a-f]{{10}})".encode())
_START = b"\xff\xff\xff\xff"  # every message of a stream begins with this


def seal(message: bytearray) -> bytearray:
    """Fill in the size and the checksum of a message that has the blank text in it."""
    at = message.find(BLANK.encode()) + len(MARK) + 1
    message[at + 17 : at + 27] = b"%010x" % len(message)
    message[at : at + 16] = xxhash.xxh3_64_hexdigest(message).encode()
    return message


def size_at(data: memoryview, start: int) -> int | None:
    """The size of the message at `start`, if there is one and each of its bytes is right."""
    if data[start : start + 4] != _START:
        return None
    metadata = int.from_bytes(data[start + 4 : start + 8], "little")
    if start + 8 + metadata > len(data):
        return None
    for hash_at, digest, size in _texts(data[start : start + 8 + metadata]):
        if start + size <= len(data) and _hash(data[start : start + size], hash_at) == digest:
            return size
    return None


def is_torn(data: memoryview, start: int) -> bool:
    """Is what follows `start`, which is no good message, the beginning of one that goes on?

    So it is after the process was killed in the middle of a write. It is not, and the file is
    damaged, if the message is there in full length.
    """
    rest = data[start:]
    metadata = int.from_bytes(rest[4:8], "little")
    if len(rest) < 8:
        return bytes(rest[:4]) == _START[: len(rest[:4])]
    for hash_at, digest, size in _texts(rest):
        if size <= len(rest):
            return False
        whole = bytearray(rest)  # is it only the size that is wrong?
        whole[hash_at + 17 : hash_at + 27] = b"%010x" % len(rest)
        if _hash(memoryview(whole), hash_at) == digest:
            return False
        return rest[:4] == _START
    return rest[:4] == _START and 8 + metadata > len(rest)


def _texts(message: memoryview) -> Iterator[tuple[int, str, int]]:
    for found in _TEXT.finditer(message):
        yield found.start(1), found.group(1).decode(), int(found.group(2), 16)


def _hash(message: Any, hash_at: int) -> str:
    hasher = xxhash.xxh3_64(message[:hash_at])
    hasher.update(b"0" * 16)
    hasher.update(message[hash_at + 16 :])
    return hasher.hexdigest()
