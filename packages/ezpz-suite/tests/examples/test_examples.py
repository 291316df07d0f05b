"""Every example, on two ranks and on one: it runs, it learns, its ranks agree."""

import ast
import importlib
import importlib.util
import inspect
import math
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import ezpz.examples
from ezpz.examples import _settings

from .conftest import curve, records

FOLDER = Path(ezpz.examples.__file__).parent


class Expected(NamedTuple):
    """What an example reaches with its defaults."""

    metric: str  # of the last record that has it; equal on all ranks
    best: float  # it is at least this high (accuracy), or at most (a loss)
    needs: tuple[str, ...] = ()  # packages that it imports
    loss: float = 1.0  # how much the training loss falls, at least
    words: str = ""  # {folder}: one in which a tiny model lies


PARALLEL = {"fsdp": 1e-2, "fsdp_tp": 1e-4, "long_context": 1e-4, "pipeline": 1e-4}
"""How near the losses of two ranks are to those of one; fsdp computes in bfloat16."""

DIGITS = ("sklearn",)
# The text is the standard library's of the Python that runs this: its losses are no constants.
# One that has learned nothing but how often each byte comes has 3.2.
EXPECTED = {
    "accelerate": Expected("accuracy", 0.9, (*DIGITS, "accelerate")),
    "ddp_resume": Expected("accuracy", 0.85, DIGITS),
    "deepspeed_zero": Expected("accuracy", 0.9, (*DIGITS, "deepspeed"), 0.2),
    "diffusion": Expected("eval_loss", 0.3, DIGITS, 0.2),
    "finetune": Expected(
        "eval_loss",
        3.0,
        ("transformers",),
        2.0,
        f"--model={{folder}} --data={inspect.__file__} --steps=60 --batch_size=16 --block=64 "
        "--lr=1e-2 --dtype=fp32",
    ),
    "fsdp": Expected("eval_loss", 2.9, loss=2.0),
    "fsdp_tp": Expected("eval_loss", 2.9, loss=2.0),
    "hf_trainer": Expected("eval_loss", 2.9, ("transformers", "accelerate"), 1.5),
    "lightning_fabric": Expected("accuracy", 0.9, (*DIGITS, "lightning_fabric")),
    "long_context": Expected("eval_loss", 3.0, loss=2.0),
    "megatron_style": Expected("eval_loss", 3.0, loss=2.0),
    "minimal": Expected("accuracy", 0.93, DIGITS),
    "pipeline": Expected("eval_loss", 2.9, loss=2.0),
    "vit": Expected("accuracy", 0.85, DIGITS),
}


def needs(name):
    for package in EXPECTED[name].needs:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")


def test_every_example_is_expected_to_reach_something():
    names = {path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("_")}
    assert names == EXPECTED.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_two_ranks_learn_and_agree(name, launch, alone, tmp_path):
    needs(name)
    expected, here = EXPECTED[name], tmp_path / "here"
    here.mkdir()
    out = here / "out"
    words = expected.words.format(folder=tmp_path / "model").split()
    if words:
        tiny_model(tmp_path / "model")
    said = launch(2, name, f"--outdir={out}", *words, cwd=here)
    assert list(here.iterdir()) == [out], "nothing else is written"
    # The progress of a loop ends with "done after 0:07".
    assert said.count("done") - said.count("done after") == 1, "rank 0 alone speaks"
    assert f"metrics={out / 'metrics.jsonl'}" in said
    assert "Warning" not in said, said

    last = next(one for one in reversed(records(out)) if expected.metric in one)
    reached = last[expected.metric]
    better = reached >= expected.best if expected.metric == "accuracy" else reached <= expected.best
    assert better, f"{expected.metric} is {reached}"
    low, high = (last[f"{expected.metric}/{end}"] for end in ("min", "max"))
    assert low == pytest.approx(high, rel=1e-5), "the ranks found other values"
    losses = [one.get("loss/mean", one.get("loss")) for one in records(out) if "loss" in one]
    assert losses[0] - losses[-1] >= expected.loss, losses
    if name in PARALLEL:
        run_here(alone, name, "--steps=5", f"--outdir={tmp_path / 'one'}")
        one = [loss for _, loss in curve(tmp_path / "one", "loss")]
        assert losses[:5] == pytest.approx(one, rel=PARALLEL[name]), "as of one process"


