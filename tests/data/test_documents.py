"""Texts of every source become the rows that Python and the library's own calls give, on any number of ranks."""

import gzip
import itertools
import json
import shutil

import h5py
import numpy as np
import pytest
import zstandard
from in_process import ends

from hpcdl.data import open_data
from hpcdl.data.format import read_info
from hpcdl.data.formats import documents, prepare_documents, tokenizer
from hpcdl.data.formats.documents import TextOptions, find_sources
from hpcdl.data.formats.prepare import Output
from hpcdl.data.formats.shard_writer import ShardWriter
from hpcdl.errors import UsageError

WORDS = ["the", "model", "of", "süß", "is", "sent,", "not", "5", "€", "there;", "🎈", "and\n\nthen", "", "it\tends.\n"]
LENGTH = 8


def texts(count, seed=0, most=60):
    """Return documents, the first of them longer than a part; each holds a word of its own."""
    random = np.random.default_rng(seed)
    sizes = [200, *random.integers(1, most, count - 1)]
    return [" ".join([f"w{k}w", *random.choice(WORDS, size)]) for k, size in enumerate(sizes)]


@pytest.fixture
def small(monkeypatch):
    """Pieces and parts of a few bytes."""
    monkeypatch.setattr(documents, "PIECE", 700)
    monkeypatch.setattr(documents, "PART", 100)


def write_sources(folder, found):
    """Write the documents in every form; return the sources by name, with options and the text that was read."""
    folder.mkdir()
    (folder / "texts").mkdir()
    for k, each in enumerate(found):
        (folder / "texts" / f"{k:03}.txt").write_bytes(each.encode())
    (folder / "texts" / "empty.txt").touch()
    lines = [text.rstrip("\n") + "\n" for text in found]
    joined = "END\n".join(lines).encode()
    records = "".join(json.dumps({"id": k, "body": each}) + "\n" * (1 + k % 2) for k, each in enumerate(found)).encode()
    pack = {"": bytes, ".gz": gzip.compress}
    pack[".zst"] = lambda data: b"".join(
        map(zstandard.ZstdCompressor().compress, (data[:500], data[500:]))
    )  # two frames
    for ending, packed in pack.items():
        (folder / f"joined.txt{ending}").write_bytes(packed(joined))
        (folder / f"records.jsonl{ending}").write_bytes(packed(records))
    sources = {"texts": (["texts"], {}, found), "pattern": (["texts/0*.txt"], {}, found)}
    for ending in pack:
        sources[f"joined{ending}"] = [f"joined.txt{ending}"], {"document_separator": "END"}, lines
        sources[f"records{ending}"] = [f"records.jsonl{ending}"], {"field": "body"}, found
    return sources


SOURCES = ["texts", "pattern", *(f"{name}{end}" for name in ("joined", "records") for end in ("", ".gz", ".zst"))]


def options_of(about):
    return TextOptions(about.get("document_separator"), about.get("field", "text"))


@pytest.mark.parametrize("name", [*SOURCES, "parquet"])
def test_documents_of_every_source(tmp_path, small, name):
    found = texts(30)
    if name == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.table({"text": [*found, None]}), tmp_path / "a.parquet", row_group_size=7)
        names, about, expected = ["a.parquet"], {}, [*found, ""]
        folder = tmp_path
    else:
        folder = tmp_path / "in"
        names, about, expected = write_sources(folder, found)[name]
    corpus = prepare_documents._plan([folder / each for each in names], options_of(about), 0.1, None)
    assert corpus.documents == len(expected) and corpus.first_test == len(expected) - len(expected) // 10
    parts = [part for piece in corpus.pieces for part in corpus.parts(piece)]
    by_document = itertools.groupby(parts, lambda part: part.document)
    read = [(number, "".join(part.text for part in each)) for number, each in by_document]
    assert read == [*enumerate(expected)]
    assert [part.ends for part in parts].count(True) == len(expected)
    if not name.endswith((".gz", ".zst")):
        assert len(corpus.pieces) > 3  # which ranks share


# --- rows


def streams(found, rows, pieces, end):
    """Return the token streams of documents, given as (piece, tokens), by plain Python."""
    if rows == "documents":
        return [[*tokens, end] for tokens in found]
    joined = []
    for piece in pieces:
        stream = []
        for number in piece:
            stream += [end] * bool(stream) + found[number]
        joined.append(stream)
    return joined


