"""The table that a run prints at its end: what was trained and how, what it reached, and what it cost each rank.
A row shows an entry of the summary; some entries are reported by one strategy alone (`Run.report`)."""

from collections.abc import Callable
from typing import Any

from rich.table import Table

from hpcdl.errors import printable
from hpcdl.formatting import counted
from hpcdl.memory import KINDS
from hpcdl.metric_lines import CLASS_SCORES, SCORES, VALUE_SCORES, base_of

MIB = 2**20
SCORED = "test_rmse"  # after this entry come further scores
Show = Callable[[Any, dict], str | None]  # (the entry, the summary) -> text of the row; None: no row


def as_table(summary: dict) -> Table:
    """Return the table of a summary."""
    title = f"{summary['strategy']} on {counted(summary['ranks'], 'rank')}"
    table = Table(title=title, title_justify="left", show_header=False)
    for name_of_row, entry, show in ROWS:
        if (text := said_of(summary, entry, show)) is not None:
            table.add_row(name_of_row, text)
        if entry == SCORED:
            for name in further(summary):
                table.add_row(printable(name.replace("_", " ")), f"{summary[name]:.4f}")
    return table


def further(summary: dict) -> list[str]:
    """Return the names of the scores of --scores, and of several outputs, which have no rows of their own."""
    own, scores = {entry for _, entry, _ in ROWS}, {*CLASS_SCORES, *VALUE_SCORES}
    names = [name for name in summary if name.startswith(SCORES) and name not in own and base_of(name) in scores]
    return sorted((name for name in names if isinstance(summary[name], float)), reverse=True)  # validation first


def said_of(summary: dict, entry: str, show: Show) -> str | None:
    """Return the text of a row; None (no row) if the summary lacks the entry, or `show` returns None."""
    value: Any = summary
    for name in entry.split("."):
        value = value.get(name) if value else None
    return None if value is None else show(value, summary)


def span(values: list, form: str, unit: float = 1, name: str = "") -> str:
    """Return values / unit as text: one number, or smallest to largest, the unit's name, and how many are None."""
    there = [each / unit for each in values if each is not None]
    if not there:
        return "unknown"
    low, high = format(min(there), form), format(max(there), form)
    missing = f" ({len(values) - len(there)} unknown)" if len(there) < len(values) else ""
    return (low if low == high else f"{low} to {high}") + name + missing


def formatted(form: str) -> Show:
    """Return a `Show` of a number or a text, in this format."""
    return lambda value, of: format(value, form)


def of_ranks(form: str, unit: float = 1, name: str = "", least: int = 1) -> Show:
    """Return a `Show` of a list with a number per rank, by `span`; no row on fewer than `least` ranks."""
    return lambda values, of: span(values, form, unit, name) if len(values) >= least else None


def consistency(value: str, of: dict) -> str:
    names = {"bsp": "bulk synchronous (bsp)", "async": "asynchronous (async)"}
    return names.get(value, f"stale synchronous (ssp), {of['staleness']} clocks at most")


def staleness(histogram: list, of: dict) -> str | None:
    """Show mean and maximum of a histogram of pushes by staleness; no row for bsp, where no push is stale."""
    count = sum(histogram)
    if of.get("consistency") == "bsp" or not count:
        return None
    mean = sum(by * pushes for by, pushes in enumerate(histogram)) / count
    return f"{mean:.2f} on average, {len(histogram) - 1} at most"


def local_steps(value: int, of: dict) -> str:
    begun = f", from epoch {of['local_from']} on" if of["local_from"] else ""
    return f"{value:,} in each of {of['synchronizations']:,} rounds{begun}"


def threads(value: int, of: dict) -> str | None:
    """Show how many threads work on a vector, and what an update locks; no row if `update_batch` is not reported."""
    if "update_batch" not in of:
        return None
    where = f" of each rank on {counted(of['vectors'], 'vector')}" if of["ranks"] > 1 else " on one vector"
    return f"{value}{where}, locking {of['locking']}" + ("" if of["repeatable"] else ", not repeatable")


def collisions(value: float | None, of: dict) -> str | None:
    """Show the share of coordinates with collisions, and by how many updates updates are late, unless repeatable."""
    if value is None or of["repeatable"]:
        return None
    stale = of["update_staleness"]
    return f"{value:.2%} of coordinates, {stale['mean']:.2f} updates late on average, {stale['max']:,} at most"


def consensus(value: float, of: dict) -> str | None:
    largest = of["consensus_distance_max"]
    return f"{value:.3g} at the end, {largest:.3g} at its largest" if of["ranks"] > 1 else None


def pipelined(show: Show) -> Show:
    """Return a `Show` that shows what `show` does, but has no row for a model of a single stage."""
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


def locking(value: str, of: dict) -> str | None:
    if "drift" not in of:
        return None
    drifted = f", drift {of['drift']:.2g}" if value == "none" else ""
    return f"{value}, of {of['threads']} threads{drifted}"


