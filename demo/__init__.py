"""Two losses over one ZeRO-3 forward, on stock DeepSpeed and patched: `python -m demo`.

Two gloo ranks train a shared trunk with two heads on scikit-learn's handwritten digits, first
without ds_patches and then with it. The demo is also a check: its exit code is 0 only if the
patched run trained, its gradients are PyTorch's and no parameter stayed gathered.

`train` is the script a user would write; `model`, `data` and `gradients` belong to it. `rank`
runs it on one rank, `ranks` starts those and hands on their `events`. `outcome` is what became of
a run, `report` what the terminal shows.
"""
