"""What is quick: what `make test` runs, and nothing else is meant by the word.

A test is quick unless it is marked `exhaustive`. Its author marks it so, because it is long or
starts many programs; or :mod:`tests.quick.sampling` does, which leaves few cases of a parametrised
test on ranks, or of one that starts interpreters: those of the core, and at least two, the most
telling. The scripts of a theme are cases of one test.
"""
