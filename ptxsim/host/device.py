"""The GPU that a session pretends to have."""

from dataclasses import dataclass

CAPABILITIES = {"sm_90a": (9, 0), "sm_100a": (10, 0)}
_L2_BYTES = {"sm_90a": 50 << 20, "sm_100a": 126 << 20}
_NAMES = {"sm_90a": "simulated Hopper GPU", "sm_100a": "simulated Blackwell GPU"}


@dataclass(frozen=True)
class Device:
    """An architecture and its size. A small `num_sms` makes persistent kernels loop over small problems."""

    arch: str
    num_sms: int

    def __post_init__(self) -> None:
        if self.arch not in CAPABILITIES:
            raise ValueError(f"arch must be one of {', '.join(CAPABILITIES)}, got {self.arch!r}")
        if self.num_sms < 1:
            raise ValueError(f"num_sms must be positive, got {self.num_sms}")

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability: major, minor."""
        return CAPABILITIES[self.arch]

    @property
    def l2_bytes(self) -> int:
        return _L2_BYTES[self.arch]

    @property
    def name(self) -> str:
        return _NAMES[self.arch]

    def max_clusters(self, cluster_size: int) -> int:
        """How many clusters of this many blocks run at a time, one block on each multiprocessor."""
        return max(1, self.num_sms // cluster_size)
