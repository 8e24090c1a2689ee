"""Gossip: what is foretold is what a run holds, whatever the method and the graph."""

import pytest


@pytest.mark.parametrize(
    "more",
    [
        ["--topology", "exponential"],
        ["--method", "dpsgd", "--topology", "one-peer"],
        ["--method", "gradient-tracking"],
        ["--method", "detag", "--optimizer", "sgd"],
        ["--method", "defacto", "--topology", "hypercube"],
    ],
    ids=" ".join,
)
def test_methods(foretold, more):
    foretold(4, "train-gossip", "--steps", "6", *more)


def test_pairs_hold_what_is_on_its_way(foretold):
    foretold(2, "train-gossip", "--steps", "60", "--method", "adpsgd")
