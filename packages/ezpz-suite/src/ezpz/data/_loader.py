"""Options of a DataLoader that suit this machine."""

from __future__ import annotations

import os
import sys
from typing import Any

_MOST = 8  # workers of a rank: more of them seldom read faster, and each is a process


def loader_options(num_workers: int | None = None) -> dict[str, Any]:
    """Return arguments for a DataLoader that suit this rank's part of the machine.

    >>> import ezpz
    >>> loader = ezpz.DataLoader(range(8), batch_size=4, **loader_options())

    ``num_workers``
        With an accelerator one for each CPU that this rank has, but for one, which feeds the
        device; at most 8. A rank has its share of the node's CPUs (`ezpz.get_cpus_per_node`), or
        those that the launcher bound it to if these are fewer. On the CPU none: workers would take
        the cores that compute.
    ``pin_memory``
        With CUDA (and ROCm) and XPU: copies to the device then go on beside the arithmetic.
    ``persistent_workers``
        With workers: they are started once, and not once an epoch.
    ``prefetch_factor``
        With workers: batches that each has ready.
    ``multiprocessing_context``
        ``"forkserver"`` for workers beside a device or MPI, whose state a forked process must not
        inherit: CUDA refuses to work in one, and memory that is registered with a network (MPI,
        libfabric, verbs) may be corrupted. The data set has to be picklable, and a script that is
        run needs its ``if __name__ == "__main__":``. Otherwise as Python chooses.

    Args:
        num_workers: How many there shall be; the other arguments follow from it.

    Raises:
        ezpz_device.DeviceError: There is no device for this rank.
        ezpz_topo.TopoError: The launcher's variables contradict each other.
        ValueError: ``num_workers`` is below 0.
    """
    import ezpz_device  # noqa: PLC0415  # torch comes with it
    import ezpz_topo  # noqa: PLC0415

    device = ezpz_device.get_torch_device_type()
    if num_workers is None:
        share = ezpz_topo.get_cpus_per_node() // ezpz_topo.get_local_world_size()
        bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else share
        num_workers = 0 if device == "cpu" else max(0, min(share, bound, _MOST + 1) - 1)
    if num_workers < 0:
        raise ValueError(f"num_workers={num_workers}; expected 0 or more")
    options: dict[str, Any] = {"num_workers": num_workers, "pin_memory": device in ("cuda", "xpu")}
    if num_workers:
        # The factor is torch's own default, said so that it can be seen.
        options |= {"persistent_workers": True, "prefetch_factor": 2}
        mpi: Any = sys.modules.get("mpi4py.MPI")
        if device != "cpu" or (mpi and mpi.Is_initialized() and not mpi.Is_finalized()):
            options["multiprocessing_context"] = "forkserver"
    return options
