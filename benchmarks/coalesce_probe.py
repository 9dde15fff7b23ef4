"""Quick look at the flushes on GPUs: torchrun --nproc-per-node 2 coalesce_probe.py --batch 256"""

import argparse, contextlib, gc, json, logging, os, statistics, warnings
import torch, torch.distributed as dist
from torch import nn

warnings.filterwarnings("ignore")
import deepspeed
from deepspeed.runtime.zero import stage_1_and_2

logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
import ds_patches
from ds_patches.coalesce import overlapped as ov, flat_reduction as fr
from ds_patches.coalesce.overlapped import Overlapped

logging.getLogger("ds_patches").setLevel(logging.ERROR)

ap = argparse.ArgumentParser()
ap.add_argument("--batch", type=int, default=256)
ap.add_argument("--backwards", type=int, default=4)
ap.add_argument("--rounds", type=int, default=5)
ap.add_argument("--steps", type=int, default=8)
ap.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3])
ap.add_argument("--bucket", type=int, default=int(5e8))
ap.add_argument("--profile", action="store_true")
o = ap.parse_args()
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dev = torch.device("cuda", rank)
deepspeed.init_distributed("nccl")
W, L, N = 4096, 8, o.backwards


def model():
    torch.manual_seed(0)
    layers = []
    for _ in range(L):
        lin = nn.Linear(W, W, bias=False, dtype=torch.bfloat16, device=dev)
        nn.init.kaiming_normal_(lin.weight)
        layers += [lin, nn.ReLU()]
    return nn.Sequential(*layers)


def engine(stage):
    m = model()
    cfg = {
        "train_micro_batch_size_per_gpu": o.batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "bf16"},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_scatter": True,
            "reduce_bucket_size": o.bucket,
            "stage3_param_persistence_threshold": 0,
        },
    }
    e, *_ = deepspeed.initialize(
        model=m, optimizer=torch.optim.AdamW(m.parameters(), lr=1e-6, weight_decay=0.0), config=cfg
    )
    return e


gen = torch.Generator(dev).manual_seed(rank)
X = [torch.randn(o.batch, W, dtype=torch.bfloat16, device=dev, generator=gen) for _ in range(N)]


def fb(e, i):
    e.backward(e(X[i]).float().pow(2).mean())


def multi(e):
    for i in range(N):
        e.set_gradient_accumulation_boundary(i == N - 1)
        fb(e, i)
    e.step()
    e._is_gradient_accumulation_boundary = None


def window(e, **k):
    with e.coalesce_grad_reduction(**k):
        for i in range(N):
            fb(e, i)
    e.step()


def no_sync(e):
    with e.no_sync():
        for i in range(N - 1):
            fb(e, i)
    fb(e, N - 1)
    e.step()


def overlapped(e, scatters):
    opt = e.optimizer
    opt.clear_backward_seen_flag()
    w = Overlapped(opt)
    init = ov.OverlappedReduction.__init__

    def patched(self, layout, **k):
        init(self, layout, **{**k, "scatters": scatters})

    ov.OverlappedReduction.__init__ = patched
    e.inside_no_sync_ctxt = True
    opt.reduce_ready_partitions_and_remove_grads = w.ready
    try:
        for i in range(N):
            if i == N - 1:
                w.begin_last_backward()
            fb(e, i)
    finally:
        e.inside_no_sync_ctxt = False
        del opt.reduce_ready_partitions_and_remove_grads
        ov.OverlappedReduction.__init__ = init
    w.close()
    e._is_gradient_accumulation_boundary = True
    e.step()
    e._is_gradient_accumulation_boundary = None


MODES = {"multi": (False, multi), "native": (False, window), "ours": (True, window)}
FLAT = {
    "overlap_scatter": (True, lambda e: overlapped(e, True)),
    "overlap_owner": (True, lambda e: overlapped(e, False)),
}
Z3 = {"ours_gather_once": (True, lambda e: window(e, gather_once=True))}


@contextlib.contextmanager
def patched(on):
    if on:
        ds_patches.apply("coalesce")
    try:
        yield
    finally:
        if on:
            ds_patches.unapply_all()


def timed(step, e):
    for _ in range(3):
        step(e)
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.reset_peak_memory_stats()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(o.steps + 1)]
    marks[0].record()
    for k in range(o.steps):
        step(e)
        marks[k + 1].record()
    torch.cuda.synchronize()
    return statistics.median(
        a.elapsed_time(b) for a, b in zip(marks, marks[1:])
    ), torch.cuda.max_memory_allocated() / 2**20


def kernels(step, e):
    from torch.profiler import profile, ProfilerActivity

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as p:
        step(e)
        torch.cuda.synchronize()
    out = {}
    for ev in p.key_averages():
        if "nccl" in ev.key and "Kernel" in ev.key:
            name = ev.key.split("_")[1] if "_" in ev.key else ev.key
            out[name] = (
                out.get(name, (0, 0))[0] + ev.count,
                round(out.get(name, (0, 0))[1] + ev.device_time_total / 1e3, 2),
            )
    return out


def floor():
    m = model()
    ps = list(m.parameters())
    flat = torch.empty(sum(p.numel() for p in ps), dtype=torch.bfloat16, device=dev)
    out = torch.empty(flat.numel() // dist.get_world_size(), dtype=torch.bfloat16, device=dev)

    def step(_):
        for p in ps:
            p.grad = None
        for i in range(N):
            m(X[i]).float().pow(2).mean().backward()
        torch.cat([p.grad.view(-1) for p in ps], out=flat)
        dist.reduce_scatter_tensor(out, flat)

    return timed(step, None)[0]


res = {"floor": floor()}
if rank == 0:
    print("floor", round(res["floor"], 2), flush=True)
for stage in o.stages:
    gc.collect()
    torch.cuda.empty_cache()
    e = engine(stage)
    modes = dict(MODES)
    if stage < 3:
        modes |= FLAT
    if stage == 3:
        modes |= Z3
    times, peak, err = {m: [] for m in modes}, {}, {}
    for r in range(o.rounds):
        for name, (on, step) in modes.items():
            if name in err:
                continue
            try:
                with patched(on):
                    t, pk = timed(step, e)
                    times[name].append(t)
                    peak[name] = pk
            except Exception as x:
                err[name] = repr(x)[:200]
    prof = {}
    if o.profile:
        for name, (on, step) in modes.items():
            if name not in err:
                with patched(on):
                    prof[name] = kernels(step, e)
    if rank == 0:
        nat = times["native"]
        for name in modes:
            if name in err:
                print(f"Z{stage} {name}: {err[name]}")
                continue
            ratio = statistics.median(a / b for a, b in zip(times[name], nat))
            print(
                f"Z{stage} b{o.batch} {name:18s} {statistics.median(times[name]):7.2f} ms  x{ratio:.3f}  peak {peak[name]:.0f}  {prof.get(name, '')}",
                flush=True,
            )
    e.destroy()
    del e
dist.destroy_process_group()
