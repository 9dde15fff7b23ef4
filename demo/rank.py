"""One rank: `python -m demo.rank stock|patched EPOCHS SEED`, started by demo.ranks.

Standard output carries pickled events. Everything printed goes to standard error, DeepSpeed's
and gloo's words from C++ included. Standard input is a lifeline: at its end the rank ends too.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import warnings

from demo.events import Failed, Finished
from demo.reporter import Reporter, WarningReporter


def die_with_parent() -> None:
    """End this rank when standard input ends.

    A thread, because a rank that hangs in a collective reads nothing.
    """
    lifeline = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def watch() -> None:
        os.read(lifeline, 1)  # the parent never writes: this returns at end of file
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="lifeline").start()


def join() -> None:
    """Import DeepSpeed and bring the process group up."""
    # torch's, for the collectives that DeepSpeed calls: they would bury what explains a failure.
    warnings.filterwarnings("ignore", category=FutureWarning)
    import deepspeed
    import deepspeed.ops

    # On CPU, DeepSpeed compiles a shared-memory all-reduce with g++ (half a minute) that serves
    # tensor-parallel inference only. This table is its own switch for it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    deepspeed.init_distributed("gloo")


def main() -> int:
    side, epochs, seed = sys.argv[1:]
    report = Reporter()
    die_with_parent()
    logging.getLogger("ds_patches").addHandler(WarningReporter(report))
    join()

    import torch.distributed

    from demo.train import train

    try:
        train(patched=side == "patched", epochs=int(epochs), seed=int(seed), report=report)
        report.send(Finished())
    except Exception as error:
        report.send(Failed(report.place, type(error).__name__, str(error).partition("\n")[0]))
        logging.exception("training failed")
    finally:
        torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
