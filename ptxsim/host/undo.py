"""Changes to attributes and environment variables that are taken back when a context closes."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

_ABSENT = object()


class Undo:
    """Sets attributes and puts them back when the stack closes."""

    def __init__(self, stack: ExitStack):
        self._stack = stack

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of a module, class or object. An inherited one is uncovered again by deleting ours.

        Raises:
            AttributeError: there is none of that name.
        """
        getattr(owner, name)
        self._stack.callback(_put_back, owner, name, vars(owner).get(name, _ABSENT))
        setattr(owner, name, value)

    def wrap(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """Replace a function or method by one that calls `wrapper(original, *args, **kwargs)`."""
        original = getattr(owner, name)

        def replacement(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs)

        self.set(owner, name, replacement)


def _put_back(owner: Any, name: str, value: Any) -> None:
    if value is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


@contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Environment variables for the length of a context."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
