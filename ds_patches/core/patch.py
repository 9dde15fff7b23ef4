"""A patch as data: `PATCH = Patch(...)` in a cure's file, or in `binding.py` of a folder."""

import sys
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any

_PAGES = "https://github.com/deepspeedai/DeepSpeed"


@dataclass(frozen=True)
class Link:
    """A page of DeepSpeed's repository: an issue or a pull request."""

    label: str
    url: str


def upstream(*labels: str) -> tuple[Link, ...]:
    """Return links to DeepSpeed's pages for labels such as "PR 7665" or "issue 7718"."""
    words = ((label, *label.split()) for label in labels)
    folders = {"PR": "pull", "issue": "issues"}
    return tuple(Link(label, f"{_PAGES}/{folders[kind]}/{number}") for label, kind, number in words)


@dataclass(frozen=True)
class Place:
    """A function or class of DeepSpeed, by the module and class that DEFINE it."""

    module: str
    qualname: str

    @cached_property
    def key(self) -> str:
        """The name of the place in reports."""
        return f"{self.module}:{self.qualname}"


@dataclass(frozen=True)
class Target(Place):
    """A function of a module, or a method of instances, to wrap.

    wrapper: a function in the patch's `hooks`, imported when the patch is applied; its signature is
        wrapt's, `(wrapped, instance, args, kwargs) -> Any`.
    releases: specifier of the releases in which it is wrapped ("" = all).
    """

    wrapper: str
    releases: str = ""


@dataclass(frozen=True)
class Dependency(Place):
    """A function or class that the patch relies on without wrapping it; the gate checks it too.

    releases: specifier of the releases in which the patch relies on it ("" = all).
    """

    why: str
    releases: str = ""


@dataclass(frozen=True)
class Class:
    """A class of DeepSpeed, and shorthands for its methods as targets and dependencies."""

    module: str
    name: str

    def target(self, method: str, wrapper: str, releases: str = "") -> Target:
        return Target(self.module, f"{self.name}.{method}", wrapper, releases)

    def needs(self, method: str, why: str, releases: str = "") -> Dependency:
        return Dependency(self.module, f"{self.name}.{method}", why, releases)


@dataclass(frozen=True, eq=False)  # by identity: to hash all its data takes long
class Patch:
    """One fix, as data.

    supported: specifier of the tested releases, with an upper bound.
    remove_when, upstream: shown on the patch's page in docs/.
    collectives: True if it changes which collectives run. All ranks of an engine must then apply
        it, and are compared when the engine is constructed.
    activate: a `() -> Sequence[str]`, run after all wrappers are installed; returns notes for the
        user. If it raises, the wrappers are removed.
    deactivate: a `() -> None`, run before the wrappers are removed.
    may_unapply: a `() -> None`, which raises Misused while the patch cannot be taken back.
    requires: names of patches that have to be live for this one, and require none themselves. They
        are applied before it, and it is taken back before any of them.
    by_default: False if the patch is applied only where it is named.
    """

    name: str
    summary: str
    supported: str
    targets: tuple[Target, ...]
    remove_when: str = ""
    upstream: tuple[Link, ...] = ()
    dependencies: tuple[Dependency, ...] = ()
    collectives: bool = True
    activate: str | None = None
    deactivate: str | None = None
    may_unapply: str | None = None
    requires: tuple[str, ...] = ()
    by_default: bool = True

    @property
    def hooks(self) -> str:
        """The module of its wrappers: a cure's own file, or `hooks` in the patch's folder."""
        cure = f"ds_patches.cures.{self.name}"
        return cure if cure in sys.modules else f"ds_patches.{self.name}.hooks"

    def function(self, name: str) -> Any:
        """Import and return the function that a target, `activate` or `deactivate` names.

        name: of a function in `hooks`, or "module:function".
        """
        module, _, function = name.rpartition(":")
        return getattr(import_module(module or self.hooks), function)
