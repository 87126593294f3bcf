"""The GPU that a session pretends to have."""

from dataclasses import dataclass

CAPABILITIES = {"sm_90a": (9, 0), "sm_100a": (10, 0), "sm_103a": (10, 3)}
_L2_BYTES = {9: 50 << 20, 10: 126 << 20}  # by major version
_NAMES = {9: "simulated Hopper GPU", 10: "simulated Blackwell GPU"}


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
        return _L2_BYTES[self.capability[0]]

    @property
    def name(self) -> str:
        return _NAMES[self.capability[0]]

    def max_clusters(self, cluster_size: int) -> int:
        """How many clusters of this many blocks run at a time, one block on each multiprocessor."""
        return max(1, self.num_sms // cluster_size)
