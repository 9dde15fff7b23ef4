"""Two checks of each new engine: do its ranks have the same patches, and are all wrappers in place?

A patch that changes which collectives run hangs the job, or trains on wrong gradients, if only some
ranks apply it. So each rank posts its patches to the process group's store before the construction
of an engine, and reads those of the engine's other ranks after it. No collective does this: a rank
without any patch would not take part, and the others would hang.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

from ds_patches import __version__
from ds_patches.core import columns, engines, lifecycle, registry, release
from ds_patches.core.errors import RanksDisagree
from ds_patches.core.journal import Journal
from ds_patches.core.log import logger
from ds_patches.core.patch import Target
from ds_patches.core.state import WrapperState

#: Seconds after which a waiting rank logs which ranks it waits for.
_NAMED_AFTER = 60.0
#: A message that every rank prints lists ranks in at most this many letters.
_LONG = 60
_KEY = "ds_patches/rank"
_INIT = Target(engines.MODULE, "DeepSpeedEngine.__init__", "around_init")
_journal = Journal()

#: What one rank posts: the versions of both packages, and by patch "live" or why it is not.
Holdings = dict[str, str]


def start() -> None:
    """Register the engines that exist, and wrap the constructor, which checks each new one."""
    if not _journal.is_in_place:
        engines.add(*engines.built())
        try:
            _journal.install([_INIT], lambda _: around_init)
        except AttributeError as error:
            logger.warning("new engines are not checked: %s", error)


def stop() -> None:
    """Unwrap the constructor, and forget the engines."""
    _journal.remove()
    engines.known.clear()
    _warn_once.cache_clear()


def around_init(wrapped: Any, engine: Any, args: Any, kwargs: Any) -> None:
    """Construct an engine, then check it and register it."""
    store = _post()
    wrapped(*args, **kwargs)
    compare(engine, store or _post())
    engines.add(engine)
    for name, of_patch in [*lifecycle.lifecycles.items()]:
        for key, (state, why) in of_patch.journal.states().items():
            if state is WrapperState.REPLACED:
                _warn_once(f"{name}: {key} is {why}")


def compare(engine: Any, store: Any) -> None:
    """Compare the patches of the ranks of a new engine, and log which are live.

    store: where this rank has posted its patches; None if no other rank can read them.

    Raises RanksDisagree if a patch that is live on this rank is not live on another, if versions
    differ, or if a rank posts nothing within the timeout of the process group.
    """
    import torch.distributed as dist

    ranks = [0]
    if store is not None and "live" in holdings().values():
        group = reduction_group(engine)
        ranks = dist.get_process_group_ranks(group)
        try:
            difference = compare_posted(store, ranks, patience(group, engine.device))
        except RuntimeError as error:  # the store ends with the rank that hosts it
            logger.info("the ranks of this engine are not compared, as one has ended: %s", error)
            return
        if difference:
            raise RanksDisagree(f"the ranks of this engine differ: {difference}")
    if not dist.is_initialized() or dist.get_rank() == 0:
        names = [name for name in registry.patches() if lifecycle.lifecycles[name].was_applied]
        patches = f"{', '.join(names)} live" if names else "no patch is live"
        where = f" on all {len(ranks)} ranks of this engine" if len(ranks) > 1 else ""
        logger.info("%s on DeepSpeed %s: %s%s", *_versions().values(), patches, where)


def compare_posted(store: Any, ranks: Sequence[int], timeout: float) -> str:
    """Wait until all ranks have posted their patches; return the differences, "" if none.

    timeout: seconds to wait.
    """
    keys = {rank: f"{_KEY}/{rank}" for rank in ranks}

    def absent() -> str:
        ranks = [rank for rank, key in keys.items() if not store.check([key])]
        return f"{_named(ranks)} did not say which patches are applied there"

    if not wait(lambda: store.check([*keys.values()]), timeout, absent):
        return (
            f"after {timeout:.0f} s, {absent()}: none may be (is ds_patches installed, and "
            "DS_PATCHES set, on that host?)"
        )
    posted = store.multi_get([*keys.values()])
    return "; ".join(differences(dict(zip(keys, map(json.loads, posted), strict=True))))


def differences(holdings: Mapping[int, Holdings]) -> Iterator[str]:
    """Yield each version, and each patch live on any rank, that is not the same on all ranks."""
    every = [item for held in holdings.values() for item in held.items()]
    live = sorted({name for name, state in every if state == "live"})
    for subject in (*_versions(), *live) if live else ():
        ranks: dict[str, list[int]] = {}
        for rank, held in holdings.items():
            ranks.setdefault(held.get(subject, "unknown to ds_patches"), []).append(rank)
        if len(ranks) > 1:
            each = ", ".join(f"{state} on {_named(where)}" for state, where in ranks.items())
            yield f"{subject} is {each}"


def holdings() -> Holdings:
    """Return the versions, and the state of each patch that changes collectives, on this rank."""
    posted = _versions()
    for name, patch in registry.patches().items():
        if patch.collectives:
            of_patch = lifecycle.lifecycles[name]
            posted[name] = "live" if of_patch.journal.is_in_place else of_patch.reason or "off"
    return posted


def wait(
    condition: Callable[[], bool], timeout: float, absent: Callable[[], str] | None = None
) -> bool:
    """Poll a condition; return False after `timeout` seconds.

    absent: says what is missing, for a warning after a minute.

    `store.wait` would block every other thread that uses the store.
    """
    begin, pause = time.monotonic(), 0.001
    while not condition():
        waited = time.monotonic() - begin
        if waited > timeout:
            return False
        if absent and waited > _NAMED_AFTER:
            logger.warning("an engine's ranks wait: %s", absent())
            absent = None
        time.sleep(pause)
        pause = min(2 * pause, 0.2)
    return True


def patience(group: Any, device: Any) -> float:
    """Return the timeout of a process group's collectives, in seconds."""
    import torch
    from torch.distributed.constants import default_pg_timeout

    try:
        timeout = group._get_backend(torch.device(device)).options._timeout
    except (AttributeError, RuntimeError):  # a vendor's backend
        timeout = default_pg_timeout
    return float(timeout.total_seconds())


def reduction_group(engine: Any) -> Any:
    """Return the process group of the ranks that share an engine's gradients."""
    return getattr(engine, "seq_data_parallel_group", None) or engine.data_parallel_group


def store() -> Any:
    """Return the store of the default process group; None for MPI and PyTorch's fake backend."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    if dist.get_backend() == "fake":
        return None
    return distributed_c10d._world.pg_map[distributed_c10d._get_default_group()][1]


def _post() -> Any:
    """Post this rank's patches, and return the store; None if no other rank can read it."""
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    if (shared := store()) is None:
        _warn_once("this process group has no store: its ranks' patches are not compared")
        return None
    with suppress(RuntimeError):  # the store has ended
        shared.set(f"{_KEY}/{dist.get_rank()}", json.dumps(holdings()))
    return shared


@cache
def _warn_once(text: str) -> None:
    logger.warning("%s", text)


def _versions() -> dict[str, str]:
    return {"ds_patches": __version__, "DeepSpeed": release.version_text()}


def _named(ranks: Sequence[int]) -> str:
    spans = columns.spans(sorted(ranks), range(max(ranks) + 1))
    if len(spans) > _LONG:
        return f"{len(ranks)} ranks ({spans[:_LONG].rpartition(', ')[0]}, ...)"
    return f"rank{'s' * (len(ranks) > 1)} {spans}"
