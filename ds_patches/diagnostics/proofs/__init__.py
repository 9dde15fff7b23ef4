"""Scripts that show on two ranks what releases get wrong: `ds-patches prove`."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import wrap
from typing import Any

from ds_patches.core import files

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Proof:
    """A function of the scripts, and the configuration besides: an entry of proofs.json.

    options: of the function. zero, settings: of the section for ZeRO, and others. why: what is not
    seen of these. stage: where it is not the row's. only: the device that shows it, and why the
    other does not. row: the name of the proof that its row has, if that is another one.
    """

    script: str
    options: Mapping[str, Any] = field(default_factory=dict)
    zero: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""
    stage: int | None = None
    only: Sequence[str] = ()
    row: str = ""


PROOFS = {name: Proof(**its) for name, its in json.loads(files.text(_HERE / "proofs.json")).items()}


def compose(name: str, stage: int, title: str) -> str:
    """Return a whole reproducer: the frame, with a script and its configuration in it."""
    proof = PROOFS[name]
    zero = {"stage": stage, **proof.zero}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 0
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
        **proof.settings,
    }
    source = "\n".join(files.text(_HERE / name) for name in ("scripts.py", "weights.py"))
    return framed(source, proof.script, config, title, proof.options)


def framed(
    source: str,
    script: str,
    config: Mapping[str, Any],
    title: str,
    options: Mapping[str, Any] | None = None,
) -> str:
    """Return the frame with a function of a source, and whatever of the source that uses."""
    frame = files.text(_HERE / "frame.py").replace("  # noqa: F401", "")
    tree = ast.parse(source)
    whole = {n.name: n for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    used = dict.fromkeys(_used(whole[script], whole))
    body = "\n\n".join(ast.get_source_segment(source, node) or "" for node in used)
    words = {*re.findall(r"\w+", body)}
    imports: dict[str, None] = {}
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            node.names = [name for name in node.names if name.name in words]
            line = ast.unparse(node) if node.names else "ds_patches"
            if "ds_patches" not in line and line not in frame:
                imports[f"{line}\n"] = None
    settings = "\n    ".join(wrap(f"CONFIG = {dict(config)}", 95))
    settings += f"\nOPTIONS = {dict(options)}" if options else ""
    call = f"in {script}(start, net, data" + ", **OPTIONS" * bool(options)
    parts = {
        "TITLE": "\n".join(wrap(title, 99)),
        "import os\nimport sys\n\n": f"{''.join(imports)}import os\nimport sys\n",
        "CONFIG = {}": settings.replace("'", '"'),
        'def script(start, net, data):\n    """A function of the scripts stands here."""': body,
        "in script(start, net, data": call,
    }
    for place, text in parts.items():
        frame = frame.replace(place, text, 1)
    return re.sub(r"\n\n+(    def )", r"\n\1", frame.replace("\n\n\n", "\n\n"))


def _used(node: ast.AST, whole: Mapping[str, ast.AST]) -> Iterator[ast.AST]:
    """Yield what a definition needs of its source, and it."""
    for name in ast.walk(node):
        if isinstance(name, ast.Name) and name.id in whole:
            yield from _used(whole[name.id], whole)
    yield node
