"""ZeRO 3: in a block, ranks take different ways through the model, as PyTorch's would."""

from typing import Any

from tests.harness.cases import checked, of
from tests.scripts.windows import window

ROUTED = ["Routed", "RoutedTwice", "RoutedUnevenly", "RoutedNonReentrant", "RoutedReentrant"]
#: DeepSpeed keeps small parameters gathered by default.
SETTINGS: list[dict[str, Any]] = [{}, {"stage3_param_persistence_threshold": 40}]

test_each_rank_uses_other_experts = checked(
    *(
        of("coalesce", window, 3, core={3} - {3 * bool(zero)}, model="Routed", zero=zero)
        for zero in SETTINGS
    ),
    *(of("coalesce zero3_retain", window, 3, model=model) for model in ROUTED),
)
