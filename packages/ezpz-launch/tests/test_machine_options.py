"""The options of the real machines' files."""

from dataclasses import replace

import pytest

from ezpz_launch import UsageError
from ezpz_launch._environment import choose_options
from ezpz_launch._identify import Launcher
from ezpz_topo import imagine


def chosen(machine, *names, kind=""):
    known = imagine(machine, 1, {}).machine if isinstance(machine, str) else machine
    return choose_options(known, names, Launcher("x", kind or known.launcher, ""))


def test_flags_variables_and_binding_come_together_each_option_once():
    told = chosen("polaris", "depth", "nccl-ofi", "depth")
    assert told.names == ("depth", "nccl-ofi")
    assert told.flags == ("--cpu-bind=depth", "--depth=8")
    assert (told.cpu_bind, told.cpu_bind_option) == ("none", "depth")
    assert told.environment["NCCL_NET"] == ("AWS Libfabric", "--option nccl-ofi")


def test_a_backend_is_told_to_the_ranks():
    assert chosen("frontier", "gloo").environment == {"TORCH_BACKEND": ("gloo", "--option gloo")}


def test_modules_are_for_the_shell_and_said():
    (note,) = chosen("perlmutter", "system-nccl").notes
    assert note.endswith("module load cudatoolkit nccl cray-mpich")


def test_an_option_that_is_none_of_the_machines():
    with pytest.raises(UsageError, match=r"--option scal: aurora has no .*: no-vni, scale$"):
        chosen("aurora", "scal")
    with pytest.raises(UsageError, match=r"workstation has no such option; .* own: none$"):
        chosen("workstation", "scale")


def test_flags_are_for_the_machines_own_launcher_only():
    with pytest.raises(UsageError, match=r"\(--no-vni\) are for pals, and the launcher is hydra"):
        chosen("aurora", "no-vni", kind="hydra")
    assert chosen("aurora", "scale", kind="hydra").flags == ()


def test_two_that_contradict_each_other():
    machine = imagine("polaris", 1, {}).machine
    options = dict(machine.options)
    options["by-numa"] = replace(options["depth"], cpu_bind="numa")
    options["no-net"] = replace(options["nccl-ofi"], environment={"NCCL_NET": "Socket"})
    known = replace(machine, options=options)
    with pytest.raises(UsageError, match="--option by-numa binds by numa, --option depth by none"):
        chosen(known, "depth", "by-numa")
    with pytest.raises(UsageError, match="--option no-net sets NCCL_NET=Socket, --option nccl-ofi"):
        chosen(known, "nccl-ofi", "no-net")
