"""``crius train`` with every call into CUDA written to a file. ``python -m cuda_fake.launch_probe FILE FLAGS...``"""

import os
import sys
import threading
from pathlib import Path

_FILES = (str(Path("torch", "cuda", "")), str(Path("torch", "accelerator", "")))
_HARMLESS = ("<module>", "<lambda>", "_is_compiled", "is_initialized", "_format_size")
"""What an import runs, and questions that ask no driver."""


def main(file: str, *flags: str) -> int:
    parent = os.getpid()

    def note(frame, event: str, argument) -> None:
        if event == "call" and any(part in frame.f_code.co_filename for part in _FILES):
            name = frame.f_code.co_name
            is_import = frame.f_back is not None and frame.f_back.f_code.co_name in ("<module>", "__build_class__")
            is_noted = name not in _HARMLESS and not is_import and not name.startswith("__")
        else:
            name = getattr(argument, "__name__", "") if event == "c_call" else ""
            is_noted = name.startswith("_cuda_")
        if is_noted:
            who = "parent" if os.getpid() == parent else "worker"
            with open(file, "a") as out:
                out.write(f"{who} {name} {frame.f_code.co_filename}:{frame.f_lineno}\n")

    threading.setprofile(note)
    sys.setprofile(note)
    from crius.launch import environment

    environment.visible_gpus = lambda *args, **options: 2
    from crius.__main__ import main as crius

    try:
        return crius(flags)
    finally:
        sys.setprofile(None)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
