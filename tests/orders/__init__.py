"""Generated orders of what a program may do: patched, it does no harm in any of them.

An order is a line, of how the engine is set and what the program does, one word after another:

    zero2 micro2 : forward backward apply_all step block{ forward } backward step

Run by plain PyTorch, stock and patched; `words` says what each word is, `verdict` what is allowed.
`python -m tests.orders 'zero1 : block{ } forward backward step'` runs one, and
`python -m tests.orders 17` what the generator makes of a seed.
"""
