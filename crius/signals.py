"""The signals that stop a run."""

import signal

STOP_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""What a person, a terminal that closes, a scheduler or a container sends to stop a run."""
