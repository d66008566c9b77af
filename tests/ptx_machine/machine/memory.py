"""Memory of the machine: allocations at addresses of their own, each access checked for bounds and alignment."""

import numpy as np

GLOBAL, PARAM, SHARED, GAP = 0x7F00_0000_0000, 0x0100_0000_0000, 0x0200_0000_0000, 4096


class Fault(Exception):
    """What a kernel must not do, with the instruction that did it."""


class Region:
    """Bytes at an address."""

    def __init__(self, name: str, base: int, data: np.ndarray):
        self.name, self.base, self.data = name, base, data

    def offsets(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Where accesses of that many bytes lie in it."""
        offsets = addresses.astype(np.int64) - self.base
        if (offsets < 0).any() or (offsets + size > self.data.size).any():
            at = int(offsets[(offsets < 0) | (offsets + size > self.data.size)][0])
            raise Fault(f"{size} bytes at {at} of {self.name}, which has {self.data.size}")
        if (offsets % size).any():
            raise Fault(f"{size} bytes at {int(offsets[offsets % size != 0][0])} of {self.name}: misaligned")
        return offsets

    def load(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """(lanes, size) bytes."""
        return self.data[self.offsets(addresses, size)[:, None] + np.arange(size)]

    def store(self, addresses: np.ndarray, values: np.ndarray) -> None:
        """Store (lanes, size) bytes."""
        self.data[self.offsets(addresses, values.shape[1])[:, None] + np.arange(values.shape[1])] = values


class Global:
    """Arrays in global memory, with gaps between them."""

    def __init__(self):
        self.regions, self._next = [], GLOBAL

    def place(self, name: str, array: np.ndarray) -> int:
        """Address of an array's memory from now on; kernels write the array itself. The same memory has one place."""
        owner = array
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        first = array.__array_interface__["data"][0]
        for region in self.regions:
            if region.owner is owner:
                return region.base + first - region.first
        whole = owner.reshape(-1).view(np.uint8) if owner.flags.c_contiguous else None
        assert whole is not None, f"{name}: memory that is not contiguous"
        region = Region(name, self._next, whole)
        region.owner, region.first = owner, owner.__array_interface__["data"][0]
        self.regions.append(region)
        self._next += -(-whole.size // GAP) * GAP + GAP
        return region.base + first - region.first

    def find(self, address: int) -> Region:
        """What lies at an address, or before it in the gap."""
        for region in self.regions:
            if region.base <= address < region.base + -(-region.data.size // GAP) * GAP + GAP:
                return region
        raise Fault(f"nothing lies at address {address:#x}")
