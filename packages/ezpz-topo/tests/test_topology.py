import ezpz_topo


def test_detect_puts_a_source_to_every_value():
    env = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2",
           "RANK": "0"}  # fmt: skip
    rows = {name: (value, source) for name, value, source in ezpz_topo.detect(env).explain()}
    assert rows["rank"] == ("1", "PMI_RANK")
    assert rows["world size"] == ("2", "PMI_SIZE")
    assert rows["scheduler"][0] == "none"
    assert all(source for name, (_, source) in rows.items() if name != "note")
    assert "RANK=0" in rows["note"][0]


def test_what_is_not_known_is_said_to_be_unknown():
    env = {"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2", "FLUX_TASK_LOCAL_ID": "0"}
    rows = {name: value for name, value, _ in ezpz_topo.detect(env).explain()}
    assert rows["local world size"] == rows["node rank"] == "unknown"


def test_detect_reads_the_real_environment():
    topology = ezpz_topo.detect()
    assert topology.hostname == ezpz_topo.get_hostname()
    assert topology.cpu_count >= 1
