"""What a patch is: data, one `PATCH = Patch(...)` in the file of a cure, or in `binding.py`."""

from __future__ import annotations

from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

_PAGES = "https://github.com/deepspeedai/DeepSpeed"


@dataclass(frozen=True)
class Link:
    """A page upstream: an issue, a pull request."""

    label: str
    url: str


def upstream(*labels: str) -> tuple[Link, ...]:
    """Return DeepSpeed's pages of these, as "PR 7665" or "issue 7718"."""
    parted = ((label, *label.split()) for label in labels)
    folders = {"PR": "pull", "issue": "issues"}
    return tuple(Link(label, f"{_PAGES}/{folders[kind]}/{of}") for label, kind, of in parted)


@dataclass(frozen=True)
class Place:
    """A function or class of DeepSpeed, by the module and class that DEFINE it."""

    module: str
    qualname: str

    @property
    def key(self) -> str:
        """The place as every report names it."""
        return f"{self.module}:{self.qualname}"


@dataclass(frozen=True)
class Target(Place):
    """A function of a module, or a method of instances, to wrap.

    wrapper: a function of the patch's `hooks`, looked up only when the patch is applied; its
        signature is wrapt's, `(wrapped, instance, args, kwargs) -> Any`.
    releases: specifier of the releases that have the target ("" = all); in others it is skipped.
    adds: the name may be absent, and the patch then adds it. Absence becomes one of its shapes.
    """

    wrapper: str
    releases: str = ""
    adds: bool = False


@dataclass(frozen=True)
class Dependency(Place):
    """A function or class the patch relies on without wrapping it; gated like a target.

    releases: specifier of the releases in which the patch relies on it ("" = all).
    """

    why: str
    releases: str = ""


@dataclass(frozen=True)
class Class:
    """A class of DeepSpeed of which a patch names several methods, by the module that defines it.

    target, needs: a method as `Target` and as `Dependency` take it.
    """

    module: str
    name: str

    def target(self, method: str, wrapper: str, releases: str = "", adds: bool = False) -> Target:
        return Target(self.module, f"{self.name}.{method}", wrapper, releases, adds)

    def needs(self, method: str, why: str, releases: str = "") -> Dependency:
        return Dependency(self.module, f"{self.name}.{method}", why, releases)


@dataclass(frozen=True, eq=False)  # known by identity: a hash of all its data takes long
class Patch:
    """One fix, as data.

    supported: specifier of the tested releases; it has an upper bound.
    remove_when, upstream: for its page in docs/, beside the docstring of the file or folder.
    collectives: whether it changes what the ranks say to each other. All ranks of an engine must
        then have it alike, and are compared when the engine is built.
    hooks: the module of its wrappers: `__name__` of a cure in one file; "" for `hooks` in the
        patch's folder, which is imported when the patch is applied. Its functions are named alone,
        others as "module:function".
    activate: its `() -> Sequence[str]`, run after all wrappers are in place; returns notes for the
        user. If it raises, all is undone.
    deactivate: its `() -> None`, run after the wrappers are gone.
    requires: names of patches that have to be live for this one, and require none: who asks for it
        gets them too, and who takes one of them back takes this one back first.
    """

    name: str
    summary: str
    supported: str
    targets: tuple[Target, ...]
    remove_when: str = ""
    upstream: tuple[Link, ...] = ()
    dependencies: tuple[Dependency, ...] = ()
    collectives: bool = True
    hooks: str = ""
    activate: str | None = None
    deactivate: str | None = None
    requires: tuple[str, ...] = ()

    def hook(self, name: str) -> Any:
        """Return the function that a target, `activate` or `deactivate` names."""
        home = self.hooks or f"ds_patches.{self.name}.hooks"
        return resolve_name(name if ":" in name else f"{home}:{name}")
