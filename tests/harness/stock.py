"""Abilities of stock DeepSpeed, by release: so that its defects are not taken for ours."""

from importlib.metadata import version

import pytest
from packaging.version import Version

RELEASE = Version(version("deepspeed"))

TORCH_STYLE = Version("0.18.3") <= RELEASE

#: A plain backward's epilogue is queued for its end; before, it runs at the last gradient.
QUEUES_EPILOGUE = Version("0.18.5") <= RELEASE

STYLES = ["engine", "scale", "torch"] if TORCH_STYLE else ["engine"]

#: Stock ZeRO-2 forgets all but the last micro step of a gradient accumulation (issue 7718; the
#: epilogue tests ``averaged_gradients`` where it means ``all_grad_tensors``).
LOSES_MICRO_STEPS = Version("0.17.6") <= RELEASE <= Version("0.18.2")

#: Models built outside ``zero.Init`` get DeepSpeed's Linear too, which saves no gathered weight.
LINEAR_SAVES_NO_WEIGHT = Version("0.19.4") <= RELEASE

#: Recomputation finds frozen parameters empty (pull request 8148).
LOSES_FROZEN = Version("0.19.3") > RELEASE

#: A module's counter of gradients is taken for another's that has it (pull request 8144).
TAKES_COUNTERS = Version("0.16.5") <= RELEASE < Version("0.19.3")


def needs_style(style: str) -> None:
    if style not in STYLES:
        pytest.skip(f"DeepSpeed {RELEASE} has no {style}-style backward (0.18.3 and later have)")


def since(release: str, what: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(Version(release) > RELEASE, reason=f"{what} came with {release}")


def up_to(release: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(Version(release) < RELEASE, reason=f"stock is right after {release}")
