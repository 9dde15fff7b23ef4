"""Files of this package, which may lie in a folder or in a zip."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ds_patches.core.errors import DsPatchesError


def text(file: Path) -> str:
    """Return the content of a file of the package, by its path.

    Raises DsPatchesError where it is not there: some ship a package without its data or sources.
    """
    spec: Any = __spec__  # whose loader reads what lies beside this module
    try:
        found: bytes = spec.loader.get_data(str(file))
    except OSError as error:
        raise DsPatchesError(f"{file} is not there: ds_patches is not installed whole") from error
    return found.decode()
