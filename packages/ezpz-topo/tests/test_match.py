"""Which machine: what identifies one, what is set aside, and what is never guessed."""

from dataclasses import FrozenInstanceError, replace

import pytest

from ezpz_topo import MachineError, get_machine, get_machine_info, known_machines

SERVERS = {
    "aurora": "2287864.aurora-pbs-0001.hostmgmt.cm.aurora.alcf.anl.gov",
    "polaris": "308834.polaris-pbs-01.hsn.cm.polaris.alcf.anl.gov",
    "crux": "12345.crux-pbs-0001.head.cm.crux.alcf.anl.gov",
    "sunspot": "12463902.sunspot-pbs-0001.head.cm.sunspot.alcf.anl.gov",
    "sophia": "192796.sophia-pbs-01.lab.alcf.anl.gov",
}


def machine(env=None, hostname="box"):
    return get_machine_info(env or {}, hostname=hostname)


@pytest.mark.parametrize(
    ("name", "hostname"),
    [
        ("polaris", "polaris-login-02"),
        ("polaris", "polaris-login-02.hsn.cm.polaris.alcf.anl.gov"),
        ("polaris", "x3005c0s13b0n0.hsn.cm.polaris.alcf.anl.gov"),
        ("sirius", "x3200c0s19b1n0.hsn.cm.sirius.alcf.anl.gov"),
        ("sirius", "sirius-uan-0002"),
        ("aurora", "aurora-uan-0010"),
        ("aurora", "aurora-uan-0010.hostmgmt1000.cm.aurora.alcf.anl.gov"),
        ("aurora", "x4102c5s2b0n0.hsn.cm.aurora.alcf.anl.gov"),
        ("sunspot", "x1921c1s2b0n0.hsn.cm.sunspot.alcf.anl.gov"),
        ("sophia", "sophia-login-01"),
        ("sophia", "sophia-gpu-06.lab.alcf.anl.gov"),
        ("crux", "crux-uan-0001.head.cm.crux.alcf.anl.gov"),
        ("crux", "crux-login-01"),
        ("perlmutter", "nid001321.chn.perlmutter.nersc.gov"),
        ("frontier", "frontier00144"),
        ("frontier", "login05.frontier.olcf.ornl.gov"),
    ],
)
def test_host_name_and_pbs_o_host(name, hostname):
    found = machine(hostname=hostname)
    assert found.name == name
    assert hostname in found.matched_by
    if known_machines({})[name].scheduler == "pbs":
        job = {"PBS_JOBID": "1.pbs-0001", "PBS_O_HOST": hostname}
        assert machine(job, "x3005c0s13b0n0").name == name


@pytest.mark.parametrize("name", SERVERS)
def test_the_server_of_the_job(name):
    env = {"PBS_JOBID": SERVERS[name]}
    assert machine(env, "x1000c0s0b1n1").name == name
    assert machine(env, "x1000c0s0b1n1").matched_by == f"PBS_JOBID={SERVERS[name]}"


def test_the_server_of_an_array_job():
    assert machine({"PBS_JOBID": SERVERS["crux"].replace("12345", "40[1]")}).name == "crux"


def test_the_servers_word_goes_before_where_the_job_was_submitted():
    found = machine({"PBS_JOBID": SERVERS["sunspot"], "PBS_O_HOST": "aurora-uan-0010"})
    assert found.name == "sunspot"
    assert any("aurora-uan-0010" in note for note in found.notes)


@pytest.mark.parametrize(
    ("name", "env"),
    [
        ("perlmutter", {"NERSC_HOST": "perlmutter"}),
        ("frontier", {"LMOD_SYSTEM_NAME": "frontier"}),
        ("frontier", {"SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": "frontier"}),
        ("perlmutter", {"SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": "perlmutter"}),
    ],
)
@pytest.mark.parametrize("hostname", ["login05", "nid001234", "box"])
def test_the_sites_own_variables(name, env, hostname):
    assert machine(env, hostname).name == name


# Traps.


@pytest.mark.parametrize(
    "hostname", ["x1000c0s0b1n1", "x1921c1s2b0n0", "x3005c0s13b0n0", "login01", "nid001234", "x1"]
)
def test_names_of_many_sites_identify_none(hostname):
    found = machine(hostname=hostname)
    assert (found.name, found.scheduler) == ("workstation", "none")


