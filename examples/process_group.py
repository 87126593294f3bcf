"""How the scripts that torchrun starts meet."""

import os

import torch
import torch.distributed as dist


def init_process_group() -> torch.device:
    """Join the ranks that torchrun has started: NCCL with a GPU each, or gloo. → this rank's device."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device
