"""One rank, two ranks."""

import pytest

from hpcdl.words import counted


@pytest.mark.parametrize(
    "number, noun, form, text",
    [
        (0, "step", "", "0 steps"),
        (1, "rank", "", "1 rank"),
        (2, "class", "", "2 classes"),
        (1.0, "epoch", "g", "1 epoch"),
        (0.5, "epoch", "g", "0.5 epochs"),
        (1438, "training row", ",", "1,438 training rows"),
        (3, "batch", "", "3 batches"),
    ],
)
def test_the_noun_agrees_with_the_number_as_it_is_shown(number, noun, form, text):
    assert counted(number, noun, form) == text
