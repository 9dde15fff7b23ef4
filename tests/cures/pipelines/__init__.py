"""Pipelines: the micro steps of a step, on every stage."""
