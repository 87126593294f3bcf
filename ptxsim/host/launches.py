"""A kernel launch as data: what the CUDA runtime was asked to start, and the kernel's parameters by name.

The layout of `cudaLaunchConfig_t` and `cudaLaunchAttribute` is that of CUDA 12 and 13. Sizes and places of parameters
come from the PTX declarations (PTX ISA, kernel function parameters), since the runtime gets bare addresses.
"""

import ctypes
import functools
import re
from dataclasses import dataclass

MAX_THREADS_PER_BLOCK = 1024
MAX_SHARED_BYTES = 227 * 1024  # of a block, compute capability 9.0 and 10.0, for static and dynamic together
MAX_CLUSTER_BLOCKS = 16  # beyond 8 only for kernels that asked for it
_ATTRIBUTE_COOPERATIVE, _ATTRIBUTE_CLUSTER, _ATTRIBUTE_PROGRAMMATIC = 2, 4, 6  # cudaLaunchAttributeID

Shape = tuple[int, int, int]


class LaunchError(ValueError):
    """A launch that the CUDA runtime would refuse."""


@dataclass(frozen=True)
class Param:
    """A kernel parameter. `offset`, `size` and `align` in bytes; the offset counts from the first parameter."""

    name: str
    offset: int
    size: int
    align: int


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


# ------------------------------------------------------------------------------------------------------ parameters

_ELEMENT_BYTES = {
    **{f".{kind}{bits}": bits // 8 for kind in "bus" for bits in (8, 16, 32, 64)},
    **{".f16": 2, ".f16x2": 4, ".f32": 4, ".f64": 8, ".b128": 16},
}
_DECLARATION = re.compile(
    r"\.param\s+(?:\.align\s+(?P<align>\d+)\s+)?(?P<type>\.\w+)\s+"
    r"(?:\.ptr(?:\s+\.(?:const|global|local|shared))?(?:\s+\.align\s+\d+)?\s+)?"  # says where a pointer points
    r"(?P<name>[\w$]+)\s*(?:\[\s*(?P<count>\d+)\s*\])?\s*$"
)


def parse_params(ptx: str, entry: str) -> list[Param]:
    """The parameters of a kernel in order, from `.entry name( .param …, … )` in the text of its module.

    Raises:
        LaunchError: the module has no such kernel, or a declaration is of an unknown form.
    """
    return list(_parse_params(ptx, entry))


@functools.lru_cache(maxsize=256)
def _parse_params(ptx: str, entry: str) -> tuple[Param, ...]:
    header = re.search(rf"\.entry\s+{re.escape(entry)}(?:\s*\((?P<params>[^)]*)\))?\s*[.{{]", ptx)
    if header is None:
        raise LaunchError(f"no .entry {entry} in the PTX; it has {', '.join(entry_names(ptx)) or 'none'}")
    params: list[Param] = []
    end = 0
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", header["params"] or "", flags=re.S)
    for declaration in filter(None, (part.strip() for part in text.split(","))):
        match = _DECLARATION.match(declaration)
        if match is None or match["type"] not in _ELEMENT_BYTES:
            raise LaunchError(f"kernel {entry}: can't read the parameter declaration {declaration!r}")
        element = _ELEMENT_BYTES[match["type"]]
        align = max(int(match["align"] or 1), element)
        offset = -(-end // align) * align
        end = offset + element * int(match["count"] or 1)
        params.append(Param(match["name"], offset, end - offset, align))
    return tuple(params)


def entry_names(ptx: str) -> list[str]:
    """The kernels of a PTX module."""
    return re.findall(r"\.entry\s+([\w$]+)", ptx)


def read_params(params: list[Param], arguments: "ctypes._Pointer[ctypes.c_void_p]") -> dict[str, bytes]:
    """Copy each parameter from the address that the launch gave for it."""
    return {param.name: ctypes.string_at(arguments[index], param.size) for index, param in enumerate(params)}


def _product(shape: Shape) -> int:
    x, y, z = shape
    return x * y * z
