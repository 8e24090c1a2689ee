"""A convolutional network for images, which any strategy trains: McMahan et al.'s for the digits of MNIST.

    cd docs/examples
    mpiexec -n 4 hpcdl train-allreduce --data fashion.h5 --model torch:cnn:make --epochs 5
    mpiexec -n 4 hpcdl train-gossip --data digits --model torch:cnn:make,width=8,hidden=32,kernel=3

    image, h x w    5 x 5, 32 channels    halved    5 x 5, 64 channels    halved    512    classes

It has 1,663,370 parameters for images of 28 x 28 and 10 classes. As it is an nn.Sequential it can be cut by its layers,
too: train-pipeline, train-model-parallel and train-fully-sharded take it as it is.

(McMahan et al., "Communication-efficient learning of deep networks from decentralized data", AISTATS 2017)
"""

from torch import nn


class Images(nn.Module):
    """Rows as a data file has them, (rows, h, w) or (rows, h, w, channels), as PyTorch's: (rows, channels, h, w)."""

    def forward(self, x):
        return x.unsqueeze(1) if x.ndim == 3 else x.movedim(3, 1)


def make(features, classes, width=32, hidden=512, kernel=5, dropout=0.0):
    """The network, for images of the shape `features`; width: channels of the first layer, half those of the next."""
    height, breadth, channels = (*features, 1)[:3]
    inner = 2 * width * (height // 4) * (breadth // 4)
    return nn.Sequential(
        Images(),
        nn.Conv2d(channels, width, kernel, padding="same"),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, kernel, padding="same"),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(inner, hidden),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(hidden, classes),
    )
