"""Who is here, do all ranks agree, and which of them differ: at set-up and in every collective."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import struct
import sys
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from ezpz_topo import RankInfo

from ._addresses import LOOK, Participant, Process, message, pack, peer_of, read_message, say
from ._diagnosis import Wakeup, calling_line
from ._errors import CollectiveError, MismatchError, NotSetUpError, SetupError, fold, grouped
from ._watch import poll, waiting
from ._world import World, current_world

logger = logging.getLogger(__name__)


# At set-up: are all ranks there, once each, and do they run the same program?

AGREEMENT = "EZPZ_AGREEMENT"  # ``warn``: versions and scripts that differ are only warned of
FIRST_WORD = 10.0  # seconds after which rank 0 says who is missing; then each time twice as long
_GRACE = 2.0  # seconds that the others give rank 0 beyond the time-out to tell them who is missing
_READING = 1.0  # seconds that rank 0, which may hold the store, gives the others to read it
_COMING = 3.0  # seconds that it waits for who has not come yet, unless the time-out is over
_SOFT = ("python", "script", "packages")  # what may differ when `AGREEMENT` says so
_SHOWN = 16
_LIBRARIES = (  # whose versions are compared between those ranks that have imported them already
    "ezpz", "ezpz_device", "ezpz_dist", "ezpz_obs", "ezpz_topo", "ezpz_tp",
    "accelerate", "deepspeed", "lightning", "mpi4py", "numpy", "transformers",
)  # fmt: skip


def common_facts(**more: object) -> dict[str, Any]:
    """Return what must be the same on every rank: versions, the script, and what is given."""
    packages = {name: getattr(sys.modules.get(name), "__version__", None) for name in _LIBRARIES}
    return {
        "torch": torch.__version__, "python": platform.python_version(), "script": _script(),
        "packages": {name: found for name, found in packages.items() if isinstance(found, str)},
        **more,
    }  # fmt: skip


def _script() -> str:
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    if path is None:
        if sys.argv[:1] != ["-c"]:
            return "no file"  # a notebook, standard input
        name, text = "python -c", sys.orig_argv[-len(sys.argv)].encode()
    else:
        name = os.path.basename(str(path))
        try:
            with open(path, "rb") as file:
                text = file.read()
        except OSError:
            return name  # a zip archive, or removed since
    return f"{name} {hashlib.blake2b(text, digest_size=4).hexdigest()}"


class Agreement(NamedTuple):
    hosts: tuple[str, ...]  # by rank
    holder: tuple[int, int]  # rank 0's process and PID namespace
    store: tuple[str, int]  # address and port of torch's
    wakeup: Wakeup


def agree(
    participant: Participant,
    info: RankInfo,
    timeout: float,
    common: Mapping[str, Any],
    process: Process,
) -> Agreement:
    """Return who takes part, once all ranks are there, once each, and the same. Collective."""
    # Rank 0 compares what each has said at its server, and tells all who takes part, or what is
    # wrong: a rank is missing, duplicate, or differs.
    rank, who = info.rank, f"rank {info.rank} of {info.world_size} on {process[0]}"
    until = time.monotonic() + timeout
    facts = json.dumps({"world_size": info.world_size, **common})
    said = {"setup": participant.setup, "said": {facts: [[rank, *process]]}}
    if participant.server is None:
        told, call, shared = say(participant, said, info, timeout + 2 * _GRACE)
    else:
        call, shared = participant.server.join(participant.setup, said), False
        told = judge(participant, info, timeout, process, facts)
        read_message(call, time.monotonic() + timeout)
    verdict = json.loads(zlib.decompress(told))
    if verdict["trouble"]:
        trouble = f"{who}: {verdict['trouble']}"
    elif verdict["world_size"] != info.world_size:
        trouble = (
            f"rank {rank} on {process[0]} was started in a world of {info.world_size}, rank 0 on "
            f"{unfold_hosts(verdict['hosts'])[0]} in one of {verdict['world_size']}; expected one "
            "world; start all ranks by one launcher, or give each job a MASTER_PORT of its own"
        )
    else:
        assert call is not None
        hosts, holder = unfold_hosts(verdict["hosts"]), tuple(verdict["holder"])
        store = peer_of(call), verdict["port"]
        return Agreement(hosts, holder, store, Wakeup(call, shared=shared))
    if call is not None:
        call.close()
    _linger(participant, info.world_size if time.monotonic() < until else 0)
    raise SetupError(trouble)


def withdraw(participant: Participant, info: RankInfo, process: Process, why: str) -> None:
    """Tell those who come to `agree` that this rank cannot take part. Not collective."""
    trouble = f"rank {info.rank} on {process[0]} cannot take part: {why}"
    if participant.server is not None:
        heard = participant.server.rounds[participant.setup]
        heard.trouble = trouble
        heard.there.add(process)
        participant.server.serve(lambda: len(heard.said) >= info.world_size - 1, LOOK)
        judge(participant, info, LOOK, process, "{}")
        _linger(participant, info.world_size)
    else:
        with participant.call()[0] as call:
            said = {"setup": participant.setup, "trouble": trouble, "process": process}
            call.sendall(message(said))


def judge(
    participant: Participant, info: RankInfo, timeout: float, process: Process, facts: str
) -> bytes:
    """Tell all who takes part, or what is wrong. For rank 0; returns the same."""
    assert participant.server is not None
    server, size = participant.server, info.world_size
    heard, said = server.rounds[participant.setup], dict[int, tuple[Process, str]]()
    start, next_word, trouble = time.monotonic(), FIRST_WORD, ""
    while not trouble and len(said) < size:
        left = max(start + timeout - time.monotonic(), 0.0)
        server.serve(lambda: heard.trouble != "" or len(heard.said) == size, min(LOOK, left))
        before, said, trouble = said, dict(heard.said), heard.trouble
        waited = time.monotonic() - start
        if not trouble:
            fresh = (rank for rank in sorted(said) if rank not in before)
            others = {rank: said[rank] for rank in fresh if said[rank][1] != facts}
            trouble = _describe_differences(process[0], facts, others)
        if trouble or len(said) == size:
            break
        if waited >= timeout:
            trouble = _describe_absent(said, size, waited)
        elif waited >= next_word:
            logger.warning("%s", _describe_absent(said, size, waited))
            next_word *= 2
    hosts = [] if trouble else [said[rank][0][0] for rank in range(size)]
    told = pack({
        "trouble": trouble, "world_size": size, "holder": process[1:], "port": server.store_port,
        "hosts": fold_hosts(hosts),
    })  # fmt: skip
    server.tell(heard, told)
    if not trouble and participant.store is not None:
        # For who looks what became of a silent rank.
        processes = pack([said[rank][0][1:] for rank in range(size)])
        participant.store.set("processes", processes)  # type: ignore[arg-type]  # it takes bytes
    return told


def _linger(participant: Participant, size: int) -> None:
    """Stay until so many have come, and all who came have closed their calls. For rank 0."""
    if participant.server is not None:
        heard = participant.server.rounds[participant.setup]
        participant.server.serve(
            lambda: len(heard.there) >= size and not heard.calls, _COMING if size else _READING
        )


def fold_hosts(hosts: Sequence[str]) -> dict[str, Any]:
    """Return the hosts of all ranks as JSON that compresses well, each name once.

    >>> fold_hosts(["x1c0", "x1c0", "x1c1", "x2c1"])
    {'names': ['0 x1c0', '3 1', '1 2c1'], 'steps': [0, 0, 1, 1]}
    """
    places = {name: place for place, name in enumerate(dict.fromkeys(hosts))}
    names, before = [], ""
    for name in places:
        shared = len(os.path.commonprefix([before, name]))  # noqa: RUF071 - by character
        names.append(f"{shared} {name[shared:]}")
        before = name
    at = [0, *(places[host] for host in hosts)]
    return {"names": names, "steps": [here - prior for prior, here in pairwise(at)]}


def unfold_hosts(folded: Mapping[str, Any]) -> tuple[str, ...]:
    names, before = [], ""
    for each in folded["names"]:
        shared, _, rest = each.partition(" ")
        before = before[: int(shared)] + rest
        names.append(before)
    return tuple(names[place] for place in accumulate(folded["steps"]))


def _describe_absent(
    said: Mapping[int, tuple[Process, str]], world_size: int, waited: float
) -> str:
    missing = [rank for rank in range(world_size) if rank not in said]
    hosts = grouped((said[rank][0][0], rank) for rank in sorted(said))
    there = ", ".join(f"{fold(ranks)} on {host}" for host, ranks in list(hosts.items())[:_SHOWN])
    more = f" and {len(hosts) - _SHOWN} hosts more" if len(hosts) > _SHOWN else ""
    plural = "s" if len(missing) > 1 else ""
    return (
        f"rank{plural} {fold(missing)} of {world_size} did not come to setup_torch in "
        f"{waited:.0f} s (there: {there}{more}); expected every rank to call it; look whether one "
        "failed earlier or takes another branch"
    )


def _describe_differences(host: str, mine: str, others: Mapping[int, tuple[Process, str]]) -> str:
    """Return in what ranks differ from rank 0, or nothing; log what may differ."""
    refused: dict[str, list[int]] = {}
    allowed: dict[str, list[int]] = {}
    soft = _SOFT if os.environ.get(AGREEMENT) == "warn" else ()
    alike = grouped((facts, (rank, where)) for rank, ((where, *_), facts) in others.items())
    for facts, places in alike.items():
        for is_allowed, difference, here in _differences(json.loads(mine), json.loads(facts), soft):
            for rank, where in places:
                text = f"{difference} on {where}, rank 0 {here}"
                (allowed if is_allowed else refused).setdefault(text, []).append(rank)

    def told(texts: Mapping[str, list[int]]) -> str:
        said = [
            f"rank{'s' if len(ranks) > 1 else ''} {fold(ranks)}: {text} on {host}"
            for text, ranks in list(texts.items())[:_SHOWN]
        ]
        more = [f"and {len(texts) - _SHOWN} differences more"] if len(texts) > _SHOWN else []
        return "; ".join(said + more)

    if allowed:
        logger.warning("the ranks differ: %s", told(allowed))
    if not refused:
        return ""
    return (
        f"the ranks differ: {told(refused)}; expected the same on all; install the same "
        "versions and start the same script with the same arguments everywhere "
        f"({AGREEMENT}=warn lets versions and scripts differ)"
    )


def _differences(
    mine: Mapping[str, Any], facts: Mapping[str, Any], soft: Sequence[str]
) -> Iterator[tuple[bool, str, Any]]:
    """Yield whether it may be, what a rank has, and what rank 0 has instead."""
    for name in sorted({*mine, *facts}):
        here, there = mine.get(name), facts.get(name)
        if not (isinstance(here, dict) and isinstance(there, dict)):
            here, there = {name.replace("_", " "): here}, {name.replace("_", " "): there}
        # Rank 0 alone may have imported what it reports with.
        for key in here:
            if key in there and here[key] != there[key]:
                yield name in soft, f"{key} {there[key]}", here[key]


# The ranks of a collective, and how torch carries what they tell each other.

# Bytes, of all ranks, that each sends straight to all others, on the host: one message each, all
# at once, takes half the time of gloo's ring (2 and 4 ranks, torch 2.13).
_DIRECT = 1 << 20
_CHUNK = 1 << 24  # bytes that a broadcast moves at once: what is staged on a device is within this


@dataclass(frozen=True, slots=True)
class Members:
    """Several ranks that take part in a collective, seen from one of them."""

    world: World
    group: dist.ProcessGroup | None  # torch's group; None: the world's
    ranks: Sequence[int]  # their ranks in the world, by place in the group
    place: int  # this rank's place in the group
    where: torch.device  # where tensors must lie for the group's backend to send them
    scope: str = ""  # which group it is, in words: ranks that wait in different ones are told apart

    @property
    def size(self) -> int:
        return len(self.ranks)

    def gather(self, mine: bytearray, what: str, timeout: float | None = None) -> bytearray:
        """Return every rank's bytes, of equal length, one after the other by place."""
        every = bytearray(len(mine) * self.size)
        group = self.group or dist.group.WORLD
        assert group is not None  # set-up made it
        got = on_host = torch.frombuffer(every, dtype=torch.uint8)
        what += self.scope
        is_direct = self.where.type == "cpu" and len(every) <= _DIRECT
        kind = dist.AllToAllOptions if is_direct else dist.distributed_c10d.AllgatherOptions  # type: ignore[attr-defined]  # it is there
        options: Any = kind()
        if timeout is not None:
            # Not less than the group's own: gloo closes the connections of what runs out of time.
            options.timeout = timedelta(seconds=max(timeout, self.world.timeout))
        with waiting(what, self.world, self.ranks):
            # The group's own methods, which torch 2.13 has renamed: dist's functions cost a fifth
            # more, and warn of the old names.
            if is_direct:
                sent = torch.frombuffer(mine * self.size, dtype=torch.uint8)
                swap = getattr(group, "all_to_all_single", None) or group.alltoall_base
                work = swap(got, sent, [], [], options)
            else:
                sent = torch.frombuffer(mine, dtype=torch.uint8).to(self.where)
                got = torch.empty_like(on_host, device=self.where)
                gather = getattr(group, "all_gather_single", None) or group._allgather_base  # noqa: SLF001
                work = gather(got, sent, options)
            if timeout is not None and self.where.type == "cpu":
                work.wait(timedelta(seconds=timeout))
            else:
                if timeout is not None:
                    # Other backends' wait only queues a wait on the device's stream.
                    poll(work.is_completed, timeout, what, self.world, self.ranks)
                work.wait()
            if got is not on_host:
                on_host.copy_(got)
        return every

    def reduce(self, tensor: torch.Tensor, op: str, what: str) -> None:
        # Never AVG, which oneCCL and gloo have not.
        with waiting(what + self.scope, self.world, self.ranks):
            dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op.upper()), group=self.group)

    def send(self, data: torch.Tensor, root: int, what: str) -> None:
        """Fill uint8 [bytes] with what ``root`` (in the world) holds; on meta it is dropped."""
        sends = self.ranks[self.place] == root
        for piece in data.split(_CHUNK):
            staged = (
                piece if piece.device == self.where else torch.empty_like(piece, device=self.where)
            )
            with waiting(what + self.scope, self.world, self.ranks):
                if sends and staged is not piece:
                    staged.copy_(piece)
                dist.broadcast(staged, src=root, group=self.group)
                if not (sends or staged is piece or piece.is_meta):
                    piece.copy_(staged)


