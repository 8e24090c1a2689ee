"""Environments from --env: a function that makes them, their observations as arrays, and their actions.

    CartPole-v1                gymnasium's registry; a package's own as package:Name-v0, which imports it
    minatar:breakout           MinAtar (MinAtar/Breakout-v1), if installed
    ALE/Breakout-v5            Atari, if ale-py and OpenCV are installed, with the usual wrappers: up to 30 no-ops, an
                               action for 4 frames, maximum of the last two, grey, 84 x 84, 4 stacked, signs of rewards
    package.module:function    the user's function; its environments have reset, step and action_space, like gymnasium's

--env-options are arguments of the maker, except the wrappers' options: noop_max, frame_skip, screen_size,
terminal_on_life_loss, stack, clip.

    observation                                 array
    Discrete, Dict, Tuple                       float32 (size,), as gymnasium flattens its space
    bytes (height, width, channels)             uint8 (channels, height, width); channels stay first if the first axis
                                                is shorter than the last
    booleans (height, width, channels)          as bytes of this shape, 0 or 255
    one axis of bytes                           uint8 (size,)
    anything else                               float32 (size,)

(Wrappers: Mnih et al., Nature 2015; Machado et al., "Revisiting the Arcade Learning Environment", JAIR 2018)"""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from hpcdl.errors import UsageError, blamed_on
from hpcdl.plugins import call_plugin, is_plugin, load_plugin, plugin_errors

MINATAR, ATARI = "minatar:", "ALE/"
WRAPPERS = {"noop_max": 30, "frame_skip": 4, "screen_size": 84, "terminal_on_life_loss": False}
AFTERWARDS = {"stack": 4, "clip": True}


class Maker(NamedTuple):
    """make() makes an environment; stack: frames per observation; clip: True to learn from signs of rewards."""

    make: Callable[[], Any]
    stack: int = 1
    clip: bool = False


def maker(spec: str, options: dict[str, Any], render: bool = False) -> Maker:
    """Return the maker of the environments named `spec`. render: True to allow pictures. Raises UsageError."""
    option = f"--env {spec}"
    if spec.lower().startswith(MINATAR):
        name = spec[len(MINATAR) :].replace("_", " ").title().replace(" ", "")
        spec = f"MinAtar/{name}-v1"
    elif is_plugin(spec):
        return plugin_maker(spec, options, option, render)
    gymnasium = imported("gymnasium", option, "pip install 'hpcdl[rl]'")
    if spec.startswith("MinAtar/"):
        minatar = imported("minatar.gym", option, "pip install minatar")
        if not any(name.startswith("MinAtar/") for name in gymnasium.registry):
            minatar.register_envs()
    how: dict[str, Any] = {"disable_env_checker": True, "render_mode": "rgb_array" if render else None}
    if not spec.startswith(ATARI):
        return Maker(lambda: make_gymnasium(gymnasium, spec, how | options, option))
    ale = imported("ale_py", option, "pip install ale-py")
    imported("cv2", option, "pip install opencv-python-headless")
    ale.ALEInterface.setLoggerMode(ale.LoggerMode.Error)
    gymnasium.register_envs(ale)
    wrapped = {name: options.get(name, value) for name, value in (WRAPPERS | AFTERWARDS).items()}
    inner = how | {"frameskip": 1} | {name: value for name, value in options.items() if name not in wrapped}
    stack, clip, step_limit = int(wrapped.pop("stack")), bool(wrapped.pop("clip")), inner.pop("max_episode_steps", 0)

    def make() -> Any:
        environment = make_gymnasium(gymnasium, spec, inner, option)
        with blamed_on(option):
            environment = gymnasium.wrappers.AtariPreprocessing(environment, **wrapped)
            if step_limit:  # the agent's steps, not the game's frames
                environment = gymnasium.wrappers.TimeLimit(environment, step_limit)
            return gymnasium.wrappers.FrameStackObservation(environment, stack) if stack > 1 else environment

    return Maker(make, stack, clip)


def plugin_maker(spec: str, options: dict[str, Any], option: str, render: bool) -> Maker:
    """Return the Maker whose environments the user's package.module:function returns. option: named in errors."""
    function, settings = load_plugin(spec, option)
    offered = {"render_mode": "rgb_array" if render else None}

    def make() -> Any:
        environment = call_plugin(function, settings | options, offered, option)
        if missing := [name for name in ("reset", "step", "action_space") if not hasattr(environment, name)]:
            raise UsageError(
                f"{option}: the environment is a {type(environment).__name__}, which has no {missing[0]}; give it "
                "reset, step and action_space, like gymnasium's environments"
            )
        return environment

    return Maker(make)


def make_gymnasium(gymnasium: Any, spec: str, arguments: dict[str, Any], option: str) -> Any:
    with blamed_on(option):
        return gymnasium.make(spec, **arguments)


def imported(name: str, option: str, install: str) -> Any:
    """Import a module. Raises UsageError if it is missing; the message names `option` and the command `install`."""
    package = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f"{option} needs {package}, which cannot be imported ({error}): {install}") from None


def actions_of(environment: Any, option: str) -> tuple[int, int]:
    """Return (number of actions, the first action's number). Raises UsageError for actions other than Discrete."""
    space = environment.action_space
    count = getattr(space, "n", None)
    if not isinstance(count, int | np.integer) or tuple(getattr(space, "shape", ()) or ()) != () or count < 1:
        raise UsageError(
            f"{option}: the action space is {space}; a Q-network needs a Discrete space, one of n actions, "
            "not continuous or several ones"
        )
    return int(count), int(getattr(space, "start", 0))


def observation_converter(environment: Any, option: str) -> Callable[[Any], np.ndarray]:
    """Return the function that converts this environment's observations to arrays, as the module's table says."""
    space = getattr(environment, "observation_space", None)
    if space is None or type(space).__name__ == "Box" or not type(space).__module__.startswith("gymnasium."):
        return array_of
    flatten = imported("gymnasium.spaces.utils", option, "pip install 'hpcdl[rl]'").flatten
    return lambda observation: np.asarray(flatten(space, observation), np.float32).reshape(-1)


def array_of(observation: Any) -> np.ndarray:
    """Return an array or array-like observation as an array, as the module's table says."""
    array = np.asarray(observation)
    if array.dtype == bool and array.ndim > 1:
        array = array.astype(np.uint8) * np.uint8(255)
    if array.dtype != np.uint8:
        return np.asarray(array, np.float32).reshape(-1)
    if array.ndim == 2:
        return array[None]
    if array.ndim == 3:
        return array if array.shape[0] < array.shape[2] else array.transpose(2, 0, 1)
    return array.reshape(-1)


def first_observation(environment: Any, seed: int, option: str) -> Any:
    """Reset the environment; return the first observation. UsageError if reset takes no seed or returns no pair."""
    with plugin_errors(option):
        begun = environment.reset(seed=seed)
    if not (isinstance(begun, tuple) and len(begun) == 2):
        raise UsageError(f"{option}: reset should return (observation, info), not {type(begun).__name__}")
    return begun[0]
