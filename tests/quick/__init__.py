"""Quick tests: those that `make test` runs, and nothing else is meant by the word.

A test is quick unless it is marked `exhaustive`: by its author, or by :mod:`tests.quick.sampling`.
The scripts of a theme are cases of one test.
"""
