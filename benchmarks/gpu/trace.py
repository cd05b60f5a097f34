"""Where the time of steps goes, from the trace of ``crius train``. No torch here."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.peers import SHAPED_8B, TINY
from benchmarks.gpu.round import Round
from benchmarks.gpu.runs import train

START, NUM_STEPS, INTERVAL = 12, 3, 10
"""Steps 12 to 14 are traced; 10 and 20 report, so that none of the traced ones does."""
ROWS = 25
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
PLANNED_WAIT = "cudaEventSynchronize"
"""With it, once a step, the host reads what the step before found; it waits for nothing queued later."""
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cuStreamSynchronize", PLANNED_WAIT)

Event = dict[str, Any]


def profile(this: Round) -> None:
    """Kernels by time, the share in which the GPU idles, and waits of the host, in three steps that report nothing."""
    case = TINY if this.is_dry else SHAPED_8B
    folder = this.folder("runs", "profile") / "trace"
    flags = [*case.flags(this), "--training.steps", "20", "--metrics.log_interval", str(INTERVAL)]
    flags += ["--profiler.enable", "--profiler.start_step", str(START), "--profiler.num_steps", str(NUM_STEPS)]
    trained = train(this, "trace", flags, folder=folder)
    if not trained.is_whole:
        this.row("trace", False, trained.done.why, trained.done.seconds)
        return
    events = read(folder / "traces" / f"step-{START}" / "rank-0.json")
    window = steps_of(events)
    this.row("the trace has the steps", len(window) == NUM_STEPS, f"{len(window)} of {NUM_STEPS}")
    if not window:
        return
    work = [event for event in events if event.get("cat") == "cpu_op"] if this.is_dry else launched_in(events, window)
    judge_waits(this, events, window)
    this.row("the trace has the work of the steps", bool(work), f"{len(work)} events")
    if not work:
        return
    # the host runs ahead of a GPU: its steps begin and end with what they launched
    span = max(event["ts"] + event["dur"] for event in work) - min(event["ts"] for event in work)
    idle = 1 - covered(work) / span
    milliseconds = span / 1e3 / len(window)
    shown = f"{milliseconds:.2f} ms with the profiler, idle {idle:.1%} of the time"
    this.row("a step", True, shown, milliseconds=milliseconds, idle=idle)
    for row in table(work, span, len(window)):
        shown = f"{row['milliseconds_a_step']:.3f} ms a step, {row['percent']} %, {row['calls_a_step']} calls"
        this.row(row["what"], True, shown, **row)


def read(path: Path) -> list[Event]:
    """The complete events of a Chrome trace, which have a begin ``ts`` and a duration ``dur``, microseconds."""
    trace = json.loads(path.read_text(encoding="utf-8"))
    return [event for event in trace["traceEvents"] if event.get("ph") == "X"]


def steps_of(events: Iterable[Event]) -> list[tuple[float, float]]:
    """Begin and end of each traced step on the host, in order."""
    found = {
        event["name"]: (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event["name"].startswith("ProfilerStep#") and event.get("cat") == "user_annotation"
    }
    return sorted(found.values())


def waits_of(events: Iterable[Event], window: Sequence[tuple[float, float]]) -> list[Event]:
    """Calls in which the host waits for the GPU and that begin in the steps; a copy to pageable memory waits in one."""
    begin = window[0][0]
    end = window[-1][1]
    return [event for event in events if event["name"] in WAITS and begin <= event["ts"] < end]


def around(events: Iterable[Event], inner: Event) -> str:
    """The innermost operator or Python frame that ``inner`` runs in: where a wait comes from."""
    outer = [
        event
        for event in events
        if event.get("cat") in ("cpu_op", "python_function", "user_annotation")
        and event.get("tid") == inner.get("tid")
        and event["ts"] <= inner["ts"]
        and event["ts"] + event["dur"] >= inner["ts"] + inner["dur"]
    ]
    return str(min(outer, key=lambda event: event["dur"])["name"]) if outer else "no operator"


def judge_waits(this: Round, events: Sequence[Event], window: Sequence[tuple[float, float]]) -> None:
    """Whether the host waits for nothing in the steps but, once in each, for the step before."""
    waits = waits_of(events, window)
    planned = [wait for wait in waits if wait["name"] == PLANNED_WAIT]
    places = Counter(f"{wait['name']} in {around(events, wait)}" for wait in waits)
    shown = ", ".join(f"{count} x {place}" for place, count in places.items()) or "none"
    ok = len(planned) <= len(window) and len(planned) == len(waits)
    claim = "the host waits at most once a step, for the step before"
    this.row(claim, None if this.is_dry else ok, shown, waits=len(waits))


def launched_in(events: Sequence[Event], window: Sequence[tuple[float, float]]) -> list[Event]:
    """What ran on the GPU because of a call in the steps, whenever it ran."""
    begin, end = window[0][0], window[-1][1]
    calls = [event for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    numbers = {correlation(event) for event in calls if begin <= event["ts"] < end} - {None}
    return [event for event in events if event.get("cat") in ON_DEVICE and correlation(event) in numbers]


def correlation(event: Event) -> Any:
    """The number that a call and what it launched have in common; None without one."""
    return event.get("args", {}).get("correlation")


def table(work: Sequence[Event], span: float, steps: int) -> list[dict[str, Any]]:
    """The ``ROWS`` names with the most time of their own, and the rest in a row.

    Args:
        work: events of ``steps`` steps.
        span: of all of them, in microseconds.
        steps: their number.
    """
    own: dict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    for event, time in own_times(work):
        own[event["name"]] += time
        calls[event["name"]] += 1
    names = sorted(own, key=lambda name: -own[name])
    rest = names[ROWS:]
    groups = [(name[:100], [name]) for name in names[:ROWS]] + ([(f"{len(rest)} others", rest)] if rest else [])
    return [
        {
            "what": title,
            "calls_a_step": round(sum(calls[name] for name in group) / steps, 1),
            "milliseconds_a_step": round(sum(own[name] for name in group) / 1e3 / steps, 3),
            "percent": round(100 * sum(own[name] for name in group) / span, 1),
        }
        for title, group in groups
    ]


def own_times(work: Iterable[Event]) -> list[tuple[Event, float]]:
    """Each event with its duration less that of the events inside it on the same thread or stream."""
    lanes: dict[tuple[Any, Any], list[Event]] = defaultdict(list)
    for event in work:
        lanes[event.get("pid"), event.get("tid")].append(event)
    found: list[tuple[Event, float]] = []
    for lane in lanes.values():
        open_events: list[list[Any]] = []  # event, end, own time
        for event in sorted(lane, key=lambda event: (event["ts"], -event["dur"])):
            while open_events and open_events[-1][1] <= event["ts"]:
                done, _, time = open_events.pop()
                found.append((done, time))
            if open_events:
                open_events[-1][2] -= event["dur"]
            open_events.append([event, event["ts"] + event["dur"], event["dur"]])
        found += [(event, time) for event, _, time in open_events]
    return found


def covered(work: Iterable[Event]) -> float:
    """Microseconds in which at least one event is under way."""
    total, done = 0.0, 0.0
    for event in sorted(work, key=lambda event: event["ts"]):
        begin, end = max(event["ts"], done), event["ts"] + event["dur"]
        total += max(0.0, end - begin)
        done = max(done, end)
    return total
