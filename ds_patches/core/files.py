"""Files of this package, which may be installed as a folder or as a zip."""

from pathlib import Path
from typing import Any

from ds_patches.core.errors import DsPatchesError


def text(file: Path) -> str:
    """Return the content of a file of the package; raises DsPatchesError if it is missing."""
    spec: Any = __spec__  # the loader reads files from a folder or a zip
    try:
        return str(spec.loader.get_data(str(file)), "utf-8")
    except OSError as error:  # an installation without the package's data or sources
        raise DsPatchesError(
            f"{file} is missing: reinstall ds_patches, which is incomplete"
        ) from error
