"""``crius`` commands without the seconds that imports take: a process that has imported torch and Crius forks one each.

``client`` gives an executable that takes the arguments of ``crius``; its folder may be put on a PATH. A command keeps
its own working folder, environment, standard streams, exit code and signals. What only a fresh interpreter shows (what
is imported, a signal before the imports) needs a real start: ``harness.crius_process``.
"""

import array
import atexit
import contextlib
import functools
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).parent.parent
STANDARD_STREAMS = (0, 1, 2)

# of the standard library alone, without site: this is what starts for each command
CLIENT = """#!{python} -ISs
import array, json, os, signal, socket, struct, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
request = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
server.sendmsg([struct.pack("!Q", len(request))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))])
server.sendall(request)
pid = struct.unpack("!q", server.recv(8, socket.MSG_WAITALL))[0]
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda number, frame: os.kill(pid, number))
answer = server.recv(8, socket.MSG_WAITALL)
code = struct.unpack("!q", answer)[0] if len(answer) == 8 else 1
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


@functools.cache
def client() -> Path:
    """The executable that stands for ``crius``; its name is that, and its folder holds nothing else."""
    folder = Path(tempfile.mkdtemp(prefix="fork-"))  # short: a socket's path has at most 107 bytes
    address = str(folder / "socket")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    server = subprocess.Popen([sys.executable, __file__, address], env=environ, stdout=subprocess.PIPE)
    assert server.stdout and server.stdout.readline() == b"ready\n"
    SERVERS.append((server, folder))
    executable = folder / "bin" / "crius"
    executable.parent.mkdir()
    executable.write_text(CLIENT.format(python=sys.executable, address=address))
    executable.chmod(0o755)
    return executable


def stop() -> None:
    """End the server, if there is one, and what it still runs."""
    for server, folder in SERVERS:
        server.terminate()
        server.wait(60)
        shutil.rmtree(folder)
    SERVERS.clear()


def serve(address: str) -> None:
    import torch
    import torch.distributed.checkpoint

    import crius.cli
    import crius.train.job  # noqa: F401
    from crius.tools.report import sweep

    sweep.PROGRAM[:] = [str(Path(address).parent / "bin" / "crius")]  # a run of a sweep is such a command too
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    events, commands = selectors.DefaultSelector(), {}
    events.register(listener, selectors.EVENT_READ)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    os.write(1, b"ready\n")
    try:
        while True:
            for key, _ in events.select():
                if key.fileobj is listener:
                    accept(listener, events, commands)
                elif key.data == "ended":
                    finish(key.fileobj, events, commands)
                elif key.fileobj in commands:  # whoever asked has gone
                    kill(commands[key.fileobj])
                    events.unregister(key.fileobj)
    finally:
        if os.getpid() == PID:
            for pid in commands.values():
                kill(pid)
            os._exit(0)  # torch takes a second to leave


def kill(pid: int) -> None:
    """End a command and what it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def accept(listener: socket.socket, events: selectors.BaseSelector, commands: dict) -> None:
    client, _ = listener.accept()
    length, passed, _, _ = client.recvmsg(8, socket.CMSG_SPACE(3 * 4))
    streams = array.array("i", passed[0][2])
    request = json.loads(client.recv(int.from_bytes(length), socket.MSG_WAITALL))
    pid = os.fork()
    if pid == 0:
        listener.close()
        client.close()
        run(streams, *request)
    with contextlib.suppress(OSError):  # it may have ended
        os.setpgid(pid, pid)
    for stream in streams:
        os.close(stream)
    client.sendall(pid.to_bytes(8, signed=True))
    commands[client] = pid
    ended = os.pidfd_open(pid)
    events.register(ended, selectors.EVENT_READ, "ended")
    events.register(client, selectors.EVENT_READ)
    ENDED[ended] = client


def finish(ended: int, events: selectors.BaseSelector, commands: dict) -> None:
    client = ENDED.pop(ended)
    _, status = os.waitpid(commands.pop(client), 0)
    events.unregister(ended)
    os.close(ended)
    if client in events.get_map():
        events.unregister(client)
    with contextlib.suppress(OSError):  # nobody may wait for it any more
        client.sendall(os.waitstatus_to_exitcode(status).to_bytes(8, signed=True))
    client.close()


def run(streams: array.array, argv: list[str], cwd: str, environ: dict[str, str]) -> None:
    """Be the command; does not return."""
    code: object = 1
    try:
        os.setpgid(0, 0)  # by both, so that neither can be too late
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(environ)
        tempfile.tempdir = None
        for stream, standard in zip(streams, STANDARD_STREAMS, strict=True):
            os.dup2(stream, standard)
        os.closerange(3, 256)
        sys.argv = ["crius", *argv]
        sys.path[0:0] = [part for part in environ.get("PYTHONPATH", "").split(os.pathsep) if part not in sys.path]
        from crius.cli import main

        for name, module in sys.modules.items():
            if name.startswith("crius.cli.") and hasattr(module, "STARTED"):
                module.STARTED = time.monotonic()
        code = main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1 if code else 0)


PID = os.getpid()
SERVERS: list[tuple[subprocess.Popen, Path]] = []
ENDED: dict[int, socket.socket] = {}

if __name__ == "__main__":
    serve(sys.argv[1])