def find_members(operation: str, group: dist.ProcessGroup | None) -> Members | None:
    """Return the ranks that take part; None where this process is the only one."""
    world = current_world(operation)
    if world is None:
        # A group that a script made by itself, without any launcher's variables.
        if dist.is_initialized() and dist.get_world_size() > 1:
            raise NotSetUpError(
                f"{operation} on rank {dist.get_rank()} of {dist.get_world_size()}, in a process "
                "group that setup_torch() did not make; expected ezpz.setup_torch() in place of "
                "init_process_group, on every rank"
            )
        return None
    rank, size = world.info.rank, world.info.world_size
    if group is None:
        if size == 1:
            return None
        if "members" not in world.kept:  # most calls are for all ranks
            world.kept["members"] = Members(world, None, range(size), rank, world.on_host)
        return cast("Members", world.kept["members"])
    # new_group returns this, and not None, to ranks that are not in the group.
    if group is dist.GroupMember.NON_GROUP_MEMBER:  # type: ignore[comparison-overlap]
        raise ValueError(
            f"{operation} on rank {rank} with a group of which it is no member; expected the call "
            "on the group's members only"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"{operation} with group={group!r}; expected a torch.distributed.ProcessGroup, for "
            "example from new_group() or mesh.get_group(), or None for all ranks"
        )
    try:
        ranks = dist.get_process_group_ranks(group)
    except KeyError:
        raise ValueError(
            f"{operation} with a group that torch does not know; expected one made since "
            "setup_torch() and not destroyed"
        ) from None
    if len(ranks) == 1:
        return None
    where = torch.device("cpu") if "gloo" in dist.get_backend(group) else world.device
    return Members(world, group, ranks, ranks.index(rank), where, f" in group {group.group_name}")


