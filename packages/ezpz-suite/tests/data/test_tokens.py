"""Files of tokens: written whole or not at all, read in blocks, refused when they are not right."""

import os
import pickle
import textwrap

import numpy as np
import pytest
import torch

from ezpz.data import (
    TokenBlocks,
    huggingface_texts,
    python_sources,
    read_header,
    text_files,
    write_tokens,
)
from ezpz_dist import DataError


@pytest.fixture
def path(tmp_path):
    (tmp_path / "a.txt").write_text("first")
    texts = ["", "second", "third"]
    return write_tokens(tmp_path / "text.tokens", [tmp_path / "a.txt"], texts=texts, progress=False)


def test_bytes_and_documents(path):
    header = read_header(path, verify=True)
    assert (header.vocab_size, header.tokens, header.documents) == (256, 19, 3)
    blocks = TokenBlocks(path, 5)
    assert len(blocks) == 3
    assert bytes(np.load(path, mmap_mode="r")) == b"first\0second\0third\0"
    tokens, targets = blocks[0]
    assert tokens.dtype == targets.dtype == torch.int64
    assert bytes(tokens.tolist()) == b"first"
    assert bytes(targets.tolist()) == b"irst\0"
    assert bytes(blocks[-1][1].tolist()) == b"d\0thi"
    assert blocks.documents.tolist() == [0, 6, 13]
    with pytest.raises(IndexError, match="block 3 of 3"):
        blocks[3]
    raw = pickle.dumps(blocks)
    assert len(raw) < 1000, "a copy for a worker maps the file itself"
    assert torch.equal(pickle.loads(raw)[1][0], blocks[1][0])
    assert len(TokenBlocks(path, 18)) == 1
    for block in (0, 19):
        with pytest.raises(DataError, match="expected 1 to 18"):
            TokenBlocks(path, block)


@pytest.mark.parametrize(("vocab_size", "itemsize"), [(256, 1), (257, 2), (65_537, 4)])
def test_a_tokenizer(tmp_path, vocab_size, itemsize):
    def encode(text):
        return [len(text), vocab_size - 2]

    path = write_tokens(
        tmp_path / "a", texts=["abc", "abcd"], encode=encode, vocab_size=vocab_size,
        separator=vocab_size - 1, progress=False,
    )  # fmt: skip
    assert read_header(path).itemsize == itemsize
    blocks = TokenBlocks(path, 5)
    assert blocks[0][0].tolist() == [3, vocab_size - 2, vocab_size - 1, 4, vocab_size - 2]
    assert blocks.vocab_size == vocab_size


def change(path, at, by):
    raw = bytearray(path.read_bytes())
    raw[at : at + len(by)] = by
    path.write_bytes(raw)


def index_of(path):
    return path.with_name(f"{path.name}.index.npz")


def of_another(path):
    """An index beside tokens that it is not of: of as many bytes, but fewer tokens."""
    write_tokens(path, texts=["a" * 17], progress=False)
    other = write_tokens(
        path.with_name("other"), texts=["a"], encode=lambda text: range(9), vocab_size=257,
        progress=False,
    )  # fmt: skip
    index_of(other).replace(index_of(path))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes; .* it is truncated"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "longer than its index says"),
        (lambda path: path.write_text("text " * 50), "no file of tokens, .* with b'text tex'"),
        (lambda path: change(path, 128 + 3, b"X"), "checksum .* damaged, or mixed from two files"),
        (lambda path: change(path, 10, b"z"), "its header is damaged"),
        (of_another, r"has uint8 of shape \(18,\); expected uint16 of shape \(9,\), as its index"),
        (lambda path: path.unlink(), r"No such file or directory; write it by write_tokens\(\)"),
        (lambda path: index_of(path).unlink(), "text.tokens.index.npz is not beside it"),
        (lambda path: change(index_of(path), 200, b"X"), "index.npz: .*; expected a whole index"),
        (lambda path: index_of(path).write_bytes(b"text"), "index.npz: .*; expected a whole index"),
    ],
    ids=[
        "truncated", "longer", "text", "mixed", "header", "another-index", "missing",
        "no-index", "index", "text-as-index",
    ],
)  # fmt: skip
def test_what_is_not_right_is_refused(path, damage, words):
    damage(path)
    with pytest.raises(DataError, match=words):
        TokenBlocks(path, 5)


