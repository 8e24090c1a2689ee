"""Named models: their parameters layer by layer, and the memory of their state on a lecture's slide."""

import pytest

from hpcdl.models.configurations import ADAM_BYTES, CONFIGURATIONS
from hpcdl.planning.memory_report import configuration, configurations


@pytest.mark.parametrize(
    "name, count",
    [
        ("bert-large", 335_141_888),  # as published of the encoder with its pooler
        ("gpt2-xl", 1_557_611_200),
        ("turing-nlg", 17_176_845_728),
        ("gpt3", 174_604_259_328),
    ],
)
def test_parameters_are_those_of_the_formula(name, count):
    each = CONFIGURATIONS[name]
    w, n = each.width, each.layers
    by_formula = 12 * n * w**2 + 13 * n * w + (each.vocabulary + each.context) * w + 2 * w + each.beyond
    assert each.parameters == by_formula == count == sum(number for _, number in each.by_layer())


@pytest.mark.parametrize("name, units, count", [("8b", 14336, 8_030_261_248), ("70b", 28672, 70_553_706_496)])
def test_parameters_of_llama_3_are_those_of_its_released_models(name, units, count):
    """Two tables; a block has q and out, k and v of an eighth or a fourth of the heads, three matrices, two norms."""
    each = CONFIGURATIONS[f"llama3-{name}"]
    w, kv = each.width, 8 * each.width // each.heads
    block = 2 * w**2 + 2 * w * kv + 3 * w * units + 2 * w
    assert each.parameters == 2 * each.vocabulary * w + each.layers * block + w == count
    assert round(each.parameters / 1e9) == pytest.approx(each.nominal, rel=0.02)


def test_parameters_of_mixtral_are_those_of_its_released_model():
    """A block has 8 experts of three matrices and a router; of the parameters a token passes the 12.9 billion of 2."""
    each = CONFIGURATIONS["mixtral-8x7b"]
    w, expert = 4096, 3 * 4096 * 14336
    block = 2 * w**2 + 2 * w * 1024 + 8 * expert + 8 * w + 2 * w
    assert each.parameters == 2 * 32000 * w + 32 * block + w == 46_702_792_704
    assert round(each.parameters / 1e9, 1) == each.nominal
    assert round((each.parameters - 32 * 6 * expert) / 1e9, 1) == 12.9


def test_parameters_of_deepseek_v3_are_those_of_its_released_model():
    """Its release has 256 numbers more in each of 58 routers, for a bias that our router lacks. The published 37 x 10^9
    that a token passes are without the table of embeddings, of which a token has one row."""
    each = CONFIGURATIONS["deepseek-v3"]
    w, expert, table = 7168, 3 * 7168 * 2048, 129280 * 7168
    queries, keys = w * 1536 + 1536 + 1536 * 128 * 192, w * 576 + 512 + 512 * 128 * 256
    attention = queries + keys + 128 * 128 * w + w
    mixture = 257 * expert + 256 * w + w
    assert each.parameters == 2 * table + 61 * attention + 3 * (3 * w * 18432 + w) + 58 * mixture + w == 671_026_404_352
    assert each.parameters + 58 * 256 == 671_026_419_200
    passed = each.parameters - 58 * 248 * expert
    assert each.parameters / 1e9 == pytest.approx(each.nominal, rel=0.005) and round((passed - table) / 1e9) == 37


def test_the_slides_figures_are_16_bytes_of_its_rounded_parameters():
    slides = {name: each for name, each in CONFIGURATIONS.items() if each.slide is not None}
    products = {name: ADAM_BYTES * each.nominal for name, each in slides.items()}
    assert products == pytest.approx({"bert-large": 5.12, "gpt2-xl": 24, "turing-nlg": 275.2, "gpt3": 2800})
    for name, each in slides.items():
        assert each.slide == pytest.approx(products[name], rel=0.001)
        assert ADAM_BYTES * each.parameters / 1e9 == pytest.approx(each.slide, rel=0.05)


def test_tables():
    lines = configurations()
    assert len(lines) == 9 and "2,793.67 GB" in lines[4] and lines[4].endswith("2,800 GB") and lines[6].endswith(" -")
    shown = configuration("gpt2-xl")
    assert shown[0].startswith("Radford et al.")
    assert "attention of 48 blocks" in "\n".join(shown)
    assert shown[-1].split() == ["all", "1,557,611,200", "24,921,779,200"]
