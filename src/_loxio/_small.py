"""Small files of JSON: written by rename, whole or not at all, and with a checksum inside."""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from typing import Any

from ._naming import Damaged, naming


def write_small(path: str, content: dict[str, Any], sync: bool = True) -> None:
    text = _text(content)
    data = f'{{"xxh3": "{_hash(text)}",\n"content": {text}}}\n'.encode()
    temporary = os.path.join(os.path.dirname(path), f".{uuid.uuid4().hex}.tmp")
    try:
        handle = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        try:
            with naming(path):
                rest = memoryview(data)
                while rest:
                    rest = rest[os.write(handle, rest) :]
                if sync:
                    os.fsync(handle)
        finally:
            os.close(handle)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    if sync:
        sync_folder(os.path.dirname(path))


def read_small(path: str) -> dict[str, Any]:
    with open(path, "rb") as file:
        data = file.read()
    try:
        whole = json.loads(data)
        content = whole["content"]
        # Byte for byte: white space is content here, so that any changed byte is found.
        text = _text(content)
        good = data == f'{{"xxh3": "{_hash(text)}",\n"content": {text}}}\n'.encode()
    except (ValueError, KeyError, TypeError):
        good = False
    if not good:
        raise Damaged(f"{path} is damaged: its checksum does not fit its content")
    return content


def sync_folder(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(handle)
    finally:
        os.close(handle)


def _text(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=1)


def _hash(text: str) -> str:
    import xxhash  # not needed by those who only import this

    return xxhash.xxh3_64_hexdigest(text.encode())