@pytest.mark.parametrize(
    "hostname",
    ["my-aurora-uan-0010", "frontier", "frontier-x1", "frontier0a", "notaurora.alcf.anl.gov",
     "aurora.alcf.anl.gov.example.org", "polaris-login-", ""],
)  # fmt: skip
def test_names_that_only_look_alike(hostname):
    assert machine(hostname=hostname).name == "workstation"


@pytest.mark.parametrize("cluster", [{}, {"SLURM_CLUSTER_NAME": "lumi"}])
def test_slurm_on_a_nid_host_that_is_not_perlmutter(cluster):
    assert machine({"SLURM_JOB_ID": "7", **cluster}, "nid001234").name == "generic-slurm"


def test_an_unknown_pbs_server_is_generic():
    found = machine({"PBS_JOBID": "1.pbs-0001", "PBS_O_HOST": "login01"}, "x1000c0s0b1n1")
    assert (found.name, found.launcher) == ("generic-pbs", "mpiexec")
    assert "PBS_JOBID" in found.matched_by


def test_qsub_on_the_path_does_not_matter(tmp_path):
    (tmp_path / "qsub").write_text("#!/bin/sh\n")
    (tmp_path / "qsub").chmod(0o755)
    assert machine({"PATH": str(tmp_path)}).name == "workstation"


@pytest.mark.parametrize(
    ("expected", "env", "hostname"),
    [
        ("aurora", {"PBS_JOBID": SERVERS["aurora"]}, "x4102c5s2b0n0"),
        ("generic-pbs", {"PBS_JOBID": "1.pbs-0001"}, "x1"),
        ("polaris", {}, "polaris-login-02.hsn.cm.polaris.alcf.anl.gov"),
        ("generic-slurm", {"SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": "lumi"}, "nid001234"),
        ("frontier", {"SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": "frontier"}, "frontier00144"),
        ("workstation", {}, "laptop.local"),
    ],
)
def test_leftover_nersc_host(expected, env, hostname):
    found = machine({"NERSC_HOST": "perlmutter", **env}, hostname)
    assert found.name == expected
    assert any("NERSC_HOST=perlmutter set aside" in note for note in found.notes)


def test_a_job_of_another_scheduler_outranks_the_hosts_name():
    found = machine({"SLURM_JOB_ID": "7"}, "polaris-login-02")
    assert found.name == "generic-slurm"
    assert found.notes == (
        (
            "the name of host polaris-login-02 set aside for polaris: "
            "this is a slurm job and polaris has pbs"
        ),
    )


def test_two_of_the_same_standing_are_none():
    found = machine({"NERSC_HOST": "perlmutter", "LMOD_SYSTEM_NAME": "frontier"})
    assert found.name == "workstation"
    assert any("set EZPZ_MACHINE" in note for note in found.notes)


def test_empty_variables_are_unset():
    env = {"NERSC_HOST": "", "EZPZ_MACHINE": "", "SLURM_JOB_ID": "", "EZPZ_MACHINES": ""}
    assert machine(env).name == "workstation"


@pytest.mark.parametrize("word", ["frontier", "Frontier"])
def test_ezpz_machine_overrides(word):
    found = machine({"EZPZ_MACHINE": word, "NERSC_HOST": "perlmutter"}, "polaris-login-02")
    assert (found.name, found.matched_by) == ("frontier", f"EZPZ_MACHINE={word}")
    assert found.notes == ()


def test_ezpz_machine_against_the_jobs_scheduler_is_noted():
    found = machine({"EZPZ_MACHINE": "frontier", "PBS_JOBID": SERVERS["aurora"]})
    assert found.name == "frontier"
    assert "pbs job" in found.notes[0]


@pytest.mark.parametrize("word", ["auroa", "../aurora", "aurora.toml"])
def test_an_unknown_ezpz_machine_lists_the_known(word):
    with pytest.raises(MachineError, match=r"EZPZ_MACHINE=.*aurora, crux, .*workstation"):
        machine({"EZPZ_MACHINE": word})


def test_get_machine_is_its_name():
    assert get_machine({"EZPZ_MACHINE": "crux"}) == "crux"


# The user's files.

