"""What a checkpoint costs: ``hatch run bench:checkpoint [--rounds=5] [--json=FILE]``.

One process saves and loads 10,000 parameters of 8 bytes with AdamW's state, and 100 MB in ten
tensors, by us and by torch.save with one fsync, and torch.load.
Two gloo ranks save and load a model and AdamW's state by us, by torch.distributed.checkpoint, and
(DDP) by torch.save and torch.load, in turn, into a temporary folder; every way flushes to disk.
Ours has checksums, is renamed when it is whole, and holds random streams and position as well.
"""

import fire
from dist import free_ports
from paired import Row, against
from ranks import ranks
from table import finish


def measure(rounds: int, width: int) -> list[Row]:
    """Return all rows of this section."""
    job = {"rounds": rounds, "width": width, "rendezvous": free_ports(1)[0]}
    found = ranks("checkpoint_ranks.py", job, 2)
    megabytes = 3 * 8 * width * width * 4 / 1e6
    rows = []
    for wrapper, samples in found.items():
        for what, of_ways in samples.items():
            key = f"checkpoint/{what}-{wrapper}"
            said = f"{what}, {wrapper.upper()}, {megabytes:.0f} MB"
            titles = {name: name.replace("torch.save", f"torch.{what}") for name in of_ways}
            del titles["ours"]
            rows += against(key, said, "s", of_ways, titles)
    job["rendezvous"] = free_ports(1)[0]
    said_of = {"small": "10,000 parameters of 8 bytes", "ten": "100 MB in 10 tensors"}
    for case, samples in ranks("checkpoint_ranks.py", job | {"alone": True}, 1).items():
        for what, of_ways in samples.items():
            titles = {"torch.save": f"torch.{what}"}
            said = f"{what}, {said_of[case]}"
            rows += against(f"checkpoint/{what}-{case}", said, "s", of_ways, titles)
    return rows


def main(rounds: int = 5, width: int = 1024, json: str = "") -> None:
    """Print the figures, and write them to a file if one is named.

    Args:
        rounds: How often each saves and loads.
        width: Of the model's 8 square layers; 1024 makes 101 MB with AdamW's state.
        json: A file to write the figures to.
    """
    finish(measure(rounds, width), json)


if __name__ == "__main__":
    fire.Fire(main)
