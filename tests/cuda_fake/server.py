"""Runs each case in a fork of this process, JSON in and JSON out by lines: ``python -m cuda_fake.server SHIM``."""

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

    steps.preload()
    for line in sys.stdin:
        child = os.fork()  # process groups, DTensor's caches and the threads of autograd are the case's own
        if not child:
            answer = _answer(steps, json.loads(line))
            print(json.dumps(answer), file=answers, flush=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            died = f"the process of the case ended with {os.waitstatus_to_exitcode(status)}"
            print(json.dumps({"error": died}), file=answers, flush=True)


def _answer(steps, request: dict) -> dict:
    try:
        if request["compiles"]:
            from cuda_fake import inductor

            inductor.stand_in()
        with tempfile.TemporaryDirectory() as folder:
            seen = steps.run(request["flags"], request["rank"], folder, stages=request["stages"])
        if request["dry_run"]:
            seen["dry_run_peak"] = steps.dry_run_peak(request["flags"])
        return seen | ({"code": inductor.CODE} if request["compiles"] else {})
    except BaseException:
        return {"error": traceback.format_exc()}


if __name__ == "__main__":
    main(sys.argv[1])