@pytest.mark.parametrize("rows", ["packed", "documents"])
@pytest.mark.parametrize("spec", ["bpe:300", "wordpiece:90", "chars", "bytes"])
def test_rows_are_those_of_the_librarys_own_calls(tmp_path, small, spec, rows):
    found = texts(30)
    names, _, _ = write_sources(tmp_path / "in", found)["texts"]
    folder = tmp_path / "in" / names[0]
    out = Output(tmp_path / "a.h5")
    info = prepare_documents.prepare_documents(folder, out, tokenizer=spec, length=LENGTH, rows=rows)
    with h5py.File(tmp_path / "a.h5") as file:
        read = {name: each[()] for group in ("train", "test") for name, each in file[group].items()}
        groups = {group: {name: each[()] for name, each in file[group].items()} for group in ("train", "test")}
    assert read
    vocabulary = info.vocabulary
    if spec in ("chars", "bytes"):
        tokens, end = [vocabulary.encode(text).tolist() for text in found], int(vocabulary.encode("\n")[0])
    else:
        library = vocabulary.tokenizer
        tokens, end = [library.encode(text).ids for text in found], library.token_to_id("<|end|>")
        assert groups["train"]["x"].dtype == (np.uint16 if spec == "bpe:300" else np.uint8) and len(vocabulary) > 80
        if spec == "bpe:300":
            assert [library.decode(each) for each in tokens] == found  # no unknown token
    corpus = prepare_documents._plan([folder], TextOptions(), 0.1, None)
    pieces = [[n for span in piece for n in range(span.first, span.first + span.documents)] for piece in corpus.pieces]
    left_out = 0
    for group, here in (("train", lambda n: n < 27), ("test", lambda n: n >= 27)):
        mine = [each for number, each in enumerate(tokens) if here(number)]
        first = 0 if group == "train" else 27
        parts = [[n - first for n in piece if here(n)] for piece in pieces]
        expected = streams(mine, rows, parts, end)
        x, y, owners = [], [], []
        for number, stream in enumerate(expected):
            count = max(0, len(stream) - 1) // LENGTH
            x += [stream[k * LENGTH : (k + 1) * LENGTH] for k in range(count)]
            y += [stream[(k + 1) * LENGTH] for k in range(count)]
            owners += [number] * count
            left_out += len(stream) - count * LENGTH - bool(count)
        assert groups[group]["x"].tolist() == x and groups[group]["y"].tolist() == y
        if rows == "documents" and group == "train":
            assert groups[group]["document"].tolist() == owners
        size = sum(len(found[number].encode()) for number in range(30) if here(number))
        ratio = size / sum(map(len, expected))
        assert info.schema.token_bytes[group] == ratio
    assert f"{left_out:,} of " in " ".join(out.summary)
    data = open_data(str(tmp_path / "a.h5"))  # a text as any other
    assert data.features == (LENGTH,) and data.classes == len(vocabulary)
    data.close()


def test_a_single_document_is_divided_by_its_tokens(tmp_path, small):
    """By characters and bytes it is the file of the whole text, also from a .gz; by bpe, tokens of a single call."""
    text = texts(1)[0] * 9
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text.encode()))
    for spec in ("chars", "bytes", "bpe:300"):
        read = []
        for name in ("a.txt", "a.txt.gz"):
            out = Output(tmp_path / f"{name}.h5", force=True, name="a")
            info = prepare_documents.prepare_documents(tmp_path / name, out, tokenizer=spec, length=LENGTH)
            with h5py.File(out.path) as file:
                read.append([file[group][name][()].tolist() for group in ("train", "test") for name in "xy"])
        assert read[0] == read[1]
        tokens = info.vocabulary.encode(text).tolist()
        cut = len(tokens) - len(tokens) // 10
        train, test = (np.ravel(x).tolist() for x in read[0][::2])
        assert train == tokens[: len(train)] and test == tokens[cut : cut + len(test)]


