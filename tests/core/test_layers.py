"""The package is layers that look down, and what is private in DeepSpeed lies in one of them."""

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import ds_patches
from ds_patches.core import registry

ROOT = Path(str(ds_patches.__file__)).parent
PATCHES = tuple(registry.patches())
#: From below: what imports only what stands before it. Patches stand side by side.
LAYERS = (
    ("core",),
    ("upstream",),
    ("steps",),
    PATCHES,
    ("startup",),
    ("diagnostics",),
    ("",),
    ("auto", "__main__"),
)
PRIVATE = r"_(?!ds_patches)[a-z]\w*[a-z]"
#: Private attributes of PyTorch and of Python that are read or written where no layer hides them.
OTHERS = {
    "modules": "_backward_hooks _buffers _compiled_call_impl _orig_mod _parameters",
    "tensors": "_cdata _post_accumulate_grad_hooks _version",
    "graph tasks": "_get_current_graph_task_keep_graph _top_saved_tensors_default_hooks",
    "Functions": "_forward_cls",
    "process groups": "_get_default_group _get_default_store _get_backend _timeout",
    "Python": "_fields _getframe",
}
#: What the package itself defines, importing nothing for it: anybody may ask for these.
OWN = {"__path__", "__version__"}
#: By the package that its imports are relative to, the tree of each module, by its name.
TREES: dict[str, tuple[str, ast.Module]] = {}
for file in ROOT.rglob("*.py"):
    # Python runs that by another name, in interpreters that may have another ds_patches, or none.
    if file.name != "sitecustomize.py":
        *package, name = file.relative_to(ROOT.parent).with_suffix("").parts
        path = package if name == "__init__" else [*package, name]
        TREES[".".join(path)] = ".".join(package), ast.parse(file.read_text(encoding="utf-8"))


def run(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what may run beneath a node: all but what only type checkers read."""
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield child
            yield from run(child)


def imported(name: str) -> Iterator[str]:
    """Yield all that a module imports: modules, and names of modules."""
    package, tree = TREES[name]
    for node in run(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            for alias in node.names:
                if f"{base}.{alias.name}" in TREES:
                    yield f"{base}.{alias.name}"
                elif not (base == "ds_patches" and alias.name in OWN):
                    yield base


def part_of(module: str) -> str:
    """Return the patch or the folder that a module belongs to."""
    _, first, second, *_ = (*module.split("."), "", "")
    return second if first == "cures" and second else first


def layer_of(part: str) -> int:
    return next(index for index, parts in enumerate(LAYERS) if part in parts)


def test_imports_run_down_and_there_is_no_circle() -> None:
    graph = {name: {*imported(name)} & TREES.keys() for name in TREES}
    TopologicalSorter(graph).prepare()  # raises CycleError, which has the circle
    for name, others in graph.items():
        own = part_of(name)
        for theirs in map(part_of, others):
            assert theirs == own or layer_of(theirs) < layer_of(own), (name, others)


def test_upstream_alone_imports_deepspeed() -> None:
    """And proofs, which are scripts of a user's."""
    for name, (_, tree) in TREES.items():
        is_free = part_of(name) == "upstream" or ".proofs." in name
        imports = re.search(r"^\s*(from|import) deepspeed", ast.unparse(tree), re.MULTILINE)
        assert is_free or not imports, name


def test_private_names_of_deepspeed_are_upstreams() -> None:
    """A patch may wrap a method that its binding names: the gate looks at each."""
    ours = {*" ".join(OTHERS.values()).split(), *own_names()}
    for name in TREES:
        part = part_of(name)
        if part in (*PATCHES, "steps") or ".traincheck" in name:
            patch = registry.patches().get(part)
            places = (*patch.targets, *patch.dependencies) if patch else ()
            bound = {place.qualname.rpartition(".")[2] for place in places}
            assert not {*used(name)} - ours - bound, name


def used(name: str) -> Iterator[str]:
    """Yield private attributes, and texts that are a private name."""
    for node in ast.walk(TREES[name][1]):
        text = getattr(node, "attr", getattr(node, "value", None))
        is_torchs = isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.")
        if isinstance(text, str) and re.fullmatch(PRIVATE, text) and not is_torchs:
            yield text


def own_names() -> Iterator[str]:
    """Yield what the package itself defines outside `upstream`: functions, and attributes."""
    trees = [tree for name, (_, tree) in TREES.items() if part_of(name) != "upstream"]
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield from {node.attr} & {ast.unparse(node).removeprefix("self.")}
