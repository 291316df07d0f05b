"""Which machine this is, what its file may say, and the packaged ones."""

import os

import pytest

from ezpz_topo import MachineError, get_machine, get_machine_info, known_machines
from ezpz_topo._machine import GENERIC, PACKAGED

# Which machine: what identifies one, what is set aside, and what is never guessed.

SERVERS = {
    "aurora": "2287864.aurora-pbs-0001.hostmgmt.cm.aurora.alcf.anl.gov",
    "polaris": "308834.polaris-pbs-01.hsn.cm.polaris.alcf.anl.gov",
    "crux": "12345.crux-pbs-0001.head.cm.crux.alcf.anl.gov",
    "sunspot": "12463902.sunspot-pbs-0001.head.cm.sunspot.alcf.anl.gov",
    "sophia": "192796.sophia-pbs-01.lab.alcf.anl.gov",
}


def machine(env=None, hostname="box"):
    return get_machine_info(env or {}, hostname=hostname)


@pytest.mark.parametrize(("name", "hostname"), [
    ("polaris", "polaris-login-02"),
    ("sirius", "x3200c0s19b1n0.hsn.cm.sirius.alcf.anl.gov"),
    ("sirius", "sirius-uan-0002"),
    ("aurora", "aurora-uan-0010"),
    ("sunspot", "x1921c1s2b0n0.hsn.cm.sunspot.alcf.anl.gov"),
    ("sophia", "sophia-gpu-06.lab.alcf.anl.gov"),
    ("crux", "crux-uan-0001.head.cm.crux.alcf.anl.gov"),
    ("perlmutter", "nid001321.chn.perlmutter.nersc.gov"),
    ("frontier", "frontier00144"),
    ("frontier", "login05.frontier.olcf.ornl.gov"),
])  # fmt: skip
def test_host_name_and_pbs_o_host(name, hostname):
    found = machine(hostname=hostname)
    assert found.name == name
    assert hostname in found.matched_by
    if known_machines({})[name].scheduler == "pbs":
        job = {"PBS_JOBID": "1.pbs-0001", "PBS_O_HOST": hostname}
        assert machine(job, "x3005c0s13b0n0").name == name


def test_the_servers_word_goes_before_where_the_job_was_submitted():
    found = machine({"PBS_JOBID": SERVERS["sunspot"], "PBS_O_HOST": "aurora-uan-0010"})
    assert found.name == "sunspot"
    assert any("aurora-uan-0010" in note for note in found.notes)


SITES = [
    ("perlmutter", {"NERSC_HOST": "perlmutter"}),
    ("frontier", {"LMOD_SYSTEM_NAME": "frontier"}),
    ("frontier", {"SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": "frontier"}),
    ("perlmutter", {"SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": "perlmutter"}),
]


@pytest.mark.parametrize(("name", "env", "hostname"), [
    *((name, {"PBS_JOBID": server}, "x1000c0s0b1n1") for name, server in SERVERS.items()),
    ("crux", {"PBS_JOBID": SERVERS["crux"].replace("12345", "40[1]")}, "box"),
    *((*site, hostname) for site in SITES for hostname in ("login05", "nid001234", "box")),
    # names of many sites identify none, nor do names that only look alike
    *(("workstation", {}, hostname) for hostname in (
        "x1000c0s0b1n1", "x1921c1s2b0n0", "login01", "nid001234", "x1",
        "my-aurora-uan-0010", "frontier", "frontier-x1", "frontier0a", "notaurora.alcf.anl.gov",
        "aurora.alcf.anl.gov.example.org", "polaris-login-", "")),
    ("generic-slurm", {"SLURM_JOB_ID": "7"}, "nid001234"),
    ("generic-slurm", {"SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": "lumi"}, "nid001234"),
    ("generic-pbs", {"PBS_JOBID": "1.pbs-0001", "PBS_O_HOST": "login01"}, "x1000c0s0b1n1"),
    # empty variables are unset
    ("workstation", dict.fromkeys(
        ("NERSC_HOST", "EZPZ_MACHINE", "SLURM_JOB_ID", "EZPZ_MACHINES"), ""), "box"),
])  # fmt: skip
def test_jobs_variables_and_traps(name, env, hostname):
    before = dict(env)
    found = machine(env, hostname)
    assert found.name == name
    assert env == before
    if "PBS_JOBID" in env:
        assert "PBS_JOBID" in found.matched_by
    elif name in ("workstation", "generic-slurm"):
        assert found.matched_by.startswith("no known machine matched")


