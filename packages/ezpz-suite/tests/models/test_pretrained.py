"""Published models train on every layout as transformers alone does, and are written for it."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from ezpz.models import (
    ModelError,
    flops_per_token,
    load_pretrained,
    load_tokenizer,
    lora_targets,
    save_pretrained,
)

transformers = pytest.importorskip("transformers", reason="the extra huggingface")

SIZES = {"vocab_size": 131, "max_position_embeddings": 64}
LLAMA = SIZES | {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48,
}  # fmt: skip
FAMILIES = {
    "llama": LLAMA,
    "mistral": LLAMA | {"sliding_window": None},
    "qwen2": LLAMA | {"tie_word_embeddings": True},
    "qwen3": LLAMA | {"head_dim": 8},
    "gpt2": {"vocab_size": 131, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "gpt_neox": SIZES | {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 64,
    },
}  # fmt: skip
STEPS = 20

# A rank's part of each batch; the gradients are those of the mean over all of it.
TRAIN = """
import torch
import ezpz
from ezpz.models import causal_losses, flops_per_token, load_pretrained, save_pretrained
place, tp, shard_size, out = {place!r}, {tp}, {shard_size}, {out!r}
ezpz.setup_torch(seed=1, tensor_parallel_size=tp)
replicas = ezpz_tp.get_data_parallel_world_size()
first = ezpz_tp.get_data_parallel_rank() * 4 // replicas
group = ezpz_tp.get_data_parallel_group()
for kind in {kinds}:
    model = load_pretrained(place + "/" + kind)
    print("flops", kind, flops_per_token(model, 24) if ezpz.get_world_size() == tp else 0)
    model = ezpz.wrap_model_for_fsdp2(model, shard_size=shard_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for tokens in torch.load(place + "/batches.pt"):
        part = tokens[first : first + 4 // replicas]
        loss = causal_losses(model, part[:, :-1], part[:, 1:]).mean()
        loss.backward()
        ezpz_tp.finalize_grads(model)
        ezpz_tp.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print("loss", kind, ezpz.all_reduce(loss.item(), "mean", group=group))
    save_pretrained(model, out + "/" + kind)
ezpz.cleanup()
"""


def trained_alone(kind, place, batches):
    """Write a tiny model of random weights; return it, and the losses, after training it alone."""
    config = transformers.AutoConfig.for_model(kind, **FAMILIES[kind])
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for one in model.parameters():
            # Nothing is nearly nothing, and norms and biases are unlike each other.
            one.mul_(4) if one.dim() > 1 else one.add_(torch.randn_like(one) / 4)
    model.save_pretrained(place / kind)
    model.eval()  # without dropout
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for tokens in batches:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


def flops_of(kind):
    """Return 6 operations for each weight of a product, and those of attention to 24 tokens."""
    sizes = {"hidden_size": 32, "num_key_value_heads": 4} | FAMILIES[kind]
    width, kept = sizes["hidden_size"], 8 * sizes["num_key_value_heads"]
    wide = sizes.get("intermediate_size", 4 * width)
    products = (2 if kind in ("gpt2", "gpt_neox") else 3) * width * wide
    layer = 2 * width * (width + kept) + products
    return 6 * (2 * layer + 131 * width) + 12 * 2 * 24 * width


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Every family, trained by transformers in one process, and where it began."""
    place = tmp_path_factory.mktemp("families")
    torch.manual_seed(0)
    batches = torch.randint(131, (STEPS, 4, 25))
    torch.save(batches, place / "batches.pt")
    return place, {kind: trained_alone(kind, place, batches) for kind in FAMILIES}


# FSDP2, TP, both, and HSDP.
LAYOUTS = [(2, 1, None), (2, 2, None), (4, 2, None), (4, 1, 2)]


@pytest.mark.parametrize(("size", "tp", "shard_size"), LAYOUTS, ids=str)
def test_losses_and_weights_are_those_of_transformers_alone(
    *, alone, ranks, tmp_path, size, tp, shard_size
):
    place, wanted = alone
    given = {"place": str(place), "out": str(tmp_path), "tp": tp, "shard_size": shard_size}
    script = TRAIN.format(**given, kinds=list(FAMILIES))
    lines = [line.split() for line in ranks(size, script)[0].splitlines()]
    for kind, (model, losses) in wanted.items():
        mine = [float(words[2]) for words in lines if words[:2] == ["loss", kind]]
        assert mine == pytest.approx(losses, abs=1e-5, rel=0), kind
        (flops,) = [float(words[2]) for words in lines if words[:2] == ["flops", kind]]
        # Once is enough, for it takes seconds; tensor-parallel ranks pad the vocabulary.
        assert flops == (pytest.approx(flops_of(kind), rel=0.01) if size == tp else 0), kind
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / kind)
        assert type(again) is type(model)
        for (name, one), other in zip(again.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3, msg=f"{kind}: {name}")


def test_of_experts_those_that_a_token_meets_are_counted():
    config = transformers.AutoConfig.for_model("mixtral", **LLAMA, num_local_experts=8)
    model = transformers.AutoModelForCausalLM.from_config(config)
    before = config._experts_implementation
    second, router = 3 * 32 * 48, 8 * 32
    wanted = flops_of("llama") + 6 * 2 * (second + router)
    assert flops_per_token(model, 24) == pytest.approx(wanted, rel=0.01)
    assert config._experts_implementation == before
    model.forward = lambda **_: [][int(model.lm_head.weight.sum() > 0)]
    assert flops_per_token(model, 24) is None


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="no /proc/self/smaps")
def test_a_node_has_the_weights_once(ranks, tmp_path):
    sizes = LLAMA | {"vocab_size": 8192, "hidden_size": 256}
    config = transformers.AutoConfig.for_model("llama", **sizes, tie_word_embeddings=True)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    script = f"""
    import re
    from pathlib import Path
    import ezpz
    from ezpz.models import load_pretrained
    rank = ezpz.setup_torch()
    model = load_pretrained({str(tmp_path)!r})
    total = sum(one.sum().item() for one in model.parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight and model.lm_head.weight.is_leaf
    ezpz_dist.barrier()
    maps = re.split(r"(?m)^(?=[0-9a-f]+-)", Path("/proc/self/smaps").read_text())
    shared, = [one for one in maps if "/ezpz-" in one.partition("\\n")[0]]
    held = {{name: int(size) for name, size in re.findall(r"(\\w+): +(\\d+) kB", shared)}}
    assert held["Rss"] >= 8192 and held["Private_Clean"] + held["Private_Dirty"] < 64, held
    ezpz_dist.barrier()
    with __import__("torch").no_grad():
        model.lm_head.weight += rank  # a rank that trains on the CPU
    ezpz_dist.barrier()
    print(total, model.lm_head.weight.sum().item() - 8192 * 256 * rank)
    ezpz.cleanup()
    """
    totals = [[float(word) for word in said.split()] for said in ranks(2, script)]
    assert totals[0] == pytest.approx(totals[1], abs=1.0)


