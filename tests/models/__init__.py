"""Models of `transformers`, tiny and from a configuration, that train as in plain PyTorch.

`zoo` has the models and their batches, `trained` what is done with them; `python -m tools.releases
models` writes docs/models.md.
"""
