"""One machine file: what is refused, with file and key."""

import os

import pytest

from ezpz_topo import MachineError, get_machine_info

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


def read(folder, text, name="utopia"):
    (folder / f"{name}.toml").write_text(text)
    return get_machine_info({"EZPZ_MACHINES": str(folder), "EZPZ_MACHINE": name})


def test_the_good_one_is_good(tmp_path):
    machine = read(tmp_path, GOOD)
    assert machine.cpu_bind["near"] == ("1-7", "8-15", "16-23", "24,26-31")
    assert machine.options["more"].flags == ("--more",)
    assert (machine.nodes, machine.backends, machine.hsn_suffix) == (None, (), "")


@pytest.mark.parametrize(
    ("old", "new", "key", "word"),
    [
        ('site = "nowhere"', "", "site", "expected a string; add it"),
        ('source = ["a test"]', "", "source", "add it"),
        ('source = ["a test"]', "source = []", "source", "add it"),
        ('launcher = "srun"', "", "launcher", "add it"),
        ('default_cpu_bind = "near"', "", "default_cpu_bind", "one of near"),
        ('default_cpu_bind = "near"', 'default_cpu_bind = "neer"', "default_cpu_bind", "'near'"),
        ("devices_per_node", "device_per_node", "device_per_node", "'devices_per_node'"),
        ('site = "nowhere"', "site = 3", "site", "a string"),
        ('site = "nowhere"', 'site = "x"\npath = "/"', "path", "no such key"),
        ('"slurm"', '"sulrm"', "scheduler", "did you mean 'slurm'"),
        ('"srun"', '"srn"', "launcher", "did you mean 'srun'"),
        ('"cuda"', '"rocm"', "device_type", "xpu, cuda, mps, cpu"),
        ('"cuda"', '"cpu"', "devices_per_node", "0 for cpu"),
        ("node = 4", "node = true", "devices_per_node", "a number"),
        ("node = 4", "node = 0", "devices_per_node", "more for cuda"),
        ("node = 4", "node = -4", "devices_per_node", "a number"),
        ("node = 4", "node = 4.0", "devices_per_node", "a number"),
        ("node = 4", 'node = "4"', "devices_per_node", "a number"),
        ("node = 4", "node = 3", "cpu_bind.near", "3 ranges"),
        ("node = 4", "node = 12", "cpu_bind.near", "12 ranges"),
        ("devices_per_node = 4", "", "cpu_bind.near", "no ranges"),
        ("[0]", "[true]", "reserved_cores", "numbers"),
        ("[0]", '["0"]', "reserved_cores", "numbers"),
        ("[0]", "[0, 31]", "cpu_bind.near", "none is reserved"),
        ('"8-15"', '"7-15"', "cpu_bind.near", "no other rank"),
        ('"8-15"', '"15-8"', "cpu_bind.near", "low-high"),
        ('"8-15"', '"8-"', "cpu_bind.near", "low-high"),
        ('"8-15"', '"8:15"', "cpu_bind.near", "low-high"),
        ('"8-15"', '"08-15"', "cpu_bind.near", "low-high"),
        ('"8-15"', '"8-15,15"', "cpu_bind.near", "low-high"),
        ('"8-15"', '"٨-15"', "cpu_bind.near", "low-high"),
        ('"8-15"', "8", "cpu_bind.near", "a list of strings"),
        ('"2026-08"', '"August"', "date", "2026-08"),
        ('"2026-08"', '"2026-13"', "date", "2026-08"),
        ('A = "1"', "A = 1", "environment.A", "as a string"),
        ('A = "1"', '"A B" = "1"', "environment.A B", "as a string"),
        ('[environment]\nA = "1"', "", "environment", "a table"),
        ('why = "for a test"', "", "options.more.why", "add it"),
        ("flags = [", "flag = [", "options.more.flag", "'flags'"),
        ("flags = [", 'backend = "rccl"\nflags = [', "options.more.backend", "one of nccl"),
        ("flags = [", 'cpu_bind = "far"\nflags = [', "options.more.cpu_bind", "near, none"),
        ('["--more"]', '"--more"', "options.more.flags", "a list of strings"),
        ('["--more"]', '[""]', "options.more.flags", "a list of strings"),
        ("[options.more]", "[options]", "options.why", "a table"),
        ("hostnames = [", "hosts = [", "match.hosts", "VARIABLE"),
        ('hostnames = ["utopia#"]', 'domains = "x"', "match.domains", "a list of strings"),
        ('hostnames = ["utopia#"]', "HOSTED = 3", "match.HOSTED", "a list of strings"),
        ('site = "nowhere"', 'site = "x"\ninferred = ["nodes"]', "inferred", "keys of this file"),
        ('site = "nowhere"', 'site = "x"\npredecessor = ["options.less"]', "predecessor", "less"),
        ('site = "nowhere"', 'site = "x"\nbackends = ["ncll"]', "backends", "'nccl'"),
        ('site = "nowhere"', 'site = "x"\nextends = "auror"', "extends", "'aurora'"),
        ('site = "nowhere"', 'site = "x"\nextends = 1', "extends", "aurora"),
        ('site = "nowhere"', 'site = "x"\nextends = "../x"', "extends", "aurora"),
    ],
)
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


