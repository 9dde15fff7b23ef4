"""A definition that is parsed alone is the one in the tree of the whole file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import ds_patches
from ds_patches.core import definitions, gate, registry, release, shape
from ds_patches.core.definitions import Definition

TROUBLE = '''
import x


@decorated
# A comment.
@also(
    1,
)

def spread(
    a,
) -> None:
    """A text
that ends nowhere near its indentation.
    def no_function():
"""
    return """
def neither():
"""


class C:
    def here(self):
        # The next comment ends nothing.
# Not here.
        def inner():
            return 1

        return inner

    @property
    def twice(self):
        return 1

    @twice.setter
    def twice(self, value):
        pass

    @also(1,
          2)
    def continued(self): return 1

    async def waits(self):
        pass
    one_line = 1


if x:
    def either(): return 1
else:
    def either(): return 2
def at_the_end(): return 1'''


def every(scope: list[ast.stmt], above: str = "") -> Iterator[tuple[str, Definition]]:
    """Every name that the module has once it has run, of classes in it too, and what it means."""
    found = {d.name: d for d in definitions._definitions(scope)}
    for name, definition in found.items():
        yield above + name, definition
        if isinstance(definition, ast.ClassDef):
            yield from every(definition.body, f"{above}{name}.")


def check(file: Path) -> int:
    """Compare what is found of each definition with the tree; how many there are."""
    tree, stamp = ast.parse(file.read_bytes()), definitions.stamp(file)
    all_ = [*every(tree.body)]
    for qualname, definition in all_:
        found = definitions.by_name(stamp, qualname)
        assert found is not None, qualname
        assert ast.dump(found) == ast.dump(definition), qualname
        assert definitions.first_line(found) == definitions.first_line(definition), qualname
    return len(all_)


def test_what_is_hard_to_see_in_a_text(tmp_path: Path) -> None:
    file = tmp_path / "trouble.py"
    file.write_text(TROUBLE)
    assert check(file) == 8
    stamp = definitions.stamp(file)
    for absent in ("neither", "no_function", "inner", "C.inner", "C.spread", "C.one_line", "x"):
        assert definitions.by_name(stamp, absent) is None, absent


@pytest.mark.core_case
def test_in_every_file_that_a_patch_looks_into() -> None:
    installed = release.installed()
    patches = registry.patches().values()
    modules = {place.module for patch in patches for place in (*patch.targets, *patch.dependencies)}
    inside = (installed.folder.joinpath(*module.split(".")[1:]) for module in sorted(modules))
    files = [file for file in (path.with_suffix(".py") for path in inside) if file.is_file()]
    assert len(files) > 5
    assert sum(map(check, files)) > 300


@pytest.mark.parametrize("name", ds_patches.names())
def test_few_files_are_parsed_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is what makes `apply_all()` take a third of a second instead of two."""
    whole: list[str] = []
    tree = definitions.tree.__wrapped__

    def seen(file: definitions.Stamp) -> ast.Module:
        whole.append(file[0].name)
        return tree(file)

    monkeypatch.setattr(definitions, "tree", seen)
    shape._found.cache_clear()
    assert gate.check(registry.patch(name)).may_apply
    assert len(whole) <= 2, whole
