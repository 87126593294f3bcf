"""Operators that a framework registers for CUDA alone also run for CPU tensors while a session is open.

`torch.library.custom_op(…, device_types="cuda")` leaves nothing to dispatch to for a CPU tensor. The function that is
registered for CUDA is registered for the CPU too, through libraries of torch that are destroyed when the session
closes. Operators with a CPU implementation keep it, and so does every operator of other packages.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._library import custom_ops

from ptxsim.host.frameworks import FRAMEWORKS
from ptxsim.host.undo import Undo


@contextmanager
def operators_on_cpu(undo: Undo) -> Iterator[None]:
    """Covers the operators that exist, and those that are defined inside."""
    with ExitStack() as stack:
        libraries: dict[str, torch.library.Library] = {}
        added: set[str] = set()

        def add(operator: custom_ops.CustomOpDef) -> None:
            kernels, namespace = operator._backend_fns, operator._namespace
            if namespace not in FRAMEWORKS or operator._qualname in added:
                return
            if "cuda" not in kernels or "cpu" in kernels or None in kernels:
                return
            if namespace not in libraries:
                libraries[namespace] = stack.enter_context(torch.library._scoped_library(namespace, "IMPL"))
            libraries[namespace].impl(operator._name, kernels["cuda"], "CPU")
            added.add(operator._qualname)

        def register(wrapped: Callable[..., Any], operator: Any, device_types: Any, fn: Any = None) -> Any:
            """`register_kernel`, which is a decorator when it gets no function."""
            if fn is None:
                return lambda function: register(wrapped, operator, device_types, function)
            result = wrapped(operator, device_types, fn)
            add(operator)
            return result

        for operator in list(custom_ops.OPDEFS.values()):
            add(operator)
        undo.wrap(custom_ops.CustomOpDef, "register_kernel", register)
        yield
