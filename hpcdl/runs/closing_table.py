"""The table that a run prints at its end: what was trained and how, what it reached, and what it cost each rank.

A row shows an entry of the summary. Many are what a strategy has reported (`Run.report`), so that the table of each
shows what it is about: the bound of the staleness, the spectral gap of a graph, the idle share of a pipeline.
Where there is no such entry, or nothing to say of it, there is no row.
"""

from collections.abc import Callable
from typing import Any

from rich.table import Table

from hpcdl.errors import printable
from hpcdl.formatting import counted
from hpcdl.memory import KINDS

MIB = 2**20
Show = Callable[[Any, dict], str | None]  # (the entry, the summary) -> what the row says; None: there is no row


def as_table(summary: dict) -> Table:
    """The result of a run for people."""
    title = f"{summary['strategy']} on {counted(summary['ranks'], 'rank')}"
    table = Table(title=title, title_justify="left", show_header=False)
    for name_of_row, entry, show in ROWS:
        if (text := said_of(summary, entry, show)) is not None:
            table.add_row(name_of_row, text)
    return table


def said_of(summary: dict, entry: str, show: Show) -> str | None:
    """What a row says; None where there is none."""
    value: Any = summary
    for name in entry.split("."):
        value = value.get(name) if value else None
    return None if value is None else show(value, summary)


def span(values: list, form: str, unit: float = 1, name: str = "") -> str:
    """One number, or the smallest and the largest of several, in a unit of this name; and how many are not known."""
    there = [each / unit for each in values if each is not None]
    if not there:
        return "unknown"
    low, high = format(min(there), form), format(max(there), form)
    missing = f" ({len(values) - len(there)} unknown)" if len(there) < len(values) else ""
    return (low if low == high else f"{low} to {high}") + name + missing


def formatted(form: str) -> Show:
    """A number, or a text, in this form."""
    return lambda value, of: format(value, form)


def of_ranks(form: str, unit: float = 1, name: str = "") -> Show:
    """Of each rank a number, which one rank by itself has, too."""
    return lambda values, of: span(values, form, unit, name)


def of_several(form: str, unit: float = 1, name: str = "") -> Show:
    """Of each rank a number that says something only where there are several."""
    return lambda values, of: span(values, form, unit, name) if len(values) > 1 else None


def model(value: str, of: dict) -> str:
    return f"{value}, {counted(of['parameters'], 'parameter', ',')}, {of['dtype']}"


def devices(value: list, of: dict) -> str | None:
    return ", ".join(sorted(set(filter(None, value)))) if "exchange" in of else None


def servers(value: int, of: dict) -> str:
    return f"{value}, on the workers" if value + of["workers"] > of["ranks"] else str(value)


def consistency(value: str, of: dict) -> str:
    names = {"bsp": "bulk synchronous (bsp)", "async": "asynchronous (async)"}
    return names.get(value, f"stale synchronous (ssp), {of['staleness']} clocks at most")


def staleness(histogram: list, of: dict) -> str | None:
    """Of the pushes that were stale by 0, 1, 2, ...; where workers go in step none is, and there is no more to say."""
    count = sum(histogram)
    if of.get("consistency") == "bsp" or not count:
        return None
    mean = sum(by * pushes for by, pushes in enumerate(histogram)) / count
    return f"{mean:.2f} on average, {len(histogram) - 1} at most"


def local_steps(value: int, of: dict) -> str:
    begun = f", from epoch {of['local_from']} on" if of["local_from"] else ""
    return f"{value:,} in each of {of['synchronizations']:,} rounds{begun}"


def samples(value: int, of: dict) -> str:
    return f"{value:,} of {counted(of['chains'], 'chain')}"


def threads(value: int, of: dict) -> str | None:
    """How many work on a vector, and what an update locks; of other strategies' threads nothing is said here."""
    if "update_batch" not in of:
        return None
    where = f" of each rank on {counted(of['vectors'], 'vector')}" if of["ranks"] > 1 else " on one vector"
    return f"{value}{where}, locking {of['locking']}" + ("" if of["repeatable"] else ", not repeatable")