@pytest.mark.parametrize(("expected", "env", "hostname"), [
    ("aurora", {"PBS_JOBID": SERVERS["aurora"]}, "x4102c5s2b0n0"),
    ("generic-pbs", {"PBS_JOBID": "1.pbs-0001"}, "x1"),
    ("polaris", {}, "polaris-login-02.hsn.cm.polaris.alcf.anl.gov"),
    ("generic-slurm", {"SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": "lumi"}, "nid001234"),
    ("frontier", {"SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": "frontier"}, "frontier00144"),
    ("workstation", {}, "laptop.local"),
])  # fmt: skip
def test_leftover_nersc_host(expected, env, hostname):
    found = machine({"NERSC_HOST": "perlmutter", **env}, hostname)
    assert found.name == expected
    assert any("NERSC_HOST=perlmutter set aside" in note for note in found.notes)


def test_a_job_of_another_scheduler_outranks_the_hosts_name():
    found = machine({"SLURM_JOB_ID": "7"}, "polaris-login-02")
    why = "set aside for polaris: this is a slurm job and polaris has pbs"
    assert (found.name, *found.notes) == (
        "generic-slurm", f"the name of host polaris-login-02 {why}",
    )  # fmt: skip


def test_two_of_the_same_standing_are_none():
    found = machine({"NERSC_HOST": "perlmutter", "LMOD_SYSTEM_NAME": "frontier"})
    assert found.name == "workstation"
    assert any("set EZPZ_MACHINE" in note for note in found.notes)


@pytest.mark.parametrize("word", ["frontier", "Frontier"])
def test_ezpz_machine_overrides(word):
    found = machine({"EZPZ_MACHINE": word, "NERSC_HOST": "perlmutter"}, "polaris-login-02")
    assert (found.name, found.matched_by) == ("frontier", f"EZPZ_MACHINE={word}")
    assert found.notes == ()
    assert get_machine({"EZPZ_MACHINE": word}) == "frontier"
    odd = machine({"EZPZ_MACHINE": word, "PBS_JOBID": SERVERS["aurora"]})
    assert (odd.name, "pbs job" in odd.notes[0]) == ("frontier", True)


@pytest.mark.parametrize("word", ["auroa", "../aurora", "aurora.toml"])
def test_an_unknown_ezpz_machine_lists_the_known(word):
    with pytest.raises(MachineError, match=r"EZPZ_MACHINE=.*aurora, crux, .*workstation"):
        machine({"EZPZ_MACHINE": word})


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
    env = {"EZPZ_MACHINES": str(folder), "NOWHERE_SYSTEM": "dystopia"}
    assert machine(env, "utopia42").name == "workstation", "a variable speaks against it"


def test_a_users_file_replaces_the_packaged_one(folder):
    (folder / "aurora.toml").write_text(IMAGINARY)
    env = {"EZPZ_MACHINES": str(folder), "EZPZ_MACHINE": "aurora"}
    assert machine(env).site == "nowhere"
    assert machine({"EZPZ_MACHINES": str(folder)}, "aurora-uan-0010").name == "workstation"
    (folder / "generic-slurm.toml").write_text(IMAGINARY.partition("[match]")[0])
    assert machine({"EZPZ_MACHINES": str(folder), "SLURM_JOB_ID": "7"}).site == "nowhere"


def test_the_first_folder_wins_and_one_that_is_not_there_is_named(folder, tmp_path_factory):
    second = tmp_path_factory.mktemp("second")
    (second / "utopia.toml").write_text(IMAGINARY.replace("nowhere", "elsewhere"))
    found = machine({"EZPZ_MACHINES": f"{second}:{folder}", "EZPZ_MACHINE": "utopia"})
    assert found.site == "elsewhere"
    for folders in (f"{folder}:{folder}/missing", "missing\0"):
        with pytest.raises(MachineError, match=r"missing.*cannot be listed.*EZPZ_MACHINES"):
            machine({"EZPZ_MACHINES": folders})


@pytest.mark.parametrize(("platform", "variable", "below"), [
    ("linux", "HOME", ".config"),
    ("darwin", "HOME", "Library/Application Support"),
    ("linux", "XDG_CONFIG_HOME", "."),
])  # fmt: skip
def test_the_platforms_configuration_folder(tmp_path, monkeypatch, platform, variable, below):
    monkeypatch.setattr("sys.platform", platform)
    folder = tmp_path / below / "ezpz" / "machines"
    assert machine({variable: str(tmp_path)}).name == "workstation"
    folder.mkdir(parents=True)
    (folder / "utopia.toml").write_text(IMAGINARY)
    (folder / ".utopia.toml.swp").write_text("no machine")
    (folder / "README").write_text("no machine")
    assert machine({variable: str(tmp_path)}, "utopia1").name == "utopia"


# One machine file: what is refused, with file and key.

GOOD = """
site = "nowhere"
source = ["a test"]
date = "2026-08"
scheduler = "slurm"
launcher = "srun"
devices_per_node = 4
device_type = "cuda"
default_cpu_bind = "near"
reserved_cores = [0]

[match]
hostnames = ["utopia#"]

[cpu_bind]
near = ["1-7", "8-15", "16-23", "24,26-31"]

[environment]
A = "1"

[options.more]
why = "for a test"
flags = ["--more"]
"""


