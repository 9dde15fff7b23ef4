"""Ordinary Python around an engine: what a script asks is answered as on stock.

What it keeps, hooks, copies, pickles and looks at is no business of a patch.
"""
