"""Patches that another package declares: a site's own, in a distribution of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.core import fake


def distribution(folder: Path, name: str = "sample", declared: str = "our_patches.sample") -> Path:
    """Write `our_patches`, installed, with one patch in it."""
    package = fake.patch_folder(folder / "our_patches", name)
    fake.write(package / "__init__.py", "")
    binding = package / name / "binding.py"
    fake.write(
        binding, fake.edited(binding.read_text(), f"ds_patches.{name}", f"our_patches.{name}")
    )
    metadata = folder / "our_patches-1.0.dist-info"
    fake.write(metadata / "METADATA", "Metadata-Version: 2.1\nName: our-patches\nVersion: 1.0\n")
    fake.write(metadata / "entry_points.txt", f"[ds_patches.patches]\n{name} = {declared}\n")
    return folder


def test_it_is_a_patch_like_any_other(tmp_path: Path) -> None:
    code = """
        import ds_patches
        from tests.core import fake
        assert ds_patches.names()[-1] == "sample"
        status = ds_patches.apply_all(skip=ds_patches.names()[:-1])["sample"]
        assert status.live, status
        assert status.options == {"mode": "hard"}
        assert all(map(fake.is_marked, ("scale", "Engine.forward", "Engine.extra")))
        ds_patches.unapply_all()
        assert not fake.is_marked("scale")
    """
    site, tree = distribution(tmp_path / "site"), fake.deepspeed(tmp_path / "deepspeed")
    fake.output(code, site, tree, DS_PATCHES_SAMPLE_MODE="hard")


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ("elsewhere", "No module named 'elsewhere'"),
        ("", "TypeError: the 'package' argument"),
    ],
)
def test_a_wrong_declaration_says_so(tmp_path: Path, declared: str, message: str) -> None:
    site = distribution(tmp_path / "site", "sample", declared)
    said = fake.output('import ds_patches; print(ds_patches.status()["sample"])', site)
    assert said.startswith(f"sample is broken: {declared}.binding")
    assert message in said


def test_the_path_is_asked_anew_when_it_changes(tmp_path: Path) -> None:
    site = distribution(tmp_path / "site")
    code = f"""
        import sys, ds_patches
        assert "sample" not in ds_patches.names()
        sys.path.insert(0, {str(site)!r})
        print(ds_patches.names()[-1])
    """
    assert fake.output(code) == "sample\n"


def test_metadata_that_cannot_be_read_hides_only_what_others_declare(tmp_path: Path) -> None:
    site = distribution(tmp_path / "site")
    fake.write(
        site / "bad-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: bad\nVersion: 1\n"
    )
    fake.write(site / "bad-1.0.dist-info/entry_points.txt", "[console_scripts]\nno equals sign\n")
    done = fake.run("import ds_patches; print('zero3_retain' in ds_patches.names())", site)
    assert done.stdout == "True\n", done.stderr
    assert "patches of other packages are not looked for: " in done.stderr
