"""Append results as JSON lines with what one needs to compare them."""

import json
import platform
import subprocess
import time
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"


def append(name: str, rows: list[dict]) -> Path:
    """Append `rows` to results/<name>.jsonl, each with commit, device, versions and date. Returns the file."""
    on_gpu = torch.cuda.is_available()
    context = {
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if on_gpu else f"cpu ({platform.machine()})",
        "torch": torch.__version__,
        **(_gpu_state() if on_gpu else {}),
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.jsonl"
    with path.open("a") as file:
        for row in rows:
            file.write(json.dumps(row | context) + "\n")
    return path


def _gpu_state() -> dict[str, str]:
    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem,power.draw", "--format=csv,noheader"]
    run = subprocess.run(query, capture_output=True, text=True, check=False)
    fields = run.stdout.splitlines()[0].split(", ") if run.returncode == 0 else []
    return dict(zip(("driver", "SM clock", "memory clock", "power"), fields, strict=False))


def _commit() -> str:
    run = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return run.stdout.strip() or "unknown"
