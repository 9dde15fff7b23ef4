"""Run one order, or that of a seed."""

import sys

from tests.orders.verdict import Worlds
from tests.orders.words import Order, generated

if __name__ == "__main__":
    what = sys.argv[1]
    order = generated(int(what)) if what.isdigit() else Order.of(what)
    with Worlds() as worlds:
        print(order, worlds.complaints([order])[0] or "no harm", sep="\n    ")