# The small exchange with which every collective begins: do all ranks call the same?

SLOT = 256  # bytes of a slot: latency is the same from 32 to 1024 (gloo), and 27 numbers fit in
_HEADER = struct.Struct("=8sB")  # the same on all ranks that take part in the same call
_TAKES_PART, _REFUSES = 0, 1
ROOM = SLOT - _HEADER.size  # bytes of a slot that a collective has for itself
_WORDS = 200  # characters of a call that a message shows: a dict can have thousands of keys


class Call(NamedTuple):
    """One call of a collective, as far as all ranks must agree on it."""

    name: str  # ``"all_reduce"``, ``"broadcast(root=0)"``, ``"barrier()"``
    op: str = ""  # ``"sum"``, ``"mean"``, ... where it combines
    # Where it combines: each key, empty where there is no dict, and its value (``"float32 [3]"``).
    leaves: tuple[tuple[str, str], ...] | None = None

    def signature(self) -> str:
        """Return all of it in words: equal where the calls fit together."""
        if self.leaves is None:
            return self.name
        inner = "{" + ", ".join([f"{key}: {kind}" for key, kind in self.leaves]) + "}"
        if len(self.leaves) == 1 and not self.leaves[0][0]:
            inner = self.leaves[0][1]
        return f"{self.name} of {inner}" + (f" ({self.op})" if self.op else "")


