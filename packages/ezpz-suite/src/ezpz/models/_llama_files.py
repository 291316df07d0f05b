"""Hugging Face's Llama: its configuration, and its weights, in and out, at any degree."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import orjson
import torch
from torch import Tensor, nn

import ezpz_tp

from ._errors import ModelError
from ._llama import LlamaConfig, RopeScaling, llamas

# What this Llama can be only; what a configuration leaves out has these values.
_FIXED = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}


def config_of(source: str | Path | Mapping[str, Any] | Any) -> LlamaConfig:
    """Return the sizes; see `LlamaConfig.from_huggingface`."""
    said, where = _read(source)
    for name, value in _FIXED.items():
        if said.get(name, value) != value:
            got = f"{name}={said[name]!r}"
            raise ModelError(f"{where}: {got}; expected {value!r}: no other is here")
    try:
        dim, heads = int(said["hidden_size"]), int(said["num_attention_heads"])
        if (said.get("head_dim") or dim // heads) * heads != dim:
            raise ModelError(
                f"{where}: head_dim={said['head_dim']} with {heads} heads of hidden_size={dim}; "
                f"expected {dim // heads}"
            )
        theta, scaling = _rotary(said, where)
        return LlamaConfig(
            vocab_size=int(said["vocab_size"]),
            dim=dim,
            layers=int(said["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(said.get("num_key_value_heads") or heads),
            hidden=int(said["intermediate_size"]),
            max_seq_len=int(said.get("max_position_embeddings", 2048)),
            rope_theta=theta,
            rope_scaling=scaling,
            norm_eps=float(said.get("rms_norm_eps", 1e-6)),
            tie_embeddings=bool(said.get("tie_word_embeddings", False)),
        )
    except KeyError as error:
        raise ModelError(f"{where}: says no {error}; expected a Llama's configuration") from error


def _read(source: object) -> tuple[Mapping[str, Any], str]:
    if isinstance(source, Mapping):
        return source, "the configuration"
    if isinstance(source, (str, Path)):
        path = Path(source)
        path = path / "config.json" if path.is_dir() else path
        try:
            said = orjson.loads(path.read_bytes())
        except (OSError, orjson.JSONDecodeError) as error:
            raise ModelError(f"{path}: {error}; expected a model's config.json") from error
        if not isinstance(said, dict):
            raise ModelError(f"{path}: holds a {type(said).__name__}; expected a JSON object")
        return said, str(path)
    kind = type(source).__name__
    if not hasattr(source, "to_dict"):
        raise ModelError(
            f"a configuration of type {kind}; expected a path, a mapping, or transformers' "
            "LlamaConfig"
        )
    return source.to_dict(), kind


def _rotary(said: Mapping[str, Any], where: str) -> tuple[float, RopeScaling | None]:
    """Return base and scaling: transformers 5 has them in one mapping, before they were two."""
    rope = said.get("rope_parameters") or said.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta") or said.get("rope_theta") or 1e4)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ModelError(f"{where}: rope_type {kind!r}; expected 'default' or 'llama3'")
    return theta, RopeScaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_length=int(rope["original_max_position_embeddings"]),
    )


_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_HEAD, _TABLE = "lm_head.weight", "model.embed_tokens.weight"
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


@torch.no_grad()
def load_huggingface(model: nn.Module, source: str | Path | Mapping[str, Tensor]) -> None:
    """Fill a Llama with the weights of transformers' ``LlamaForCausalLM``.

    Each rank reads its own parts and no more; nothing is sent, so only ranks that hold a model's
    part need to call it. The weights are converted to the dtype that the parameters have. Do it
    before DDP or FSDP2 wraps the model, and after ``to_empty`` if it was built on the meta device.

    >>> from ezpz.models import Llama, LlamaConfig
    >>> config = LlamaConfig(dim=64, layers=2, heads=4)
    >>> one, other = Llama(config, seed=1), Llama(config, seed=2)
    >>> load_huggingface(one, huggingface_state_dict(other))
    >>> bool((one.lm_head.weight == other.lm_head.weight).all())
    True

    Args:
        model: A `Llama`, plain or parallel, or a pipeline's part (``pipeline.module``).
        source: A folder with ``model.safetensors`` (or several such files and their index), or a
            state dict.

    Raises:
        ModelError: A tensor is missing, unknown or of another shape (before anything is changed);
            the model is wrapped, or has no data; or safetensors is not installed.
    """
    config = next(llamas(model)).config
    named = _parameters(model)
    with ExitStack() as stack:
        tensors, where = _open(source, stack)
        _check(named, tensors, config, where)
        for name, (parameter, shard, index, degree) in named.items():
            found = tensors[_source(name, config)]
            parameter.zero_()  # what pads a vocabulary
            for into, start, length in shard.pieces(index, degree):
                dim = shard.dim or 0
                part = (slice(None),) * dim + (slice(start, start + length),)
                parameter.narrow(dim, into, length).copy_(found[part])


def huggingface_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights as transformers' ``LlamaForCausalLM`` names them, whole, on every rank.

    Collective, where parallel: every rank of the model calls this.

    Args:
        model: A `Llama`, plain or parallel, or a pipeline's part (``pipeline.module``).

    Raises:
        ModelError: The model is wrapped: by DDP (give its ``module``), or sharded by FSDP2.
    """
    is_parallel = all(one.is_parallel for one in llamas(model))
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "device_mesh"):
            raise ModelError(
                f"{name} is sharded by FSDP2; expected a Llama that is not wrapped: take the whole "
                "state dict of torch.distributed.checkpoint.state_dict"
            )
    whole = ezpz_tp.gather_state_dict(model) if is_parallel else model.state_dict()
    return {_their_name(name): tensor.detach() for name, tensor in whole.items()}


