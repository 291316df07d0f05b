"""What cannot be is one line and exit status 2, before anything is done."""

import importlib.util
import os
import subprocess
import sys

import pytest

from .test_examples import EXPECTED, run_here, tiny_model

WORLD_OF_ONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "0"}  # fmt: skip


def refused(alone, capsys, tmp_path, name, *words):
    alone.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        run_here(alone, name, *words)
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert list(tmp_path.iterdir()) == [], "nothing was written"
    lines = said.err.splitlines(keepends=True)
    return "".join(line for line in lines if "[info" not in line)


@pytest.fixture
def tiny(tmp_path_factory):
    """A model's folder, and 720 bytes of text."""
    pytest.importorskip("transformers", reason="the extra huggingface")
    place = tmp_path_factory.mktemp("tiny")
    tiny_model(place / "model")
    text = place / "text.txt"
    text.write_text("to be or " * 80, encoding="utf-8")
    return place / "model", text


WHOLE = "a whole number"


@pytest.mark.parametrize(
    ("name", "word", "expected"),
    [
        ("minimal", "--epochs=True", f"{WHOLE} from 1"),
        ("minimal", "--lr=0", "a number above 0"),
        ("minimal", "--use_fsdp=3", "True or False"),
        ("minimal", "--outdir", "--outdir True; expected --outdir=True"),
        ("pipeline", "--schedule=fast", "1f1b, gpipe or interleaved"),
        ("vit", "--dtype=fp8", "bf16, fp16 or fp32"),
        ("finetune", "--dtype=fp16", "bf16 or fp32"),
        ("vit", "--batch_size=2000", "at most 1438"),
        ("deepspeed_zero", "--stage=4", "0, 1, 2 or 3"),
        ("lightning_fabric", "--precision=16-true",
         "one of 32-true, 64-true, bf16-mixed, bf16-true"),
        ("pipeline", "--microbatches=5",
         "a divisor of 16, the blocks that are evaluated at the end"),
        ("megatron_style", "--tp=two", f"{WHOLE} above 0"),
        ("megatron_style", "--lr=fast", "a number above 0"),
        ("megatron_style", "--outdir",
         "--outdir=True; expected a folder, such as --outdir=./True"),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be(name, word, expected, alone, capsys, tmp_path):  # noqa: PLR0917
    """Megatron's would begin, and miss RANK, if it did not look at its settings first."""
    said = refused(alone, capsys, tmp_path, name, word)
    full = expected if "; " in expected else f"{word}; expected {expected}"
    assert said == f"{name}: {full}\n"


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("minimal", ["--epoch=2"], "unknown setting --epoch=2; did you mean --epochs?\n"),
        ("minimal", ["--lr", "0.1", "x"], "unknown word 'x'; expected settings as --name=value\n"),
        ("megatron_style", ["--step=3"], "Could not consume arg"),
    ],
)
def test_an_unknown_setting(name, words, said, alone, capsys, tmp_path):  # noqa: PLR0917
    assert said in refused(alone, capsys, tmp_path, name, *words)
    if name != "megatron_style":
        for variable, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
            alone.setenv(variable, value)
        assert not refused(alone, capsys, tmp_path, name, *words), "once, not on every rank"


