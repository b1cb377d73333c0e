"""A site that is held in the middle of a round: ``python held_site.py WHEN ROUND FILE join ...``.

It is the command ``fedcomposite federation`` with one stop: in round ROUND, before the work or after it (the new state
is on disk, the reply not yet sent), it says so and goes on when FILE is there. So a test can do what it wants in the
middle of a round, however fast the machine is.
"""

import sys
import time
from pathlib import Path

from fedcomposite import cli
from fedcomposite.federation.site.site import Site


def main():
    when, wanted, file = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    train = Site._train

    def hold(number):
        if number == wanted:
            print(f"held in round {wanted}", flush=True)
            while not file.exists():
                time.sleep(0.02)

    def held(self, order, *given):
        if when == "before":
            hold(order.round + 1)
        done = train(self, order, *given)
        if when == "after":
            hold(order.round + 1)
        return done

    Site._train = held
    sys.argv[1:] = ["federation", *sys.argv[4:]]
    cli.main()


if __name__ == "__main__":
    main()
