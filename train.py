"""``python train.py --section.flag value`` is ``crius train --section.flag value``."""

import sys

from crius.__main__ import main

if __name__ == "__main__":
    raise SystemExit(main(["train", *sys.argv[1:]]))
