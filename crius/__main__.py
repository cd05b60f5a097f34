"""``python -m crius`` is the ``crius`` command."""

from crius.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
