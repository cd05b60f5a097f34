"""``crius``, and ``python -m crius``: sets the effect of signals before slow imports."""

import gc
import sys
from collections.abc import Sequence

from crius.config.other_trainers import check_verb
from crius.errors import ConfigError
from crius.launch.stop import leave_on_stop_signals
from crius.redact import printable, redact


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, see ``crius.cli.main``. A signal before training starts ends it like a run that saved."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments[:1] == ["train"]:
        leave_on_stop_signals()
    try:
        check_verb(arguments)
    except ConfigError as error:
        sys.stderr.write(f"{printable(redact(str(error)))}\n")
        return error.exit_code
    gc.disable()  # objects of imports and of flags stay; looking at them takes a fifth of the time until a verb begins
    try:
        from crius import cli  # takes half a second

        return cli.main(arguments)
    finally:
        gc.enable()


if __name__ == "__main__":
    raise SystemExit(main())
