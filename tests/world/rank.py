"""One rank: `python -m tests.world.rank CASES_FD LIFELINE_FD`, started by tests.world.ranks.

It joins the process group once and then runs the cases that arrive, until it is told to leave
or pytest is gone.
"""

import faulthandler
import functools
import gc
import logging
import os
import pickle
import signal
import sys
import threading
import traceback
from importlib.metadata import version
from multiprocessing.connection import Connection
from pkgutil import resolve_name
from typing import Any

SEED = 1234


def die_with_pytest(lifeline: int) -> None:
    """End this rank, and whatever it started, once the other end of `lifeline` closes.

    A thread, because a rank that hangs in a collective reads no messages.
    """

    def watch() -> None:
        os.read(lifeline, 1)  # pytest never writes: this returns at end of file
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="lifeline").start()


def join() -> None:
    """Import DeepSpeed and bring the process group up."""
    import deepspeed
    import deepspeed.ops

    if os.environ["DS_ACCELERATOR"] == "cuda":
        import torch

        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        deepspeed.init_distributed("nccl")
        gc.freeze()
        return
    # On CPU, DeepSpeed compiles a shared-memory all-reduce with g++ (half a minute per release)
    # that serves tensor-parallel inference only. This table is its own switch for it: without
    # the op it uses gloo, as it does off Linux.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    step_on_cpu()
    wait_for_gathers()
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    deepspeed.init_distributed("gloo")
    # What lives now lives for good: leave it out of the collection after each case.
    gc.freeze()


def step_on_cpu() -> None:
    """Avoid a crash of stock's ZeRO-1/2 step on CPU, 0.18.7 to 0.18.9: 'Output 0 of Split'.

    Where memory suffices it flattens the parameters in place, with their graph. Told that there is
    none, it goes the way of every other release.
    """
    from deepspeed.accelerator import get_accelerator
    from packaging.version import Version

    if Version("0.18.7") <= Version(version("deepspeed")) <= Version("0.18.9"):
        get_accelerator().available_memory = lambda device_index=None: 0


def wait_for_gathers() -> None:
    """Wait for each gather, up to 0.19.7: of several gathers ZeRO-3 waits for the last.

    Those of NCCL end in order, gloo's do not: parameters of which a part came late have any value.
    """
    from deepspeed.comm.torch import TorchBackend
    from packaging.version import Version

    if Version("0.19.7") < Version(version("deepspeed")):
        return
    gather = TorchBackend.all_gather_into_tensor

    @functools.wraps(gather)
    def gather_and_wait(*args: Any, **kwargs: Any) -> Any:
        handle = gather(*args, **kwargs)
        if handle is not None:
            handle.wait()
        return handle

    TorchBackend.all_gather_into_tensor = gather_and_wait


def answer(case: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
    """Return True and the case's value; or False, "Type: message" and the traceback below it."""
    import torch
    import torch.distributed

    try:
        # A collective that the last case left open meets this barrier, and fails here, instead
        # of pairing with one of this case's and giving a wrong number.
        torch.distributed.barrier()
        torch.manual_seed(SEED)
        return True, resolve_name(case)(*args, **kwargs)
    except BaseException as error:  # pytest.fail and SystemExit are answers too
        return raised(error)


def raised(error: BaseException) -> tuple[bool, str]:
    summary = "".join(traceback.format_exception_only(error)).strip()
    return False, f"{summary}\n{''.join(traceback.format_exception(error)).rstrip()}"


def give_linear_back(linear: Any) -> None:
    """Undo what a model under ``deepspeed.zero.Init`` leaves behind for all that come after it.

    Stock then fails with other words where it fails, and plain PyTorch is not plain.
    """
    import torch
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses

    torch.nn.functional.linear = linear
    if "linear_bk" in vars(InsertPostInitMethodToModuleSubClasses):
        del InsertPostInitMethodToModuleSubClasses.linear_bk


def serve(connection: Connection) -> None:
    import torch

    linear = torch.nn.functional.linear
    while call := pickle.loads(connection.recv_bytes()):
        reply = answer(*call)
        give_linear_back(linear)
        # Plain pickle, not Connection.send: that one would move tensors through shared memory,
        # which the sending rank may not live long enough to serve.
        try:
            connection.send_bytes(pickle.dumps(reply))
        except Exception as error:  # the value cannot be pickled
            connection.send_bytes(pickle.dumps(raised(error)))
        # Engines are cyclic garbage: drop them now, not in the middle of the next case.
        del call, reply
        gc.collect()
        # What is left lives for good: Dynamo, which the first engine imports, and engines that
        # stock's own hooks hold. Going over it again takes half a second and more, after each
        # case and in each ZeRO-3 engine that is built.
        gc.freeze()


def main(cases: int, lifeline: int) -> None:
    """Serve until told to leave; both arguments are open files."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    die_with_pytest(lifeline)
    join()
    connection = Connection(cases)
    connection.send_bytes(pickle.dumps((True, None)))
    serve(connection)

    import torch.distributed

    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
