"""Whether there is a file or a folder, for names from anywhere: pathlib raises for some that no file can have."""

import os


def is_file(path: str | os.PathLike[str]) -> bool:
    """Return whether ``path`` is a regular file; False for a name with null bytes, and for one that is too long."""
    return os.path.isfile(path)  # noqa: PTH113


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Return whether ``path`` is a folder; False as in :func:`is_file`."""
    return os.path.isdir(path)  # noqa: PTH112