@lru_cache(32)  # a training loop calls the same few again and again
def summary(call: Call) -> tuple[bytes, str]:
    """Return eight bytes that stand for a call, and words for whoever asks what is going on."""
    signature = call.signature()
    return _digest(signature), _shorten(signature)


def _shorten(signature: str) -> str:
    return signature if len(signature) <= _WORDS else f"{signature[: _WORDS - 1]}…"


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def exchange(
    call: Call, members: Members | None, payload: bytes | bytearray = b"",
    *, timeout: float | None = None, refusal: Exception | None = None,
) -> bytearray:  # fmt: skip
    """Make sure that all ranks call the same, and return all slots; see `payload_of`. Collective.

    Each may give `ROOM` bytes, or a ``refusal``, so that the others need not wait for it; that is
    raised. The only rank has no members, and sends nothing.
    """
    if members is None:
        if refusal is not None:
            raise refusal
        return bytearray()
    hashed, what = summary(call)
    tag = _TAKES_PART
    if refusal is not None:
        hashed, tag = _digest(f"{type(refusal).__name__}: {refusal}"), _REFUSES
    mine = bytearray(SLOT)
    _HEADER.pack_into(mine, 0, hashed, tag)
    mine[_HEADER.size : _HEADER.size + len(payload)] = payload
    every = members.gather(mine, what, timeout)
    heads = [bytes(every[at : at + _HEADER.size]) for at in range(0, len(every), SLOT)]
    if refusal is None and heads.count(heads[members.place]) == len(heads):
        return every
    refused = {place for place, head in enumerate(heads) if head[-1] == _REFUSES}
    if refusal is not None and len(refused) == len(heads):
        raise refusal
    raise _explain(call, members, heads, refused, refusal) from refusal