def all_reduce(value: str, of: dict) -> str:
    """Show the algorithm; for auto also the algorithms that it uses, the one for short vectors first."""
    taken = dict.fromkeys(each["algorithm"] for each in of["allreduce_by_length"] or [])
    return f"{value} ({', '.join(taken)})" if taken else value


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


def memory(values: list, of: dict) -> str | None:
    return span(values, ",.2f", MIB, " MiB") if any(values) else None


ROWS: list[tuple[str, str, Show]] = [
    ("model", "model", lambda value, of: f"{value}, {counted(of['parameters'], 'parameter', ',')}, {of['dtype']}"),
    ("data", "data", lambda value, of: None if "env" in of else printable(value)),
    ("environment", "env", lambda value, of: printable(value)),
    ("device", "device_per_rank", lambda value, of: ", ".join(sorted({*value} - {None})) if "exchange" in of else None),
    ("messages from there", "exchange", formatted("")),
    ("servers", "servers", lambda n, of: f"{n}, on the workers" if n + of["workers"] > of["ranks"] else str(n)),
    ("consistency", "consistency", consistency),
    ("fixed delay", "fixed_delay", lambda value, of: f"{value} versions" if value else None),
    ("method", "method", formatted("")),
    ("topology", "topology", lambda value, of: printable(value)),
    ("staleness", "staleness_histogram", staleness),
    ("spectral gap", "spectral_gap", formatted(".3g")),
    ("batches of a phase", "phase", lambda value, of: str(value) if value > 1 else None),
    ("local steps", "sync_every", local_steps),
    ("gradients per example", "gradients_per_example", formatted(",.1f")),
    ("samples", "samples", lambda value, of: f"{value:,} of {counted(of['chains'], 'chain')}"),
    ("R-hat", "r_hat_max", lambda value, of: f"{of['r_hat_median']:.3f} (median), {value:.3f} at its largest"),
    ("outer optimizer", "outer", lambda v, of: None if v == "average" else f"{v}, learning rate {of['outer_lr']:g}"),
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
    ("attention", "attention", lambda value, of: value),
    ("exchange hidden", "hidden_fraction", formatted(".0%")),
    ("rounds", "rounds", rounds),
    ("rounds to accuracy", "rounds", rounds_to_accuracy),
    (
        "rounds abandoned",
        "rounds_abandoned",
        lambda n, of: f"{n:,}, with too few answers for secure sums" if n else None,
    ),
    ("privacy", "epsilon", lambda value, of: f"epsilon {value:.3g} at delta {of['delta']:g}"),
    ("steps", "steps", steps),
    ("legs", "legs", legs),
    ("locking", "locking", locking),
    ("duality gap", "duality_gap", lambda v, of: f"{v:.3g} (primal {of['primal']:.6g}, dual {of['dual']:.6g})"),
    ("train loss", "train_loss", formatted(".4f")),
    ("validation loss", "validation_loss", formatted(".4f")),
    ("validation accuracy", "validation_accuracy", formatted(".2%")),
    ("test loss", "test_loss", formatted(".4f")),
    ("test perplexity", "test_perplexity", formatted(".4g")),
    ("test bits per byte", "test_bits_per_byte", formatted(".4f")),
    ("test accuracy", "test_accuracy", formatted(".2%")),
    ("test rmse", "test_rmse", formatted(".4f")),
    ("training episodes", "episodes", episodes),
    ("replay memory", "replay_size", replay),
    ("test return", "test_return", lambda v, of: f"{v:.4g} ({of['test_return_min']:g} to {of['test_return_max']:g})"),
    ("seconds", "seconds", lambda value, of: f"{value:.2f} ({of['examples_per_second']:,.0f} examples/s)"),
    ("all-reduce", "allreduce", all_reduce),
    ("messages in", "compress", lambda value, of: None if value == "none" else value),
    ("sent per rank", "bytes_sent_per_rank", of_ranks(".2f", 1e6, " MB", least=2)),
    ("messages per rank", "messages_per_rank", lambda v, of: span(v, ",.0f") if {*v} - {None} and len(v) > 1 else None),
    ("compute per rank", "compute_seconds_per_rank", of_ranks(".2f", 1, " s")),
    ("communication per rank", "communication_seconds_per_rank", of_ranks(".2f", 1, " s", least=2)),
    ("idle per rank", "idle_seconds_per_rank", of_ranks(".2f", 1, " s", least=2)),
    ("peak memory per rank", "peak_memory_bytes_per_rank", of_ranks(",.0f", MIB, " MiB")),
    *((f"{kind} per rank", f"memory_bytes_per_rank.{kind}", memory) for kind in KINDS),
    ("replicas agree", "replicas_agree", lambda value, of: ("yes" if value else "NO") if of["ranks"] > 1 else None),
    ("consensus distance", "consensus_distance", consensus),
    ("test accuracy of replicas", "replica_test_accuracy", of_ranks(".2%", least=2)),
    ("ended by", "stopped", lambda value, of: None if value == "finished" else value),
]