IMAGINARY = """
site = "nowhere"
source = ["a test"]
date = "2026-08-01"
scheduler = "slurm"
launcher = "srun"

[match]
NOWHERE_SYSTEM = ["utopia", "utopia-2"]
hostnames = ["utopia#"]
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "utopia.toml").write_text(IMAGINARY)
    return tmp_path


@pytest.mark.parametrize(
    ("env", "hostname"),
    [({"NOWHERE_SYSTEM": "utopia-2"}, "x1"), ({}, "utopia42"), ({"EZPZ_MACHINE": "utopia"}, "x1")],
)
def test_adding_a_machine_is_adding_one_file(folder, env, hostname):
    found = machine({"EZPZ_MACHINES": str(folder), **env}, hostname)
    assert (found.name, found.site, found.launcher) == ("utopia", "nowhere", "srun")
    assert found.path == str(folder / "utopia.toml")
    assert "utopia" in known_machines({"EZPZ_MACHINES": str(folder)})
    assert "utopia" not in known_machines({})


def test_a_variable_of_another_value_speaks_against(folder):
    env = {"EZPZ_MACHINES": str(folder), "NOWHERE_SYSTEM": "dystopia"}
    assert machine(env, "utopia42").name == "workstation"


def test_a_users_file_replaces_the_packaged_one(folder):
    (folder / "aurora.toml").write_text(IMAGINARY)
    env = {"EZPZ_MACHINES": str(folder), "EZPZ_MACHINE": "aurora"}
    assert machine(env).site == "nowhere"
    assert machine({"EZPZ_MACHINES": str(folder)}, "aurora-uan-0010").name == "workstation"


def test_a_users_generic_file_serves_where_none_matches(folder):
    (folder / "generic-slurm.toml").write_text(IMAGINARY.partition("[match]")[0])
    assert machine({"EZPZ_MACHINES": str(folder), "SLURM_JOB_ID": "7"}).site == "nowhere"


def test_the_first_folder_wins(folder, tmp_path_factory):
    second = tmp_path_factory.mktemp("second")
    (second / "utopia.toml").write_text(IMAGINARY.replace("nowhere", "elsewhere"))
    found = machine({"EZPZ_MACHINES": f"{second}:{folder}", "EZPZ_MACHINE": "utopia"})
    assert found.site == "elsewhere"


def test_a_folder_that_is_not_there_is_named(folder):
    with pytest.raises(MachineError, match=r"missing.*EZPZ_MACHINES"):
        machine({"EZPZ_MACHINES": f"{folder}:{folder}/missing"})


@pytest.mark.parametrize(
    ("platform", "variable", "below"),
    [
        ("linux", "HOME", ".config"),
        ("darwin", "HOME", "Library/Application Support"),
        ("linux", "XDG_CONFIG_HOME", "."),
    ],
)
def test_the_platforms_configuration_folder(tmp_path, monkeypatch, platform, variable, below):
    monkeypatch.setattr("sys.platform", platform)
    folder = tmp_path / below / "ezpz" / "machines"
    assert machine({variable: str(tmp_path)}).name == "workstation"
    folder.mkdir(parents=True)
    (folder / "utopia.toml").write_text(IMAGINARY)
    (folder / ".utopia.toml.swp").write_text("no machine")
    (folder / "README").write_text("no machine")
    assert machine({variable: str(tmp_path)}, "utopia1").name == "utopia"


def test_a_wrong_file_is_refused_even_if_it_is_another_machines(folder):
    (folder / "utopia.toml").write_text(IMAGINARY.replace("hostnames", "hostname"))
    with pytest.raises(MachineError, match=r"utopia\.toml: match\.hostname = .*'hostnames'"):
        machine({"EZPZ_MACHINES": str(folder)})


def test_machines_compare_by_their_facts():
    aurora = known_machines({})["aurora"]
    found = machine({}, "aurora-uan-0010")
    assert found == aurora
    assert "aurora-uan-0010" in found.matched_by
    assert replace(aurora, nodes=1) != aurora
    assert aurora != "aurora"
    with pytest.raises(FrozenInstanceError):
        aurora.nodes = 1


def test_the_environment_is_never_changed():
    env = {"PBS_JOBID": SERVERS["aurora"]}
    machine(env)
    assert env == {"PBS_JOBID": SERVERS["aurora"]}
