"""The form of a linear model, for methods that work on single examples and coordinates.

    z = x W + b        W (features, outputs) row by row, then b (outputs,): the whole flat vector
    loss               squared, logistic, hinge, or softmax with a class for each output

The gradient of an example by W is x times the slopes of its loss, one number for each output. So a table of slopes
represents a table of gradients (SAGA), one dual variable per example suffices (SDCA), HOGWILD! updates are sparse."""

from typing import Any, NamedTuple

from hpcdl.errors import UsageError
from hpcdl.kernels.linear import HINGE, LOGISTIC, SOFTMAX, SQUARED
from hpcdl.models.layered import Layered
from hpcdl.models.layers import Dense, Identity
from hpcdl.models.losses import Hinge, Huber, Logistic, SoftmaxCrossEntropy, Squared
from hpcdl.models.model import unwrapped

LOSSES: dict[type, int] = {Squared: SQUARED, Logistic: LOGISTIC, Hinge: HINGE, SoftmaxCrossEntropy: SOFTMAX}


class LinearForm(NamedTuple):
    """The form of a linear model; loss: its number in hpcdl.kernels.linear.
    Parameter j * outputs + k is the weight of feature j for output k, parameter features * outputs + k its bias."""

    loss: int
    features: int
    outputs: int


def linear_form(model: Any, what: str, losses: tuple[int, ...] = (SQUARED, LOGISTIC, HINGE, SOFTMAX)) -> LinearForm:
    """Return the form of a built-in linear model with one of these losses. Raises UsageError for another model.
    what: the program or option that needs the form, for the message, such as "train-hogwild"."""
    model = unwrapped(model)
    layers = model.layers if isinstance(model, Layered) else []
    if len(layers) == 2 and isinstance(layers[0], Dense) and layers[0].activation is Identity:
        kind = LOSSES.get(type(layers[1]))
        if layers[1].class_weights is not None:
            raise UsageError(f"{what} knows no class weights: leave out --class-weight, or take train-allreduce")
        if kind in losses:
            return LinearForm(int(kind), layers[0].full_shapes["weight"][0], layers[0].full_shapes["weight"][1])
        if isinstance(layers[1], Huber):
            raise UsageError(f"{what} knows no Huber loss; take --loss squared")
    names = {SQUARED: "linear", LOGISTIC: "logistic", HINGE: "svm", SOFTMAX: "softmax"}
    *others, last = [names[kind] for kind in losses]
    wanted = f"{', '.join(others)} or {last}" if others else last
    raise UsageError(f"{what} works on the coordinates of linear models: take --model {wanted}")
