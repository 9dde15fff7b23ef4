"""Files of this package, which may be installed as a folder or as a zip."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ds_patches.core.errors import DsPatchesError


def text(file: Path) -> str:
    """Return the content of a file of the package; raises DsPatchesError if it is missing."""
    spec: Any = __spec__  # its loader reads the files of the package
    try:
        return str(spec.loader.get_data(str(file)), "utf-8")
    except OSError as error:  # some ship a package without its data or sources
        raise DsPatchesError(f"{file} is not there: ds_patches is not installed whole") from error
