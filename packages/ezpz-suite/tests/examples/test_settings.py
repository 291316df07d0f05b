"""What cannot be is one line and exit status 2, before anything is done."""

import importlib
import sys

import pytest

from .test_examples import EXPECTED, run_here


def refused(alone, capsys, tmp_path, name, *words):
    alone.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        run_here(alone, name, *words)
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert list(tmp_path.iterdir()) == [], "nothing was written"
    return said.err


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("--epochs=0", "--epochs=0; expected a whole number from 1"),
        ("--epochs=two", "--epochs=two; expected a whole number from 1"),
        ("--epochs=True", "--epochs=True; expected a whole number from 1"),
        ("--lr=0", "--lr=0; expected a number above 0"),
        ("--lr=fast", "--lr=fast; expected a number above 0"),
        ("--seed=-1", "--seed=-1; expected a whole number from 0"),
        ("--use_fsdp=3", "--use_fsdp=3; expected True or False"),
    ],
)
def test_a_bad_value(word, expected, alone, capsys, tmp_path):
    assert refused(alone, capsys, tmp_path, "minimal", word) == f"minimal: {expected}\n"


@pytest.mark.parametrize("words", [["--epoch=2"], ["3", "x"]])
def test_an_unknown_setting(words, alone, capsys, tmp_path):
    assert "Could not consume arg" in refused(alone, capsys, tmp_path, "minimal", *words)


@pytest.mark.parametrize(
    ("name", "word", "expected"),
    [
        ("pipeline", "--schedule=fast", "expected 1f1b, gpipe or interleaved"),
        ("long_context", "--attention=star", "expected ring or ulysses"),
        ("vit", "--dtype=fp8", "expected bf16, fp16 or fp32"),
    ],
)
def test_an_unknown_choice(name, word, expected, alone, capsys, tmp_path):  # noqa: PLR0917
    said = refused(alone, capsys, tmp_path, name, word)
    assert said == f"{name}: {word}; {expected}\n"


def test_a_half_set_environment(alone, capsys, tmp_path):
    alone.setenv("RANK", "1")
    said = refused(alone, capsys, tmp_path, "minimal")
    assert said.startswith("minimal: half-set torchrun environment: RANK=1 without")
    assert len(said.splitlines()) == 1


def test_a_folder_whose_name_is_a_number(alone, tmp_path):
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    alone.chdir(tmp_path)
    run_here(alone, "minimal", "--epochs=1", "--outdir=2024")
    assert (tmp_path / "2024" / "metrics.jsonl").exists()


def test_the_folder_it_chooses_is_named(alone, tmp_path, capsys):
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    alone.chdir(tmp_path)
    run_here(alone, "minimal", "--epochs=1")
    (folder,) = (tmp_path / "outputs").iterdir()
    assert folder.name.startswith("minimal-")
    assert f"/outputs/{folder.name}/metrics.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [
        ("accelerate", "accelerate", "huggingface"),
        ("deepspeed_zero", "deepspeed", "deepspeed"),
        ("diffusion", "PIL", "examples"),
        ("hf_trainer", "transformers", "huggingface"),
        ("lightning_fabric", "lightning_fabric", "fabric"),
        ("minimal", "sklearn", "examples"),
    ],
)
def test_a_missing_package(name, package, extra, alone, capsys, tmp_path):  # noqa: PLR0917
    for known in [one for one in sys.modules if one.partition(".")[0] == package]:
        alone.delitem(sys.modules, known)
    alone.setitem(sys.modules, package, None)  # what Python takes for a package that is not there
    said = refused(alone, capsys, tmp_path, name)
    (line,) = [one for one in said.splitlines() if "[info" not in one]
    assert line.startswith(f"{name}: ")
    assert line.endswith(f"pip install 'ezpz-suite[{extra}]'")


@pytest.mark.parametrize("name", sorted(EXPECTED.keys() - {"megatron_style"}))
def test_help_names_every_setting(name, alone, capsys):
    module = importlib.import_module(f"ezpz.examples.{name}")
    with pytest.raises(SystemExit) as ended:
        run_here(alone, name, "--help")
    assert ended.value.code == 0
    said = capsys.readouterr()
    described = module.Settings.__doc__
    for setting in module.Settings.__dataclass_fields__:
        assert f"--{setting}=" in said.out + said.err
        assert f"{setting}: " in described
