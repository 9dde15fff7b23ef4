"""The walks through the code are those of real runs: each row runs, and in its order."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import ds_patches
from tests.dc_fallback.patterns import inputs
from tests.harness import models
from tests.harness.models import loss_of
from tests.harness.options import Options
from tests.harness.surroundings import DEEPCOMPILE, around, compile_engine
from tests.harness.trainers import engine_of
from tests.world import World

Calls = list[tuple[str, str]]
#: A row of a walk: a file of the package, and a function or class in it.
STEP = re.compile(r"(?<=^\| `)([\w/.]+)(` \| `)([\w.]+)(?=`)", re.M)

PAGE = Path("docs/how-it-works.md").read_text(encoding="utf-8")
#: By its title, the rows of each walk: a file of the package, and a function in it.
WALKS = {
    part.partition("\n")[0].strip("`"): [(file, name) for file, _, name in STEP.findall(part)]
    for part in PAGE.split("\n## ")[1:]
}


def test_each_row_names_a_function_of_its_file() -> None:
    assert sum(map(len, WALKS.values())) > 30
    assert all(is_there(*row) for rows in WALKS.values() for row in rows)


def is_there(file: str, name: str) -> bool:
    """Return True if a file of the package defines a function or class of this name."""
    scope: Any = ast.parse(Path("ds_patches", file).read_text(encoding="utf-8"))
    for part in name.split("."):
        scope = next((node for node in scope.body if getattr(node, "name", None) == part), None)
        if scope is None:
            return False
    return True


@contextmanager
def traced() -> Iterator[Calls]:
    """Yield the functions of the package that are called, each where it is called first."""
    seen: dict[tuple[str, str], None] = {}
    calls: Calls = []

    def note(frame: FrameType, event: str, _: object) -> None:
        _, ours, file = frame.f_code.co_filename.rpartition("/ds_patches/")
        if event == "call" and ours:
            seen.setdefault((file, frame.f_code.co_qualname))

    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        calls += seen


@pytest.mark.parametrize("walk", WALKS)
def test_the_rows_run_in_their_order(fresh_world: World, walk: str) -> None:
    run = dict(zip(WALKS, (apply, zero2, block, deepcompile), strict=True))[walk]
    calls, _ = fresh_world.run(run)
    rows = WALKS[walk]
    assert not {*rows} - {*calls}
    assert sorted(rows, key=calls.index) == rows


def apply() -> Calls:
    with traced() as calls:
        ds_patches.apply_all()
    return calls


def zero2() -> Calls:
    ds_patches.apply_all()
    engine = engine_of(stage=2, micro_steps=4)
    with traced() as calls:
        for micro_step in range(4):
            engine.backward(loss_of(engine, micro_step))
            engine.step()
    return calls


def block() -> Calls:
    ds_patches.apply_all()
    engine = engine_of(stage=3)
    with traced() as calls:
        with engine.coalesce_grad_reduction():
            engine.backward(loss_of(engine, 0))
            engine.backward(loss_of(engine, 1))
        engine.step()
    return calls


def deepcompile() -> Calls:
    ds_patches.apply_all()
    options = Options(model="patterns.Mixed")
    with around(DEEPCOMPILE), traced() as calls:
        engine = compile_engine(models.build(options.model), options.config)
        engine.backward(engine(*inputs(0)))
        engine.step()
    return calls
