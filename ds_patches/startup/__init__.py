"""Patches without a line in the script: what makes an interpreter apply them by itself.

A start-up hook runs `arm` in every interpreter while `DS_PATCHES` is set, and costs nothing while
it is not. There are two ways to have it:

- `ds-patches enable` writes one `.pth` file into the environment (site_packages.py);
- `ds-patches run -- COMMAND` puts the folder `hook`, with a sitecustomize.py that runs
  the user's own next, on the command's PYTHONPATH and so on that of its children (command.py).

`arm` imports neither torch nor DeepSpeed nor wrapt; the patches are applied when DeepSpeed itself
is imported. If that fails, the program runs on unpatched, with one warning for each patch; in
strict mode it ends.
"""

from __future__ import annotations

_armed = False


def arm() -> None:
    """Apply the wanted patches once DeepSpeed is imported; calling it again changes nothing."""
    global _armed
    from ds_patches.core import imports

    if not _armed:
        imports.add_post_import_hook("deepspeed", _begin)
        _armed = True


def _begin() -> None:
    from ds_patches.core import api

    api.after_the_call(_apply)


def _apply() -> None:
    """Apply what the environment wants; only a strict refusal comes out of the import."""
    import threading

    from ds_patches.core import api, errors, flags, log, registry
    from ds_patches.core.lifecycle import lives

    log.say()  # also of flags that mean nothing, which are read next
    try:
        requests = flags.read(registry.patches())
        log.say(requests.level)
        wanted = [name for name, one in requests.of.items() if one.wanted and not one.for_others]
        due = [name for name in wanted if not lives[name].reverted]
        if due or not wanted:  # else the program took them back already
            api.apply_wanted(requests, due)
    except Exception as error:
        if flags.is_strict():
            if threading.current_thread() is not threading.main_thread():
                log.ours.critical("%s", error)  # Python says nothing of a thread that exits
            raise SystemExit(f"ds_patches: {error} ({flags.PREFIX}_STRICT)") from error
        if not isinstance(error, errors.PatchNotApplied):  # of those it has been warned
            log.ours.log(log.for_the_job(), "nothing is applied to deepspeed: %s", error)
            log.ours.debug("auto-apply failed", exc_info=error)
