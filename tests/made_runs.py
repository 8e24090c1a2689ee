"""Folders of runs and comparisons as they are written, made up: of any length, on any number of ranks, in no time."""

import json
import math
import random

from hpcdl.reports.measures import BY_NAME

RANKS = 4
MEASURES = "test_accuracy test_loss seconds examples_per_second bytes_per_rank idle seconds_to_target"


def write_run(folder, steps=50, evaluations=5, ranks=RANKS, seed=0, strategy="all_reduce", traced=True, **summary):
    """Write a run's folder; summary: entries that are others."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(seed)
    header = "# launch: 4 ranks: python hpcdl train-allreduce\n# commit: abc\n# hpcdl: 0.1.0\n# machine: none\n"
    (folder / "config.yaml").write_text(f"{header}data: digits\nmodel: mlp\nlr: 0.05\ntrace: {2000 if traced else 0}\n")
    every, lines = max(1, steps // max(1, evaluations)), []
    for step in range(1, steps + 1):
        loss = 2 * math.exp(-3 * step / steps) + 0.3 * draw.random()
        at = f'"step": {step}, "epoch": {step / 45:.6g}, "train_loss": {loss:.6g}, "seconds": {step * 0.0021:.6g}'
        lines.append(f'{{{at}, "learning_rate": {0.05 * (1 - step / steps):.6g}}}\n')
        if evaluations and step % every == 0:
            score = 0.95 - 0.8 * math.exp(-4 * step / steps) + 0.02 * draw.random()
            at += f', "test_loss": {loss + 0.1:.6g}, "test_accuracy": {score:.6g}, "consensus_distance": {loss / 9:.3g}'
            lines.append(f'{{{at}, "bytes": {step * 19280}, "messages": {6 * step}}}\n')
    (folder / "metrics.jsonl").write_text("".join(lines))
    each = [1 + 0.1 * draw.random() for _ in range(ranks)]
    spent = {"compute": 3, "communication": 2, "idle": 1, "data": 0.2, "bookkeeping": 0.4}
    found = {"schema_version": 2, "strategy": strategy, "ranks": ranks, "workers": ranks, "data": "digits"}
    found |= {"model": "mlp:32", "parameters": 2410, "dtype": "float32", "device": "cpu", "epochs": steps / 45}
    found |= {"steps": steps, "batch_size": 32, "seed": seed, "train_loss": 0.3, "test_loss": 0.4}
    found |= {"test_accuracy": 0.93, "seconds": 0.0021 * steps, "examples_per_second": 32 / 0.0021}
    found |= {"replicas_agree": True, "bytes_sent_per_rank": [4820 * steps] * ranks}
    found |= {"messages_per_rank": [6 * steps] * ranks, "peak_memory_bytes_per_rank": [2e8] * ranks}
    found |= {f"{name}_seconds_per_rank": [much * value for value in each] for name, much in spent.items()}
    kinds = ("parameters", "gradients", "optimizer", "activations")
    found["memory_bytes_per_rank"] = {kind: [9640.0] * ranks for kind in kinds}
    found["sent_to_per_rank"] = [[[(rank + 1) % ranks, 4820 * steps, 6 * steps]] for rank in range(ranks)]
    found["message_sizes_per_rank"] = [{"0": 3, "4096": 5 * steps, "65536": steps}] * ranks
    found |= {"staleness_histogram": [10, 30, 20, 3], "hidden_fraction": 0.4}
    found["legs"] = [{"ranks": ranks, "steps": steps, "hosts": ["n1", "n2"]}]
    found["environment"] = {"launch": "4 ranks: python hpcdl", "commit": "abc", "hpcdl": "0.1.0", "machine": "none"}
    found["options"] = {"data": "digits", "seed": seed, "trace": 2000 if traced else 0}
    (folder / "summary.json").write_text(json.dumps(found | summary))
    if traced:
        write_trace(folder / "trace.json", ranks)
    return folder


def write_trace(path, ranks=RANKS, steps=40, microbatches=0):
    """Write a trace: steps of 100 us, each with an all-reduce, or a pipeline's micro-batches, staggered by rank."""
    events = []
    for rank in range(ranks):
        events.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": f"rank {rank} on n1"}})
        events.append({"name": "thread_sort_index", "ph": "M", "pid": 0, "tid": rank, "args": {"sort_index": rank}})

        def span(name, start, length, rank=rank, **args):
            found = {"name": name, "ph": "X", "pid": 0, "tid": rank, "ts": start, "dur": length}
            events.append(found | ({"args": args} if args else {}))

        for step in range(steps):
            at = 100.0 * step
            span("step", at, 98)
            if microbatches:
                for number in range(microbatches):
                    each = 80 / microbatches / 3
                    span("forward", at + rank * 2 + number * each, each, **{"micro-batch": number, "chunk": 0})
                    back = at + 85 - rank * 2 - (microbatches - number) * 2 * each
                    span("backward", back, 2 * each, **{"micro-batch": number, "chunk": 0})
            else:
                span("all_reduce", at + 60 + rank, 30, **{"bytes sent": 4820})
        span("evaluate", 100.0 * steps, 60)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def write_comparison(folder, names, seeds=3, failing=(), **more):
    """Write a comparison of lines with these names, of which those that are failing have failed with every seed."""
    lines = []
    for place, name in enumerate(names, 1):
        runs, where = [], f"{place}-line"
        for seed in range(seeds):
            failed = "rank 1: no memory is left" if place - 1 in failing else None
            values = {"test_accuracy": 0.9 + 0.01 * seed - 0.01 * place, "seconds": 3.0 + place, "bytes_per_rank": 1e6}
            values |= {"seconds_to_target": 1.0 + place + 0.1 * seed, "bytes_to_target": 1e6 * place, "test_loss": 0.3}
            if failed is None:
                write_run(folder / where / f"seed-{seed}", seed=seed, steps=60 + 10 * place, traced=seed == 0)
            runs.append({"seed": seed, "folder": f"{where}/seed-{seed}", "failed": failed, "values": values})
        base = {"runs": seeds, "mean": 0.9 - 0.01 * place, "deviation": 0.008}
        other = {"difference": -0.01 * place, "interval": [-0.02, 0.01], "within_noise": place == 2}
        base |= other if place > 1 else {"difference": None, "interval": None, "within_noise": None}
        known = () if place - 1 in failing else ("test_accuracy", "seconds", "test_loss", "bytes_per_rank")
        line = {"line": name, "ranks": 4, "folder": where, "runs": runs, "statistics": dict.fromkeys(known, base)}
        lines.append(line)
    measures = [BY_NAME[name]._asdict() for name in MEASURES.split()]
    results = {"schema_version": 1, "command": "4 ranks: hpcdl compare", "options": {"epochs": 5}, "budget": ""}
    results |= {"environment": {"commit": "abc", "machine": "none"}, "seeds": list(range(seeds))}
    results |= {"target": {"accuracy": 0.9}, "measures": measures, "lines": lines}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "compare.yaml").write_text("epochs: 5\n")
    (folder / "results.json").write_text(json.dumps(results | more))
    return folder