def read(folder, text):
    (folder / "utopia.toml").write_text(text)
    return get_machine_info({"EZPZ_MACHINES": str(folder), "EZPZ_MACHINE": "utopia"})


NO_CORES = ("15-8", "8-", "08-15", "8-15,15")


@pytest.mark.parametrize(("old", "new", "key", "word"), [
    ('site = "nowhere"', "", "site", "expected a string; add it"),
    ('source = ["a test"]', "source = []", "source", "add it"),
    ('launcher = "srun"', "", "launcher", "add it"),
    ('default_cpu_bind = "near"', "", "default_cpu_bind", "one of near"),
    ('default_cpu_bind = "near"', 'default_cpu_bind = "neer"', "default_cpu_bind", "'near'"),
    ("devices_per_node", "device_per_node", "device_per_node", "'devices_per_node'"),
    ('site = "nowhere"', "site = 3", "site", "a string"),
    ('site = "nowhere"', 'site = "x"\npath = "/"', "path", "no such key"),
    ('"srun"', '"srn"', "launcher", "did you mean 'srun'"),
    ('"cuda"', '"rocm"', "device_type", "xpu, cuda, mps, cpu"),
    ('"cuda"', '"cpu"', "devices_per_node", "0 for cpu"),
    *(("node = 4", f"node = {n}", "devices_per_node", "a number") for n in ("true", "-4")),
    ("node = 4", "node = 0", "devices_per_node", "more for cuda"),
    ("node = 4", "node = 12", "cpu_bind.near", "12 ranges"),
    ("devices_per_node = 4", "", "cpu_bind.near", "no ranges"),
    ("[0]", "[true]", "reserved_cores", "numbers"),
    ("[0]", "[0, 31]", "cpu_bind.near", "none is reserved"),
    ('"8-15"', '"7-15"', "cpu_bind.near", "no other rank"),
    *(('"8-15"', f'"{cores}"', "cpu_bind.near", "low-high") for cores in NO_CORES),
    ('"8-15"', "8", "cpu_bind.near", "a list of strings"),
    ('"2026-08"', '"2026-08-39"', "date", "2026-08"),
    ('A = "1"', "A = 1", "environment.A", "as a string"),
    ('A = "1"', '"A B" = "1"', "environment.A B", "as a string"),
    ('[environment]\nA = "1"', "", "environment", "a table"),
    ('why = "for a test"', "", "options.more.why", "add it"),
    ("flags = [", "flag = [", "options.more.flag", "'flags'"),
    ("flags = [", 'backend = "rccl"\nflags = [', "options.more.backend", "one of nccl"),
    ("flags = [", 'cpu_bind = "far"\nflags = [', "options.more.cpu_bind", "near, none"),
    *(('["--more"]', flags, "options.more.flags", "a list of strings")
      for flags in ('"--more"', '[""]')),
    ("[options.more]", "[options]", "options.why", "a table"),
    ("hostnames = [", "hosts = [", "match.hosts", "VARIABLE"),
    ('hostnames = ["utopia#"]', 'domains = "x"', "match.domains", "a list of strings"),
    ('hostnames = ["utopia#"]', "HOSTED = 3", "match.HOSTED", "a list of strings"),
    ('site = "nowhere"', 'site = "x"\ninferred = ["nodes"]', "inferred", "keys of this file"),
    ('site = "nowhere"', 'site = "x"\npredecessor = ["options.less"]', "predecessor", "less"),
    ('site = "nowhere"', 'site = "x"\nbackends = ["ncll"]', "backends", "'nccl'"),
    ('site = "nowhere"', "site = 'x'\nextends = '../x'", "extends", "aurora"),
    ('hostnames = ["utopia#"]', 'domains = [".u.org"]', "match.domains", "without the dot"),
    ('hostnames = ["utopia#"]', 'hostnames = ["u#a"]', "match.hostnames", "at its end"),
])  # fmt: skip
def test_what_is_refused_with_file_and_key(tmp_path, old, new, key, word):
    text = GOOD.replace(old, new)
    if key == "environment":
        text = f"environment = 3\n{text}"
    assert text != GOOD
    with pytest.raises(MachineError) as caught:
        read(tmp_path, text)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path}/utopia.toml: ")
    assert f"{key} = " in message or f"no {key};" in message
    assert word in message
    assert "\n" not in message


def test_what_is_read(tmp_path):
    machine = read(tmp_path, GOOD.replace('"2026-08"', "2026-08-01"))  # TOML has dates too
    assert machine.cpu_bind["near"] == ("1-7", "8-15", "16-23", "24,26-31")
    assert machine.options["more"].flags == ("--more",)
    assert (machine.nodes, machine.backends, machine.date) == (None, (), "2026-08-01")


