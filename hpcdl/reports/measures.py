"""The measures of a comparison: numbers from a run's summary, and the cost to reach a target. None: not known."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hpcdl.errors import UsageError, nearest, parse_finite
from hpcdl.files import finite
from hpcdl.metric_lines import (
    CLASS_SCORES,
    SCORES,
    TEXT_SCORES,
    USUAL_SCORES,
    VALUE_SCORES,
    MetricLines,
    base_of,
    larger_is_better,
)

TAKEN = ("seconds", "bytes", "steps", "environment_steps")  # costs to reach a target; bytes of all ranks


class Measure(NamedTuple):
    """A measure, printed as `format(value * scale, format)` and the unit; better: "less", "more" or "" (neither)."""

    name: str
    title: str
    format: str = ".4f"
    unit: str = ""
    scale: float = 1
    better: str = "less"


MEASURES = (
    Measure("test_accuracy", "test accuracy", ".2%", better="more"),
    Measure("test_rmse", "test rmse", ".4g"),
    Measure("test_rmse_standardized", "test rmse, standardized", ".4g"),
    Measure("test_return", "test return", ".4g", better="more"),
    Measure("test_loss", "test loss"),
    Measure("validation_accuracy", "validation accuracy", ".2%", better="more"),
    Measure("validation_rmse", "validation rmse", ".4g"),
    Measure("validation_rmse_standardized", "validation rmse, standardized", ".4g"),
    Measure("validation_loss", "validation loss"),
    Measure("train_loss", "train loss"),
    Measure("epochs", "epochs", ".4g", better=""),
    Measure("steps", "steps", ",.0f", better=""),
    Measure("seconds", "time", ".2f", " s"),
    Measure("examples_per_second", "examples/s", ",.0f", better="more"),
    Measure("milliseconds_per_step", "a step", ".2f", " ms"),
    Measure("bytes_per_rank", "sent by the busiest rank", ",.2f", " MB", 1e-6),
    Measure("bytes_per_worker", "sent by the busiest worker", ",.2f", " MB", 1e-6),
    Measure("messages_per_rank", "messages of the busiest rank", ",.0f"),
    Measure("idle", "workers idle", ".1%"),
    Measure("memory", "memory of the fullest rank", ",.2f", " MiB", 2**-20),
    Measure("staleness", "mean staleness", ".2f", better=""),
    Measure("consensus_distance", "consensus distance", ".3g", better=""),
    Measure("seconds_to_target", "time to the target", ".2f", " s"),
    Measure("bytes_to_target", "sent by all to the target", ",.2f", " MB", 1e-6),
    Measure("steps_to_target", "steps to the target", ",.0f"),
    Measure("environment_steps_to_target", "environment steps to the target", ",.0f"),
)
BY_NAME = {measure.name: measure for measure in MEASURES}
USUAL = ["test_accuracy", "test_return", "test_rmse", "test_rmse_standardized", "test_loss", "train_loss", "steps"]
USUAL += ["seconds", "examples_per_second", "bytes_per_rank", "messages_per_rank", "idle", "memory"]
USUAL += ["seconds_to_target", "bytes_to_target", "steps_to_target", "environment_steps_to_target"]


def measure_of(name: str) -> Measure | None:
    """Return the measure of this name: one of MEASURES, or any other score of an evaluation; None: there is none."""
    others = (*CLASS_SCORES, *VALUE_SCORES, *TEXT_SCORES)
    if name in BY_NAME or not name.startswith(SCORES) or base_of(name) not in others:
        return BY_NAME.get(name)
    return Measure(name, name.replace("_", " "), ".4g", better="more" if larger_is_better(name) else "less")


def read_target(text: str) -> dict[str, float]:
    """Return {name: value} of --target, as accuracy=0.95 or loss=0.3; {} for "", no target. Raises UsageError."""
    if not text:
        return {}
    name, _, number = text.partition("=")
    if measure_of(f"test_{name}") is None:
        guess = nearest(name, [*USUAL_SCORES, *CLASS_SCORES, *VALUE_SCORES])
        said = f"--target {text}: there is no score {name!r}{guess}"
        raise UsageError(f"{said}; give one such as accuracy=0.95, loss=0.3, rmse=2 or return=475")
    try:
        goal = parse_finite(number)
    except ValueError:
        raise UsageError(f"--target {text}: {name} is a number, as in {name}=0.95") from None
    if name == "accuracy" and not 0 < goal <= 1:
        raise UsageError(f"--target {text}: an accuracy is greater than 0 and at most 1, as 0.95")
    return {name: goal}


def measured(
    folder: Path, summary: dict[str, Any], target: dict[str, float]
) -> tuple[dict[str, float | None], dict[str, float]]:
    """Return the measures of an ended run, by name, and lower bounds of the costs of a missed target."""
    found, beyond = dict(of_summary(summary)), {}
    if target:
        reached, last = to_target(folder / "metrics.jsonl", *next(iter(target.items())))
        found |= {f"{name}_to_target": reached.get(name) for name in TAKEN}
        if not reached:
            beyond = {f"{name}_to_target": finite_or_none(last.get(name)) for name in TAKEN}
    names = dict.fromkeys([*BY_NAME, *filter(measure_of, found)])
    values = {name: finite_or_none(found.get(name)) for name in names}
    return values, {name: value for name, value in beyond.items() if value is not None}


def of_summary(summary: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a summary, and the measures derived from it."""
    yield from summary.items()
    workers, steps, seconds = summary.get("workers") or 1, summary.get("steps"), summary.get("seconds")
    yield "milliseconds_per_step", 1e3 * seconds / steps if steps and seconds is not None else None
    sent, messages = summary.get("bytes_sent_per_rank"), summary.get("messages_per_rank")
    yield "bytes_per_rank", of_ranks(max, sent)
    yield "bytes_per_worker", of_ranks(max, sent and sent[-workers:])
    yield "messages_per_rank", of_ranks(max, messages)
    yield "idle", idle(summary, workers)
    yield "memory", memory(summary)
    if isinstance(counts := summary.get("staleness_histogram"), list) and sum(counts):
        yield "staleness", sum(value * count for value, count in enumerate(counts)) / sum(counts)


