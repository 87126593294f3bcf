"""A trace: what one cluster of a launch executed, kept in one file."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

NO_OPERATION = -1
EXECUTED = 1 << 31  # of a log's entry: at least one lane executed the instruction
PRODUCT_KINDS = {"f16": 0, "tf32": 1, "f8f6f4": 2, "i8": 2, "mxf8f6f4": 2, "mxf4": 3, "mxf4nvf4": 3}


class Kind(enum.IntEnum):
    """Of a timing operation; numbers are those of `replay.c`."""

    ARRIVE = 0  # node; source: the operation whose completion arrives, or the instruction itself
    WAIT = 1  # node
    LOAD = 2  # rank of the CTA that receives, count bytes
    STORE = 3  # count bytes from shared to global memory
    REDUCTION = 4  # the same, added to what is there
    REMOTE_STORE = 5  # st.async: rank, count
    PRODUCT = 6  # tcgen05.mma: m, n, format; count bytes of contraction; group: CTAs; a_in_place: A in tensor memory
    WGMMA = 7  # a warp's quarter of a warpgroup's product; a_in_place: A in registers; column: the warpgroup
    COPY = 8  # tcgen05.cp: count bytes
    COMMIT = 9  # tcgen05.commit


# position: index in the warp's log of the instruction that it belongs to
OPERATION = np.dtype(
    [
        (name, "i4")
        for name in (
            "kind", "warp", "position", "node", "source", "rank", "count", "m", "n", "format", "group", "a_in_place",
            "column",
        )
    ]
)  # fmt: skip


@dataclass
class Trace:
    """One cluster's run.

    logs: for each warp uint32 [executed], index of the PTX instruction, with `EXECUTED`. warps: int32 [warps, 2], rank
    of the CTA and index in it. operations: `OPERATION` [operations]. labels: int64 [nodes], the barrier's shared
    address or number, −1 where none was seen. num_clusters: of the launch.
    """

    kernel: str
    ptx: str
    logs: list[np.ndarray]
    warps: np.ndarray
    operations: np.ndarray
    labels: np.ndarray
    num_clusters: int

    @property
    def num_instructions(self) -> int:
        return sum(len(log) for log in self.logs)

    @property
    def num_ctas(self) -> int:
        return int(self.warps[:, 0].max()) + 1

    def repeated(self, count: int) -> Trace:
        """The same CTA `count` times on its SM, as several are resident there."""
        warps, operations = np.tile(self.warps, (count, 1)), np.tile(self.operations, count)
        copies = np.repeat(np.arange(count), len(self.operations))
        warps[:, 1] += np.repeat(np.arange(count), len(self.warps)) * len(self.warps)
        operations["warp"] += copies * len(self.warps)
        operations["node"] += copies * len(self.labels) * (operations["node"] >= 0)
        operations["source"] += copies * len(self.operations) * (operations["source"] >= 0)
        operations["column"] += copies * -(-len(self.warps) // 4) * (operations["kind"] == Kind.WGMMA)
        return replace(
            self, logs=self.logs * count, warps=warps, operations=operations, labels=np.tile(self.labels, count)
        )

    def save(self, path: Path | str) -> None:
        """Write everything into one .npz."""
        np.savez_compressed(
            path,
            text=np.array([self.kernel, self.ptx]),
            log=np.concatenate(self.logs),
            lengths=np.array([len(log) for log in self.logs]),
            warps=self.warps,
            operations=self.operations,
            labels=self.labels,
            num_clusters=np.array(self.num_clusters),
        )

    @classmethod
    def load(cls, path: Path | str) -> Trace:
        """Read what `save` wrote.

        Raises:
            FileNotFoundError: no such file.    ValueError: the file is no trace.
        """
        with np.load(path) as file:
            missing = {"text", "log", "lengths", "warps", "operations", "labels", "num_clusters"} - set(file)
            if missing:
                raise ValueError(f"{path} is no trace: it lacks {', '.join(sorted(missing))}")
            kernel, ptx = (str(text) for text in file["text"])
            logs = np.split(file["log"], np.cumsum(file["lengths"])[:-1])
            operations, labels = file["operations"], file["labels"]
            return cls(kernel, ptx, logs, file["warps"], operations, labels, int(file["num_clusters"]))
