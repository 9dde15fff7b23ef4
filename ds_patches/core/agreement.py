"""Checks of each new engine: its ranks have the same patches, and all wrappers are in place.

A patch that changes which collectives run hangs the job, or trains on wrong gradients, if only some
ranks apply it. So each rank posts its patches to the process group's store before the construction
of an engine, and reads those of the engine's other ranks after it. No collective does this: a rank
without any patch would not take part, and the others would hang.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

from ds_patches import __version__
from ds_patches.core import columns, engines, registry, release
from ds_patches.core.errors import RanksDisagree
from ds_patches.core.journal import Journal
from ds_patches.core.lifecycle import lifecycles
from ds_patches.core.log import logger
from ds_patches.core.patch import Target
from ds_patches.core.state import WrapperState

#: Seconds after which a waiting rank warns which ranks it waits for.
_WARN_AFTER = 60.0
#: The longest list of ranks in a message that every rank prints, in characters.
_MAX_LIST = 60
_KEY = "ds_patches/rank"
_INIT = Target(engines.MODULE, "DeepSpeedEngine.__init__", "around_init")
_journal = Journal()

#: The versions of both packages, and for each patch "live" or why it is not, on one rank.
RankPatches = dict[str, str]


def start() -> None:
    """Register the engines that exist, and wrap the constructor, which checks each new one."""
    if not _journal.is_in_place:
        engines.add(*engines.built())
        try:
            _journal.install([_INIT], lambda _: around_init)
        except AttributeError as error:
            logger.warning("new engines are not compared across ranks: %s", error)


def stop() -> None:
    """Unwrap the constructor, and clear the registered engines."""
    _journal.remove()
    engines.known.clear()
    _warn_once.cache_clear()


def around_init(wrapped: Any, engine: Any, args: Any, kwargs: Any) -> None:
    """Construct an engine, then check it and register it."""
    store = _post()
    wrapped(*args, **kwargs)
    compare(engine, store or _post())
    engines.add(engine)
    for name, lifecycle in [*lifecycles.items()]:
        for key, (state, reason) in lifecycle.journal.states().items():
            if state is WrapperState.REPLACED:
                _warn_once(f"{name}: {key} is {reason}")


def compare(engine: Any, store: Any) -> None:
    """Compare the patches of the ranks of a new engine, and log which are live.

    store: the store to which this rank has posted its patches; None if there is none.

    Raises RanksDisagree if a patch that is live on this rank is not live on another, if versions
    differ, or if a rank posts nothing within the timeout of the process group.
    """
    import torch.distributed as dist

    ranks = [0]
    if store is not None and "live" in rank_patches().values():
        group = reduction_group(engine)
        ranks = dist.get_process_group_ranks(group)
        try:
            difference = compare_posted(store, ranks, patience(group, engine.device))
        except RuntimeError as error:  # the rank that hosts the store has ended
            logger.info("ranks of this engine are not compared, since one has ended: %s", error)
            return
        if difference:
            raise RanksDisagree(
                f"the ranks of this engine differ: {difference}; use the same packages and "
                "variables on every host"
            )
    if not dist.is_initialized() or dist.get_rank() == 0:
        names = [name for name in registry.patches() if lifecycles[name].was_applied]
        patches = f"{', '.join(names)} live" if names else "no patch is live"
        ranks_text = f" on all {len(ranks)} ranks of this engine" if len(ranks) > 1 else ""
        logger.info("%s on DeepSpeed %s: %s%s", *_versions().values(), patches, ranks_text)


def compare_posted(store: Any, ranks: Sequence[int], timeout: float) -> str:
    """Wait until all ranks have posted their patches; return the differences, "" if none.

    timeout: seconds to wait.
    """
    keys = {rank: f"{_KEY}/{rank}" for rank in ranks}

    def describe_absent() -> str:
        absent = [rank for rank, key in keys.items() if not store.check([key])]
        return f"{_listed(absent)} did not post which patches are applied there"

    if not wait(lambda: store.check([*keys.values()]), timeout, describe_absent):
        return (
            f"after {timeout:.0f} s, {describe_absent()}, perhaps none: check that ds_patches is "
            "installed and DS_PATCHES is set on that host"
        )
    posted = store.multi_get([*keys.values()])
    return "; ".join(differences(dict(zip(keys, map(json.loads, posted), strict=True))))


def differences(patches: Mapping[int, RankPatches]) -> Iterator[str]:
    """Yield a text for each version, and each patch live on any rank, that differs by rank."""
    states = [item for of_rank in patches.values() for item in of_rank.items()]
    live = sorted({name for name, state in states if state == "live"})
    for subject in (*_versions(), *live) if live else ():
        ranks: dict[str, list[int]] = {}
        for rank, of_rank in patches.items():
            ranks.setdefault(of_rank.get(subject, "unknown to ds_patches"), []).append(rank)
        if len(ranks) > 1:
            by_state = (f"{state} on {_listed(group)}" for state, group in ranks.items())
            yield f"{subject} is {', '.join(by_state)}"


def rank_patches() -> RankPatches:
    """Return the versions, and the state of each patch that changes collectives, on this rank."""
    posted = _versions()
    for name, patch in registry.patches().items():
        if patch.collectives:
            lifecycle = lifecycles[name]
            posted[name] = "live" if lifecycle.journal.is_in_place else lifecycle.reason or "off"
    return posted


def wait(
    condition: Callable[[], bool], timeout: float, describe: Callable[[], str] | None = None
) -> bool:
    """Poll a condition; return False after `timeout` seconds.

    describe: returns what is missing, for a warning that is logged after a minute.

    `store.wait` would block every other thread that uses the store.
    """
    started, pause = time.monotonic(), 0.001
    while not condition():
        waited = time.monotonic() - started
        if waited > timeout:
            return False
        if describe and waited > _WARN_AFTER:
            logger.warning("this rank waits to construct an engine: %s", describe())
            describe = None
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
        _warn_once("this process group has no store, so the patches of its ranks are not compared")
        return None
    with suppress(RuntimeError):  # the rank that hosts the store has ended
        shared.set(f"{_KEY}/{dist.get_rank()}", json.dumps(rank_patches()))
    return shared


@cache
def _warn_once(text: str) -> None:
    logger.warning("%s", text)


def _versions() -> dict[str, str]:
    return {"ds_patches": __version__, "DeepSpeed": release.version_text()}


def _listed(ranks: Sequence[int]) -> str:
    spans = columns.spans(sorted(ranks), range(max(ranks) + 1))
    if len(spans) > _MAX_LIST:
        return f"{len(ranks)} ranks ({spans[:_MAX_LIST].rpartition(', ')[0]}, ...)"
    return f"rank{'s' * (len(ranks) > 1)} {spans}"