def payload_of(place: int, every: bytearray) -> bytearray:
    return every[place * SLOT + _HEADER.size : (place + 1) * SLOT]


# Ranks that called different things: who, what, and where in their code.

_PARTIES = 8  # different calls that are told apart; more make no message clearer
_KEYS = 3  # keys that a message names for each rank


def _explain(
    call: Call, members: Members, heads: list[bytes], refused: set[int], refusal: Exception | None
) -> CollectiveError:
    """Return the error of every rank; one of each party says what it called. Collective."""
    # The places of those that say the same: the most first; of equally many, the lowest.
    parties = grouped((head, place) for place, head in enumerate(heads)).values()
    ordered = sorted(parties, key=lambda one: (one[0] in refused, -len(one), one[0]))
    mine = {
        "name": call.name, "op": call.op, "signature": call.signature(), "at": calling_line(),
        "leaves": None if call.leaves is None else dict(call.leaves),
        "refusal": refusal and f"{type(refusal).__name__}: {refusal}",
    }  # fmt: skip
    said = _hear(members, mine, [party[0] for party in ordered[:_PARTIES]])
    hosts = members.world.hosts

    def name(party: list[int]) -> str:
        ranks = [members.ranks[place] for place in party]
        return f"rank {ranks[0]} ({hosts[ranks[0]]})" if len(ranks) == 1 else f"ranks {fold(ranks)}"

    lines = []
    if ordered[0][0] not in refused:
        verb = "calls" if len(ordered[0]) == 1 else "call"
        lines.append(f"{name(ordered[0])} {verb} {_words(said[0])}")
    for party, other in zip(ordered[1:], said[1:], strict=False):
        if bool(refused) == (party[0] in refused):
            lines.append(f"{name(party)} {_describe_call(said[0], other, len(party) > 1)}")
    if len(ordered) > _PARTIES:
        lines.append(f"and {len(ordered) - _PARTIES} more different calls")
    if refused:
        return CollectiveError(
            f"{'; '.join(lines)}; expected every rank to take part; mend the call there",
            sorted(members.ranks[place] for place in refused),
        )
    return MismatchError(
        f"{'; '.join(lines)}; expected every rank to call the same, with the same keys, shapes "
        "and dtypes",
        sorted(members.ranks[place] for party in ordered[1:] for place in party),
    )


