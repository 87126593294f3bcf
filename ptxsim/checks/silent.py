"""A monitor that watches nothing: what the machine talks to when races are not looked for."""

from typing import Any


class SilentOperation:
    """The record of an asynchronous operation; see `ptxsim.checks` for the one that records."""

    clock = None

    def shared_read(self, rank: int, offset: int, count: int) -> None: ...

    def shared_write(self, rank: int, offset: int, count: int) -> None: ...

    def shared_read_at(self, rank: int, offsets: Any) -> None: ...

    def shared_write_at(self, rank: int, offsets: Any) -> None: ...

    def tmem_read(self, rank: int, bands: range, columns: range) -> None: ...

    def tmem_write(self, rank: int, bands: range, columns: range) -> None: ...


_OPERATION = SilentOperation()


class SilentMonitor:
    """Takes every notice and does nothing."""

    is_watching = False

    def start(self, warp: Any, what: str) -> SilentOperation:
        return _OPERATION

    def start_store(self, warp: Any, what: str) -> SilentOperation:
        return _OPERATION

    def start_tensor(self, warp: Any, what: str, pair: int, is_commit: bool) -> SilentOperation:
        return _OPERATION

    def start_product(self, warp: Any, what: str) -> SilentOperation:
        return _OPERATION

    def note_product(self, warp: Any, kind: str, m: int, n: int, column: int) -> None: ...

    def release(self, warp: Any) -> None: ...

    def acquire(self, warp: Any, clock: Any) -> None: ...

    def merge(self, clock: Any, other: Any) -> None: ...

    def now(self, warp: Any) -> None: ...

    def check_knows(self, warp: Any, moment: Any, what: object) -> None: ...

    def tmem_freed(self, warp: Any, columns: range) -> None: ...

    def proxy_fence(self, warp: Any) -> None: ...

    def shared_read(self, warp: Any, rank: int, offset: int, count: int) -> None: ...

    def shared_write(self, warp: Any, rank: int, offset: int, count: int) -> None: ...

    def shared_atomic(self, warp: Any, rank: int, offset: int, count: int) -> None: ...

    def shared_read_at(self, warp: Any, rank: int, offsets: Any) -> None: ...

    def shared_write_at(self, warp: Any, rank: int, offsets: Any) -> None: ...

    def tmem_access(
        self, warp: Any, bands: range, columns: range, *, line: int, is_write: bool, state: str = "done"
    ) -> None: ...

    def drain(self, warp: Any) -> None: ...

    def finish(self) -> None: ...