def test_words_of_a_document_are_not_special(tmp_path):
    (tmp_path / "a.txt").write_text("a<|end|>b " * 300)
    info = prepare_documents.prepare_documents(
        tmp_path / "a.txt", Output(tmp_path / "a.h5"), tokenizer="bpe:300", length=4
    )
    with h5py.File(tmp_path / "a.h5") as file:
        assert file["train/x"][()].min() > 0  # the end is token 0
    assert info.vocabulary.encode("a<|end|>b").tolist()[1] == 0 and info.vocabulary.decode([0]) == "<|end|>"


def test_words_are_cut_where_the_tokenizers_cut(tmp_path):
    """Random blanks, signs and letters: tokens by words are those of one call; and a safe place changes none."""
    signs = " \n\t\r\x1c\x85\xa0\u2003ab'sé€3,.<|end|>\u0301😀Σσ\u3000\v\f"
    random = np.random.default_rng(5)
    made = ["".join(random.choice([*signs], random.integers(0, 40))) for _ in range(800)]
    for spec in (("bpe", 280), ("wordpiece", 80)):
        encoder = tokenizer.Tokenizer(tokenizer.trained(*spec, texts(20)))
        assert encoder.pattern is not None
        for text in made:
            once = encoder._encode([text])[0]
            assert encoder.encode(text).tolist() == once
            cut = documents.safe(text)
            assert encoder._encode([text[:cut]])[0] + encoder._encode([text[cut:]])[0] == once