def collisions(value: float | None, of: dict) -> str | None:
    """Of what one update in some has touched; and by how many of the others' updates it was late."""
    if value is None or of["repeatable"]:
        return None
    stale = of["update_staleness"]
    return f"{value:.2%} of coordinates, {stale['mean']:.2f} updates late on average, {stale['max']:,} at most"


def outer(value: str, of: dict) -> str | None:
    return None if value == "average" else f"{value}, learning rate {of['outer_lr']:g}"


def consensus(value: float, of: dict) -> str | None:
    largest = of["consensus_distance_max"]
    return f"{value:.3g} at the end, {largest:.3g} at its largest" if of["ranks"] > 1 else None


def pipelined(show: Show) -> Show:
    """What is shown where there are several stages."""
    return lambda value, of: show(value, of) if len(of.get("layers_of_stages", [])) > 1 else None


def schedule(value: str, of: dict) -> str:
    if value == "pipedream":
        return value
    chunks = f", {of['chunks']} chunks of layers a stage" if of["chunks"] > 1 else ""
    return f"{value}, {of['microbatches']} micro-batches{chunks}" + (", recomputed" if of["recompute"] else "")


def sharded(stage: int, of: dict) -> str | None:
    what = ["optimizer's state", "gradients", "parameters"][:stage]
    return f"{', '.join(what)} (stage {stage})" if stage else None


def rounds(value: int, of: dict) -> str:
    if "clients" not in of:
        return f"{value:,} of {counted(of['local_steps'], 'pass', 'g')} over a rank's examples"
    return f"{value:,} of {of['clients_per_round']:,} of {counted(of['clients'], 'client', ',')}"


def rounds_to_accuracy(value: int, of: dict) -> str | None:
    return str(of["rounds_to_accuracy"] or "not reached") if "rounds_to_accuracy" in of else None


def abandoned(value: int, of: dict) -> str | None:
    return f"{value:,}, with too few answers for secure sums" if value else None


def gap(value: float, of: dict) -> str:
    """What is certified: at most so far from the best that there is."""
    return f"{value:.3g} (primal {of['primal']:.6g}, dual {of['dual']:.6g})"


def locking(value: str, of: dict) -> str | None:
    if "drift" not in of:
        return None
    drifted = f", drift {of['drift']:.2g}" if value == "none" else ""
    return f"{value}, of {of['threads']} threads{drifted}"


def all_reduce(value: str, of: dict) -> str:
    """auto tells what it takes, for short vectors first."""
    taken = dict.fromkeys(each["algorithm"] for each in of["allreduce_by_length"] or [])
    return f"{value} ({', '.join(taken)})" if taken else value


def messages(values: list, of: dict) -> str | None:
    return span(values, ",.0f") if len(values) > 1 and any(each is not None for each in values) else None


def replicas_agree(value: bool, of: dict) -> str | None:
    return ("yes" if value else "NO") if of["ranks"] > 1 else None


def steps(value: int, of: dict) -> str | None:
    if "rounds" in of:
        return None
    if "environment_steps_per_step" in of:
        every = counted(of["environment_steps_per_step"], "environment step", ",")
        return f"{value:,} of {every}, with {counted(of['updates'], 'update', ',')} of {of['batch_size']:,} transitions"
    return f"{value:,} of {counted(of['batch_size'], 'example')}, {counted(of['epochs'], 'epoch', 'g')}"


def legs(value: list, of: dict) -> str | None:
    count = ", ".join(f"{leg['steps']:,}" for leg in value[:-1]) + f" and {value[-1]['steps']:,}"
    return f"{len(value)}, of {count} steps" if len(value) > 1 else None


def episodes(value: int, of: dict) -> str | None:
    if "return_mean" not in of:
        return None
    return f"{value:,}, mean return of the last ones {of['return_mean']:.4g}"


def replay(value: int, of: dict) -> str:
    return f"{counted(value, 'transition', ',')}, each environment step learned from {of['replay_ratio']:.1f} times"


def test_return(value: float, of: dict) -> str:
    return f"{value:.4g} ({of['test_return_min']:g} to {of['test_return_max']:g})"


def memory(values: list, of: dict) -> str | None:
    return span(values, ",.2f", MIB, " MiB") if any(values) else None


