"""What real models cost: ``hatch run bench:models [--rounds=5] [--json=FILE]``.

A Llama of random weights, made here and saved as the hub has models, beside what people use in our
place: a step of ``ezpz.examples.finetune`` under FSDP2 on two gloo ranks beside transformers and
Accelerate; a step with adapters beside PEFT's; greedy generation beside transformers' own; and the
memory of the loss from the output layer's input beside that of all logits.
"""

import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import fire
from callee import begin, fresh
from dist import free_ports
from paired import Row, against, beside, interleaved, times
from peers import Peer, present
from ranks import RanksError
from ranks import ranks as world
from table import finish

from ezpz.data import python_sources

ONE_THREAD = {"OMP_NUM_THREADS": "1", "TORCH_DEVICE": "cpu", "HF_HUB_OFFLINE": "1"}

# 3 million parameters; tokens are bytes.
MODEL = """
import sys, torch, transformers
from tokenizers import Tokenizer, models, pre_tokenizers
torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=384, hidden_size=256, intermediate_size=768, num_hidden_layers=4,
    num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=512,
    bos_token_id=None, eos_token_id=None,
)
transformers.LlamaForCausalLM(config).save_pretrained(sys.argv[1])
by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False)
letters = {each: index for index, each in enumerate(sorted(by_bytes.alphabet()))}
tokens = Tokenizer(models.BPE(vocab=letters | {"</s>": 256}, merges=[]))
tokens.pre_tokenizer = by_bytes
made = transformers.PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="</s>")
made.save_pretrained(sys.argv[1])
"""

# A step with adapters of rank 8 on queries and values. What is imported is not counted.
ADAPTERS = {
    "ours": (
        "from ezpz_tp import apply_lora",
        "apply_lora(model, ('q_proj', 'v_proj'), 8, 16, seed=0)",
    ),
    "peft": (
        "from peft import LoraConfig, get_peft_model",
        """config = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])
model = get_peft_model(model, config)""",
    ),
}
ADAPTED_STEP = """
import torch
from transformers import AutoModelForCausalLM
{imports}
model = AutoModelForCausalLM.from_pretrained(words[0], dtype=torch.float32)
before = peak_mb()
{adapt}
model.train()
torch.manual_seed(0)
tokens = torch.randint(256, (4, 128))
optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-4)
def call():
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""

# Greedy, with a cache; what was generated is written, to be compared.
GENERATORS = {
    "ours": """
from ezpz.models import Llama, LlamaConfig, generate, load_huggingface
model = Llama(LlamaConfig.from_huggingface(words[0]))
load_huggingface(model, words[0])
def call(): return generate(model, prompts, max_new_tokens=32)
""",
    "transformers": """
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(words[0], dtype=torch.float32).eval()
options = {"do_sample": False, "max_new_tokens": 32, "pad_token_id": 0}
mask = torch.ones_like(prompts)
def call(): return model.generate(prompts, attention_mask=mask, **options)[:, prompts.shape[1]:]
""",
}
GENERATION = """
import torch
torch.manual_seed(0)
prompts = torch.randint(256, (4, 64))
{generator}
open(words[0] + "/tokens-{name}", "w").write(str(call().tolist()))
"""

# The loss of 1,024 tokens over a vocabulary of 128,000, beside the weight and its gradient.
LOSS = """
import sys, torch, ezpz_device, ezpz_tp
torch.manual_seed(0)
weight = torch.nn.init.normal_(torch.empty(128_000, 256), std=0.02).requires_grad_()
hidden = torch.randn(1024, 256, requires_grad=True)
weight.grad, targets = torch.zeros_like(weight), torch.randint(128_000, (1024,))
ezpz_device.reset_peak_memory("cpu")
before = ezpz_device.get_memory("cpu").allocated
if sys.argv[1] == "ours":
    loss = ezpz_tp.vocab_parallel_linear_cross_entropy(hidden, weight, targets).mean()
else:
    loss = torch.nn.functional.cross_entropy(hidden @ weight.t(), targets)
