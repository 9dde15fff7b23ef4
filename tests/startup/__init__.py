"""Interpreters that apply patches by themselves: hooks, commands, waiting, applying, cost."""
