"""Frameworks that people train with, unmodified: the real packages on real ranks.

`user/` holds scripts as their users write them, without a line about ds_patches. Each runs on two
ranks of stock, on two that `DS_PATCHES=all` alone has patched, as `python -m ds_patches run` does
it, and without DeepSpeed on one process, whose batches are those of both ranks.
"""