def test_a_syntax_error_gives_its_line(tmp_path):
    with pytest.raises(MachineError, match=r"utopia\.toml: .*line 3.*mend that line"):
        read(tmp_path, 'site = "x"\nlauncher = "srun"\nscheduler = \n')


def test_a_key_given_twice(tmp_path):
    with pytest.raises(MachineError, match=r"utopia\.toml: .*line"):
        read(tmp_path, 'site = "x"\nsite = "y"\n')


def test_bytes_that_are_no_text(tmp_path):
    (tmp_path / "utopia.toml").write_bytes(b"site = '\xff'")
    with pytest.raises(MachineError, match=r"utopia\.toml: cannot be read"):
        get_machine_info({"EZPZ_MACHINES": str(tmp_path), "EZPZ_MACHINE": "utopia"})


def test_a_folder_for_a_file(tmp_path):
    (tmp_path / "utopia.toml").mkdir()
    with pytest.raises(MachineError, match=r"utopia\.toml: cannot be read"):
        get_machine_info({"EZPZ_MACHINES": str(tmp_path)}, hostname="x")


@pytest.mark.parametrize("name", ["My Cluster", "Aurora", "-x"])
def test_a_file_whose_name_is_no_machines(tmp_path, name):
    with pytest.raises(MachineError, match="rename the file"):
        read(tmp_path, GOOD, name)


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


def test_what_is_overridden_loses_its_mark(tmp_path):
    text = 'extends = "polaris"\n[cpu_bind]\nnuma = ["0-7", "8-15", "16-23", "24-31"]\n'
    machine = read(tmp_path, text)
    assert machine.inferred == ()
    assert machine.predecessor == ("options.depth",)


def test_an_override_is_validated_with_what_it_extends(tmp_path):
    with pytest.raises(
        MachineError, match=r"utopia\.toml: cpu_bind\.pytorch = .*expected 8 ranges"
    ):
        read(tmp_path, 'extends = "aurora"\ndevices_per_node = 8\n')


# Two readers.


@pytest.mark.parametrize(
    "rules",
    [
        "[match]\nhostnames = ['utopia#']\n",
        "[ match ]\nhostnames = ['utopia#']\n",
        "[match] # where\nhostnames = ['utopia#']\n",
        "match.hostnames = ['utopia#']\n",
        "match = {hostnames = ['utopia#']}\n",
        '[match]\nhostnames = ["\\u0075topia#"]\n',
        "'match'.hostnames = ['utopia#']\n",
    ],
)
def test_rules_in_any_spelling(tmp_path, rules):
    head = GOOD.partition("[match]")[0].replace('default_cpu_bind = "near"', "")
    (tmp_path / "utopia.toml").write_text(head + rules)
    env = {"EZPZ_MACHINES": str(tmp_path)}
    assert get_machine_info(env, hostname="utopia7").name == "utopia"


def test_a_date_may_be_tomls(tmp_path):
    assert read(tmp_path, GOOD.replace('"2026-08"', "2026-08-01")).date == "2026-08-01"


@pytest.mark.parametrize(
    "text",
    [
        "a = " + "[" * 3000,
        "a = " + "9" * 5000,
        "a = {" * 2000,
        "a = 1\na = 2\n",
        "[match]\nhostnames = ['x'\n",
    ],
    ids=["nested", "digits", "tables", "twice", "open"],
)
def test_what_is_no_toml_is_a_machine_error(tmp_path, text):
    with pytest.raises(MachineError, match=r"TOML|recursion"):
        read(tmp_path, text)


def test_a_file_without_end_or_writer_is_refused(tmp_path):
    env = {"EZPZ_MACHINES": str(tmp_path)}
    os.mkfifo(tmp_path / "utopia.toml")
    with pytest.raises(MachineError, match="not a regular file"):
        get_machine_info(env, hostname="x")
    (tmp_path / "utopia.toml").unlink()
    (tmp_path / "utopia.toml").symlink_to("/dev/zero")
    with pytest.raises(MachineError, match="not a regular file"):
        get_machine_info(env, hostname="x")


def test_a_folders_name_with_a_nul():
    with pytest.raises(MachineError, match="cannot be listed"):
        get_machine_info({"EZPZ_MACHINES": "a\0b"}, hostname="x")


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ('hostnames = ["utopia#"]', 'domains = [".utopia.org"]', "without the dot"),
        ('hostnames = ["utopia#"]', 'hostnames = ["u#a"]', "at its end"),
        ('date = "2026-08"', 'date = "2026-08-39"', "date"),
    ],
)
def test_rules_that_can_never_match_and_days_that_never_come(tmp_path, old, new, what):
    assert old in GOOD
    with pytest.raises(MachineError, match=what):
        read(tmp_path, GOOD.replace(old, new))
