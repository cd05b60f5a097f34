"""Runs cases in one process, a line of JSON in, a line of JSON out: ``python -m cuda_fake.server SHIM``."""

import ctypes
import json
import os
import sys
import tempfile
import traceback


def main(library: str) -> None:
    ctypes.CDLL(library, ctypes.RTLD_GLOBAL)  # before torch, which asks for hooks once
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints
    from cuda_fake import device

    device.stand_in(library)
    from cuda_fake import steps

    for line in sys.stdin:
        request = json.loads(line)
        try:
            with tempfile.TemporaryDirectory() as folder:
                answer = steps.run(request["flags"], request["rank"], folder)
        except BaseException:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
