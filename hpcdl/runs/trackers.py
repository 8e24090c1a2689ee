"""--log wandb and mlflow: the numbers of metrics.jsonl go to an experiment tracker while the run goes on.

    wandb     a run of the project $WANDB_PROJECT, or hpcdl; $WANDB_MODE=offline writes files for `wandb sync`
    mlflow    a run of the experiment $MLFLOW_EXPERIMENT_NAME, or hpcdl, at $MLFLOW_TRACKING_URI

The tracker's run has the name of the run's folder, and its options. A resumed run is a new one there, which begins with
all lines that metrics.jsonl keeps. A tracker that fails is left out from then on, with a line: a training goes on."""

import logging
import os
from abc import abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hpcdl.runs.metric_logs import LineLog, numbers

log = logging.getLogger("hpcdl")


class Tracker(LineLog):
    """An experiment tracker. began: UNIX seconds of the run's begin. options: of the run."""

    def __init__(self, folder: Path, lines: Iterable[dict[str, Any]], began: float, options: dict[str, Any]):
        super().__init__(folder)
        self.began, self.works = began, True
        self._try(self._open, folder.resolve().name, options)
        self.write(lines)

    def write(self, lines: Iterable[dict[str, Any]]) -> None:
        for line in lines:
            self._try(self._send, numbers(line), line)

    def flush(self) -> None:
        """Do nothing: a tracker sends by itself."""

    def close(self) -> None:
        self._try(self._end)

    def _try(self, call: Any, *arguments: Any) -> None:
        if self.works:
            try:
                call(*arguments)
            except Exception as error:
                self.works = False
                name = type(self).__name__.lower()
                log.warning("--log %s: %s; the run goes on without it", name, " ".join(str(error).split())[:300])

    @abstractmethod
    def _open(self, name: str, options: dict[str, Any]) -> None:
        """Begin a run of the tracker."""

    @abstractmethod
    def _send(self, values: dict[str, float], line: dict[str, Any]) -> None:
        """Send the numbers of a line."""

    @abstractmethod
    def _end(self) -> None:
        """End the tracker's run."""


class Wandb(Tracker):
    """Weights & Biases."""

    def _open(self, name: str, options: dict[str, Any]) -> None:
        import wandb

        project, settings = os.environ.get("WANDB_PROJECT") or "hpcdl", wandb.Settings(silent=True, console="off")
        self.run = wandb.init(project=project, name=name, config=options, settings=settings)

    def _send(self, values: dict[str, float], line: dict[str, Any]) -> None:
        self.run.log({**values, "seconds": line.get("seconds")}, step=int(line["step"]))

    def _end(self) -> None:
        self.run.finish()


class Mlflow(Tracker):
    """MLflow, by its client, which has no state of the process."""

    def _open(self, name: str, options: dict[str, Any]) -> None:
        from mlflow import MlflowClient

        self.client, experiment = MlflowClient(), os.environ.get("MLFLOW_EXPERIMENT_NAME") or "hpcdl"
        found = self.client.get_experiment_by_name(experiment)
        number = self.client.create_experiment(experiment) if found is None else found.experiment_id
        begun = self.client.create_run(number, start_time=int(1000 * self.began), run_name=name)
        self.id = begun.info.run_id
        for option, value in options.items():
            self.client.log_param(self.id, option, value)

    def _send(self, values: dict[str, float], line: dict[str, Any]) -> None:
        from mlflow.entities import Metric

        at, step = int(1000 * (self.began + (line.get("seconds") or 0.0))), int(line["step"])
        self.client.log_batch(self.id, [Metric(name, float(value), at, step) for name, value in values.items()])

    def _end(self) -> None:
        self.client.set_terminated(self.id)


TRACKERS: dict[str, type[Tracker]] = {"wandb": Wandb, "mlflow": Mlflow}
