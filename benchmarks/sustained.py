"""The time of one kernel under its own load: power settles the clock as it does for who runs nothing else.

Variants in turn (`timing.side_by_side`) share a clock, which favours the one that draws most power.
"""

from __future__ import annotations

import ctypes
import statistics
import threading
import time
from collections.abc import Callable

import torch

SECONDS = 0.8


class Clock:
    """Samples the SM clock and the power through NVML while it is open."""

    SM = 1  # NVML_CLOCK_SM

    def __init__(self) -> None:
        self._nvml, self._device = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p()
        self._nvml.nvmlInit_v2()
        self._nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self._device))
        self.samples: list[tuple[float, int, float]] = []  # time, MHz, W
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Clock:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        clock, power = ctypes.c_uint(), ctypes.c_uint()
        while not self._stop.wait(0.01):
            self._nvml.nvmlDeviceGetClockInfo(self._device, self.SM, ctypes.byref(clock))
            self._nvml.nvmlDeviceGetPowerUsage(self._device, ctypes.byref(power))
            self.samples.append((time.perf_counter(), clock.value, power.value / 1e3))


def measure(call: Callable[[], object]) -> dict[str, float]:
    """Milliseconds of a call without a pause for `SECONDS`, SM clock and power: medians of the second half."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    events: list[torch.cuda.Event] = []
    with Clock() as clock:
        begin = time.perf_counter()
        while time.perf_counter() - begin < SECONDS:
            for _ in range(4):
                events.append(torch.cuda.Event(enable_timing=True))
                events[-1].record()
                call()
            if len(events) > 8:
                events[-8].synchronize()  # the queue never runs empty, nor far ahead
        torch.cuda.synchronize()
    half = begin + SECONDS / 2
    times = [a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False)][len(events) // 2 :]
    late = [sample for sample in clock.samples if sample[0] > half]
    return {
        "ms": round(statistics.median(times), 4), "clock MHz": statistics.median(sample[1] for sample in late),
        "power W": round(statistics.median(sample[2] for sample in late)),
    }  # fmt: skip