def of_ranks(of: Callable[[list], float], values: Any) -> float | None:
    """Return of(values) for a list with a number per rank; None if a number or the list is unknown."""
    return of(values) if isinstance(values, list) and values and None not in values else None


def idle(summary: dict[str, Any], workers: int) -> float | None:
    """Return the idle share of the steps' time, averaged over the workers, which are the last ranks; None: unknown."""
    names = ("idle", "compute", "communication")
    each = [of_ranks(list, summary.get(f"{name}_seconds_per_rank")) for name in names]  # type: ignore[arg-type]
    if None in each:
        return None
    ranks: Any = list(zip(*each, strict=True))[-workers:]  # type: ignore[arg-type]
    shares = [idle / (compute + communication) for idle, compute, communication in ranks if compute + communication]
    return sum(shares) / len(shares) if shares else None


def memory(summary: dict[str, Any]) -> float | None:
    """Return the memory of the rank with the most, in bytes: the sum of its peaks of each kind; None: unknown."""
    kinds = summary.get("memory_bytes_per_rank")
    if not isinstance(kinds, dict) or not kinds:
        return None
    return max(sum(each or 0 for each in of) for of in zip(*kinds.values(), strict=True))


def to_target(metrics: Path, name: str, goal: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the costs at the first evaluation that reached the goal ({}: none did), and at the last one read."""
    key, last = f"test_{name}", dict[str, Any]()
    with contextlib.suppress(OSError):
        for line in MetricLines(metrics):
            score = line.get(key)
            if score is not None:
                last = {each: line.get(each) for each in TAKEN} | {"steps": line["step"]}
                if score >= goal if larger_is_better(key) else score <= goal:
                    return last, last
    return {}, last


def finite_or_none(value: Any) -> float | None:
    return value if finite(value) is not None else None


def shown(measure: Measure, value: float | None, sign: str = "", unit: bool = True) -> str:
    if value is None:
        return ""
    return format(value * measure.scale, sign + measure.format) + measure.unit * unit
