"""The signals that stop a run, and those that ask its ranks where they are."""

import signal

STOP_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""What a person, a terminal that closes, a scheduler or a container sends to stop a run."""

STACKS = signal.SIGUSR2
FLIGHT: int | None = getattr(signal, "SIGRTMIN", None)
"""macOS has no such signal: there are no dumps of the flight recorder then."""

QUESTIONS = tuple(number for number in (STACKS, FLIGHT) if number is not None)
"""The signals that ask; they kill a process that is not prepared, so they are blocked until it is."""
