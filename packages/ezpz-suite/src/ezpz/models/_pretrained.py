"""Published language models of transformers: read, put on parallel layers, trained, written."""

from __future__ import annotations

import io
import logging
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from shutil import rmtree
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import ezpz_dist
import ezpz_tp
from ezpz_topo import get_local_world_size, get_rank

from ._errors import ModelError
from ._llama import degree_of

logger = logging.getLogger(__name__)

# How the layers of each family are split over tensor-parallel ranks, by the ends of their names
# (transformers 5.23, models/*/modeling_*.py). The embedding and the output layer, which the model
# itself names, are split by rows of the vocabulary. A family more is an entry more.
#
# column   a linear layer by its outputs; queries, keys and values by heads
# thirds   the same of queries, keys and values that are stacked
# row      a linear layer by its inputs
# heads    what each rank has whole, and uses for its own heads: its gradient is summed
_LLAMA = {
    "column": ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"),
    "row": ("o_proj", "down_proj"),
}
PLANS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "llama": _LLAMA, "mistral": _LLAMA, "qwen2": _LLAMA,
    "qwen3": {**_LLAMA, "heads": ("q_norm", "k_norm")},
    "gpt2": {"thirds": ("c_attn",), "column": ("c_fc",), "row": ("c_proj",)},
    "gpt_neox": {
        "column": ("query_key_value", "dense_h_to_4h"), "row": ("attention.dense", "dense_4h_to_h"),
    },
}  # fmt: skip

# What makes queries and values, in most families; GPT-2's is linear where it is parallel.
_ADAPTED = ("q_proj", "v_proj", "qkv_proj", "query_key_value", "c_attn", "Wqkv")


class _Split(NamedTuple):
    """What a layer's parameters are parts of; the names are the layer's own."""

    shards: dict[str, ezpz_tp.Shard]
    transposed: bool  # in transformers' files, as GPT-2's


# Reading.


def find_pretrained(source: str | Path, cache: str | Path | None = None) -> Path:
    """Return the folder of a model: one that is here, or that the hub has.

    One rank of each node asks the hub, and downloads what is not in the cache. Collective: every
    rank calls this.

    Args:
        source: A folder, or a name on the hub (``Qwen/Qwen3-0.6B``).
        cache: Where downloads go, for example a node's own disk; default: the hub's own cache.

    Raises:
        DataError: On every rank of the node: there is no such folder, and the hub has no such
            model, or cannot be reached and the cache has it not.
    """
    if Path(source).expanduser().is_dir():
        return Path(source).expanduser()

    def download() -> list[str]:
        from huggingface_hub import snapshot_download  # noqa: PLC0415  # an extra

        wanted = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
        twice = ["consolidated*", "original/*"]  # the same weights, as Mistral and Meta read them
        try:
            found = snapshot_download(
                str(source), cache_dir=cache, allow_patterns=wanted, ignore_patterns=twice
            )
        except (OSError, ValueError) as error:  # the hub's own errors are of these
            why = str(error).strip().partition("\n")[0]
            raise ezpz_dist.DataError(
                f"{source}: no folder here, and not to be had from the hub ({why}); expected a "
                f"model's folder or its name on the hub. Without network: `hf download {source}` "
                "on a login node, then the same command"
            ) from error
        return [found] * get_local_world_size()

    return Path(ezpz_dist.scatter_from_one_reader(download))


def load_tokenizer(folder: str | Path, length: int = 1) -> Any:
    """Return the tokenizer of a model of transformers.

    Args:
        folder: As of transformers' ``save_pretrained``.
        length: Tokens of a sequence that the model will be given.

    Raises:
        ModelError: The folder has no tokenizer, or the model has positions for fewer tokens.
    """
    from transformers import AutoConfig, AutoTokenizer  # noqa: PLC0415  # an extra

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        if len(tokenizer) < 2:  # what transformers makes of no files, for GPT-2
            raise ValueError("its tokenizer is empty")
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        why = str(error).strip().partition("\n")[0]
        raise ModelError(
            f"{folder}: {why}; expected the files of the model's tokenizer, as transformers' "
            "save_pretrained writes them"
        ) from error
    most = getattr(config, "max_position_embeddings", None) or length
    if length > most:
        raise ModelError(f"--block={length}; expected at most the model's {most} positions")
    return tokenizer


