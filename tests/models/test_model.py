"""The abilities of a model, as declared or as its members show them; wrappers of models."""

import pytest

from hpcdl.kernels.device import CPU
from hpcdl.models import make_model
from hpcdl.models.model import Abilities, ModelWrapper, abilities_of, layers_of, unwrapped, wrapper_of


class Plain:
    """A user's model that declares nothing."""


class Scored(Plain):
    sparse, rows_at_once, device, extra = True, 7, "a GPU", {}

    def evaluate(self, parameters, batch):
        return 0.0, 0.0


class Declared(Scored):
    abilities = Abilities(rows_at_once=3)


@pytest.mark.parametrize(
    ("model", "can"),
    [
        (Plain(), Abilities(CPU, rows_at_once=1024)),
        (Scored(), Abilities("a GPU", sparse=True, rows_at_once=7, evaluate=True, buffers=True)),
        (Declared(), Abilities(rows_at_once=3)),
        (make_model("linear", (2,), 0), Abilities(evaluate=True, layers=True, pool=True)),
        (
            make_model("gpt:layers=1,width=4,heads=1,context=8", (8,), 5, text=True),
            Abilities(rows_at_once=512, evaluate=True, generate=True, layers=True, pool=True),
        ),
    ],
)
def test_what_a_model_can_do(model, can):
    assert abilities_of(model) == abilities_of(ModelWrapper(ModelWrapper(model))) == can
    assert layers_of(ModelWrapper(model)) == (model.layers if can.layers else None)


def test_wrappers_are_found_from_outside():
    class Slow(ModelWrapper):
        pass

    model = Plain()
    slow = Slow(model)
    outer = ModelWrapper(slow)
    assert wrapper_of(outer, Slow) is slow and wrapper_of(outer, ModelWrapper) is outer
    assert wrapper_of(model, Slow) is None and unwrapped(outer) is model
