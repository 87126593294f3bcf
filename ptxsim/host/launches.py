"""A kernel launch as data: what the CUDA runtime was asked to start, and the kernel's parameters by name.

The layout of `cudaLaunchConfig_t` and `cudaLaunchAttribute` is that of CUDA 12 and 13. Sizes of parameters come from
the PTX declarations, since the runtime gets bare addresses.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from ptxsim.ptx.parse import Parameter

MAX_THREADS_PER_BLOCK = 1024
MAX_SHARED_BYTES = 227 * 1024  # of a block, compute capability 9.0 and 10.0, for static and dynamic together
MAX_CLUSTER_BLOCKS = 16  # beyond 8 only for kernels that asked for it
_ATTRIBUTE_COOPERATIVE, _ATTRIBUTE_CLUSTER, _ATTRIBUTE_PROGRAMMATIC = 2, 4, 6  # cudaLaunchAttributeID

Shape = tuple[int, int, int]


class LaunchError(ValueError):
    """A launch that the CUDA runtime would refuse."""


@dataclass(frozen=True)
class LaunchShape:
    """The launch configuration."""

    grid: Shape  # blocks
    block: Shape  # threads
    cluster: Shape  # blocks
    shared_bytes: int  # dynamic shared memory
    cooperative: bool
    programmatic: bool  # may start before the launch before it has ended (programmatic dependent launch)

    def check(self, kernel: str) -> None:
        """Raise LaunchError for what a GPU would refuse."""
        blocks, threads = _product(self.cluster), _product(self.block)
        reasons = {
            f"the grid must be positive, got {self.grid}": min(self.grid) < 1,
            f"a block has 1 to {MAX_THREADS_PER_BLOCK} threads, got {self.block}": not (
                min(self.block) >= 1 and threads <= MAX_THREADS_PER_BLOCK and self.block[2] <= 64
            ),
            f"a cluster has 1 to {MAX_CLUSTER_BLOCKS} blocks, got {self.cluster}": blocks > MAX_CLUSTER_BLOCKS,
            f"the cluster {self.cluster} must divide the grid {self.grid}": any(
                n % c for n, c in zip(self.grid, self.cluster, strict=True)
            ),
            f"dynamic shared memory goes up to {MAX_SHARED_BYTES} bytes, got {self.shared_bytes}": (
                self.shared_bytes > MAX_SHARED_BYTES
            ),
        }
        for reason, applies in reasons.items():
            if applies:
                raise LaunchError(f"launch of {kernel}: {reason}")


@dataclass(frozen=True)
class Launch:
    """One kernel launch. `params` holds the bytes of each parameter by its PTX name, in order of declaration.

    Bytes that nobody wrote (padding, the second half of a tensor map) are whatever lay in memory: don't compare them.
    """

    kernel: str
    ptx: str  # the whole module, which may hold other kernels too
    grid: Shape
    block: Shape
    shared_bytes: int
    cluster: Shape
    params: dict[str, bytes]
    source: str | None = None  # the name under which the DSL compiled the module, if known
    cooperative: bool = False
    programmatic: bool = False


# ------------------------------------------------------------------------------------------- launch configuration


class _Dim3(ctypes.Structure):
    _fields_ = [("x", ctypes.c_uint32), ("y", ctypes.c_uint32), ("z", ctypes.c_uint32)]

    def shape(self) -> Shape:
        return self.x, self.y, self.z


class _Attribute(ctypes.Structure):
    """72 bytes: identifier, padding, a union of 64 bytes."""

    _fields_ = [("id", ctypes.c_int32), ("padding", ctypes.c_int32), ("value", ctypes.c_uint32 * 16)]


class LaunchConfig(ctypes.Structure):
    """`cudaLaunchConfig_t`."""

    _fields_ = [
        ("grid", _Dim3),
        ("block", _Dim3),
        ("shared_bytes", ctypes.c_uint64),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint32),
    ]

    def shape(self) -> LaunchShape:
        """Read the structure. Only the part of an attribute's union that its kind uses holds defined bytes."""
        cluster, cooperative, programmatic = (1, 1, 1), False, False
        for attribute in self.attributes[: self.num_attributes]:
            if attribute.id == _ATTRIBUTE_CLUSTER:
                x, y, z = (max(1, extent) for extent in attribute.value[:3])
                cluster = (x, y, z)
            elif attribute.id == _ATTRIBUTE_COOPERATIVE:
                cooperative = attribute.value[0] != 0
            elif attribute.id == _ATTRIBUTE_PROGRAMMATIC:
                programmatic = attribute.value[0] != 0
        grid, block = self.grid.shape(), self.block.shape()
        return LaunchShape(grid, block, cluster, self.shared_bytes, cooperative, programmatic)


def read_parameters(parameters: Sequence[Parameter], arguments: "ctypes._Pointer[ctypes.c_void_p]") -> dict[str, bytes]:
    """Copy each parameter from the address that the launch gave for it."""
    return {each.name: ctypes.string_at(arguments[index], each.size) for index, each in enumerate(parameters)}


def _product(shape: Shape) -> int:
    x, y, z = shape
    return x * y * z