def test_what_is_not_to_be_had_or_split_is_told(ranks, tmp_path):
    small = {"vocab_size": 8, "hidden_size": 12, "n_layer": 1, "n_head": 2}
    odd = LLAMA | {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 3}
    for kind, sizes in (("bloom", small), ("llama", odd)):
        config = transformers.AutoConfig.for_model(kind, **sizes)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / kind)
    script = f"""
    import ezpz
    from ezpz.models import ModelError, find_pretrained, load_pretrained
    ezpz.setup_torch(tensor_parallel_size=2)
    for act in (
        lambda: find_pretrained("no-such/model"),
        lambda: load_pretrained({str(tmp_path)!r}),
        lambda: load_pretrained({str(tmp_path / "bloom")!r}),
        lambda: load_pretrained({str(tmp_path / "llama")!r}),
    ):
        try:
            act()
        except (ModelError, ezpz_dist.DataError) as error:
            print(error)
    ezpz.cleanup()
    """
    for said in ranks(2, script, env={"HF_HUB_OFFLINE": "1"}):
        for words in (
            "no-such/model: no folder here, and not to be had from the hub",
            "`hf download no-such/model` on a login node",
            "expected the folder of a causal language model",
            "bloom has no plan of tensor parallelism; expected one of llama, mistral",
            "2 tensor-parallel ranks for 3 heads and 3 of keys and values",
        ):
            assert words in said


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_what_is_written_keeps_the_settings_of_what_was_read(kind, tmp_path):
    config = transformers.AutoConfig.for_model(kind, **FAMILIES[kind], attention_dropout=0.25)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.generation_config.update(eos_token_id=[2, 7], do_sample=True, temperature=0.7)
    model.save_pretrained(tmp_path / "read")
    again = load_pretrained(tmp_path / "read")
    assert not again.config.use_cache
    save_pretrained(again, tmp_path / "written")
    for name in ("config.json", "generation_config.json"):
        read, written = (json.loads((tmp_path / one / name).read_text())
                         for one in ("read", "written"))  # fmt: skip
        assert written == read


