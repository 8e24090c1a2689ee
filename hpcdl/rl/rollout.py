"""Rollouts of a trained agent: its returns over many episodes, and a moving picture of one.

    hpcdl evaluate runs/cartpole --episodes 100 --render cartpole.gif

A checkpoint names the environment, its options and the model. Pictures are written one by one by imageio: .gif by
Pillow, .mp4 if it has a codec (`pip install 'imageio[ffmpeg]'`)."""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpcdl.checkpoint.checkpoint_file import Checkpoint
from hpcdl.checkpoint.shards import joins_pieces
from hpcdl.errors import UsageError, blamed_on
from hpcdl.files import atomic_path, parse_json
from hpcdl.inference.trained_model import parameters_of
from hpcdl.kernels.device import CPU
from hpcdl.plugins import names_in, refuse_untrusted
from hpcdl.rl.environment_factory import imported
from hpcdl.rl.environments import Environments, Episode
from hpcdl.rl.q_network import QNetwork
from hpcdl.rl.task import APART, play

PICTURES = (".gif", ".mp4")
RATE = 30  # default pictures a second


def is_agent_run(run: str) -> bool:
    """True if this is the folder of an agent's run, or its checkpoint file."""
    path = Path(run, "checkpoint.h5") if os.path.isdir(run) else Path(run)
    attributes: Any = {}
    with contextlib.suppress(Exception):  # the later full read reports errors
        joins_pieces(path)  # checks the pieces before HDF5 opens them
        with h5py.File(path, "r") as file:
            attributes = parse_json(file.attrs["attributes"])
    return isinstance(attributes, dict) and "environment" in attributes


class Player:
    """The greedy policy of a run, or of a checkpoint file. model "": the run's. UsageError if it cannot be played.
    trust: names of code in the checkpoint that may be called, as by --trust (hpcdl/plugins.py)."""

    def __init__(self, run: str, model: str = "", trust: Iterable[str] = ()):
        checkpoint = Checkpoint.read(Path(run))
        self.name, self.about = run, checkpoint.attributes
        self.parameters = parameters_of(checkpoint, run)
        self.environment, self.settings = self.about["environment"]["name"], self.about["environment"]["options"]
        shape, self.actions = tuple(self.about["environment"]["shape"]), self.about["environment"]["actions"]
        spec = model or self.about["model"]
        code_names = {"env": self.environment} | ({} if model else {"model": spec})
        refuse_untrusted([(key, name) for key, text in code_names.items() for name in names_in(key, text)], run, trust)
        self.network = QNetwork(shape, self.actions, spec, self.parameters.dtype, CPU)
        if self.network.layout.describe() != self.about["layout"]:
            raise UsageError(f"{run}: its model {self.about['model']!r} is not one that this program can build")
        environments = self.make(1, 0, APART)
        actual = tuple(environments.shape), environments.actions
        if actual != (self.network.shape, self.actions):
            raise UsageError(
                f"{run}: {self.environment} now has observations {actual[0]} and {actual[1]} actions; the run has "
                f"learned with observations {self.network.shape} and {self.actions} actions"
            )

    def make(self, count: int, seed: int, first: int, render: bool = False) -> Environments:
        return Environments(self.environment, self.settings, count, seed, first, render=render)

    def play(self, episodes: int, seed: int) -> list[Episode]:
        """Play episodes, the same ones for the same seed; evaluations in runs use seed 0."""
        return play(self.network, self.parameters, self.make, episodes, seed)

    def render(self, path: Path, seed: int) -> Episode:
        """Write a moving picture of the first episode of `play`; return the episode. Raises UsageError."""
        environments = self.make(1, seed, APART, render=True)
        metadata = getattr(environments.copies[0], "metadata", None) or {}
        imageio = imported("imageio.v2", f"--render {path}", "pip install 'hpcdl[rl]'")
        with blamed_on(f"--render {path} cannot be written"), atomic_path(path) as temporary:
            whole = temporary.with_name(temporary.name + path.suffix)
            try:
                rate = metadata.get("render_fps") or RATE
                gif = {"format": "GIF", "mode": "I", "duration": 1000 / rate, "loop": 0}
                with imageio.get_writer(whole, **gif if path.suffix == ".gif" else {"fps": rate}) as file:
                    watch = lambda: file.append_data(environments.picture())  # noqa: E731
                    (episode,) = play(self.network, self.parameters, lambda *_: environments, 1, seed, watch)
                os.replace(whole, temporary)
            finally:
                whole.unlink(missing_ok=True)
        environments.close()
        return episode


def evaluation_summary(player: Player, played: list[Episode], seed: int) -> dict[str, Any]:
    """Return the results of an evaluation, for --json."""
    returns = np.array([episode.returned for episode in played])
    return {
        "run": player.name,
        "step": player.about["step"],
        "environment": player.environment,
        "episodes": len(played),
        "seed": seed,
        **{f"return_{name}": float(getattr(np, name)(returns)) for name in ("mean", "min", "max")},
        "return_deviation": float(returns.std()),
        "length_mean": float(np.mean([episode.length for episode in played])),
        "returns": returns.tolist(),
    }
