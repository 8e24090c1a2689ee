"""A small residual network for images, with a choice of what normalizes; batch norm depends on who shares a batch.

    cd docs/examples
    mpiexec -n 4 hpcdl train-allreduce --data fashion.h5 --model torch:resnet:make --optimizer momentum --lr 0.1
    mpiexec -n 4 hpcdl train-pipeline --data fashion.h5 --model torch:resnet:make,norm=group

    block       x -> 3 x 3 -> norm -> relu -> 3 x 3 -> norm -> + x -> relu
    network     3 x 3 to `width` channels, then a stage of blocks for each of `stages`: from the second on half the size
                and twice the channels; the mean over the image; classes

norm     batch    statistics of the rows that a rank has at once, as nn.BatchNorm2d in any data-parallel training
         group    of each row by itself: the same steps on any number of ranks
         frozen   batch norm in evaluation mode: the statistics stay as they are, as in fine-tuning

(He et al., "Deep residual learning for image recognition", CVPR 2016; Wu and He, "Group normalization", ECCV 2018)
"""

from cnn import Images
from torch import nn


class Frozen(nn.BatchNorm2d):
    """Batch norm that always evaluates."""

    def train(self, mode=True):
        return super().train(False)


NORMS = {"batch": nn.BatchNorm2d, "frozen": Frozen, "group": lambda channels: nn.GroupNorm(min(8, channels), channels)}


class Block(nn.Module):
    """Two convolutions and a way past them, of 1 x 1 where the shape changes."""

    def __init__(self, before, channels, stride, norm):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(before, channels, 3, stride, padding=1, bias=False),
            norm(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            norm(channels),
        )
        self.past = nn.Identity()
        if stride > 1 or before != channels:
            self.past = nn.Sequential(nn.Conv2d(before, channels, 1, stride, bias=False), norm(channels))

    def forward(self, x):
        return (self.layers(x) + self.past(x)).relu()


def make(features, classes, width=16, stages=3, blocks=1, norm="batch"):
    """The network, for images of the shape `features`; blocks: of each stage."""
    channels, kind = (*features, 1)[2], NORMS[norm]
    layers = [Images(), nn.Conv2d(channels, width, 3, padding=1, bias=False), kind(width), nn.ReLU()]
    before = width
    for stage in range(stages):
        for number in range(blocks):
            now = width << stage
            layers.append(Block(before, now, 2 if stage and not number else 1, kind))
            before = now
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))
