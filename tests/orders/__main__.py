"""Run one order, or shrink that of a seed."""

import sys

from tests.orders.verdict import Worlds
from tests.orders.words import Order, generated


def main(what: str) -> None:
    with Worlds() as worlds:
        order = generated(int(what)) if what.isdigit() else Order.of(what)
        if what.isdigit() and worlds.complaints([order])[0]:
            print(order)
            order = worlds.shrunk(order)
        print(order, worlds.complaints([order])[0] or "no harm", sep="\n    ")


if __name__ == "__main__":
    main(sys.argv[1])
