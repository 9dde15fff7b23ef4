"""What the start-up commands raise."""

from __future__ import annotations

from ds_patches.core.errors import DsPatchesError


class CannotEnable(DsPatchesError, OSError):
    """The environment's start-up hook cannot be written or removed."""


class CannotRun(DsPatchesError):
    """The command to run does not exist, or would run unpatched in strict mode."""


class CannotWrite(DsPatchesError, OSError):
    """The file for DeepSpeed's launchers cannot be written."""
