"""The patterns with DeepCompile itself, against eager ZeRO-3."""

import sys
from collections.abc import Callable
from typing import Any

import pytest

import ds_patches
from tests.dc_fallback import patterns
from tests.dc_fallback.test_training import CASES, PATTERNS
from tests.gpu.held import WIDTH, Held, deep_compiled, hold, in_a_row, repeated
from tests.harness import BF16, Options, World

AGAIN = 6  # DeepCompile compiles again in the step before
SECONDS = 300.0  # one rank may have to build DeepCompile's extension
#: Eager ZeRO-3 refuses the model that gathers by itself, in use as its parameters are.
NAMES = [p.__name__ for p in patterns.ALL if p is not patterns.Gathers]
#: Their experts are chosen by the last bits of what they see, so not in bfloat16.
CHOOSE = ["Leaf", "FusedExperts"]
SOME = ["TiedToSkipped", "Mixed"]
SKIPPED = {"layers.0.weight", "layers.1.weight", "layers.2.weight", "layers.3.weight"}


def first(gpus: World, act: Callable[..., Any], *args: Any, **more: Any) -> Any:
    answer = gpus.within(SECONDS).run(act, *args, **more)[0]
    # To stderr, which pytest-xdist passes on at once with --capture=no.
    print(act.__name__, args, more, answer, file=sys.stderr)
    return answer


def held(gpus: World, pattern: str, **case: Any) -> Held:
    result: Held = first(gpus, hold, pattern, **case)
    print("wrong", result.wrong, file=sys.stderr)
    return result


def assert_like_eager(result: Held) -> None:
    assert not result.error, result.error
    assert not result.untrained, f"these did not train: {result.untrained}"
    assert not result.wrong, f"update norms, eager and DeepCompile: {result.wrong}"
    assert max(result.apart.values()) < 0.1, result.apart
    assert not any(result.available), "a parameter stayed gathered"


@pytest.mark.parametrize("pattern", NAMES)
def test_trains_as_eager_does(gpus: World, pattern: str) -> None:
    assert_like_eager(held(gpus, pattern, dtype="float32" if pattern in CHOOSE else "bfloat16"))


@pytest.mark.parametrize(
    "case",
    [
        {"micro_steps": 2},
        {"micro_steps": 2, "style": "torch"},
        {"forwards": 2},
        {"evaluates": True},
        {"clip": 0.05},
        {"zero": {"stage3_param_persistence_threshold": 10**5}},
        {"sums": "fp32"},
    ],
    ids=["accumulates", "torch", "forwards", "evaluates", "clips", "persistent", "fp32 sums"],
)
@pytest.mark.parametrize("pattern", SOME)
def test_training(gpus: World, pattern: str, case: dict[str, Any]) -> None:
    assert_like_eager(held(gpus, pattern, **case))


@pytest.mark.parametrize("micro_steps", [1, 2])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_weights_are_those_of_plain_pytorch(gpus: World, pattern: str, micro_steps: int) -> None:
    scripts = [s for p, s in CASES if p == pattern and s.options.micro_steps == micro_steps]
    outcomes = first(gpus, in_a_row, pattern, scripts)
    assert list(outcomes) == [script.name for script in scripts]
    assert all(outcome.equal for outcome in outcomes.values()), outcomes


def test_overflow(gpus: World) -> None:
    scale = {"enabled": True, "initial_scale_power": 18, "hysteresis": 1}  # trains from 16 on
    result = held(gpus, "Mixed", dtype="float32", settings={"fp16": scale})
    assert result.skipped[0] == result.skipped[1] > 0
    assert_like_eager(result)


def test_peak_memory_where_all_is_skipped(gpus: World) -> None:
    result = held(gpus, "Whole", width=2048)
    assert_like_eager(result)
    assert result.peaks[1] <= 1.10 * result.peaks[0], result.peaks


@pytest.mark.parametrize("pattern", ["Whole", "Mixed"])
def test_thirty_runs_are_one(gpus: World, pattern: str) -> None:
    assert not any(gpus.within(SECONDS).run(repeated, pattern, 30))


def test_stock_runs_once_with_older_parameters(gpus: World) -> None:
    """Right after the step in which DeepCompile compiled again."""
    off = []
    for patch in (False, True):
        result = held(gpus, "Broken", patch=patch)
        assert not result.error, result.error
        eager, compiled = (losses[AGAIN] for losses in result.losses)
        off.append(abs(compiled - eager))
    assert off[1] < 0.1 * off[0]


def checked(patch: bool) -> list[str]:
    """Return the error of `train_check` for one step."""
    engine = deep_compiled(patterns.build("Disabled", WIDTH), Options(**BF16).config, patch)

    def train(step: int) -> None:
        engine.backward(engine(*patterns.inputs(step, 0)))
        engine.step()

    train(0)
    train(1)
    try:
        with ds_patches.train_check(engine):
            train(2)
    except Exception as error:
        return [type(error).__name__, str(error)]
    return []


@pytest.mark.parametrize("patch", [False, True], ids=["stock", "patched"])
def test_train_check(gpus: World, patch: bool) -> None:
    try:
        raised = first(gpus, checked, patch)
    except Exception as error:
        if patch or "must be" not in str(error):
            raise
        pytest.skip("stock crashes here before anything could be checked")
    if patch:
        assert not raised
    else:
        assert raised[0] == "NotTrained"
        assert all(name in raised[1] for name in SKIPPED)