@pytest.mark.parametrize(("make", "message"), [
    (lambda path: path.write_text('site = "x"\ndate =\n'), r"utopia\.toml: .*line 2.*mend"),
    (lambda path: path.write_text(GOOD.replace("hostnames", "hostname")),
     r"utopia\.toml: match\.hostname = .*'hostnames'"),
    (lambda path: path.write_bytes(b"site = '\xff'"), r"utopia\.toml: cannot be read"),
    (lambda path: path.mkdir(), r"utopia\.toml: cannot be read"),
    (os.mkfifo, "not a regular file"),
    (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
    *((lambda path, name=name: path.with_name(name).write_text(GOOD), "rename the file")
      for name in ("My Cluster.toml", "Aurora.toml", "-x.toml")),
])  # fmt: skip
def test_a_file_that_is_none_is_refused_even_if_it_is_another_machines(tmp_path, make, message):
    make(tmp_path / "utopia.toml")
    with pytest.raises(MachineError, match=message):
        get_machine_info({"EZPZ_MACHINES": str(tmp_path)}, hostname="x")


# extends


def test_extending_the_same_machine_keeps_its_rules(tmp_path):
    (tmp_path / "aurora.toml").write_text('extends = "aurora"\n[environment]\nMINE = "1"\n')
    env = {"EZPZ_MACHINES": str(tmp_path)}
    machine = get_machine_info(env, hostname="aurora-uan-0010")
    assert machine.environment["MINE"] == "1"
    assert machine.environment["CCL_KVS_MODE"] == "mpi"
    assert (machine.nodes, machine.path) == (10624, str(tmp_path / "aurora.toml"))


def test_extending_another_machine_leaves_its_hosts(tmp_path):
    (tmp_path / "dawn.toml").write_text('extends = "aurora"\nsite = "elsewhere"\n')
    env = {"EZPZ_MACHINES": str(tmp_path)}
    assert get_machine_info(env, hostname="aurora-uan-0010").name == "aurora"
    machine = get_machine_info({**env, "EZPZ_MACHINE": "dawn"})
    assert (machine.devices_per_node, machine.nodes, machine.hsn_suffix) == (12, None, "")


def test_what_is_overridden_loses_its_mark_and_is_validated_with_what_it_extends(tmp_path):
    text = 'extends = "polaris"\n[cpu_bind]\nnuma = ["0-7", "8-15", "16-23", "24-31"]\n'
    machine = read(tmp_path, text)
    assert (machine.inferred, machine.predecessor) == ((), ("options.depth",))
    wrong = r"utopia\.toml: cpu_bind\.pytorch = .*expected 8 ranges"
    with pytest.raises(MachineError, match=wrong):
        read(tmp_path, 'extends = "aurora"\ndevices_per_node = 8\n')


def test_what_is_no_toml_is_a_machine_error(tmp_path):
    long = ("a = " + "[" * 3000, "a = " + "9" * 5000, "a = {" * 2000)
    for text in (*long, "a = 1\na = 2\n", "[match]\na = ['x'"):
        with pytest.raises(MachineError, match=r"TOML|recursion"):
            read(tmp_path, text)


# The packaged machines: their facts are in their files, and pinned by ezpz-launch's dry-runs.

MACHINES = known_machines({})


def test_all_of_them_are_there():
    assert {f"{name}.toml" for name in MACHINES} == set(os.listdir(PACKAGED))
    assert {MACHINES[name].scheduler: name for name in GENERIC.values()} == GENERIC
    assert all(machine.date >= "2026-08" and machine.source for machine in MACHINES.values())


def test_bind_lists():
    running_jobs = MACHINES["aurora"].cpu_bind["running-jobs"]  # others are in golden files
    assert running_jobs == MACHINES["sunspot"].cpu_bind["running-jobs"]
    first = [*range(1, 48, 8), *range(53, 100, 8)]  # of each tile, six a socket
    assert running_jobs == tuple(f"{core}-{core + 7}" for core in first)
    # OLCF's user guide: GPU 4 is near cores 0-7, 5: 8-15, 2: 16-23, 3: 24-31, 6: 32-39,
    # 7: 40-47, 0: 48-55, 1: 56-63; the first core of each is reserved.
    first_core = {4: 0, 5: 8, 2: 16, 3: 24, 6: 32, 7: 40, 0: 48, 1: 56}
    expected = [f"{first_core[gcd] + 1}-{first_core[gcd] + 7}" for gcd in range(8)]
    assert list(MACHINES["frontier"].cpu_bind["gcd"]) == expected
    assert "cpu_bind.gcd" in MACHINES["frontier"].inferred
