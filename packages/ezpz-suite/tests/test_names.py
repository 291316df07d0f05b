"""Every name that type checkers see is there; importing ezpz loads nothing."""

import inspect
import subprocess
import sys
from operator import attrgetter

import pytest

import ezpz
import ezpz_tp


@pytest.mark.parametrize("face", [ezpz, ezpz.data, ezpz.models])
def test_every_name_is_there_and_kept(face):
    assert len(face.__all__) > 10
    for name in face.__all__:
        value = getattr(face, name)
        assert vars(face)[name] is value, "fetched once, then kept"
        assert name in dir(face)
        home = getattr(value, "__module__", "")
        public = sys.modules[home.partition(".")[0]] if home.startswith("ezpz_") else face
        assert name in public.__all__


def test_a_star_imports_all_of_them():
    found = {}
    exec("from ezpz import *", found)
    assert set(ezpz.__all__) <= found.keys()


@pytest.mark.parametrize(
    ("face", "meant"),
    [
        (ezpz, "setup_torch"),
        (ezpz.data, "TokenBlocks"),
        (ezpz.models, "LlamaConfig"),
        (ezpz.tp, "get_tensor_parallel_rank"),
    ],
)
def test_a_misspelt_name_suggests_the_right_one(face, meant):
    code = f"import {face.__name__}; {face.__name__}.{meant.replace('o', 'oo', 1)}"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert f"'{face.__name__}' has no attribute" in done.stderr
    assert done.stderr.endswith(f"Did you mean: {meant!r}?\n")


def test_tp_is_all_of_ezpz_tp():
    assert ezpz.tp.__all__ == ezpz_tp.__all__
    assert set(ezpz_tp.__all__) <= set(dir(ezpz.tp))
    for name in ezpz_tp.__all__:
        assert getattr(ezpz.tp, name) is getattr(ezpz_tp, name)


WITHOUT = """
cleanup get_cpus_per_node get_dist_info get_gpus_per_node get_hostname get_local_rank get_machine
get_node_index get_num_nodes get_rank get_torch_backend get_torch_device get_torch_device_type
get_world_size_in_use get_world_size_total print_dist_setup query_environment synchronize
verify_wandb History tp.destroy_tensor_parallel
"""
# What the documents promise: the name, and the arguments under their names and in their order.
PROMISED = {
    **dict.fromkeys(WITHOUT.split(), ""),
    **{
        f"tp.get_{axis}_parallel_{what}": ""
        for axis in ("tensor", "data", "pipeline", "context")
        for what in ("group", "rank", "world_size")
    },
    **dict.fromkeys(["get_nodes_from_hostfile", "get_hostfile_with_fallback"], "hostfile"),
    **dict.fromkeys(["wrap_model_for_ddp", "wrap_model_for_fsdp", "wrap_model_for_fsdp2"], "model"),
    "all_reduce": "obj op implementation",
    "barrier": "group implementation",
    "breakpoint": "rank",
    "broadcast": "obj root",
    "get_device_properties": "device",
    "get_logger": "name",
    "get_world_size": "total in_use",
    "log_dict_as_bulleted_list": "d name",
    "seed_everything": "seed",
    "setup_torch": "framework backend seed",
    "setup_wandb": "project_name",
    "timeitlogit": "rank",
    "tp.initialize_tensor_parallel": (
        "tensor_parallel_size pipeline_parallel_size context_parallel_size"
    ),
    "wrap_model": "model use_fsdp dtype",
    "write_hostfile_from_list_of_hosts": "hosts hostfile",
    "write_localhost_to_hostfile": "hostfile",
}


@pytest.mark.parametrize("name", PROMISED)
def test_what_is_promised_is_there_documented_and_typed(name):
    value = attrgetter(name)(ezpz)
    assert inspect.getdoc(value)
    signature = inspect.signature(value)
    asked = [each for each in signature.parameters if each in PROMISED[name].split()]
    assert asked == PROMISED[name].split()
    assert signature.return_annotation is not inspect.Signature.empty
    for parameter in signature.parameters.values():
        assert parameter.annotation is not inspect.Parameter.empty
        wanted = parameter.default is inspect.Parameter.empty
        if wanted and parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            assert parameter.name in PROMISED[name].split(), "callable as the documents call it"


def test_importing_it_loads_nothing():
    code = """
import sys
before = set(sys.modules)
for name in ("ezpz", "ezpz.data", "ezpz.models"):
    __import__(name)
    print(*sorted(set(sys.modules) - before))
print(sys.modules["ezpz"].doctor.__name__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, topo = "ezpz ezpz._version", "ezpz_topo ezpz_topo._version"
    loaded = [
        f"{first} {topo}",
        f"{first} ezpz.data {topo}",
        f"{first} ezpz.data ezpz.models {topo}",
    ]
    assert done.stdout.splitlines() == [*loaded, "ezpz.doctor"]


def test_the_version_is_that_of_the_distribution():
    from importlib.metadata import version

    assert ezpz.__version__ == version("ezpz-suite")
