"""Whose fault endings were: a table of those that we made, and of published ones."""

import pytest

from ezpz_launch._nodes.bad_nodes import Suspects, Verdict, describe, exceptions, patterns, verdict
from ezpz_launch._run.launch import FailureEvidence, Outcome

HOSTS = ("n0", "n1", "n2", "n3")


def ended(rank, status, /, *, own=None, hosts=HOSTS, **facts):
    """Two ranks a node; the first that failed, and what else had ended by itself."""
    failure = None if rank is None else (rank, hosts[rank // 2], status)
    own = {rank: status} if own is None and rank is not None else own or {}
    return Outcome(status, failure, evidence=FailureEvidence(hosts, 2, own, **facts))


GLOO = (
    b"RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:544] Connection closed "
    b"by peer [10.0.0.2]:28048\n"
)
NCCL = (
    b"torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/"
    b"NCCLUtils.hpp:268, remote process exited or there was a network error, NCCL version 2.21.5\n"
    b"ncclRemoteError: A call failed possibly due to a network error or a remote process exiting "
    b"prematurely.\n"
)
TRACE = b'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    main()\n'
CASCADE = TRACE + GLOO


def raised(line, rank=None):
    prefix = b"" if rank is None else b"[rank%d]: " % rank
    return b"".join(prefix + each + b"\n" for each in (TRACE + line).splitlines())


ALL = dict.fromkeys(range(8), 1)
KILLED = {**ALL, 3: 137}
BOO = b"ValueError: boo"

# What it is and where it is from, its end, its last words, whose fault, the hosts, why.
ENDINGS = [
    # Nodes that are lost.
    ("link down (ours, Hydra)", ended(2, 137, unreachable_nodes=frozenset({1})), b"",
     "node", "n1", "answer"),
    ("our own link down", ended(2, 137, unreachable_nodes=frozenset({1, 2, 3})), b"",
     "unknown", "", "3 of 4"),
    ("agent and proxy killed; an innocent fails first (ours, Hydra)",
     ended(0, 1, own={0: 1, 1: 1, 5: 1}, dead_agents=frozenset({1})), CASCADE,
     "node", "n1", "agent"),
    ("every agent gone with the step (srun that was killed)",
     ended(0, 137, dead_agents=frozenset(range(4))), b"", "unknown", "", "4 of 4"),
    ("the proxy of one host killed (ours, Hydra)", ended(4, 137, lost_ranks=frozenset({4, 5})), b"",
     "node", "n2", "what started"),
    ("all of a node frozen: it does not answer (ours)",
     ended(7, 124, hangs=True, unresponsive_nodes=frozenset({3})), b"", "node", "n3", "hangs"),
    ("every node answers: the program hangs (ours)", ended(7, 124, hangs=True, own={}), b"",
     "unknown", "", "every node answers"),
    ("ranks of one node never started (ours)", ended(None, 1, unstarted_ranks=(4, 5)), b"",
     "node", "n2", "never started"),
    ("no rank started: the launcher failed (ours)", ended(None, 1, unstarted_ranks=tuple(range(8))),
     b"", "unknown", "", "never started"),
    ("Slurm: node failure", ended(0, 137, own={0: 137, 1: 137}),
     b"srun: error: Node failure on n3\nsrun: Job step aborted\n", "node", "n3", "Slurm"),
    ("PALS: shepherd died from signal 9 (predecessor)", ended(0, 143),
     b"x4102c5s1b0n0: shepherd died from signal 9\n", "node", "x4102c5s1b0n0", "PALS"),
    # Statuses.
    ("kill -9 of a rank (ours)", ended(3, 137), b"", "node", "n1", "SIGKILL"),
    ("the same, and the cascade (ours)", ended(3, 137, own=KILLED), CASCADE * 7, "node",
     "n1", "SIGKILL"),
    ("bus error of a rank (pytorch/pytorch#5040)", ended(3, 135), b"", "node", "n1", "SIGBUS"),
    ("SIGKILL on several nodes: memory", ended(3, 137, own={3: 137, 6: 137}), b"", "program", "",
     "memory"),
    ("Slurm's OOM killer (nextflow-io/nextflow#5932)", ended(3, 137),
     (b"slurmstepd: error: Detected 1 oom_kill event in StepId=11300781.0. Some of the step tasks "
     b"have been OOM Killed.\nsrun: error: n1: task 3: Out Of Memory\n"), "program", "", "memory"),
    ("143 after an unknown cause (predecessor: taken for the time limit)", ended(3, 143), b"",
     "unknown", "", "somebody sent"),
    ("segmentation fault of one rank (ours)", ended(3, 139), b"", "unknown", "n1", "SIGSEGV"),
    ("the others of a segfault died from 11 and 15 (predecessor)",
     ended(3, 139, own={3: 139, 5: 143, 6: 143}), b"", "unknown", "n1", "rank 3"),
    ("the interpreter is not there on one node (ours)", ended(4, 127, own={4: 127, 5: 127}), b"",
     "node", "n2", "on other nodes"),
    ("the command is nowhere (ours)", ended(4, 127, own=dict.fromkeys(range(8), 127)), b"",
     "program", "", "127"),
    ("usage (ours)", ended(0, 2, own=dict.fromkeys(range(8), 2)), b"usage: train.py ...\n",
     "program", "", "status 2"),
    # Exceptions.
    ("an exception of one rank, and the cascade (ours, gloo)", ended(3, 1, own=ALL),
     raised(BOO) + CASCADE * 7, "unknown", "", "not told which"),
    ("the same; an innocent was quicker to end, torch names the rank (ours)",
     ended(0, 1, own=ALL), raised(BOO, 5) + CASCADE, "unknown", "n2", "boo"),
    ("of all, with torch's prefix (ours)", ended(3, 1, own=ALL),
     raised(b"ValueError: rank 3", 3) + raised(b"ValueError: rank 6", 6), "program", "", "2 ranks"),
    ("a module is missing on one node (ours)", ended(4, 1, own={4: 1, 5: 1}),
     raised(b"ModuleNotFoundError: No module named 'nope'") * 2, "unknown", "n2", "nope"),
    ("a module is missing everywhere (ours)", ended(4, 1, own=ALL),
     raised(b"ModuleNotFoundError: No module named 'nope'") * 8, "program", "", "8 ranks"),
    ("a full disk (ours; NVIDIA/Megatron-LM#878)", ended(3, 1),
     raised(b"OSError: [Errno 28] No space left on device"), "unknown", "n1", "No space left"),
    # Lost peers: who says so is innocent, and the peer is a suspect only.
    ("gloo lost a peer (pytorch/pytorch#75512)", ended(0, 1, own={0: 1, 1: 1}), CASCADE, "unknown",
     "n2", "gloo"),
    ("NCCL: remote process exited (NVIDIA/nccl#2076: the nodes' InfiniBand)", ended(0, 1),
     TRACE + NCCL, "unknown", "", "who says so stayed"),
    ("NCCL over InfiniBand (tatsu-lab/stanford_alpaca#207)", ended(0, 134),
     (b"terminate called after throwing an instance of 'std::runtime_error' what(): NCCL error: "
     b"remote process exited or there was a network error, NCCL version 2.14.3 Last error: NET/IB "
     b": Got completion from peer 10.0.0.2<38536> with error 12, opcode 0, vendor err 129\n"),
     "unknown", "n2", "NCCL"),
    ("NCCL: recv failed (NVIDIA/nccl#795: a rank had crashed)", ended(0, 1),
     (b"misc/socket.cc:518 NCCL WARN Net : Call to recv from 10.200.84.247<58355> failed : Broken "
     b"pipe\n"), "unknown", "", "NCCL"),
    ("NCCL's watchdog (Lightning-AI/pytorch-lightning#20434)", ended(3, 134),
     (b"[rank2]:[E1119 ProcessGroupNCCL.cpp:1595] [Rank 2] Watchdog caught collective operation "
     b"timeout: WorkNCCL(SeqNum=1, OpType=BROADCAST) ran for 1800013 milliseconds before timing "
     b"out.\n"), "unknown", "", "no culprit"),
    ("Slingshot: OFI poll failed (ofiwg/libfabric#10072)", ended(3, 1),
     b"MPIDI_OFI_handle_cq_error(1075): OFI poll failed (Input/output error - PTLTE_NOT_FOUND)\n",
     "unknown", "n1", "network"),
    # Devices.
    ("ECC (vllm-project/vllm#5222: other hardware was fine)", ended(3, 1),
     raised(b"RuntimeError: CUDA error: uncorrectable ECC error encountered"), "node", "n1", "ECC"),
    ("ECC, as TensorFlow says it (nagadit/DeepFaceLab_Linux#89: it was the hardware)", ended(3, 1),
     b"CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error encountered\n", "node", "n1", "ECC"),
    ("Xid 79", ended(3, 134), (b"NVRM: Xid (PCI:0000:03:00): 79, pid=9, GPU has fallen off the bus."
     b"\n"), "node", "n1", "Xid"),
    ("Xid 31: the program's page fault", ended(3, 1), b"NVRM: Xid (PCI:0000:03:00): 31, pid=9\n",
     "program", "", "Xid"),
    ("Intel: device lost (intel/torch-xpu-ops#2990)", ended(6, 1),
     raised(b"RuntimeError: level_zero backend: error: 20 (UR_RESULT_ERROR_DEVICE_LOST)"),
     "node", "n3", "device is lost"),
    ("AMD: hardware exception (vllm-project/vllm#20007)", ended(6, 134),
     (b":0:rocdevice.cpp :3020: Callback: Queue 0x7f4580c00000 aborting with error : "
     b"HSA_STATUS_ERROR_EXCEPTION: An HSAIL operation resulted in a hardware exception.\n"), "node",
     "n3", "hardware"),
    ("AMD: page fault (ROCm/legacy-rocm-build#2804)", ended(6, 134),
     (b"Memory access fault by GPU node-2 (Agent handle: 0x5640a8bb1980) on address 0x7f. "
     b"Reason: Page not present.\n"), "program", "", "page fault"),
    ("out of a GPU's memory", ended(6, 1), raised(
     b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."), "program", "",
     "device's memory"),
    # One node alone.
    ("every rank of the only node raises (ours)", ended(0, 1, own={0: 1, 1: 1}, hosts=("n0",)),
     raised(BOO) * 2, "program", "", "2 ranks"),
    ("the only node's agent is gone", ended(0, 137, dead_agents=frozenset({0}), hosts=("n0",)), b"",
     "unknown", "", "1 of 1"),
]  # fmt: skip


@pytest.mark.parametrize("row", ENDINGS, ids=[row[0] for row in ENDINGS])
def test_whose_fault_it_was(row):
    _, outcome, words, whose, hosts, why = row
    found = verdict(outcome, words, {"10.0.0.2": "n2"}.get)
    assert (found.whose, " ".join(found.hosts)) == (whose, hosts), found
    assert why in describe(found)


def test_every_pattern_has_a_source_and_a_row_of_the_table():
    endings = [words for _, _, words, *_ in ENDINGS]
    for row in patterns():
        assert row.source
        assert row.whose in ("node", "program", "cascade", "unknown")
    unused = [row.why for row in patterns() if not any(map(row.match.search, endings))]
    # Not seen published with its words: from the vendors' catalogues.
    assert unused == ["contained ECC error (Xid 94)", "its device is gone"]


def test_exceptions_by_rank():
    words = raised(BOO, 3) + b"[5@n2] " + raised(b"KeyError: 'x'").replace(b"\n", b"\n[5@n2] ")
    assert exceptions(words) == {"ValueError: boo": [3], "KeyError: 'x'": [5]}


ONE = Verdict("unknown", ("n1",), "rank 3 on n1 exited with status 1: ValueError: boo")


def test_once_more_there_then_another_node_then_it_is_the_program():
    suspects = Suspects()
    assert suspects.judge(ONE, (3, "n1", 1)) == ONE
    second = suspects.judge(ONE, (3, "n1", 1))
    assert (second.whose, second.hosts) == ("node", ("n1",))
    third = suspects.judge(ONE._replace(hosts=("n4",)), (3, "n4", 1))
    assert (third.whose, third.hosts) == ("program", ())
    assert suspects.cleared == ["n1", "n1"]
    assert "rank 3 failed on n1, and again on n4" in third.why


def test_a_rank_that_is_killed_wherever_it_is():
    suspects, killed = Suspects(), Verdict("node", ("n1",), "killed")
    assert suspects.judge(killed, (3, "n1", 137)) == killed
    assert suspects.judge(killed._replace(hosts=("n4",)), (3, "n4", 137)).whose == "program"
    # But nodes that are lost are lost.
    assert suspects.judge(Verdict("node", ("n2",), "lost"), (0, "n0", 1)).whose == "node"
