"""From files to files: for other degrees, or in another format; one process, a piece at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from ._errors import DegreeError, ParallelError
from ._formats import Options, Source, Way, format_of, llama, new_folder
from ._formats.dcp import write_dcp
from ._formats.huggingface import write_huggingface
from ._formats.llama import write_llama


def reshard(
    path_in: str | Path,
    path_out: str | Path,
    *,
    tp: int,
    pp: int = 1,
    plan: Mapping[str, Way] | None = None,
    vocab_size: int | None = None,
) -> None:
    """Write files of any format that is known for ``torch.distributed.checkpoint``, bit for bit.

    One file for each tensor-parallel rank. What `dtensor_state_dict` returns is loaded from there
    by ``torch.distributed.checkpoint.load``, at any degree and in any pipeline: ``tp`` says what is
    fast. One process, no process groups; of the model one tensor is in memory at a time.

    Everything is checked before anything is written, and ``path_out`` is there once it is whole:
    after an error nothing is.

    Args:
        path_in: Files of Megatron-LM (``mp_rank_NN``), of Meta's Llama (``consolidated.NN.pth``),
            safetensors in Hugging Face's layout, or a folder of ``torch.distributed.checkpoint``.
        path_out: A folder that is not there yet, or is empty.
        tp: The tensor-parallel degree to write for.
        pp: Without effect: any number of pipeline stages loads the folder.
        plan: How tensors are split, for files that do not say it: patterns of names, and the dim,
            None for what is whole, or ``(dim, matrices)`` with their number or sizes.
        vocab_size: The vocabulary without padding, for files that do not say it.

    Raises:
        DegreeError: A degree does not divide a tensor; names it.
        ParallelError: A file is missing, truncated or does not fit the others; ``path_out`` is
            there already.
    """
    for what, degree in (("tp", tp), ("pp", pp)):
        if degree < 1:
            raise DegreeError(f"{what}={degree}; expected at least 1")
    source = open_source(path_in, Options(plan, vocab_size))
    for entry in source.entries.values():
        entry.local_shape(0, tp)
    with new_folder(path_out) as folder:
        write_dcp(source, folder, tp)


def save_huggingface(
    path_in: str | Path,
    path_out: str | Path,
    *,
    names: str | Callable[[str], str] = "huggingface",
    max_shard_size: int = 5_000_000_000,
    plan: Mapping[str, Way] | None = None,
    vocab_size: int | None = None,
) -> None:
    """Write the full tensors of a model to a new folder, in Hugging Face's layout.

    ``model.safetensors``, or ``model-00001-of-00002.safetensors`` and so on with their index. In
    one process, without process groups, and a piece of a tensor at a time. An optimizer's tensors
    are left out. ``config.json`` and the tokenizer are not made.

    Queries, keys and values of Megatron-LM's files are separated by their groups, and so are gate
    and up projections. The rows of queries and keys of Meta's files are put in the order of
    Hugging Face's rotary embedding.

    Args:
        path_in: As of `reshard`, or a step's folder of ezpz_dist's checkpoints.
        path_out: A folder; there is none yet, or an empty one.
        names: ``huggingface`` translates the names of Megatron-LM's and Meta's files and leaves
            others; ``keep`` leaves all, and the order of rows; a function gives a name for each.
        max_shard_size: Bytes of tensors in a file; a larger tensor has one of its own.
        plan: As of `reshard`: how tensors of files with unknown names are split.
        vocab_size: The vocabulary without Megatron-LM's padding.

    Raises:
        ParallelError: A file is missing, truncated or does not fit the others, or a tensor has no
            name there. Nothing is written then.
    """
    source = open_source(path_in, Options(plan, vocab_size))
    if callable(names):
        made = Source()
        for name in source.entries:
            made.take(source, name, names(name))
        source = made
    elif names == "huggingface":
        translate = format_of(Path(path_in)).as_huggingface
        source = translate(source) if translate else source
    elif names != "keep":
        raise ParallelError(f"names={names!r}; expected 'huggingface', 'keep' or a function")
    with new_folder(path_out) as folder:
        write_huggingface(source, folder, max_shard_size)


def save_llama(
    path_in: str | Path, path_out: str | Path, *, tp: int, plan: Mapping[str, Way] | None = None
) -> None:
    """Write Meta's Llama files again, for another number of ranks, to a new folder.

    ``consolidated.00.pth`` and so on, and a copy of ``params.json``. In one process, a tensor's
    part at a time.

    Args:
        path_in: A folder of such files.
        path_out: A folder; there is none yet, or an empty one.
        tp: The number of tensor-parallel ranks, and of files.
        plan: As of `reshard`. A single file does not tell how Meta's code splits the embedding.
            It is along its rows, as of Llama 3. ``{"tok_embeddings.weight": 1}`` says that it is
            along its columns, as of Llama 1 and 2.

    Raises:
        DegreeError: ``tp`` does not divide a dim that is split.
        ParallelError: A file is missing, truncated or does not fit the others. Nothing is written
            then.
    """
    if format_of(Path(path_in)) is not llama.FORMAT:
        raise ParallelError(f"{path_in}: expected Meta's consolidated.NN.pth and params.json")
    source = open_source(path_in, Options(plan))
    with new_folder(path_out) as folder:
        write_llama(source, folder, tp)
        params = Path(path_in) / "params.json"
        if params.is_file():
            (folder / params.name).write_bytes(params.read_bytes())


def open_source(path: str | Path, options: Options | None = None) -> Source:
    return format_of(Path(path)).open(Path(path), options or Options())
