"""Where blocks of rows are read to: buffers on the host, and pinned ones in front of a device."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from ._rowtypes import RowType, mappable


class Buffer:
    """Bytes on the host. `wait` until nothing reads them any more."""

    def __init__(self, array: np.ndarray, tensor: Any = None):
        self.bytes, self.tensor = array, tensor
        self.copied: Any = None  # the event after its copy to the device

    def wait(self) -> None:
        if self.copied is not None:
            self.copied.synchronize()


class HostRing:
    """Two buffers, and rows as NumPy arrays in them, or in a third one if they must be decoded."""

    copies = False
    workers = 1

    def __init__(self, size: int, type: RowType):
        self.buffers = [Buffer(np.empty(size, np.uint8)) for _ in range(2)]
        self.decoded = None
        if type.name != "float32":
            self.decoded = np.empty((size // type.nbytes, type.dim), np.float32)
        if mappable():
            self.workers = max(1, min(4, cores() // 2))

    def rows(self, buffer: Buffer, size: int, type: RowType) -> np.ndarray:
        out = type.decode(buffer.bytes[:size].reshape(-1, type.nbytes), self.decoded)
        out.flags.writeable = False
        return out

    def used(self) -> None:
        pass


class DeviceRing:
    """Three pinned buffers on the host and two on the device; copies overlap with products.

    On the device the order is kept by events: the products of the caller's stream wait for the copy
    of their rows, a copy waits for the products with the rows that it replaces. The host waits for
    neither, but for a copy before it fills the buffer anew.
    """

    copies = True

    def __init__(self, size: int, device: Any):
        import torch

        self.torch, self.device = torch, torch.device(device)
        self.pinned = self.device.type == "cuda"
        make = lambda: torch.empty(size, dtype=torch.uint8, pin_memory=self.pinned)
        self.buffers = [Buffer(x.numpy(), x) for x in (make() for _ in range(3))]
        self.slots = [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(2)]
        self.workers, self.turn = max(1, cores()), 0
        if self.pinned:
            self.stream = torch.cuda.Stream(self.device)
            # The memory of the slots may still be in use by what was enqueued before.
            self.done = [torch.cuda.current_stream(self.device).record_event()] * 2

    def rows(self, buffer: Buffer, size: int, type: RowType) -> Any:
        slot = self.slots[self.turn][:size]
        if self.pinned:
            cuda = self.torch.cuda
            with cuda.stream(self.stream):
                self.stream.wait_event(self.done[self.turn])
                slot.copy_(buffer.tensor[:size], non_blocking=True)
                # Who waits for it sleeps: the cores are needed by the threads that read.
                buffer.copied = self.stream.record_event(cuda.Event(blocking=True))
            cuda.current_stream(self.device).wait_event(buffer.copied)
        else:
            slot.copy_(buffer.tensor[:size])
        return type.decode_tensor(slot.view(-1, type.nbytes))

    def used(self) -> None:
        """What was made of the latest rows has been enqueued."""
        if self.pinned:
            self.done[self.turn] = self.torch.cuda.current_stream(self.device).record_event()
        self.turn = 1 - self.turn


def cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
