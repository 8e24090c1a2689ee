"""Numbers and their nouns, as in 1 rank, 2 ranks."""

ES = ("s", "x", "tch", "sh")  # how nouns end whose plural takes -es


def counted(number: float, noun: str, form: str = "") -> str:
    """The number in this format, and the noun in the singular where that reads 1.

    >>> counted(1, "rank"), counted(2, "class"), counted(1438, "training row", ","), counted(0.5, "epoch", "g")
    ('1 rank', '2 classes', '1,438 training rows', '0.5 epochs')
    """
    text = format(number, form)
    return f"{text} {noun if text == '1' else noun + ('es' if noun.endswith(ES) else 's')}"
