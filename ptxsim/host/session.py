"""The host side as one object: while a session is open, kernels that are launched arrive at a callback.

    with HostSession("sm_100a", num_sms=148, on_launch=simulate_one) as session:
        quack.rmsnorm(x, weight)          # CPU tensors; simulate_one gets a Launch, then this returns

An exception of the callback leaves the call that launched the kernel, as the same object.
"""

import warnings
from collections.abc import Callable
from typing import Any

from ptxsim.host.artifacts import STORE
from ptxsim.host.binding import load_runtime
from ptxsim.host.device import Device
from ptxsim.host.launches import Launch, LaunchConfig, read_parameters
from ptxsim.host.patches import Patches
from ptxsim.ptx.parse import parse_parameters

_open: "HostSession | None" = None


class LaunchOutsideSession(RuntimeError):
    """A function that was compiled in a session was called when none was open."""


class HostSession:
    """Context manager. Not reentrant, and meant for one thread.

    Args:
        arch: "sm_90a", "sm_100a" or "sm_103a".
        num_sms: multiprocessors of the device, from which persistent kernels take the size of their grid.
        on_launch: called for every launch, in order, while the launching function waits.
    """

    def __init__(self, arch: str, num_sms: int, on_launch: Callable[[Launch], None]):
        self.device = Device(arch, num_sms)
        self._on_launch = on_launch
        self._runtime = load_runtime()
        self._patches = Patches(self.device, self._runtime)

    def __enter__(self) -> "HostSession":
        global _open
        self._patches.__enter__()
        self._runtime.set_device(self.device.capability, self.device.num_sms)
        self._runtime.set_callbacks(STORE.load_library, _dispatch)
        self._runtime.clear_ranges()
        _open = self
        return self

    def __exit__(self, *error: object) -> None:
        global _open
        _open = None
        self._runtime.take_raised()  # a delivered exception would keep the frames of its traceback
        self._patches.__exit__(*error)

    def tensor_ranges(self) -> list[tuple[int, int]]:
        """[begin, end) addresses of the tensors that were passed through DLPack in this session, so far.

        That is every tensor of a call through TVM-FFI (quack, FlashAttention). Plain calls pass pointers, of which
        nothing but the address is known.
        """
        return self._runtime.ranges()

    def launch(self, library: int, kernel: str, config: LaunchConfig, arguments: Any) -> None:
        """Put a launch together and hand it on."""
        shape = config.shape()
        shape.check(kernel)
        module = STORE.find(library, kernel)
        params = read_parameters(parse_parameters(module.ptx, kernel), arguments)
        self._on_launch(
            Launch(
                kernel=kernel,
                ptx=module.ptx,
                grid=shape.grid,
                block=shape.block,
                shared_bytes=shape.shared_bytes,
                cluster=shape.cluster,
                params=params,
                source=module.source,
                cooperative=shape.cooperative,
                programmatic=shape.programmatic,
            )
        )


def _dispatch(library: int, kernel: str, config: LaunchConfig, arguments: Any) -> None:
    """What the runtime calls, for as long as the process lives."""
    if _open is None:
        message = f"{kernel} was compiled in a simulation that has ended; launch it inside `with ptxsim.simulate(...)`"
        warnings.warn(message, RuntimeWarning, stacklevel=2)  # a plain call reports a bare error number
        raise LaunchOutsideSession(message)
    _open.launch(library, kernel, config, arguments)
