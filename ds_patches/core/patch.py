"""What a patch is: data. A patch folder's `binding.py` holds one `PATCH = Patch(...)`."""

from __future__ import annotations

from dataclasses import dataclass

#: Stands for every choice of an option that takes several.
ALL = "all"
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
        """The place as `shapes.json` and every report name it."""
        return f"{self.module}:{self.qualname}"


@dataclass(frozen=True)
class Target(Place):
    """A function of a module, or a method of instances, to wrap.

    wrapper: reference `"package.module:function"`, resolved only when the patch is applied; its
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


@dataclass(frozen=True)
class Option:
    """A choice left to the user: `DS_PATCHES_<PATCH>_<OPTION>` or `apply(name, option=value)`.

    default: one of the choices; or a tuple of some, if a value is one choice or more, separated by
        commas or plus signs, or `all`. The patch gets them as `choices` orders them, joined by
        commas, and `DS_PATCHES_<PATCH>`, which is 0 or 1, takes them too.
    """

    name: str
    default: str | tuple[str, ...]
    choices: tuple[str, ...]
    help: str

    @property
    def several(self) -> bool:
        """Whether a value may be several choices. At most one option of a patch is like that."""
        return isinstance(self.default, tuple)

    @property
    def words(self) -> tuple[str, ...]:
        """What a value is made of."""
        return (*self.choices, ALL) if self.several else self.choices


@dataclass(frozen=True)
class Patch:
    """One fix, as data.

    supported: specifier of the tested releases; it has an upper bound.
    fixed_in: first DeepSpeed release that needs no patch, or None.
    why, how, remove_when, upstream: texts of its page in docs/, for a patch of this package.
    collectives: whether it changes what the ranks say to each other. All ranks of an engine must
        then have it alike, and are compared when the engine is built.
    activate: reference to `(release: Version, options: Mapping[str, str]) -> Sequence[str]`, run
        after all wrappers are in place; returns notes for the user. If it raises, all is undone.
    deactivate: reference to `() -> Sequence[str]`, run after the wrappers are gone.
    requires: names of patches that have to be live for this one, and require none: who asks for it
        gets them too, and who takes one of them back takes this one back first.
    package: import name of the patch's folder, where its shapes lie; the registry knows it.
    broken: what is wrong with it, where the registry found that it cannot be used.
    """

    name: str
    summary: str
    supported: str
    targets: tuple[Target, ...]
    fixed_in: str | None = None
    why: str = ""
    how: str = ""
    remove_when: str = ""
    upstream: tuple[Link, ...] = ()
    dependencies: tuple[Dependency, ...] = ()
    options: tuple[Option, ...] = ()
    collectives: bool = True
    activate: str | None = None
    deactivate: str | None = None
    requires: tuple[str, ...] = ()
    package: str = ""
    broken: str = ""
