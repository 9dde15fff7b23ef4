"""What is looked at when an engine is built, while any patch is applied.

Whether another library has put something in the place of a wrapped function; and whether all ranks
have the same patches. One that changes which collectives run, live on some ranks only, hangs the
job or trains on wrong gradients. So each rank puts what it has into the process group's store, and
one that has such a patch refuses where another has not. By no collective: a rank without any patch
would take no part, and the others would hang.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ds_patches import __version__
from ds_patches.core import columns, engines, flags, imports, lifecycle, registry, release
from ds_patches.core.errors import RanksDisagree
from ds_patches.core.journal import Journal
from ds_patches.core.patch import Target
from ds_patches.core.state import WrapperState

log = logging.getLogger("ds_patches")

#: Seconds that a rank waits for others, which leave an engine's last collective together with it.
PATIENCE = 120.0
#: Seconds that it waits, before it raises, until they have read what is wrong.
_READING = 10.0
#: Letters of a list of ranks, in a message that each of them prints.
_LONG = 60
_INIT = Target(engines.MODULE, "DeepSpeedEngine.__init__", "around_init")
_journal = Journal()
_NONE = flags.Requests(strict=False, of={})
#: As the flags were when patches were applied last; `_NONE` where none is.
_requests = _NONE
#: Of the wrappers that are replaced, what was said: each once.
_said: set[str] = set()


class Holdings(NamedTuple):
    """What one rank has.

    live: its live patches that change collectives.
    told: versions, and where each patch stands; compared only if the patch is live on some rank.
    """

    live: list[str]
    told: dict[str, str]


def start(requests: flags.Requests) -> None:
    """Look at every engine from now on; the flags are those that patches were applied with."""
    global _requests
    _requests = requests
    if not _journal.is_in_place and not imports.awaited([engines.MODULE]):
        engines.add(*engines.built())
        imports.add_post_import_hook(engines.MODULE, _wrap)


def stop() -> None:
    """Look at none any longer."""
    global _requests
    _requests = _NONE
    _journal.remove()
    engines.known.clear()
    _said.clear()


def _wrap() -> None:
    if _requests is _NONE:
        return
    try:
        _journal.install([_INIT], lambda _: around_init)
    except AttributeError as error:
        log.warning("engines are not looked at: %s", error)


def around_init(wrapped: Any, engine: Any, args: Any, kwargs: Any) -> None:
    wrapped(*args, **kwargs)
    compare(engine)
    engines.add(engine)
    for patch, life in [*lifecycle.lives.items()]:
        for key, (state, by) in life.journal.states().items():
            text = f"{patch}: {key} is replaced by {by}"
            if state is WrapperState.REPLACED and text not in _said:
                _said.add(text)
                log.warning("%s", text)


def compare(engine: Any) -> None:
    """Compare the ranks of an engine that was just built: they leave its construction together.

    Raises RanksDisagree if this rank has a live patch, and another rank lacks it, has other
    versions, or says nothing for PATIENCE seconds. A rank without a live patch goes on.
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        return
    group, me = reduction_group(engine), dist.get_rank()
    ranks = tuple(map(int, dist.get_process_group_ranks(group)))
    if dist.get_backend(group) == "fake":  # PyTorch's: there is no other rank, and no store
        log.debug("the ranks of a fake process group are not compared")
        ranks = (me,)
    trouble = ""
    try:
        if len(ranks) > 1:
            trouble = exchange(store(), meeting("ranks", ranks, me), ranks, me, holdings())
    except RuntimeError as error:  # of the store, which ends with the rank that has it
        log.info("the ranks of this engine are not compared, as one has ended: %s", error)
        return
    if me == 0:
        _leave(len(ranks), trouble)
    if trouble:
        raise RanksDisagree(f"the ranks of this engine differ: {trouble}")
    if me == 0:
        here = [name for name in registry.patches() if lifecycle.lives[name].journal.active]
        what = f"{', '.join(here)} live" if here else "no patch is live"
        where = f" on all {len(ranks)} ranks of this engine" if len(ranks) > 1 else ""
        log.info("%s on DeepSpeed %s: %s%s", *_versions().values(), what, where)


def reduction_group(engine: Any) -> Any:
    """Return the process group of the ranks that share an engine's gradients."""
    return getattr(engine, "seq_data_parallel_group", None) or engine.data_parallel_group


def meeting(subject: str, ranks: Sequence[int], me: int) -> str:
    """Return a place in the store where these ranks meet: for each, their next over a subject.

    The store itself counts, so that the ranks of a process group that was built anew, some of them
    in new processes, begin anew.
    """
    place = f"ds_patches/{subject}/{hashlib.sha256(repr((*ranks,)).encode()).hexdigest()[:16]}"
    return f"{place}/{store().add(f'{place}/{me}', 1)}"


