"""The statements that random programs are made of. A kind is a function that draws its operands and writes its lines.

To add one, write a function under ``@statement`` in a file of this folder, an old or a new one; its name is what counts
and failures are reported under. Failures shrink towards what stands first: the plainest kinds, and among a draw's
options the first.
"""

import importlib
import pkgutil

from programs.statements.registry import STATEMENTS, WEIGHTS

_PLAINEST = ("arithmetic", "products", "layers", "indexing", "casts", "writes", "blocks")
_OTHERS = sorted({module.name for module in pkgutil.iter_modules(__path__)} - {*_PLAINEST, "registry"})

for _name in (*_PLAINEST, *_OTHERS):
    importlib.import_module(f"{__name__}.{_name}")

__all__ = ["STATEMENTS", "WEIGHTS"]