def _words(said: Mapping[str, Any]) -> str:
    return f"{_shorten(said['signature'])} at {said['at']}"


def _describe_call(expected: Mapping[str, Any], said: Mapping[str, Any], several: bool) -> str:
    if said["refusal"]:
        return f"cannot take part in {_words(said)}: {said['refusal']}"
    mine, theirs = said["leaves"], expected["leaves"]
    alike = (said["name"], said["op"]) == (expected["name"], expected["op"])
    if not alike or mine is None or theirs is None or ("" in mine) != ("" in theirs):
        return f"{'call' if several else 'calls'} {_words(said)}"
    has = "have" if several else "has"
    found = [f"{has} no key {key}" for key in theirs if key not in mine]
    found += [f"{has} a key {key} that the others have not" for key in mine if key not in theirs]
    found += [
        f"{has} {kind}{f' at key {key}' if key else ''} instead of {theirs[key]}"
        for key, kind in mine.items()
        if theirs.get(key, kind) != kind
    ]
    found = found or [f"{has} the same in another order"]
    more = [f"and {len(found) - _KEYS} more differences"] if len(found) > _KEYS else []
    return f"{', '.join(found[:_KEYS] + more)} at {said['at']}"


def _hear(members: Members, mine: Mapping[str, Any], leaders: list[int]) -> list[Any]:
    """Return what each of the leaders says. Collective."""
    said = []
    for place in leaders:
        raw = bytearray(json.dumps(mine).encode() if place == members.place else b"")
        length = torch.tensor([len(raw)])
        members.send(length.view(torch.uint8), members.ranks[place], "what the ranks call")
        raw = raw or bytearray(int(length))
        data = torch.frombuffer(raw, dtype=torch.uint8)
        members.send(data, members.ranks[place], "what the ranks call")
        said.append(json.loads(raw))
    return said