def tiny_model(folder):
    """Write a Qwen 2 of random weights, whose tokens are bytes, as the hub has models."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=384, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters = {each: index for index, each in enumerate(sorted(by_bytes.alphabet()))}
    tokens = Tokenizer(models.BPE(vocab=letters | {"</s>": 256}, merges=[]))
    tokens.pre_tokenizer = by_bytes
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="</s>")
    made.save_pretrained(folder)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # PEFT's
def test_finetune_writes_adapters_that_peft_reads_and_resumes(alone, capsys, tmp_path):
    needs("finetune")
    peft = pytest.importorskip("peft")
    import transformers

    model = tmp_path / "model"
    tiny_model(model)
    out = tmp_path / "out"
    words = (
        f"--model={model}", f"--data={inspect.__file__}", "--lora=4", "--block=64",
        "--batch_size=4", "--lr=1e-2", "--dtype=fp32", f"--outdir={out}", "--save_every=2",
    )  # fmt: skip
    run_here(alone, "finetune", *words, "--steps=2")
    run_here(alone, "finetune", *words, "--steps=4")
    assert "from_step=2" in capsys.readouterr().err
    adapted = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(model), out / "adapter"
    )
    learned = [one for name, one in adapted.named_parameters() if "lora_B" in name]
    assert learned
    assert all(one.abs().sum() > 0 for one in learned), "they were 0 at first"


@pytest.mark.slow
def test_finetune_writes_a_model_that_transformers_reads(launch, tmp_path):
    needs("finetune")
    import transformers

    model = tmp_path / "model"
    tiny_model(model)
    words = (
        f"--model={model}", f"--data={inspect.__file__}", "--block=64", "--batch_size=4",
        "--lr=1e-2", "--dtype=fp32", f"--outdir={tmp_path / 'out'}", "--steps=2",
    )  # fmt: skip
    launch(2, "finetune", *words, cwd=tmp_path)
    read = transformers.AutoModelForCausalLM.from_pretrained
    before = read(model).state_dict()
    after = read(tmp_path / "out/model").state_dict()
    assert before.keys() == after.keys()
    assert not any(torch.equal(before[name], after[name]) for name in before if "proj" in name)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out/model").eos_token == "</s>"


def run_here(monkeypatch, name, *words):
    """Run an example in this process as ``python -m ezpz.examples.NAME WORDS`` does."""
    module = importlib.import_module(f"ezpz.examples.{name}")
    monkeypatch.setattr(sys, "argv", [str(FOLDER / f"{name}.py"), *words])
    if name == "megatron_style":
        module.main()
    else:
        _settings.main(module.Settings, module.train)


def test_vit_counts_the_images_that_it_saw(alone, tmp_path):
    """In every step, the last of an epoch too: 1438 are no multiple of 64."""
    needs("vit")
    run_here(alone, "vit", "--epochs=1", f"--outdir={tmp_path}")
    steps = [one for one in records(tmp_path) if "samples_per_s" in one]
    assert {round(one["samples_per_s"] * one["step_s"]) for one in steps} == {64}
    assert len(steps) == 1438 // 64


@pytest.mark.filterwarnings("ignore:Detected call of")  # torch's, where the first step is left out
def test_fp16_scales_its_loss_and_leaves_out_a_step_that_overflows(alone, tmp_path):
    """A loss of a millionth makes gradients that are 0 in fp16, unless it is scaled."""
    from ezpz.examples import fsdp

    forward = fsdp.Llama.forward
    found = {}
    with alone.context() as patch:
        patch.setattr(fsdp.Llama, "forward", lambda *args: 1e-6 * forward(*args))
        for dtype in ("fp32", "fp16"):
            run_here(patch, "fsdp", "--steps=3", f"--dtype={dtype}", f"--outdir={tmp_path / dtype}")
            found[dtype] = [value for _, value in curve(tmp_path / dtype, "gradient_norm")][:3]
    assert all(norm > 0 for norm in found["fp32"])
    assert found["fp16"] == pytest.approx(found["fp32"], rel=0.05)

    scaler = torch.amp.GradScaler
    alone.setattr(torch.amp, "GradScaler", partial(scaler, init_scale=2.0**40))
    run_here(alone, "fsdp", "--steps=3", "--dtype=fp16", f"--outdir={tmp_path}")
    norms = [value for _, value in curve(tmp_path, "gradient_norm")]
    assert not math.isfinite(float(norms[0])), "or this would show nothing"
    assert all(math.isfinite(value) for _, value in curve(tmp_path, "loss"))


@pytest.mark.slow
def test_fp16_on_two_ranks_is_near_fp32_in_the_folder_of_rank_0(ranks, tmp_path):
    """Where one's shards overflow all leave the step out; a folder's default name is the time."""
    ranks(
        2,
        f"""
        from ezpz.examples.fsdp import Settings, train
        for dtype in ("fp32", "fp16"):
            outdir = {str(tmp_path)!r} + "/" + dtype + "-" + os.environ["RANK"]
            train(Settings(steps=8, dtype=dtype, outdir=outdir))
        """,
    )
    names = ["fp16-0", "fp32-0"]
    assert sorted(each.name for each in tmp_path.glob("fp*")) == names
    half, full = ([value for _, value in curve(tmp_path / name, "loss/mean")] for name in names)
    assert len(half) == 8
    assert half == pytest.approx(full, rel=0.02)


def test_hf_trainer_evaluates_less_than_a_batch_of_all_ranks(alone, tmp_path):
    """As of 16 blocks on three ranks, which take eight each at once."""
    needs("hf_trainer")
    alone.setattr("ezpz.examples._text.HELD_OUT", 5)
    run_here(alone, "hf_trainer", "--steps=2", "--log_every=1", f"--outdir={tmp_path}")
    assert len(curve(tmp_path, "eval_loss")) == 1


def test_diffusion_draws_a_picture(alone, tmp_path):
    needs("diffusion")
    image = pytest.importorskip("PIL.Image")
    run_here(alone, "diffusion", "--epochs=1", "--rows=3", f"--outdir={tmp_path}")
    path = tmp_path / "samples.png"
    with image.open(path) as picture:
        assert picture.size == (10 * 8 * 4, 3 * 8 * 4)
        low, high = picture.convert("L").getextrema()
    assert high - low > 100, "not one gray"


@pytest.mark.slow
def test_text_of_ones_own(alone, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be " * 500, encoding="utf-8")
    out = tmp_path / "out"
    run_here(alone, "fsdp", f"--data={text}", "--steps=25", f"--outdir={out}")
    assert curve(out, "eval_loss")[-1][1] < 1.0, "nineteen bytes, over and over, are soon known"


def test_megatron_style_imports_torch_and_ezpz_tp_alone():
    tree = ast.parse((FOLDER / "megatron_style.py").read_text(encoding="utf-8"))
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module.partition(".")[0])
    assert found - sys.stdlib_module_names == {"fire", "torch", "ezpz_tp"}


def test_megatron_style_starts_no_world_of_one_by_itself(alone, tmp_path):
    from ezpz.examples import megatron_style

    alone.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        megatron_style.train()
    assert ended.value.code == 2
    assert list(tmp_path.iterdir()) == []