def load_pretrained(folder: str | Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a causal language model of transformers with its weights, to be trained.

    Where tensor parallelism is initialized, its layers are put on ezpz_tp's: each rank keeps its
    part of the weights. One rank of each node reads; until the model is wrapped the node's ranks
    have the weights once in host memory, while they are read twice. Dropout is off, so that every
    layout computes the same.

    Collective: every rank calls this, before DDP or FSDP2 wraps the model.

    Args:
        folder: As of transformers' ``save_pretrained``.
        dtype: Of the weights.

    Raises:
        ModelError: The folder has no causal language model; or the model has no plan of tensor
            parallelism, or heads that the degree does not divide.
    """
    model = _read_once(lambda: _load(folder, dtype))
    if degree_of("tensor") > 1:
        _parallelize(model, model.config)
    return model


def _load(folder: str | Path, dtype: torch.dtype) -> nn.Module:
    from safetensors import SafetensorError  # noqa: PLC0415  # comes with transformers
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415  # an extra

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        published = {
            name: value for name, value in vars(config).items()
            if name.endswith(("dropout", "pdrop")) and isinstance(value, float)
        } | {"use_cache": getattr(config, "use_cache", True)}  # fmt: skip
        config.update(dict.fromkeys(published, 0.0) | {"use_cache": False})
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype, local_files_only=True
        )
    except (OSError, ValueError, SafetensorError) as error:
        why = str(error).strip().partition("\n")[0]
        raise ModelError(
            f"{folder}: {why}; expected the folder of a causal language model, as transformers' "
            "save_pretrained writes it"
        ) from error
    model.published = published  # what `save_pretrained` writes in place of training's settings
    return model  # type: ignore[no-any-return]


def _read_once(load: Callable[[], nn.Module]) -> nn.Module:
    """Return a model that one rank of each node loads; the others have it from memory."""
    if get_local_world_size() == 1:
        return load()

    def read() -> dict[str, Tensor]:
        file = io.BytesIO()
        packer = _Packer(file)
        packer.dump(load())
        without = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
        return {"model": without} | {str(at): one for at, one in enumerate(packer.tensors)}

    try:
        # A rank that trains on the CPU writes into its weights.
        found = ezpz_dist.share_on_node(read, private=True)
    except ezpz_dist.DataError as error:
        raise ModelError(str(error)) from error
    model: nn.Module = _Unpacker(found).load()
    return model


class _Packer(pickle.Pickler):
    """Writes a model, and keeps its tensors aside."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []
        self._places: dict[int, int] = {}

    def persistent_id(self, one: object) -> tuple[int, bool, bool] | None:
        if not isinstance(one, Tensor):
            return None
        if id(one) not in self._places:  # a tied one has one place
            self._places[id(one)] = len(self.tensors)
            self.tensors.append(one)
        return self._places[id(one)], isinstance(one, nn.Parameter), one.requires_grad


class _Unpacker(pickle.Unpickler):
    """Reads what `_Packer` wrote: it comes from this node's reader, by memory."""

    def __init__(self, found: dict[str, Tensor]) -> None:
        super().__init__(io.BytesIO(found.pop("model").numpy().tobytes()))
        self._found: dict[str, Tensor] = found

    def persistent_load(self, said: tuple[int, bool, bool]) -> Tensor:
        place, is_parameter, requires_grad = str(said[0]), *said[1:]
        if is_parameter and not isinstance(self._found[place], nn.Parameter):
            self._found[place] = nn.Parameter(self._found[place], requires_grad)
        return self._found[place]


def _parallelize(model: nn.Module, config: Any) -> None:
    """Put a model's layers on those of ezpz_tp, in place, with this rank's part of the weights."""
    kind, degree = config.model_type, degree_of("tensor")
    if (plan := PLANS.get(kind)) is None:
        raise ModelError(
            f"{kind} has no plan of tensor parallelism; expected one of {', '.join(PLANS)}, or "
            "--tp=1: FSDP2 shards any model"
        )
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if config.num_attention_heads % degree or kv_heads % degree:
        raise ModelError(
            f"{degree} tensor-parallel ranks for {config.num_attention_heads} heads and {kv_heads} "
            "of keys and values; expected a degree that divides both"
        )
    table, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    ways = {end: way for way, ends in plan.items() for end in ends}
    left = {*ways, "vocabulary", "head"}
    for name, module in list(model.named_modules()):
        end = next((end for end in ways if f".{name}".endswith(f".{end}")), "")
        end = "vocabulary" if module is table else "head" if module is head else end
        left.discard(end)
        way = ways.get(end, end)
        if way == "heads":
            ezpz_tp.mark_sequence_parallel(module.get_parameter("weight"))
        elif way:
            above, _, last = name.rpartition(".")
            setattr(model.get_submodule(above), last, _split(module, way))
        elif hasattr(module, "split_size"):  # of GPT-2's stacked queries, keys and values
            module.split_size //= degree
    if left:  # a layer that stays whole would give wrong gradients
        raise ModelError(
            f"{kind}: no layer is named {', '.join(sorted(left))}; expected the names of "
            "transformers 5.23: use that version, or --tp=1"
        )
    if head.weight is table.weight:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight  # type: ignore[operator]


@torch.no_grad()
def _split(module: nn.Module, way: str) -> nn.Module:
    """Return a parallel layer that has this rank's part of a layer's weights."""
    transposed = hasattr(module, "nf")  # transformers' Conv1D, whose weight is [in, out]
    whole = {name: one.t() if one.dim() > 1 and transposed else one
             for name, one in module.named_parameters(recurse=False)}  # fmt: skip
    outputs, inputs = whole["weight"].shape
    options: dict[str, Any] = {"init_method": nn.init.zeros_, "seed": 0}
    options |= {"dtype": whole["weight"].dtype}
    made: Any
    if way == "vocabulary":
        index = getattr(module, "padding_idx", None)
        made = ezpz_tp.VocabParallelEmbedding(outputs, inputs, index, **options)
    elif way == "row":
        made = ezpz_tp.RowParallelLinear(
            inputs, outputs, "bias" in whole, input_is_parallel=True, **options
        )
    else:
        made = ezpz_tp.ColumnParallelLinear(
            inputs, outputs, "bias" in whole, gather_output=False,
            stride=3 if way == "thirds" else 1, pad_output=way == "head", **options,
        )  # fmt: skip
    shards = {}
    for name, one in made.named_parameters():
        shard = ezpz_tp.shard_of(one)
        shards[name] = shard or ezpz_tp.Shard(tuple(one.shape))
        one.copy_(shards[name].cut(whole[name], made.tp_rank, made.tp_size))
    made.pretrained = _Split(shards, transposed)
    return made  # type: ignore[no-any-return]


# Training.


def causal_losses(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Return each token's loss ``[batch, s]``, float32, of a model of `load_pretrained`.

    Collective where the model is parallel or sharded: every rank of it calls this.

    Args:
        model: Also wrapped.
        tokens: ``[batch, s]``, int64.
        targets: ``[batch, s]``, int64: the token that follows each; -100 has loss 0.
    """
    logits: Tensor = model(input_ids=tokens).logits
    if degree_of("tensor") > 1:
        size = _bare(model).config.vocab_size
        return ezpz_tp.vocab_parallel_cross_entropy(logits, targets, vocab_size=size)
    flat = cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    return flat.view_as(targets)


def flops_per_token(model: Any, length: int) -> float | None:
    """Return the floating-point operations of a token of a sequence, forward and backward.

    They are counted by `ezpz_device.count_flops`, of all ranks that share the model's layers.

    Args:
        model: Of `load_pretrained`, not wrapped and without activation checkpointing yet.
        length: The sequence's tokens.

    Returns:
        None where the model does not run on shapes alone.
    """
    from ezpz_device import count_flops  # noqa: PLC0415  # a second: sympy, by torch's shapes

    config, tokens = model.config, torch.zeros(1, length, dtype=torch.int64)
    experts = getattr(config, "_experts_implementation", None)
    try:
        if experts == "grouped_mm":  # in fp32 torch has no shapes of it
            model.set_experts_implementation("batched_mm")
        return count_flops(model, input_ids=tokens) * degree_of("tensor") / length
    except Exception as error:  # noqa: BLE001  # any architecture's forward: it may ask for values
        if get_rank() == 0:
            logger.warning("no FLOP/s: %s cannot be counted: %s", type(model).__name__, error)
        return None
    finally:
        if experts == "grouped_mm":
            model.set_experts_implementation(experts)


def lora_targets(model: nn.Module) -> tuple[str, ...]:
    """Return the layers that `ezpz_tp.apply_lora` adapts by default: what makes queries and values.

    Args:
        model: Of `load_pretrained`, not wrapped yet.

    Returns:
        The ends of their names.

    Raises:
        ModelError: No linear layer has one of the names that are known, as GPT-2's without tensor
            parallelism: it has no linear layers but transformers' ``Conv1D``.
    """
    linear = (nn.Linear, ezpz_tp.ColumnParallelLinear)
    ends = {n.rpartition(".")[2] for n, one in model.named_modules() if isinstance(one, linear)}
    if not (found := tuple(name for name in _ADAPTED if name in ends)):
        raise ModelError(
            f"{type(model).__name__} has no linear layer named {', '.join(_ADAPTED)}, which "
            "adapters go on; expected one, or --lora=0 (GPT-2: or --tp=2)"
        )
    return found


# Writing.


def save_pretrained(model: nn.Module, folder: str | Path, tokenizer: Any = None) -> None:
    """Write a model of `load_pretrained` as transformers' ``from_pretrained`` reads it.

    ``config.json`` and ``generation_config.json`` with the settings that were read, and safetensors
    files of at most 5 GB, in a new folder, which is renamed when it is whole. Rank 0 holds the
    whole model in host memory for that.

    Collective: every rank calls this.

    Args:
        model: Also wrapped by DDP or FSDP2.
        folder: What is there is replaced.
        tokenizer: Of `load_tokenizer`; written beside the model.

    Raises:
        ModelError: On every rank: the folder cannot be written.
    """
    bare = _bare(model)
    state = {name: one for name, one in _whole(bare) if get_rank() == 0}
    trouble, cause = "", None
    if get_rank() == 0:
        folder = Path(folder)
        aside, config = folder.with_name(f".{folder.name}.part"), deepcopy(bare.config)
        config.update(getattr(bare, "published", {}))
        try:
            rmtree(aside, ignore_errors=True)
            aside.parent.mkdir(parents=True, exist_ok=True)
            # transformers' own of the wrapped model would gather once more, on this rank alone.
            with torch.device("meta"):
                fresh = _bare_class(bare)(config)
            fresh.generation_config = bare.generation_config
            fresh.save_pretrained(aside, state_dict=state, max_shard_size="5GB")
            if tokenizer is not None:
                tokenizer.save_pretrained(aside)
            with suppress(FileNotFoundError):
                rmtree(folder)
            aside.rename(folder)
        except Exception as error:  # noqa: BLE001  # whatever it is, the other ranks wait
            rmtree(aside, ignore_errors=True)
            cause = error
            trouble = f"{folder} cannot be written ({error}); expected a folder with room for it"
    if trouble := ezpz_dist.broadcast(trouble, root=0):
        raise ModelError(trouble) from cause


def _bare(model: nn.Module) -> Any:
    return model.module if isinstance(model, DistributedDataParallel) else model


def _bare_class(model: nn.Module) -> Any:
    """Return the class that a model had before FSDP2 made one of it and its own."""
    return next(kind for kind in type(model).__mro__ if kind.__module__.startswith("transformers."))


def _whole(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor that belongs into a file, whole, on the CPU; a tied one once."""
    seen = set[int]()
    for path, module in model.named_modules():
        split: _Split | None = vars(module).get("pretrained")
        kept = module.state_dict(keep_vars=True).keys()
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, one in own:
            if id(one) in seen or name not in kept:
                continue
            seen.add(id(one))
            full: Any = one.detach()
            if hasattr(full, "full_tensor"):
                full = full.full_tensor()
            if split is not None and split.shards[name].dim is not None:
                group = ezpz_tp.get_tensor_parallel_group()
                parts = [torch.empty_like(full) for _ in range(degree_of("tensor"))]
                dist.all_gather(parts, full.contiguous(), group)
                full = split.shards[name].join(parts)
            full = full.t() if split is not None and split.transposed and full.dim() > 1 else full
            yield f"{path}.{name}", full.cpu().contiguous()
