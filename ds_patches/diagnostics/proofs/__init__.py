"""Scripts that show defects of DeepSpeed on two ranks, for `ds-patches prove`."""

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import wrap
from typing import Any

from ds_patches.core import files

_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Proof:
    """An entry of proofs.json: a function of scripts.py or weights.py, and a configuration.

    options: arguments of the function. zero: settings of `zero_optimization`. settings: all others.
    why: the reason for settings whose purpose is not obvious. stage: the ZeRO stage, by default
    that of the defect. only: the device that shows the defect, and why the other one does not.
    """

    script: str
    options: Mapping[str, Any] = field(default_factory=dict)
    zero: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""
    stage: int | None = None
    only: Sequence[str] = ()


_ENTRIES = json.loads(files.text(_FOLDER / "proofs.json"))
PROOFS = {name: Proof(**entry) for name, entry in _ENTRIES.items()}


def compose(name: str, stage: int, title: str) -> str:
    """Return the text of a reproducer, which needs only DeepSpeed and torch."""
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
    source = "\n".join(files.text(_FOLDER / file) for file in ("scripts.py", "weights.py"))
    nodes = ast.parse(source).body
    definitions = {n.name: n for n in nodes if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    used = dict.fromkeys(_used(definitions[proof.script], definitions))
    body = "\n\n".join(ast.get_source_segment(source, node) or "" for node in used)
    return framed(title, config, body, proof.script, proof.options, _imports(source, body))


def framed(
    title: str, config: Any, body: str, script: str, options: Any = None, imports: str = ""
) -> str:
    """Return frame.py with the function `script`, which `body` defines, and its configuration."""
    settings = "\n    ".join(wrap(f"CONFIG = {config}", 95))
    settings += f"\nOPTIONS = {options}" * bool(options)
    call = f"in {script}(start, net, data" + ", **OPTIONS" * bool(options)
    parts = {
        "TITLE": "\n".join(wrap(title, 99)),
        "import os\n": f"{imports}import os\n",
        "  # noqa: F401": "",
        "CONFIG = {}": settings.replace("'", '"'),
        'def script(start, net, data):\n    """Replaced by the function of a proof."""': body,
        "in script(start, net, data": call,
    }
    frame = files.text(_FOLDER / "frame.py")
    for placeholder, text in parts.items():
        frame = frame.replace(placeholder, text, 1)
    return re.sub(r"\n\n+(    def )", r"\n\1", frame.replace("\n\n\n", "\n\n"))


def _imports(source: str, body: str) -> str:
    """Return the imports of a source whose names a text uses, but those that frame.py has."""
    frame, words = files.text(_FOLDER / "frame.py"), {*re.findall(r"\w+", body)}
    imports = re.findall(r"^(?:from (?!ds_patches).+ )?import .+\n", source, re.MULTILINE)
    used = (line for line in dict.fromkeys(imports) if line.split()[-1] in words)
    return "".join(line for line in used if line.strip() not in frame)


def _used(node: ast.AST, definitions: Mapping[str, ast.AST]) -> Iterator[ast.AST]:
    """Yield the definitions that a definition uses, then the definition itself."""
    for name in ast.walk(node):
        if isinstance(name, ast.Name) and name.id in definitions:
            yield from _used(definitions[name.id], definitions)
    yield node