_Part = tuple[nn.Parameter, ezpz_tp.Shard, int, int]
"""A parameter, what it is a part of, and which part of how many."""


def _parameters(model: nn.Module) -> dict[str, _Part]:
    found: dict[str, _Part] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        place = getattr(module, "tp_rank", 0), getattr(module, "tp_size", 1)
        for name, parameter in module.named_parameters(recurse=False):
            key = f"{path}.{name}"
            if parameter.is_meta or hasattr(parameter, "device_mesh"):
                state = "has no data: call to_empty" if parameter.is_meta else "is sharded by FSDP2"
                raise ModelError(f"{key} {state}; load weights into a model after the one and "
                                 "before the other")  # fmt: skip
            shard = ezpz_tp.shard_of(parameter)
            assert shard is not None  # ezpz_tp's own layers say it
            found[_their_name(key)] = parameter, shard, *place
    return found


def _their_name(name: str) -> str:
    return name if name.startswith("lm_head.") else f"model.{name}"


def _source(name: str, config: LlamaConfig) -> str:
    """Return the tensor that fills a parameter: of a tied head the table, whatever is stored."""
    return _TABLE if config.tie_embeddings and name == _HEAD else name


def _check(
    named: Mapping[str, _Part], tensors: Mapping[str, Any], config: LlamaConfig, where: str
) -> None:
    for name, (_, shard, _, _) in named.items():
        other = _source(name, config)
        if other not in tensors:
            raise ModelError(f"{where}: has no {other}; expected the weights of a Llama")
        one = tensors[other]
        shape = tuple(one.shape if isinstance(one, Tensor) else one.get_shape())
        if shape != shard.full_shape:
            raise ModelError(
                f"{where}: {other} has shape {shape}; expected {shard.full_shape}: make the model "
                "by LlamaConfig.from_huggingface"
            )
    blocks = {match[2] for name in named if (match := _LAYER.match(name))}
    for name in tensors:
        match = _LAYER.match(name)
        known = name in named or name in (_HEAD, _TABLE, "model.norm.weight")
        if match and int(match[1]) < config.layers:
            known = known or match[2] in blocks or not blocks
        if not known and not name.endswith("rotary_emb.inv_freq"):
            raise ModelError(
                f"{where}: has {name}, which this model of {config.layers} layers has not; "
                "expected the weights of the same model"
            )


def _open(
    source: str | Path | Mapping[str, Tensor], stack: ExitStack
) -> tuple[Mapping[str, Any], str]:
    """Return tensors, or what reads parts of those in files, by name; and what to call it."""
    if isinstance(source, Mapping):
        return source, "the state dict"
    try:
        from safetensors import safe_open  # noqa: PLC0415  # an extra
    except ImportError as error:
        raise ModelError(
            f"{source}: reading it takes safetensors ({error}); "
            "pip install 'ezpz-suite[huggingface]'"
        ) from error
    tensors: dict[str, Any] = {}
    for path in _files(Path(source)):
        try:
            file: Any = stack.enter_context(safe_open(path, framework="pt"))
        except Exception as error:  # safetensors' own is no class that it documents
            raise ModelError(f"{path}: {error}; expected a whole safetensors file") from error
        for name in file.keys():  # noqa: SIM118  # it is no mapping
            tensors[name] = file.get_slice(name)
    return tensors, str(source)


def _files(folder: Path) -> list[Path]:
    if (folder / _INDEX).is_file():
        names = orjson.loads((folder / _INDEX).read_bytes())["weight_map"].values()
        return [folder / name for name in sorted(set(names))]
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    raise ModelError(f"{folder}: has neither {_SINGLE} nor {_INDEX}; expected a model's folder")
