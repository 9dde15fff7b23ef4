"""All ranks of an engine must have the same patches: they compare when the engine is built.

A patch that changes which collectives run, live on some ranks only, hangs the job or trains on
wrong gradients. So each rank puts what it has into the process group's store and reads the others'.
No collective is used: a rank without any patch would not take part, and the others would hang.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ds_patches import __version__
from ds_patches.core import flags, imports, lifecycle, registry, release
from ds_patches.core.errors import RanksDisagree
from ds_patches.core.journal import Journal
from ds_patches.core.patch import Patch, Target
from ds_patches.core.references import resolve
from ds_patches.core.state import State

log = logging.getLogger("ds_patches")

ENGINE = Target(
    "deepspeed.runtime.engine", "DeepSpeedEngine.__init__", "ds_patches.core.agreement:around_init"
)
#: Seconds before the ranks that have not answered are named.
PATIENCE = 10.0

_journal = Journal()
#: How many engines were built over each set of ranks: one exchange each.
_built: Counter[tuple[int, ...]] = Counter()

#: What one rank has: a line of text for each thing that all ranks must have alike.
Holdings = Mapping[str, str]


def watch() -> None:
    """Compare the ranks of every engine that is built from now on."""
    if not _journal.active and not imports.awaited([ENGINE.module]):
        imports.when_whole(ENGINE.module, _wrap)


def rest() -> None:
    """Compare no longer."""
    imports.forget(ENGINE.module, _wrap)
    _journal.remove()


def _wrap() -> None:
    try:
        _journal.install([ENGINE], lambda target: resolve(target.wrapper))
    except AttributeError as error:
        log.warning("ranks are not compared: %s", error)


def around_init(wrapped: Any, engine: Any, args: Any, kwargs: Any) -> None:
    """Of DeepSpeedEngine. Afterwards, because its last collective lets the ranks go together."""
    wrapped(*args, **kwargs)
    import torch.distributed as dist

    if not dist.is_initialized():
        return
    group = getattr(engine, "seq_data_parallel_group", None) or engine.data_parallel_group
    ranks = tuple(dist.get_process_group_ranks(group))
    if len(ranks) > 1 and (trouble := _compare(ranks, dist.get_rank(), holdings())):
        raise RanksDisagree(f"the ranks of this engine differ: {trouble}")
    if dist.get_rank() == 0:
        log.info("%s", _summary(len(ranks)))


def holdings() -> Holdings:
    """Return what this rank has of the patches that change collectives."""
    found = {"ds_patches": __version__}
    if (installed := release.installed()) is not None:
        found["DeepSpeed"] = installed.text
    patches = registry.patches()
    wishes = flags.read(patches)
    for name, patch in patches.items():
        if patch.collectives:
            found[name] = _holding(patch, wishes.of[name])
    return found


def differences(everyone: Mapping[int, Holdings]) -> Iterator[str]:
    """Say what is not alike, by ranks."""
    for thing in dict.fromkeys(name for held in everyone.values() for name in held):
        ranks: dict[str, list[int]] = {}
        for rank, held in sorted(everyone.items()):
            ranks.setdefault(held.get(thing, "unknown to ds_patches"), []).append(rank)
        if len(ranks) > 1:
            yield f"{thing} is " + ", ".join(
                f"{what} on {_named(who)}" for what, who in ranks.items()
            )


def _holding(patch: Patch, wish: flags.Wish) -> str:
    status = lifecycle.status(patch, wish)
    if status.state is State.READY:
        return "not applied"
    if not status.live:
        return f"{status.state.value} ({status.reason})"
    chosen = ", ".join(f"{k}={v}" for k, v in status.options.items())
    return "live" + f" with {chosen}" * bool(chosen)


def _compare(ranks: tuple[int, ...], me: int, mine: Holdings) -> str:
    """Return what the first of the ranks found: "" for agreement. The others read its verdict."""
    store, timeout = _store(), flags.rank_timeout()
    group = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
    prefix = f"ds_patches/{group}/{_built[ranks]}"
    _built[ranks] += 1
    if me != ranks[0]:
        store.set(f"{prefix}/{me}", json.dumps(mine))
        # Longer than the first rank waits, so that its verdict comes before this rank gives up.
        silent = _wait(store, {ranks[0]: f"{prefix}/verdict"}, timeout + PATIENCE)
        verdict = _silence(silent, timeout) or store.get(f"{prefix}/verdict").decode()
        store.set(f"{prefix}/{me}/read", "")
        return verdict
    keys = {rank: f"{prefix}/{rank}" for rank in ranks[1:]}
    silent = _wait(store, keys, timeout)
    theirs = {rank: json.loads(store.get(keys[rank])) for rank in keys if rank not in silent}
    verdict = _silence(silent, timeout) or "; ".join(differences({me: mine} | theirs))
    store.set(f"{prefix}/verdict", verdict)
    if verdict:  # the store may end with this rank: not before the others know why
        _wait(store, {rank: f"{keys[rank]}/read" for rank in theirs}, PATIENCE)
    return verdict


def _wait(store: Any, keys: Mapping[int, str], timeout: float) -> list[int]:
    """Wait for each rank's key; returns the ranks that have set none after `timeout` seconds."""
    begin, told, pause, silent = time.monotonic(), False, 0.001, list(keys)
    while silent := [rank for rank in silent if not store.check([keys[rank]])]:
        waited = time.monotonic() - begin
        if waited > timeout:
            break
        if waited > PATIENCE and not told:
            log.warning("%s", _silence(silent, waited))
            told = True
        time.sleep(pause)
        pause = min(2 * pause, 0.2)
    return silent


def _silence(ranks: Sequence[int], waited: float) -> str:
    if not ranks:
        return ""
    return (
        f"after {waited:.0f} s, {_named(ranks)} did not say which patches are applied there: "
        "none may be (is ds_patches installed, and DS_PATCHES set, on that host?)"
    )


def _store() -> Any:
    """Return the store that the ranks met at; every rank reaches it without the others' help."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def _summary(ranks: int) -> str:
    installed = release.installed()
    here = [name for name, patch in registry.patches().items() if lifecycle.is_active(patch)]
    what = f"{', '.join(here)} live" if here else "no patch is live"
    where = f" on all {ranks} ranks of this engine" if ranks > 1 else ""
    return f"{__version__} on DeepSpeed {installed.text if installed else '?'}: {what}{where}"


def _named(ranks: Sequence[int]) -> str:
    """Name ranks, with spans for neighbours: "ranks 0, 2-7"."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][-1] + 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    text = ", ".join("-".join(map(str, span)) for span in spans)
    return f"rank{'s' * (len(ranks) > 1)} {text}"
