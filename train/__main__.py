"""`python -m specheads.train`, the form that `accelerate launch -m` takes: the same as `specheads train`."""

import sys

from specheads.cli import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