def holdings() -> Holdings:
    """Return what this rank has of the patches that change collectives."""
    found = Holdings([], _versions())
    for name, patch in registry.patches().items():
        life = lifecycle.lives[name]
        if patch.collectives and life.live:
            found.live.append(name)
            found.told[name] = "live"
        elif name in _requests.of:
            status = life.status(_requests.of[name])
            found.told[name] = f"{status.state.value} ({status.reason})"
    return found


def differences(everyone: Mapping[int, Holdings]) -> Iterator[str]:
    """Say what is not alike, by ranks: versions, and patches that are live anywhere."""
    live = (name for one in everyone.values() for name in one.live)
    for thing in dict.fromkeys(["ds_patches", "DeepSpeed", *live]):
        ranks: dict[str, list[int]] = {}
        for rank, one in sorted(everyone.items()):
            ranks.setdefault(one.told.get(thing, "unknown to ds_patches"), []).append(rank)
        if len(ranks) > 1:
            told = ", ".join(f"{what} on {_named(who)}" for what, who in ranks.items())
            yield f"{thing} is {told}"


def exchange(store: Any, prefix: str, ranks: tuple[int, ...], me: int, mine: Holdings) -> str:
    """Say what this rank has, and return what is wrong: "" if all ranks have the same.

    A rank without a live patch says so and goes on; whatever others have is for them to refuse.
    Where all is well, each asks for two numbers alone. prefix: a place that no other engine uses.
    """
    compared = {name: mine.told[name] for name in ("ds_patches", "DeepSpeed", *mine.live)}
    alike, read = f"{prefix}/{compared}", f"{prefix}/read"
    store.add(alike, 1)
    silent = come(store, prefix, ranks, me, PATIENCE if mine.live else None, json.dumps(mine))
    if not mine.live or store.add(alike, 0) >= len(ranks):
        return ""
    heard = {
        rank: Holdings(*json.loads(store.get(f"{prefix}/{rank}")))
        for rank in ranks
        if rank not in silent
    }
    # The store may end with this rank: not before the others have read.
    readers = sum(bool(one.live) for one in heard.values())
    with suppress(RuntimeError):  # of a store that has ended: with its rank, which has read
        store.add(read, 1)
        _until(lambda: store.add(read, 0) >= readers, _READING)
    if not silent:
        return "; ".join(differences(heard))
    return (
        f"after {PATIENCE:.0f} s, {_named(silent)} did not say which patches are applied there: "
        "none may be (is ds_patches installed, and DS_PATCHES set, on that host?)"
    )


def come(
    store: Any, place: str, ranks: Sequence[int], me: int, patience: float | None, word: str = ""
) -> list[int]:
    """Say that this rank has come to a place, wait for the others, and return those that do not.

    Not by a collective, as a rank that raised takes part in none. patience: None waits for nobody.
    """
    came = f"{place}/came"
    store.set(f"{place}/{me}", word)
    store.add(came, 1)
    if patience is None or _until(lambda: store.add(came, 0) >= len(ranks), patience):
        return []
    return [rank for rank in ranks if not store.check([f"{place}/{rank}"])]


def _until(condition: Callable[[], bool], timeout: float) -> bool:
    """Ask again and again: a store that is told to wait is closed to all other threads."""
    begin, pause = time.monotonic(), 0.001
    while not condition():
        if time.monotonic() - begin > timeout:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.2)
    return True


def store() -> Any:
    """Return the store that the ranks met at; every rank reaches it without the others' help."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def _versions() -> dict[str, str]:
    return {"ds_patches": __version__, "DeepSpeed": release.told()}


def _leave(ranks: int, trouble: str) -> None:
    """Write the job's status file, if one is asked for: whole or not at all."""
    if not (file := _requests.status_file):
        return
    requests = _requests.of
    told = {
        "versions": _versions(),
        "ranks": ranks,
        "trouble": trouble,
        "patches": {n: lifecycle.lives[n].status(one).as_json() for n, one in requests.items()},
    }
    try:
        part = Path(f"{file}.{os.getpid()}.{time.time_ns()}")
        with part.open("x", encoding="utf-8") as whole:  # "x" follows no link
            whole.write(json.dumps(told, indent=2) + "\n")
        part.replace(file)
    except OSError as error:
        log.warning("the status file %s cannot be written: %s", file, error.strerror)


def _named(ranks: Sequence[int]) -> str:
    spans = columns.spans(sorted(ranks), range(max(ranks) + 1))
    if len(spans) > _LONG:
        return f"{len(ranks)} ranks ({spans[:_LONG].rpartition(', ')[0]}, ...)"
    return f"rank{'s' * (len(ranks) > 1)} {spans}"