@pytest.mark.parametrize(("kind", "sizes", "wanted"), [
    ("phi3", LLAMA | {"pad_token_id": 0}, ("qkv_proj",)),
    ("mpt", {"vocab_size": 131, "d_model": 32, "n_layers": 1, "n_heads": 4}, ("Wqkv",)),
    ("llama", LLAMA, ("q_proj", "v_proj")),
], ids=str)  # fmt: skip
def test_adapters_go_on_what_makes_queries_and_values(kind, sizes, wanted):
    config = transformers.AutoConfig.for_model(kind, **sizes)
    assert lora_targets(transformers.AutoModelForCausalLM.from_config(config)) == wanted


@pytest.fixture
def llama(tmp_path):
    config = transformers.AutoConfig.for_model("llama", **LLAMA)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def test_a_truncated_file_is_told(llama):
    weights = llama / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"incomplete metadata.*; expected the folder of a causal"):
        load_pretrained(llama)


def test_a_disk_that_is_full_is_told_and_nothing_stays(llama, tmp_path):
    resource = pytest.importorskip("resource")
    model, limits = load_pretrained(llama), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))  # the weights have more
    try:
        with pytest.raises(ModelError, match="cannot be written"):
            save_pretrained(model, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == [llama]


def test_no_file_has_more_than_5_gb(llama, tmp_path, monkeypatch):
    """Asked of transformers: files of as much take as much memory."""
    sizes, real = [], transformers.modeling_utils.split_torch_state_dict_into_shards
    monkeypatch.setattr(
        transformers.modeling_utils, real.__name__,
        lambda *args, **options: sizes.append(options["max_shard_size"]) or real(*args, **options),
    )  # fmt: skip
    save_pretrained(load_pretrained(llama), tmp_path / "out")
    assert sizes == ["5GB"]


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_folder_without_a_tokenizer_is_told(kind, tmp_path):
    """Of GPT-2 transformers makes a tokenizer that is empty."""
    config = transformers.AutoConfig.for_model(kind, **FAMILIES[kind])
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="; expected the files of the model's tokenizer, as"):
        load_tokenizer(tmp_path)


class Hub(BaseHTTPRequestHandler):
    """The answers of Hugging Face's hub for one model, on this host."""

    protocol_version = "HTTP/1.1"

    def answer(self, body=b"", **headers):
        self.send_response(200 if body else 404)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self):
        files, commit = self.server.files, "0" * 40
        of_api = self.path.partition("?")[0].removeprefix("/api/models/some/model/")
        sizes = [
            {"type": "file", "path": name, "oid": commit, "size": len(body)}
            for name, body in files.items()
        ]
        names = [{"rfilename": name} for name in files]
        told = {"revision/main": {"id": "some/model", "sha": commit, "siblings": names}}
        told[f"tree/{commit}"] = sizes
        if of_api in told:
            self.answer(json.dumps(told[of_api]).encode(), Content_Type="application/json")
        else:
            body = files.get(self.path.removeprefix(f"/some/model/resolve/{commit}/"), b"")
            tag = f'"{hashlib.sha1(body).hexdigest()}"'
            self.server.fetched += [self.path.rpartition("/")[2]] * bool(
                body and self.command == "GET"
            )
            self.answer(body, ETag=tag, X_Repo_Commit=commit)

    do_HEAD = do_GET  # noqa: N815 - http.server's name

    def log_message(self, *_):
        """Say nothing."""


@pytest.fixture
def hub(tmp_path):
    config = transformers.AutoConfig.for_model("llama", **LLAMA)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "published")
    files = {each.name: each.read_bytes() for each in (tmp_path / "published").iterdir()}
    files |= {"consolidated.safetensors": b"twice", "original/params.json": b"{}", "page.md": b"x"}
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.files, server.fetched = files, []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_one_rank_of_a_node_downloads_what_is_read_and_then_the_hub_is_not_needed(
    hub, ranks, tmp_path
):
    script = f"""
    import ezpz
    from ezpz.models import find_pretrained, load_pretrained
    ezpz.setup_torch()
    folder = find_pretrained("some/model", {str(tmp_path / "cache")!r})
    names = sorted(each.name for each in folder.iterdir())
    print(*names, load_pretrained(folder).config.vocab_size)
    ezpz.cleanup()
    """
    read = ["config.json", "generation_config.json", "model.safetensors"]
    env = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(tmp_path)}
    for offline in ("0", "1"):
        said = ranks(2, script, env={**env, "HF_HUB_OFFLINE": offline})
        assert [each.split() for each in said] == [[*read, "131"]] * 2
        assert sorted(hub.fetched) == read