def test_what_is_missing_is_said_before_torch_is_imported(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['sklearn'] = None\n")
    ended = [
        subprocess.run(
            [sys.executable, "-X", "importtime", "-m", "ezpz.examples.minimal"],
            env={**os.environ, **rank, "PYTHONPATH": str(tmp_path)}, text=True,
            capture_output=True, check=False,
        )
        for rank in ({}, {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"})
    ]  # fmt: skip
    lines = [
        [one for one in done.stderr.splitlines() if "import time:" not in one] for done in ended
    ]
    assert [done.returncode for done in ended] == [2, 2]
    assert lines == [["minimal: needs sklearn: pip install 'ezpz-suite[examples]'"], []]
    assert not [done for done in ended if "| torch" in done.stderr]


@pytest.mark.parametrize(
    ("name", "words"),
    [("fsdp", ["--outdir", "2024_01"]), ("megatron_style", ["--outdir=2024_01"])],
)
def test_a_folder_whose_name_python_takes_for_a_number(name, words, alone, tmp_path):
    if name == "megatron_style":  # which makes no world of one by itself
        for variable, value in WORLD_OF_ONE.items():
            alone.setenv(variable, value)
    alone.chdir(tmp_path)
    run_here(alone, name, *words, "--steps=1")
    assert [each.name for each in tmp_path.iterdir()] == ["2024_01"]
    assert (tmp_path / "2024_01" / "metrics.jsonl").exists()


def test_a_folder_that_cannot_be_made(alone, capsys, tmp_path):
    (tmp_path / "file").touch()
    alone.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        run_here(alone, "fsdp", "--outdir=file/run")
    assert ended.value.code == 2
    (line,) = [one for one in capsys.readouterr().err.splitlines() if "[info" not in one]
    assert line.startswith("fsdp: ")
    assert "Not a directory" in line


def test_what_the_place_does_not_have(alone, capsys, tmp_path):
    if importlib.util.find_spec("lightning_fabric"):
        with alone.context() as patch:
            patch.setattr("ezpz.get_num_nodes", lambda: 2)  # as of three ranks, two of them here
            said = refused(alone, capsys, tmp_path, "lightning_fabric")
        assert "1 of 1 ranks on one of 2 nodes; expected as many on each" in said
    alone.setenv("RANK", "1")
    said = refused(alone, capsys, tmp_path, "minimal")
    assert said.startswith("minimal: half-set torchrun environment: RANK=1 without")
    assert len(said.splitlines()) == 1


def test_the_folder_it_chooses_is_named(alone, tmp_path, capsys):
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    alone.chdir(tmp_path)
    run_here(alone, "minimal", "--epochs=1")
    (folder,) = (tmp_path / "outputs").iterdir()
    assert folder.name.startswith("minimal-")
    assert f"/outputs/{folder.name}/metrics.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "package", "extra"),
    [
        (["diffusion"], "sklearn", "ezpz-suite[examples]"),
        (["hf_trainer"], "transformers", "ezpz-suite[huggingface]"),
        (["vit", "--report"], "matplotlib", "ezpz-obs[report]"),
    ],
)
def test_a_missing_package(words, package, extra, alone, capsys, tmp_path):  # noqa: PLR0917
    for known in [one for one in sys.modules if one.partition(".")[0] == package]:
        alone.delitem(sys.modules, known)
    alone.setitem(sys.modules, package, None)  # what Python takes for a package that is not there
    (line,) = refused(alone, capsys, tmp_path, *words).splitlines()
    assert line.startswith(f"{words[0]}: ")
    assert line.endswith(f"pip install '{extra}'")


@pytest.mark.parametrize("name", sorted(EXPECTED.keys() - {"megatron_style"}))
def test_help_names_every_setting(name, alone, capsys):
    module = importlib.import_module(f"ezpz.examples.{name}")
    with pytest.raises(SystemExit) as ended:
        run_here(alone, name, "--help")
    assert ended.value.code == 0
    said = "".join(capsys.readouterr())
    for setting in module.Settings.__dataclass_fields__:
        assert f"--{setting}=" in said
        assert f"  {setting}: " in said, "described"
    assert "FIRE" not in said


def test_finetune_refuses_too_little_text(alone, capsys, tmp_path, tiny):
    model, text = tiny
    words = (f"--model={model}", f"--data={text}", "--block=64", "--batch_size=16")
    said = refused(alone, capsys, tmp_path, "finetune", *words)
    expected = "expected 32 for --batch_size=16: more text by --data, or a smaller --block"
    assert said.endswith(f"blocks of 64 tokens; {expected}\n")  # behind transformers' progress
