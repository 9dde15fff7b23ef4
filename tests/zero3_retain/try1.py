import torch, deepspeed
from tests.zero3_retain import models, trainers
def script_sum(trainer, k=2, zero=False, steps=3, micro=1):
    for step in range(steps):
        for m in range(micro):
            tokens, classes = models.batch(step, m)
            out = trainer.forward(tokens)
            ls = models.losses(out, classes)
            ls = (ls + [ls[0]*ls[1], 0.1*(ls[0]-ls[1])**2])[:k]
            for i, l in enumerate(ls):
                if zero and i: trainer.zero_grad()
                trainer.backward(l, retain_graph=i < k-1)
            trainer.step()
def case(model="TwoHeads", stage=3, style="engine", k=2, zero=False, micro=1, patched=True, steps=3, over=None, zo=None, dtype='float32'):
    import ds_patches
    mc = getattr(models, model)
    m = models.build(mc, getattr(torch, dtype))
    script = lambda t: script_sum(t, k, zero, steps, micro)
    ref = trainers.plain(m, script, micro)
    start = trainers.PlainTrainer(m).parameters()
    if patched: ds_patches.apply("zero3_retain")
    from deepspeed.accelerator import get_accelerator
    get_accelerator().is_fp16_supported = lambda: True
    try:
        eng = trainers.build_engine(m, trainers.config(stage, micro_steps=micro, zero=zo or {}, **(over or {})))
        t = trainers.EngineTrainer(eng, style)
        try:
            script(t)
        except Exception as e:
            import traceback
            return type(e).__name__ + ": " + str(e)[:200] + traceback.format_exc()[-900:]
        got = t.parameters()
        moved = trainers.worst_difference(ref, {k: v for k, v in start.items()})
        return trainers.worst_difference(got, ref), moved[0], [len(a) for a in t.available_after_backward], {x for a in t.available_after_backward for x in a}
    finally:
        if patched: ds_patches.unapply("zero3_retain")
