"""The shipped policies. None has a file of its own: the name of each says which files it consists of.

``DEVICE-DTYPE`` is the table ``DEVICE.toml`` in that dtype. ``DEVICE-DTYPE-VARIANT`` is a policy of that device and
dtype and then the variant's file: ``VARIANT-DEVICE.toml`` if there is one, else ``VARIANT.toml``. Its table
``[variant]`` names the policies that it extends, so it is shipped for their devices and dtypes only.
"""

import re
from dataclasses import dataclass
from functools import cache
from os import PathLike, fspath
from pathlib import Path

from fxamp.devices import DEVICES
from fxamp.dtypes import DTYPES
from fxamp.errors import PolicyError, nearest
from fxamp.policy.file.check_file import PolicyFile
from fxamp.policy.file.parse import read
from fxamp.policy.file.paths import folder, is_file
from fxamp.policy.model.rule import Origin

_NAME = re.compile(rf"({'|'.join(DEVICES)})-({'|'.join(DTYPES)})(?:-(.+))?")


@dataclass(frozen=True)
class Composition:
    """The parts of a shipped policy: the files and policies that it extends, in order.

    ``dtype``: the 16-bit dtype, if none of them sets it. ``purpose``: a sentence.
    """

    name: str
    extends: tuple[str, ...]
    purpose: str
    dtype: str = ""

    def file(self) -> PolicyFile:
        """Return the composition as the content of a file that extends its parts."""
        settings = {"lower_precision_fp": self.dtype} if self.dtype else {}
        origins = dict.fromkeys(settings, Origin(f"the name {self.name}"))
        return PolicyFile(self.name, [(name, 0) for name in self.extends], tables={"": settings}, origins=origins)


def composition(name: str) -> Composition | None:
    """Return the parts of the shipped policy called ``name``; None if there is no such policy."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    device, dtype, variant = match.groups()
    if variant is None:
        purpose = f'torch.autocast("{device}", dtype=torch.{dtype}), op by op.'
        return Composition(name, (f"{device}.toml",), purpose, dtype)
    family = f"{device}-{dtype}"
    path = next((path for path in _variant_files(device, variant) if is_file(path)), None)
    table = None if path is None else read(path).variant
    base = None if table is None else next((base for base in table.of if f"{base}-".startswith(f"{family}-")), None)
    if path is None or table is None or base is None:
        return None
    return Composition(name, (base, path.name), f"{family} with {table.what}; see {path.name}.")


def _variant_files(device: str, variant: str) -> list[Path]:
    """Return the files in which a variant for a device may be, the device's own first."""
    names = [] if variant.endswith(f"-{device}") else [f"{variant}-{device}.toml", f"{variant}.toml"]
    return [folder() / name for name in names]


@cache
def built_in_names() -> tuple[str, ...]:
    """Return the names of the policies that agree with torch.autocast, sorted: "cpu-bfloat16", "cpu-float16", ..."""
    return tuple(sorted(f"{device}-{dtype}" for device in DEVICES for dtype in DTYPES))


@cache
def variant_names() -> tuple[str, ...]:
    """Return the names of the policies that differ from torch.autocast on purpose, sorted: "cpu-bfloat16-moe", ..."""
    names = set()
    for path in folder().glob("*.toml"):
        table = read(path).variant
        for base in () if table is None else table.of:
            device, dtype = base.split("-")[:2]
            names.add(f"{device}-{dtype}-{path.stem.removesuffix(f'-{device}')}")
    return tuple(sorted(names))


def find(name_or_path: "str | PathLike[str]") -> Path:
    """Return the file that a name or a path ending in ``.toml`` means; raise PolicyError if there is none.

    For the name of a shipped policy this is a path that no file has, but from which :func:`composed` finds the policy.
    """
    name = fspath(name_or_path)
    if not name.endswith(".toml"):
        if composition(name) is not None:
            return folder() / f"{name}.toml"
        raise PolicyError(f"no policy is named {name!r}{_nearest(name)}; {_accepted()}")
    if is_file(name) or composed(Path(name)) is not None:
        return Path(name)
    raise PolicyError(f"there is no policy file {name!r}{_nearest(Path(name).stem)}; {_accepted()}")


def composed(path: Path) -> Composition | None:
    """Return the shipped policy that ``path`` names: a file of its name in the folder of the shipped ones."""
    return composition(path.stem) if path.parent == folder() and path.suffix == ".toml" else None


def _nearest(name: str) -> str:
    return nearest(name, (*built_in_names(), *variant_names()))


def _accepted() -> str:
    names, variants = built_in_names(), len(variant_names())
    return (
        f"accepted: a path ending in .toml, or one of {', '.join(names)} and their {variants} variants "
        "(fxamp-policy list prints all)"
    )