ROWS: list[tuple[str, str, Show]] = [
    ("model", "model", model),
    ("data", "data", lambda value, of: None if "env" in of else printable(value)),
    ("environment", "env", lambda value, of: printable(value)),
    ("device", "device_per_rank", devices),
    ("messages from there", "exchange", formatted("")),
    ("servers", "servers", servers),
    ("consistency", "consistency", consistency),
    ("fixed delay", "fixed_delay", lambda value, of: f"{value} versions" if value else None),
    ("method", "method", formatted("")),
    ("topology", "topology", lambda value, of: printable(value)),
    ("staleness", "staleness_histogram", staleness),
    ("spectral gap", "spectral_gap", formatted(".3g")),
    ("batches of a phase", "phase", lambda value, of: str(value) if value > 1 else None),
    ("local steps", "sync_every", local_steps),
    ("gradients per example", "gradients_per_example", formatted(",.1f")),
    ("samples", "samples", samples),
    ("R-hat", "r_hat_max", lambda value, of: f"{of['r_hat_median']:.3f} (median), {value:.3f} at its largest"),
    ("outer optimizer", "outer", outer),
    ("threads", "threads", threads),
    ("collisions", "collisions", collisions),
    ("grid", "grid", lambda value, of: ", ".join(f"{axis} {ranks}" for axis, ranks in value.items())),
    ("stages", "layers_of_stages", pipelined(lambda value, of: str(len(value)))),
    ("schedule", "schedule", pipelined(schedule)),
    ("weights, updates old", "weights_updates_old", of_ranks(",.0f")),
    ("gradient noise scale", "noise_scale", formatted(",.0f")),
    ("idle share of stages", "idle_share", pipelined(formatted(".1%"))),
    ("sharded", "stage", sharded),
    ("parts of each layer", "parts", formatted("d")),
    ("sequence parallel", "sequence_parallel", lambda value, of: "yes" if value else None),
    ("exchange hidden", "hidden_fraction", formatted(".0%")),
    ("rounds", "rounds", rounds),
    ("rounds to accuracy", "rounds", rounds_to_accuracy),
    ("rounds abandoned", "rounds_abandoned", abandoned),
    ("privacy", "epsilon", lambda value, of: f"epsilon {value:.3g} at delta {of['delta']:g}"),
    ("steps", "steps", steps),
    ("legs", "legs", legs),
    ("locking", "locking", locking),
    ("duality gap", "duality_gap", gap),
    ("train loss", "train_loss", formatted(".4f")),
    ("validation loss", "validation_loss", formatted(".4f")),
    ("validation accuracy", "validation_accuracy", formatted(".2%")),
    ("test loss", "test_loss", formatted(".4f")),
    ("test accuracy", "test_accuracy", formatted(".2%")),
    ("test rmse", "test_rmse", formatted(".4f")),
    ("training episodes", "episodes", episodes),
    ("replay memory", "replay_size", replay),
    ("test return", "test_return", test_return),
    ("seconds", "seconds", lambda value, of: f"{value:.2f} ({of['examples_per_second']:,.0f} examples/s)"),
    ("all-reduce", "allreduce", all_reduce),
    ("messages in", "compress", lambda value, of: None if value == "none" else value),
    ("sent per rank", "bytes_sent_per_rank", of_several(".2f", 1e6, " MB")),
    ("messages per rank", "messages_per_rank", messages),
    ("compute per rank", "compute_seconds_per_rank", of_ranks(".2f", 1, " s")),
    ("communication per rank", "communication_seconds_per_rank", of_several(".2f", 1, " s")),
    ("idle per rank", "idle_seconds_per_rank", of_several(".2f", 1, " s")),
    ("peak memory per rank", "peak_memory_bytes_per_rank", of_ranks(",.0f", MIB, " MiB")),
    *((f"{kind} per rank", f"memory_bytes_per_rank.{kind}", memory) for kind in KINDS),
    ("replicas agree", "replicas_agree", replicas_agree),
    ("consensus distance", "consensus_distance", consensus),
    ("test accuracy of replicas", "replica_test_accuracy", of_several(".2%")),
    ("ended by", "stopped", lambda value, of: None if value == "finished" else value),
]
