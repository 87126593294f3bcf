"""Shared addresses: the CTA's rank in its cluster in bits 24 to 27, the offset in its window below.

So do B200 kernels see them: the compiler masks with 0xFEFFFFFF to reach the even CTA of a pair. Offset 0 … 1023 belongs
to the system, as on hardware, which makes 0 no valid address.
"""

RANK_SHIFT = 24
SYSTEM_BYTES = 1024
MAX_CTAS = 16
WINDOW_BYTES = 1 << 18  # more than a CTA can have


def is_shared(address: int) -> bool:
    """Whether a generic address is one of shared memory: host memory may lie as low, but seldom in a CTA's window."""
    return address < MAX_CTAS << RANK_SHIFT and offset_of(address) < WINDOW_BYTES


def rank_of(address: int) -> int:
    return address >> RANK_SHIFT & MAX_CTAS - 1


def offset_of(address: int) -> int:
    return address & (1 << RANK_SHIFT) - 1


def shared_address(rank: int, offset: int) -> int:
    return rank << RANK_SHIFT | offset


def in_cta(address: int, rank: int) -> int:
    """The same offset in another CTA (PTX `mapa`)."""
    return shared_address(rank, offset_of(address))
