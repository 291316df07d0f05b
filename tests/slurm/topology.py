"""What the processes of say_topology.py report, and what must hold of it however they started."""

from collections import Counter
from datetime import datetime

JOB = ("salloc", "-Q", "-N", "2", "-n", "4")
HET_JOB = ("salloc", "-Q", "-N", "1", "-n", "1", ":", "-N", "2", "-n", "3")


def row(said):
    """Return launcher, rank, world size, local rank, local world size, node rank."""
    names = ("launcher", "rank", "world_size", "local_rank", "local_world_size", "node_rank")
    launcher, *numbers = (said["rank_info"][name] for name in names)
    return (launcher, *numbers)


def hosts(said):
    """Return the hosts that every answer agrees on."""
    found = said["allocation"]["hosts"]
    assert [entry["host"] for entry in said["hosts"]["entries"]] == found
    assert said["num_nodes"] == len(found)
    return found


def ends(said):
    return datetime.fromisoformat(said["allocation"]["ends_at"]).timestamp()


def assert_one_process_of_the_job(said, slots, *, on_node):
    assert row(said) == ("none", 0, 1, 0, 1, 0)
    assert hosts(said) == said["scontrol"]["job"]
    job = said["allocation"]
    assert (job["scheduler"], job["job_id"]) == ("slurm", said["env"]["SLURM_JOB_ID"])
    assert (job["slots"], job["on_node"]) == (slots, on_node)
    assert (said["node_index"], said["in_use"]) == (0, 1)
    assert said["total"] == (sum(slots) if slots else len(hosts(said)))


def assert_ranks_of_a_step(said):
    """Every rank knows the step's hosts in Slurm's order, its own among them, and their tasks."""
    assert [one["rank"] for one in said] == list(range(len(said)))
    seen = Counter()
    tasks = Counter(one["env"]["SLURMD_NODENAME"] for one in said)
    for one in said:
        assert one["rank_info"]["launcher"] == "slurm"
        assert hosts(one) == one["scontrol"]["step"]
        assert hosts(one)[one["node_index"]] == one["env"]["SLURMD_NODENAME"]
        assert one["allocation"]["slots"] == [tasks[host] for host in hosts(one)]
        assert one["allocation"]["on_node"] is True
        assert one["in_use"] == one["total"] == len(said)
        node = one["env"]["SLURMD_NODENAME"]
        assert one["rank_info"]["local_world_size"] == tasks[node]
        assert one["rank_info"]["local_rank"] == seen[node]
        assert one["rank_info"]["node_rank"] == one["node_index"]
        seen[node] += 1
