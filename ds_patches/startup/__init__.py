"""The start-up hook: applies the patches when DeepSpeed is imported, without a line of code.

While `DS_PATCHES` is set, `hook/sitecustomize.py` waits in every interpreter for the import of
DeepSpeed, and calls `apply` at its end. Python runs that file at its start in two ways:

- installing the package puts a copy of it, and a `.pth` file that imports it, into site-packages;
- `ds-patches run -- COMMAND` puts the folder `hook` on the command's PYTHONPATH (command.py).

If a patch fails, the program continues unpatched, with a warning; in strict mode it ends.
"""


def apply() -> None:
    """Apply the patches that the environment wants; a failure raises only in strict mode."""
    import threading

    from ds_patches.core import api, errors, flags, log, registry
    from ds_patches.core.lifecycle import lifecycles

    log.set_up()  # before the flags are read, since an invalid flag is logged
    try:
        requests = flags.read(registry.patches())
        log.set_up(requests.level)
        if names := [name for name in requests.wanted if not lifecycles[name].declined]:
            api.apply_and_report(requests, names)
    except Exception as error:
        if flags.is_strict():
            if threading.current_thread() is not threading.main_thread():
                log.logger.critical("%s", error)  # Python prints nothing if a thread exits
            raise SystemExit(f"ds_patches: {error} ({flags.PREFIX}_STRICT)") from error
        if not isinstance(error, errors.PatchNotApplied):  # which `apply_and_report` has logged
            log.logger.log(log.level_for_the_job(), "no patch is applied: %s", error)
            log.logger.debug("auto-apply failed", exc_info=error)