def test_a_tokenizer_from_elsewhere(tmp_path):
    """FILE.json with no end gets one; DATA.h5 gives its own; both may split words in any way."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    found = texts(12)
    foreign = Tokenizer(models.BPE(unk_token="?"))
    foreign.pre_tokenizer = pre_tokenizers.Metaspace()
    foreign.train_from_iterator(found, trainers.BpeTrainer(vocab_size=120, special_tokens=["?"], show_progress=False))
    foreign.enable_truncation(5)
    foreign.save(str(tmp_path / "t.json"))
    sources = write_sources(tmp_path / "in", found)
    names, about, _ = sources["records"]
    made = []
    for spec in (tmp_path / "t.json", tmp_path / "1.h5"):
        out = Output(tmp_path / f"{len(made) + 1}.h5", name="a")
        given = {"tokenizer": str(spec), "rows": "documents", "length": 4, **about}
        made.append(prepare_documents.prepare_documents(tmp_path / "in" / names[0], out, **given))
    assert (
        made[0].vocabulary.description == made[1].vocabulary.description
        and len(made[0].vocabulary) == foreign.get_vocab_size() + 1
    )
    foreign.no_truncation()
    with h5py.File(tmp_path / "2.h5") as file:
        x, y = file["train/x"][()], file["train/y"][()]
    assert x[0].tolist() == foreign.encode(found[0]).ids[:4] and y[0] == foreign.encode(found[0]).ids[4]
    made[0].schema.refuse_other_columns(made[1].schema, "b")
    (tmp_path / "none.json").write_text("{}")
    for spec, message in (("none.json", "none.json: a tokenizer is the JSON of"), ("1.h6", "--tokenizer is bpe:N")):
        with pytest.raises(UsageError, match=message):
            prepare_documents.prepare_documents(
                tmp_path / "in" / names[0], out, tokenizer=str(tmp_path / spec), **about
            )


# --- many ranks, and calls that are killed


def contents(path):
    """All of a data file, or of the files of a folder, but for the times beside the digests."""
    found = []
    for each in sorted(path.glob("*.h5")) if path.is_dir() else [path]:
        with h5py.File(each) as file:
            names = [f"{group}/{name}" for group in ("train", "test") if group in file for name in sorted(file[group])]
            found += [(name, file[name][()].tolist()) for name in names]
            found += [file.attrs["digest"].split()[0], file.attrs["bytes_per_token"]]
    return found


@pytest.mark.parametrize("out", ["o.h5", "o/"])
def test_any_number_of_ranks_makes_the_same(each_group, mpi_tmp_path, small, out):
    def body(comm):
        folder = mpi_tmp_path / f"{comm.size}-{comm.Get_name()[:0]}in"
        if comm.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            write_sources(folder, texts(40))
        comm.Barrier()
        names = [folder / "texts", folder / "joined.txt.zst"]
        for spec in ("bpe:300", "chars"):
            given = {"tokenizer": spec, "length": LENGTH, "document_separator": "END"}
            output = Output(f"{folder}/{spec[:3]}{out}", name="a", shard_size=1500, force=True)
            prepare_documents.prepare_documents(names, output, comm=comm, **given)
            if comm.rank == 0:
                alone = Output(f"{folder}/{spec[:3]}1{out}", name="a", shard_size=1500, force=True)
                prepare_documents.prepare_documents(names, alone, **given)
                assert contents(output.path) == contents(alone.path)
                one, read = read_info(output.path), f"{folder}/{spec[:3]}o.h5"
                if out.endswith("/"):
                    assert len([*output.path.glob("*.h5")]) > 2
                    file = Output(read, name="a", force=True)
                    same = prepare_documents.prepare_documents(names, file, **given)
                    assert same.schema.describe() == one.schema.describe() and same.rows == one.rows
        comm.Barrier()

    each_group(body, least=1)


def test_a_killed_call_is_gone_on_with(tmp_path, small, monkeypatch):
    names, about, _ = write_sources(tmp_path / "in", texts(40))["joined"]
    given = {"tokenizer": "bpe:300", "length": LENGTH, "rows": "documents", **about}

    def prepare(name):
        output = Output(tmp_path / name, name="a", force=True)
        prepare_documents.prepare_documents(tmp_path / "in" / names[0], output, **given)
        return output

    whole, written, write = prepare("whole.h5"), [], ShardWriter.write

    def killed(self, number, *rest, **about):
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(number)
        write(self, number, *rest, **about)

    monkeypatch.setattr(ShardWriter, "write", killed)
    with pytest.raises(KeyboardInterrupt):
        prepare("a.h5")
    assert not (tmp_path / "a.h5").exists()
    again = []
    monkeypatch.setattr(
        ShardWriter, "write", lambda self, n, *rest, **about: (again.append(n), write(self, n, *rest, **about))
    )
    output = prepare("a.h5")
    assert written == [0, 1, 2] and again[0] == 3
    assert contents(tmp_path / "a.h5") == contents(tmp_path / "whole.h5") and output.summary == whole.summary


def test_a_document_is_on_one_side_only(tmp_path, small):
    names, about, _ = write_sources(tmp_path / "in", texts(40, most=90))["records"]
    for rows in ("packed", "documents"):
        output = Output(tmp_path / f"{rows}.h5")
        info = prepare_documents.prepare_documents(
            tmp_path / "in" / names[0], output, tokenizer="bpe:400", length=4, rows=rows, test_fraction=0.3, **about
        )
        with h5py.File(output.path) as file:
            train, test = (info.vocabulary.decode(file[group]["x"][()]) for group in ("train", "test"))
            assert ("document" in file["train"]) == (rows == "documents")
            assert rows == "packed" or set(file["train/document"][()]) <= set(range(28))
        sides = [{number for number in range(40) if f"w{number}w" in text} for text in (train, test)]
        assert sides[0] <= set(range(28)) and sides[1] <= set(range(28, 40)) and min(map(len, sides)) > 8
    assert read_info(output.path).rows["test"]


# --- what is refused


def truncated(folder, name, keep):
    path = folder / "in" / name
    path.write_bytes(path.read_bytes()[:keep])


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (b'{"text": "a"}\n\n{"text": "\xff"}\n', "a.jsonl", "a.jsonl, line 3 is not UTF-8: byte 10 of the line"),
        (
            b'{"text": "a"}\n{"txt": "b"}\n',
            "a.jsonl",
            "a.jsonl, line 2 has no text 'text' (it has: 'txt'); name the --field",
        ),
        (b'{"text": "a"}\n[1]\n', "a.jsonl", "line 2 has no text 'text' (it has: it is no object)"),
        (b'{"text": "a"}\n{"text": 1}\n', "a.jsonl", "line 2 has no text 'text'"),
        (b'{"text": "a"}\n{"text": \n', "a.jsonl", "line 2 is no JSON: "),
        (b'{"text": "a"}\n' + b"[" * 99999, "a.jsonl", "line 2 is no JSON: "),
        (b"\n\n", "a.jsonl", "there is no document in it"),
        (b"", "a.jsonl", "a.jsonl is empty; leave it out"),
        (b"", "a.txt.gz", "a.txt.gz is empty; leave it out"),
        (gzip.compress(b"word " * 9999)[:-9], "a.txt.gz", "a.txt.gz cannot be read: Compressed file ended"),
        (b"no gzip at all", "a.txt.gz", "a.txt.gz cannot be read: Not a gzipped file"),
        (
            zstandard.compress(bytes(range(250)) * 999)[:90],
            "a.txt.zst",
            "a.txt.zst cannot be read: the compressed file ends",
        ),
        (b"no zstd at all", "a.txt.zst", "a.txt.zst cannot be read: zstd decompress"),
        (b"PAR1 no parquet", "a.parquet", "a.parquet cannot be read: "),
        (b"word \xff" * 99, "a.txt", "a.txt is not utf-8: byte 5 cannot be decoded; name its --encoding"),
        (b"word" * 500_000 + b"\xe2\x82", "a.txt", "a.txt is not utf-8: byte 2000000 cannot be decoded"),
    ],
)
def test_broken_sources_are_one_line(tmp_path, content, name, message):
    (tmp_path / name).write_bytes(content)
    given = ["text", str(tmp_path / name), str(tmp_path / "a.h5"), "--tokenizer", "bpe:300", "--length", "2"]
    status, said = ends("prepare_data", given)
    assert status == 2 and message in said and {each.name for each in tmp_path.iterdir()} == {name}


def test_what_cannot_be(tmp_path):
    (tmp_path / "a.txt").write_text("words of a text\n" * 99)
    (tmp_path / "b.txt").write_text("words\0of a text\n" * 99)
    (tmp_path / "empty").mkdir()
    cases = [
        (["*.text"], [], "no file has a name like"),
        (["empty"], [], "the folder"),
        (["a.txt"], ["--tokenizer", "bpe:12"], "write bpe:N for N tokens, from 257 to 1048576, as bpe:8192"),
        (["a.txt"], ["--tokenizer", "words"], "--tokenizer is bpe:N, wordpiece:N, FILE.json, DATA.h5, chars or bytes"),
        (["a.txt"], ["--tokenizer", "x.json"], "x.json cannot be read: No such file"),
        (["a.txt"], ["--tokenizer", "digits.h5"], "does not exist"),
        (["a.txt"], ["--tokenizer", "bytes", "--level", "byte"], "say the same"),
        (["a.txt"], ["--tokenizer-sample", "much"], "--tokenizer-sample much: write a number of bytes"),
        (["a.txt", "b.txt"], [], r"holds '\x00', which is not plain text; leave it out, or use --tokenizer bytes"),
        (["a.txt"], ["--encoding", "utf-16", "--document-separator", "END"], "cannot be found in utf-16"),
        (["a.txt"], ["--encoding", "none", "--document-separator", "END"], "unknown text encoding 'none'"),
        (["a.txt"], ["--encoding", "rot13", "--tokenizer", "bpe:300"], "unknown text encoding 'rot13'"),  # not of bytes
        (
            ["a.txt"],
            ["--length", "5000", "--tokenizer", "bpe:300"],
            "tokens; rows of 5000 and a test fraction of 0.1 need",
        ),
        (["a.txt", "a.txt"], ["--length", "5000", "--rows", "documents"], "need "),
    ]
    for names, options, message in cases:
        sources = [str(tmp_path / name) for name in names]
        status, said = ends("prepare_data", ["text", *sources, str(tmp_path / "a.h5"), *options])
        assert (status, message in said) == (2, True), said
        assert not (tmp_path / "a.h5").exists() and not [*tmp_path.glob(".*")]


def test_order_of_sources(tmp_path):
    for name in ("b/2.txt", "b/10.txt", "b/.hidden", "a/z.txt", "a/.git/c.txt", "c.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "b/more").symlink_to(tmp_path / "a")
    found = find_sources([tmp_path / "c.txt", tmp_path / "b", f"{tmp_path}/*/*.txt"])
    wanted = ["c.txt", "b/10.txt", "b/2.txt", "b/more/z.txt", "a/z.txt"]
    assert [each.removeprefix(f"{tmp_path}/") for each in found] == wanted
