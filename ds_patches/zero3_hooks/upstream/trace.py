"""The coordinator's trace of the modules that a step has run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ds_patches.runtime.coordinator import private


@contextmanager
def renumbered(coordinator: Any) -> Iterator[None]:
    """Modules get other numbers meanwhile, by which an unfinished trace has to know them then."""
    order = private(coordinator, "submodule_order")
    modules = {_number(module): module for module in order}
    yield
    if coordinator.is_record_trace():
        steps = private(coordinator, "step_id_module_fetched_for")
        before = {module: steps.pop(number, ()) for number, module in modules.items()}
        for module, fetched in before.items():
            steps[_number(module)].extend(fetched)


def _number(module: Any) -> int:
    """In 0.16.3 and before it is called otherwise."""
    number: int = vars(module)["ds_id" if "ds_id" in vars(module) else "id"]
    return number