def test_damage_is_looked_for_unless_it_was_already(path):
    change(path, 128 + 3, b"X")
    assert read_header(path) == TokenBlocks(path, 5, verify=False).header
    with pytest.raises(DataError, match="mixed from two files"):
        read_header(path, verify=True)


def test_a_writer_that_fails_leaves_what_was_there(path, tmp_path):
    before = path.read_bytes()

    def texts():
        yield "more"
        raise RuntimeError("no more texts")

    with pytest.raises(RuntimeError, match="no more texts"):
        write_tokens(path, texts=texts(), progress=False)
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    options = {"encode": list, "vocab_size": 3, "progress": False}
    for more, words in (
        ({"texts": ["a"], "encode": lambda text: [5], "vocab_size": 3}, r"token 5; expected 0 to"),
        ({"texts": ["a"], "encode": lambda text: [-1], "vocab_size": 3}, "token -1"),
        ({"files": [tmp_path / "latin"], **options}, "latin: .*; expected UTF-8"),
        ({"files": [tmp_path / "none"]}, "No such file"),
        ({"texts": []}, "no documents"),
        ({"files": "text.txt"}, "files='text.txt'; expected a list"),
        ({"texts": "text"}, "texts='text'; expected a list"),
        ({"texts": [b"bytes"]}, r"texts\[0\] is bytes; expected a text"),
        ({"encode": list}, "expected both, or neither"),
        ({"separator": 256}, "expected a token, 0 to 255"),
    ):
        with pytest.raises(DataError, match=words):
            write_tokens(path, **{"progress": False, **more})
    assert path.read_bytes() == before
    names = {file.name for file in tmp_path.iterdir()}
    assert names == {"a.txt", "latin", path.name, index_of(path).name}
    # Also where even looking for what was begun is an error, as on a read-only file system.
    with pytest.raises(DataError, match="Not a directory"):
        write_tokens(path / "below", texts=["a"], progress=False)


def test_others_may_read_it_as_the_umask_says_and_progress_is_shown(tmp_path, capfd):
    old = os.umask(0o027)
    try:
        path = write_tokens(tmp_path / "a.tokens", texts=["a", "b"])
    finally:
        os.umask(old)
    assert [each.stat().st_mode & 0o777 for each in (path, index_of(path))] == [0o640] * 2
    assert "writing a.tokens" in "".join(capfd.readouterr())


def test_which_files(tmp_path):
    for name in ("b.txt", "a.txt", "c.md"):
        (tmp_path / name).write_text("text")
    assert [file.name for file in text_files(tmp_path)] == ["a.txt", "b.txt"]
    assert [file.name for file in text_files(tmp_path, "")] == ["a.txt", "b.txt", "c.md"]
    assert text_files(tmp_path / "c.md") == [tmp_path / "c.md"]
    assert [file.name for file in text_files(tmp_path, most=5)] == ["a.txt"]
    with pytest.raises(DataError, match=r"no text files in .* within 3 bytes"):
        text_files(tmp_path, most=3)
    with pytest.raises(DataError, match="no text files"):
        text_files(tmp_path / "nowhere")
    assert {"this.py", "decoder.py"} <= {file.name for file in python_sources()}
    some = python_sources(most=2_000_000)
    assert sum(file.stat().st_size for file in some) <= 2_000_000
    assert not any("site-packages" in str(file) for file in some)


def test_text_that_cannot_be_read_is_not_passed_over(tmp_path, monkeypatch):
    (tmp_path / "closed").mkdir()
    (tmp_path / "a.txt").write_text("text")
    real = os.scandir

    def scandir(folder):
        if os.fspath(folder).endswith("closed"):
            raise PermissionError(13, "Permission denied", os.fspath(folder))
        return real(folder)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", scandir)  # root may read everything
        with pytest.raises(DataError, match=r"closed: Permission denied; expected a folder"):
            text_files(tmp_path)
    (tmp_path / "b.txt").symlink_to("nowhere")
    with pytest.raises(DataError, match=r"b.txt: No such file or directory; expected a file"):
        text_files(tmp_path)


ONCE = """
from ezpz.data import *
ezpz_dist.setup_torch()
calls = 0
def files():
    global calls
    calls += 1
    return python_sources(most=50_000)
path = write_tokens_once({path!r}, files, per={per!r}, progress=False)
print(calls, len(TokenBlocks(path, 100)), read_header(path).checksum)
ezpz_dist.cleanup()
"""


