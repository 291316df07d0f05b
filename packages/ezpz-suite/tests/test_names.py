"""Every name that type checkers see is there; importing ezpz loads nothing."""

import inspect
import subprocess
import sys
from operator import attrgetter

import pytest

import ezpz
import ezpz_tp

MODULES = ("data", "doctor", "models", "tp")


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


def test_a_misspelt_name_suggests_the_right_one():
    with pytest.raises(
        AttributeError, match="no attribute 'setup_troch'; did you mean 'setup_torch'"
    ):
        ezpz.setup_troch  # noqa: B018


@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_reached_by_its_name_alone(name):
    code = f"import ezpz; print(ezpz.{name}.__name__, ezpz.{name}.__doc__.count('.') > 0)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == [f"ezpz.{name}", "True"]


def test_tp_is_all_of_ezpz_tp():
    assert ezpz.tp.__all__ == ezpz_tp.__all__
    assert set(ezpz_tp.__all__) <= set(dir(ezpz.tp))
    for name in ezpz_tp.__all__:
        assert getattr(ezpz.tp, name) is getattr(ezpz_tp, name)
    with pytest.raises(
        AttributeError, match=r"'ezpz.tp' has no .* did you mean 'get_tensor_parallel_rank'"
    ):
        ezpz.tp.get_tensor_paralel_rank  # noqa: B018


@pytest.mark.parametrize(("module", "name"), [("data", "TokenBlocks"), ("models", "LlamaConfig")])
def test_a_misspelt_name_of_a_module_suggests_the_right_one(module, name):
    with pytest.raises(AttributeError, match=f"'ezpz.{module}' has no .* did you mean '{name}'"):
        getattr(getattr(ezpz, module), name[:-1])


# What the documents promise: the name, and the arguments under their names and in their order.
PROMISED = {
    "setup_torch": "framework backend seed",
    "cleanup": "",
    "wrap_model": "model use_fsdp dtype",
    "wrap_model_for_ddp": "model",
    "wrap_model_for_fsdp": "model",
    "wrap_model_for_fsdp2": "model",
    "get_rank": "",
    "get_local_rank": "",
    "get_world_size": "total in_use",
    "get_world_size_total": "",
    "get_world_size_in_use": "",
    "get_num_nodes": "",
    "get_gpus_per_node": "",
    "get_cpus_per_node": "",
    "get_node_index": "",
    "get_device_properties": "device",
    "get_torch_device": "",
    "get_torch_device_type": "",
    "get_torch_backend": "",
    "synchronize": "",
    "barrier": "group implementation",
    "broadcast": "obj root",
    "all_reduce": "obj op implementation",
    "get_dist_info": "",
    "get_hostname": "",
    "get_machine": "",
    "print_dist_setup": "",
    "query_environment": "",
    "seed_everything": "seed",
    "setup_wandb": "project_name",
    "verify_wandb": "",
    "timeitlogit": "rank",
    "log_dict_as_bulleted_list": "d name",
    "get_nodes_from_hostfile": "hostfile",
    "get_hostfile_with_fallback": "hostfile",
    "write_localhost_to_hostfile": "hostfile",
    "write_hostfile_from_list_of_hosts": "hosts hostfile",
    "get_logger": "name",
    "History": "",
    "breakpoint": "rank",
    "tp.initialize_tensor_parallel": (
        "tensor_parallel_size pipeline_parallel_size context_parallel_size"
    ),
    "tp.destroy_tensor_parallel": "",
    **{
        f"tp.get_{axis}_parallel_{what}": ""
        for axis in ("tensor", "data", "pipeline", "context")
        for what in ("group", "rank", "world_size")
    },
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


@pytest.mark.parametrize("name", ["ezpz", "ezpz.data", "ezpz.models"])
def test_importing_it_loads_nothing(name):
    code = (
        f"import sys; before = set(sys.modules); import {name}; print(*set(sys.modules) - before)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(out.stdout.split()) == {"ezpz", "ezpz._names", "ezpz._version", name}


def test_the_version_is_that_of_the_distribution():
    from importlib.metadata import version

    assert ezpz.__version__ == version("ezpz-suite")
