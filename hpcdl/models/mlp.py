"""The multi-layer perceptron; without hidden layers it is a linear model. The loss tells the models apart:

    x -> relu(x W1 + b1) -> ... -> h Wn + bn -> softmax -> cross-entropy                          softmax, mlp
                                            -> values  -> half the squared error, or Huber's      linear, mlp
    x -> x w + b                            -> 1 / (1 + exp(-z)) -> cross-entropy                 logistic
                                            -> z > 0   -> the hinge loss                          svm

Without hidden layers all losses are convex. The support vector machine usually has an L2 penalty:

    1/n sum over i of max(0, 1 - (2 y_i - 1) (x_i w + b)) + weight_decay / 2 |(w, b)|^2

(Rumelhart, Hinton and Williams, "Learning representations by back-propagating errors", Nature 1986; Cortes and Vapnik,
"Support-vector networks", Machine Learning 1995)"""

from collections.abc import Callable, Sequence
from typing import Any

from hpcdl.kernels.device import CPU, Device
from hpcdl.models.layered import Layered
from hpcdl.models.layers import dense_layers
from hpcdl.models.pool import Pool


class MLP(Layered):
    """Dense layers from widths[0] features to widths[-1] outputs, with the activation between them; then the loss."""

    def __init__(self, widths: Sequence[int], activation: str, loss: Callable, dtype: Any, device: Device = CPU):
        pool = Pool(dtype, device)
        super().__init__(widths[0], [*dense_layers(widths, activation, pool), loss(pool)], pool)
