"""ptxsim: runs Hopper and Blackwell kernels on a CPU. See ptxsim/README.md."""

from ptxsim.machine.grid import Deadlock, Options
from ptxsim.simulate import simulate

__all__ = ["Deadlock", "Options", "simulate"]
