"""Rules about traces, snapshots and debugging."""

from crius.config.facts import Facts, Violations


def profiler_window(facts: Facts) -> Violations:
    """The profiler's window lies inside the run, and settings of a trace are given only with a trace."""
    profiler = facts.config.profiler
    steps = facts.config.training.steps
    last = profiler.start_step + profiler.num_steps - 1
    has_window = profiler.enable or profiler.memory_snapshot
    reason = " without a trace"
    fix = "add --profiler.enable, or leave it out"
    if not profiler.enable:
        yield from facts.no_effect(("--profiler.record_shapes", "--profiler.with_stack"), reason, fix)
    if not has_window:
        names = ("--profiler.start_step", "--profiler.num_steps", "--profiler.interval")
        yield from facts.no_effect(names, reason, fix)
    if has_window and 0 < profiler.interval < profiler.num_steps:
        yield facts.error(
            f"profiler.interval {profiler.interval} is shorter than a window of {profiler.num_steps} steps.",
            "profiler.interval",
            fix=f"--profiler.interval {10 * profiler.num_steps}",
        )
    if has_window and last > steps >= 1:
        yield facts.error(
            f"the profiler traces steps {profiler.start_step} to {last}, but the run has {steps}.",
            "profiler.start_step",
            why="the trace is written when its last step is done",
            fix=f"--profiler.start_step 1 --profiler.num_steps {min(profiler.num_steps, steps)}, or more steps",
        )


def anomalies_have_a_line(facts: Facts) -> Violations:
    """If the line of a NaN is to be named, every operation is one of PyTorch's, so no block is compiled."""
    if facts.config.debug.detect_anomaly and facts.config.compile.enable:
        yield facts.error(
            "debug.detect_anomaly does not go with compile.enable.",
            "debug.detect_anomaly",
            why="the backward pass of a compiled block is one operation without a line of the forward pass",
            fix="--compile.no_enable",
        )


DEBUGGING_RULES = (profiler_window, anomalies_have_a_line)
