"""Modules: PMA, its collection over keys, the norm and projection layers whose weights they hold."""

from pma.modules.collection import PMACollection
from pma.modules.pma import PMA

__all__ = ["PMA", "PMACollection"]