@pytest.mark.parametrize("per", ["job", "node"])
def test_one_rank_writes_and_all_read(ranks, tmp_path, per):
    done = [line.split() for line in ranks(3, ONCE.format(path=str(tmp_path / "once"), per=per))]
    assert [calls for calls, *_ in done] == ["1", "0", "0"]
    assert len({tuple(rest) for _, *rest in done}) == 1
    assert (tmp_path / "once").exists()


def test_a_writer_that_fails_or_is_late_is_everybodys_error(ranks, tmp_path):
    script = """
    import time
    from ezpz.data import *
    from ezpz.data import _tokens
    rank = ezpz_dist.setup_torch()
    def late():
        while True:
            time.sleep(0.2)
            yield "text"
    def attempt(path, **options):
        try:
            write_tokens_once(path, progress=False, **options)
        except ezpz_dist.DataError as error:
            print(error)
    attempt({path!r}, files=["/nowhere/a.txt"])
    attempt({path!r}, texts=late, timeout=1.5)
    attempt({path!r}, texts="a")
    def lost(path, **options):
        raise ezpz_dist.DataError("it is gone")
    if rank == 0:
        _tokens.read_header = lost
    attempt({path!r} + "-lost", texts=["a"])
    ezpz_dist.cleanup()
    """
    target = tmp_path / "once"
    first, second = ranks(2, textwrap.dedent(script).format(path=str(target)))
    assert first == second
    failed, late, one, lost = first.splitlines()
    start = f"rank 0, which writes {target}, failed: "
    assert failed == f"{start}DataError: write_tokens: /nowhere/a.txt: No such file or directory"
    assert late == f"{start}DataError: it is not done after 1.5 s; give a longer timeout="
    assert one == f"{start}DataError: write_tokens: texts='a'; expected a list of them"
    assert lost.endswith("failed: DataError: it is gone")
    assert not {"once", "once.index.npz"} & {each.name for each in tmp_path.iterdir()}


def test_reuse_takes_what_is_there_and_whole(ranks, path):
    script = f"""
    from ezpz.data import *
    ezpz_dist.setup_torch()
    try:
        path = write_tokens_once({str(path)!r}, texts=["other"], reuse=True, progress=False)
        print(read_header(path).tokens)
    except ezpz_dist.DataError as error:
        print(error)
    ezpz_dist.cleanup()
    """
    assert [int(text) for text in ranks(2, script)] == [19, 19]
    change(path, 128 + 3, b"X")
    assert all("failed: DataError: " in said and "damaged" in said for said in ranks(2, script))


def test_hugging_faces_data_sets(tmp_path):
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_dict({"text": ["one", "two"], "number": [1, 2]})
    datasets.disable_progress_bars()
    made.save_to_disk(tmp_path / "set")
    datasets.DatasetDict({"train": made}).save_to_disk(tmp_path / "dict")
    for source in (made, tmp_path / "set", str(tmp_path / "dict")):
        assert list(huggingface_texts(source)) == ["one", "two"]
    path = write_tokens(tmp_path / "a", texts=huggingface_texts(made), progress=False)
    assert bytes(np.load(path)) == b"one\0two\0"
    for source, options, words in (
        (made, {"column": "body"}, "no column 'body'; expected one of 'text', 'number'"),
        (made, {"column": "number"}, "column 'number' has a int; expected texts"),
        (tmp_path / "dict", {"split": "dev"}, "no split 'dev'; expected one of 'train'"),
        ("squad", {}, "squad: no folder; expected one that Dataset.save_to_disk wrote"),
        (tmp_path, {}, "expected what Dataset.save_to_disk wrote"),
        ([], {}, "a list; expected a Hugging Face Dataset, or a folder"),
    ):
        with pytest.raises(DataError, match=words):
            list(huggingface_texts(source, **options))


def test_a_data_set_of_hugging_face_goes_into_the_loader():
    datasets = pytest.importorskip("datasets")
    from ezpz_dist import DataLoader

    made = datasets.Dataset.from_dict({"x": [1.0, 2.0, 3.0]}).with_format("torch")
    assert [batch["x"].tolist() for batch in DataLoader(made, 2)] == [[1.0, 2.0], [3.0]]
