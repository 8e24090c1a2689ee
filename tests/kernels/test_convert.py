"""Conversions to 16 bits and back, for every code, every tie and every kind of value, against numpy and exact sums."""

import numba
import numpy as np
import pytest

from hpcdl.kernels import convert

KINDS = ["float16", "bfloat16"]
CODES = np.arange(1 << 16, dtype=np.uint16)


def kernels(kind):
    return [getattr(convert, f"{name}_{kind}") for name in ("encode", "decode", "add")]


def values(kind):
    """Return the float32 value of each code, computed otherwise than by the kernels."""
    return CODES.view("f2").astype("f4") if kind == "float16" else (CODES.astype("u4") << 16).view("f4")


def nearest(kind, v):
    """Return the codes of the values nearest to float32 v, a tie to the even code, by a search in all codes' values."""
    table = values(kind)[: 1 << 15]
    finite = int(np.isfinite(table).sum())
    table = table[:finite].astype("f8")
    table = np.append(table, 2 * table[finite - 1] - table[finite - 2])  # infinity, as the next value would be
    size = np.abs(v.astype("f8"))
    above = np.clip(np.searchsorted(table, size), 1, finite)
    low, high = size - table[above - 1], table[above] - size
    code = np.where((low < high) | ((low == high) & (above % 2 == 1)), above - 1, above)
    return (code + np.where(np.signbit(v), 1 << 15, 0)).astype("u2")


def agree(kind, code, wanted):
    """Return True if two arrays of codes have equal values; NaN equals NaN, and -0 equals 0."""
    return np.array_equal(values(kind)[code], values(kind)[wanted], equal_nan=True)


def edges(kind):
    """Return each value and each tie of two neighbours, with the float32 numbers below and above; of both signs."""
    table = values(kind)[: 1 << 15]
    table = table[np.isfinite(table)].astype("f8")
    points = np.concatenate([table, (table[1:] + table[:-1]) / 2, [(3 * table[-1] - table[-2]) / 2]]).astype("f4")
    points = np.concatenate([points, np.nextafter(points, np.float32(0)), np.nextafter(points, np.float32(np.inf))])
    return np.concatenate([points, -points])


def encoded(kind, x, residual=None):
    residual, code = np.zeros_like(x) if residual is None else residual, np.empty(x.size, "u2")
    kernels(kind)[0](x, residual, code)
    return code, residual


@pytest.mark.parametrize("kind", KINDS)
def test_every_code_is_decoded_to_its_value_and_encoded_back(kind, dtype):
    _, decode, add = kernels(kind)
    into, wanted = np.full(CODES.size, 7, dtype), values(kind)
    decode(into, CODES)
    np.testing.assert_array_equal(into, wanted)  # a NaN equals a NaN here
    assert np.array_equal(np.signbit(into), np.signbit(wanted))
    code, left = encoded(kind, into)
    assert agree(kind, code, CODES) and not left[np.isfinite(wanted)].any()
    total = np.full(CODES.size, 0.5, dtype)
    add(total, CODES)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(total, wanted.astype(dtype) + np.asarray(0.5, dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_all_ties_and_their_neighbours_are_rounded_to_nearest_even(kind):
    v = edges(kind)
    code, _ = encoded(kind, v)
    assert agree(kind, code, nearest(kind, v))
    if kind == "float16":
        with np.errstate(over="ignore"):
            assert agree(kind, code, v.astype("f2").view("u2"))


@pytest.mark.parametrize("kind", KINDS)
def test_any_float32(kind):
    v = np.random.default_rng(1).integers(0, 1 << 32, 300_000, dtype="u4").view("f4")  # all exponents, NaN among them
    v[:4] = 0.0, -0.0, np.inf, -np.inf
    code, left = encoded(kind, v)
    number = ~np.isnan(v)
    assert agree(kind, code[number], nearest(kind, v[number]))
    assert np.isnan(values(kind)[code[~number]]).all() and (~number).any()
    back = values(kind)[code]
    finite = np.isfinite(back)
    np.testing.assert_array_equal(left[finite].astype("f8"), v[finite].astype("f8") - back[finite])  # not one bit lost
    assert not np.isfinite(left[~finite]).any()


def test_bfloat16_as_torch_has_it():
    torch = pytest.importorskip("torch")
    v = edges("bfloat16")
    wanted = torch.from_numpy(v).to(torch.bfloat16).view(torch.int16).numpy().view("u2")
    assert agree("bfloat16", encoded("bfloat16", v)[0], wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_what_rounding_leaves_comes_with_the_next_value(kind, dtype):
    random = np.random.default_rng(2)
    residual, given, arrived = np.zeros(1000, dtype), np.zeros(1000), np.zeros(1000)
    for _ in range(20):
        x = random.standard_normal(1000).astype(dtype)
        before, v = residual.copy(), x + residual
        code, residual = encoded(kind, x, residual)
        assert agree(kind, code, nearest(kind, v.astype("f4")))
        np.testing.assert_array_equal(values(kind)[code] + residual.astype("f8"), v.astype("f8"))
        assert np.abs(v.astype("f8") - (x.astype("f8") + before)).max() <= np.finfo(dtype).eps * np.abs(v).max()
        given, arrived = given + x, arrived + values(kind)[code]
    unit = 2.0**-11 if kind == "float16" else 2.0**-8
    assert np.abs(given - arrived).max() <= unit * np.abs(v).max() * 1.01  # one rounding's error after 20 of them
    assert np.abs(given - arrived).max() > 0


def test_float16_by_bits_is_the_same():
    """The operations for a processor without the instruction: compiled, and as plain Python, as in the simulator."""
    to, back = numba.njit(convert.to_float16), numba.njit(convert.from_float16)
    np.testing.assert_array_equal([back(code) for code in CODES], values("float16"))
    np.testing.assert_array_equal([convert.from_float16(code) for code in CODES[::97]], values("float16")[CODES[::97]])
    v = edges("float16")
    assert np.array_equal([to(each) for each in v], nearest("float16", v))
    assert np.array_equal([convert.to_float16(each) for each in v[::997]], nearest("float16", v[::997]))
    special = np.array([np.nan, np.inf, -np.inf], "f4")
    for way in (to, convert.to_float16):
        np.testing.assert_array_equal(values("float16")[[way(each) for each in special]], special)


def test_a_processor_without_float16(launch, tmp_path):
    """LLVM's conversion would call a function that is not linked, and the process would end."""
    program = tmp_path / "plain.py"
    program.write_text(
        "import numpy as np\n"
        "from hpcdl.kernels import convert\n"
        "x, code = np.float32([1 + 2**-11, 70000, 3e-8]), np.empty(3, 'u2')\n"
        "convert.encode_float16(x, np.zeros(3, 'f4'), code)\n"
        "print(convert.has_float16(), code.tolist())\n"
    )
    plain = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": str(tmp_path)}
    done = launch(1, program, check=0, **plain)
    assert done.stdout.split(maxsplit=1)[1].strip() == "[15360, 31744, 1]"
