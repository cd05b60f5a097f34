"""The signals that stop a run, and the signals that ask its ranks where they are."""

import signal

STOP_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals that a person, a closing terminal, a scheduler or a container sends to stop a run."""

STACKS = signal.SIGUSR2
FLIGHT: int | None = getattr(signal, "SIGRTMIN", None)
"""macOS lacks this signal, so it gets no dumps of the flight recorder."""

QUESTIONS = tuple(number for number in (STACKS, FLIGHT) if number is not None)
"""The signals that ask. They would kill an unprepared process, so they are blocked until it is prepared."""