loss.backward()
print((ezpz_device.get_memory("cpu").peak - before) / 1e6)
"""


def finetuning(rounds: int, folder: str) -> list[Row]:
    """Return the rows of a step of fine-tuning on two ranks, and of its memory."""
    there, missing = present(["accelerate"])
    job = {"rounds": 6 * rounds, "folder": folder}

    def run(way: str) -> Any:
        return world("models_ranks.py", job | {"ports": free_ports(1), "way": way}, 2)

    held, steps = {"ours": [run("ours")]}, dict[str, list[float]]()
    for name, each in there.items():
        job["path"] = each.site_packages
        try:
            held[name] = [run(name)]
            steps = {way: times(1e3, found) for way, found in run("both").items()}
        except RanksError as error:  # ours alone has not failed
            missing[name] = f"it fails: {error}"
    titles, what = {name: each.name for name, each in there.items()}, "fine-tuning step, FSDP2"
    return [
        *against("models/finetune", what, "ms", steps, titles, missing=missing),
        *against("models/finetune-memory", f"{what}: memory added", "MB", held, titles,
                 missing=missing),
    ]  # fmt: skip


def adapters(rounds: int, folder: str) -> list[Row]:
    """Return the rows of a step with adapters, and of the memory that it adds."""
    there, missing = present(["peft"])
    programs = {
        name: (python, ADAPTED_STEP.format(imports=imports, adapt=adapt))
        for name, (imports, adapt) in ADAPTERS.items()
        if (python := python_of(name, there))
    }
    with ExitStack() as running:
        callees = begin(programs, folder, running=running, failed=missing, env=ONE_THREAD)
        ways = {name: partial(callee.typical, 3) for name, callee in callees.items()}
        samples = interleaved(ways, 2 * rounds, failed=missing)
        held = {name: [callees[name].peak()] for name in samples}
    titles, what = {name: each.name for name, each in there.items()}, "step with LoRA"
    in_ms = {name: times(1e3, found) for name, found in samples.items()}
    return [
        *against("models/lora", what, "ms", in_ms, titles, missing=missing),
        *against(
            "models/lora-memory", f"{what}: memory added", "MB", held, titles, missing=missing
        ),
    ]


def generation(rounds: int, folder: str) -> list[Row]:
    """Return the row of 32 tokens added to each of four prompts, where all add the same."""
    there, missing = present(["transformers"])
    programs = {
        name: (python, GENERATION.format(generator=code, name=name))
        for name, code in GENERATORS.items()
        if (python := python_of(name, there))
    }
    with ExitStack() as running:
        callees = begin(programs, folder, running=running, failed=missing, env=ONE_THREAD)
        said = {name: Path(folder, f"tokens-{name}").read_text("utf-8") for name in callees}
        others = [name for name, tokens in said.items() if tokens != said["ours"]]
        missing |= dict.fromkeys(others, "it generates other tokens")
        ways = {name: partial(callees[name].typical, 1) for name in said if name not in missing}
        samples = interleaved(ways, 2 * rounds, failed=missing)
    in_ms = {name: times(1e3, found) for name, found in samples.items()}
    titles, what = {name: each.name for name, each in there.items()}, "greedy generation, 4 x 32"
    return against("models/generate", what, "ms", in_ms, titles, missing=missing)


def python_of(name: str, there: dict[str, Peer]) -> str:
    """Return the interpreter of a program; nothing of a peer that is not here."""
    return sys.executable if name == "ours" else there[name].python if name in there else ""


def loss_memory(rounds: int) -> Row:
    """Return the row of the loss's memory."""
    ways = {
        name: partial(lambda name: fresh(sys.executable, LOSS, name)[0], name)
        for name in ("ours", "torch")
    }
    samples = interleaved(ways, min(3, rounds), warm=0)
    what, title = "memory of the loss, vocabulary 128,000", f"torch {version('torch')}"
    return beside(
        "models/loss-memory/torch", what, "MB", (samples["ours"], samples["torch"]), title
    )


def main(rounds: int = 5, json: str = "") -> None:
    """Print the figures, and write them to a file if one is named.

    Args:
        rounds: How often the memory of the loss is measured, three times at most; others 2 to 6
            times as often.
        json: A file to write the figures to.
    """
    with tempfile.TemporaryDirectory() as folder:
        fresh(sys.executable, MODEL, folder)
        text = b"\n".join(path.read_bytes() for path in python_sources(most=200_000))
        Path(folder, "text.txt").write_bytes(text)
        rows = finetuning(rounds, folder)
        rows += adapters(rounds, folder)
        rows += generation(rounds, folder)
        rows.append(loss_memory(rounds))
    finish(rows, json)


if __name__ == "__main__":
    fire.Fire(main)
