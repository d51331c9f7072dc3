"""What ``distckpt doctor`` makes of what the ranks saw: one line for each thing that a job depends on."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from distckpt import human
from distckpt.cli import output
from distckpt.cli.launcher import launcher

OK, WARNING, FAIL = "ok", "warning", "will fail"
_GB = 10 ** 9
_LEAST = 16 << 20
_SOCKETS = 4
"""Connections that each rank holds to rank 0's store."""
_OF_ITS_OWN = 512
"""Open files that a training process needs beside them."""
_OBJECT_STORES = ("s3fs", "mount-s3", "gcsfuse", "goofys", "rclone", "blobfuse", "blobfuse2", "ossfs", "geesefs")
_IN_MEMORY = ("tmpfs", "ramfs")
_SKEW = 5.0
NEEDED = ("mkdir", "write and fsync a file", "fsync a directory", "exclusive create", "rename a directory",
          "rename never overwrites", "unlink", "be seen")


@dataclass(frozen=True)
class Line:
    """One thing looked at: what was ``seen``, and where it is not ok what to do (``fix``)."""

    what: str
    state: str
    seen: str
    fix: str = ""

    def to_json(self) -> dict[str, str]:
        return asdict(self)


@dataclass
class Story:
    """What is known of the run whose root this is. ``bytes``: of its newest checkpoint; ``seconds``: what a stop takes,
    as ``takes`` explains."""

    owner: str = ""
    owner_lives: bool | None = False
    leftovers: list[str] = field(default_factory=list)
    unclear: list[str] = field(default_factory=list)
    bytes: int | None = None
    seconds: float | None = None
    takes: str = ""
    problem: str = ""


@dataclass
class Seen:
    """All that the ranks told. By rank: ``facts``, ``tried`` (what came of the probe), ``clocks`` (seconds ahead of rank 0)."""

    hosts: dict[int, str]
    kind: str
    root: str
    visible: float
    node_local: bool = False
    facts: dict[int, dict[str, Any]] = field(default_factory=dict)
    tried: dict[int, dict[str, Any]] = field(default_factory=dict)
    clocks: dict[int, float] = field(default_factory=dict)
    back: dict[int, float | None] = field(default_factory=dict)
    unwritable: OSError | None = None
    saved: dict[str, Any] = field(default_factory=dict)
    story: Story = field(default_factory=Story)

    def who(self, ranks: Iterable[int]) -> str:
        """``rank 3 on n2``, ``ranks 0, 1 on n1; rank 2 on n2``; the first few hosts."""
        by: dict[str, list[int]] = {}
        for rank in sorted(ranks):
            by.setdefault(self.hosts.get(rank, "?"), []).append(rank)
        parts = [f"rank{'s' if len(found) > 1 else ''} {', '.join(map(str, found[:8]))}{' ...' if len(found) > 8 else ''}"
                 f" on {host}" for host, found in list(by.items())[:4]]
        return "; ".join(parts) + (f" and {len(by) - 4} more hosts" if len(by) > 4 else "")

    def groups(self, of: Callable[[dict[str, Any]], Any]) -> dict[Any, list[int]]:
        """The ranks by what ``of`` gives for their facts."""
        found: dict[Any, list[int]] = {}
        for rank, facts in sorted(self.facts.items()):
            found.setdefault(of(facts), []).append(rank)
        return found


def diagnose(seen: Seen) -> list[Line]:
    """Every line, in the order in which a job meets them."""
    return [*_ranks(seen), *_root(seen), *_mount(seen), *_trust(seen), *_operations(seen), *_visibility(seen), *_clocks(seen),
            *_space(seen), *_speed(seen), *_owner(seen), *_leftovers(seen), *_grace(seen), *_limits(seen), *_memory(seen)]


def _ranks(seen: Seen) -> list[Line]:
    hosts = len(set(seen.hosts.values()))
    world = len(seen.hosts)
    text = f"{output.plural(world, 'rank')} on {output.plural(hosts, 'host')}, found by {seen.kind}"
    return [Line("ranks", OK, text + ("" if world > 1 else "; start it as the job is started to look from every rank"))]


def _root(seen: Seen) -> list[Line]:
    lines = []
    for path, ranks in seen.groups(lambda f: f["root"]).items():
        if path != seen.root:
            lines.append(Line("root", FAIL, f"{seen.who(ranks)} was given {path}, rank 0 {seen.root}",
                              "give every rank the same absolute path"))
    for blocked, ranks in seen.groups(lambda f: f.get("blocked")).items():
        if blocked:
            lines.append(Line("root", FAIL, f"{blocked} ({seen.who(ranks)})", "choose another root, or move it away"))
    first = seen.facts[0]
    if seen.unwritable and not first.get("blocked"):
        number = seen.unwritable.errno
        fix = "free space or raise the quota" if number in (errno.ENOSPC, errno.EDQUOT) else "fix its permissions or its mount"
        lines.append(Line("root", FAIL, f"rank 0 on {seen.hosts[0]} cannot write in {first['standing']}: "
                          f"{seen.unwritable.strerror}", f"{fix}, or choose another root"))
    if not lines:
        where = "" if first["real"] == seen.root else f", which is {first['real']}"
        lines.append(Line("root", OK, f"{seen.root}{where}" + ("" if first["exists"] else f": not there yet, will be made in "
                                                                                          f"{first['standing']}")))
    return lines


def _mount(seen: Seen) -> list[Line]:
    lines = []
    for (kind, source, options), ranks in seen.groups(lambda f: _mounted(f["mount"])).items():
        where = f"{kind} of {source} ({options}) on {seen.who(ranks)}" if kind else f"unknown on {seen.who(ranks)}"
        set_ = dict(option.partition("=")[::2] for option in options.split(","))
        problems = []
        name = kind.partition(".")[2] or source.partition("#")[0]
        if kind.startswith("fuse") and any(name.startswith(store) for store in _OBJECT_STORES):
            problems.append((FAIL, "a directory cannot be renamed in one step there",
                             "use a file system; copy checkpoints to the object store after the commit (manager.on_commit)"))
        if kind in _IN_MEMORY:
            problems.append((WARNING, "it is memory: all is gone with the machine", "use a disk for what must last"))
        if kind == "overlay":
            problems.append((WARNING, "it belongs to the container and may go with it", "mount a volume and put the root there"))
        if seen.facts[ranks[0]]["network"]:
            problems += _cached(kind, set_, seen.visible)
        if "barrier" in set_ and set_["barrier"] == "0" or "nobarrier" in set_:
            problems.append((WARNING, "barriers are off: fsync does not reach the disk", "mount it without nobarrier"))
        lines += [Line("file system", state, f"{where}: {text}", fix) for state, text, fix in problems]
        if not problems:
            lines.append(Line("file system", OK, where))
    kinds = seen.groups(lambda f: f["network"])
    if len(set(seen.hosts.values())) > 1 and False in kinds and not seen.node_local:
        lines.append(Line("file system", WARNING, f"it looks like a local disk on {seen.who(kinds[False])}, and the ranks are on "
                          "several hosts", "put the root on storage that every host mounts"))
    return lines


def _mounted(mount: Mapping[str, str] | None) -> tuple[str, str, str]:
    return (mount["kind"], mount["source"], mount["options"]) if mount else ("", "", "")


def _cached(kind: str, options: Mapping[str, str], visible: float) -> list[tuple[str, str, str]]:
    """What a network mount's options mean for ranks that look at each other's files."""
    found = []
    times = [int(options[name]) for name in ("actimeo", "acdirmax", "acregmax") if options.get(name, "").isdigit()]
    longest = max(times, default=60)
    if kind.startswith("nfs") and longest >= visible:
        found.append((WARNING, f"this host may be shown the past for {longest} s, and a rank looks for {visible:g} s",
                      f"mount it with actimeo=60 or less, or pass Timeouts(visible={2 * longest})"))
    if "nocto" in options:
        found.append((WARNING, "nocto: a file that was just written may be read in an older state", "mount it without nocto"))
    if kind.startswith("nfs") and ("soft" in options or "softerr" in options):
        found.append((WARNING, "soft: a slow server is an error to a save, which then fails", "mount it hard (the default)"))
    return found


def _trust(seen: Seen) -> list[Line]:
    lines = [Line("owner and mode", FAIL, f"{problem.partition(':')[0]} ({seen.who(ranks)})",
                  f"{problem.partition(': ')[2]}; or pass allow_shared_root=True if all who can write there are trusted")
             for problem, ranks in seen.groups(lambda f: f.get("trust")).items() if problem]
    users = seen.groups(lambda f: f["uid"])
    if len(users) > 1:
        lines.append(Line("owner and mode", WARNING, "the ranks run as different users: "
                          + "; ".join(f"uid {uid}: {seen.who(ranks)}" for uid, ranks in users.items()), "run them as one user"))
    return lines or [Line("owner and mode", OK, f"only uid {seen.facts[0]['uid']}, root and the group may write in it"
                          if seen.facts[0]["exists"] else f"it will belong to uid {seen.facts[0]['uid']}")]


def _operations(seen: Seen) -> list[Line]:
    tried = {rank: found["tried"] for rank, found in seen.tried.items() if "tried" in found}
    if not tried:
        return []
    lines, absent = [], []
    for name in [*NEEDED, "exchange two names", "hard link"]:
        wrong: dict[str, list[int]] = {}
        for rank, found in tried.items():
            answer = found.get(name, "ok")
            if answer != "ok":
                wrong.setdefault(answer, []).append(rank)
        for answer, ranks in wrong.items():
            if answer == "not there":
                absent.append(name)
            elif name in NEEDED:
                full = "No space" in answer or "quota" in answer
                fix = "free space or raise the quota" if full else "use a file system that can, or fix its permissions"
                lines.append(Line("operations", FAIL, f"{name}: {answer} ({seen.who(ranks)})", fix))
            else:
                lines.append(Line("operations", WARNING, f"{name}: {answer} ({seen.who(ranks)})", "see the file server's log"))
    if not lines:
        note = f"; without {' and '.join(absent)}, which is done in two steps instead" if absent else ""
        lines.append(Line("operations", OK, "mkdir, exclusive create, fsync of files and directories, rename, unlink" + note))
    return lines


def _visibility(seen: Seen) -> list[Line]:
    apart = [rank for rank, found in seen.tried.items() if "apart" in found]
    unseen = {rank: found["unseen"] for rank, found in seen.tried.items() if "unseen" in found and rank not in apart}
    if seen.node_local and not unseen and len(set(seen.hosts.values())) > 1:
        return [_disks(seen, apart)]
    back = {rank: waited for rank, waited in seen.back.items() if rank in seen.tried and rank not in unseen}
    lost = [rank for rank, waited in back.items() if waited is None]
    fix = ("put the root on storage that every host mounts at the same path, in containers into each of them; or, if every "
           "node's own disk is what you want, pass storage='node-local', and --storage node-local here")
    lines = []
    if unseen:
        first = min(unseen)
        lines.append(Line("visibility", FAIL, f"{seen.who(unseen)} does not see what rank 0 on {seen.hosts[0]} wrote there "
                          f"({unseen[first]}), looked for {seen.tried[first]['waited']:.0f} s", fix))
    if lost:
        lines.append(Line("visibility", FAIL, f"rank 0 on {seen.hosts[0]} does not see what {seen.who(lost)} wrote there", fix))
    known = {rank: found["seen"] for rank, found in seen.tried.items() if "seen" in found and rank}
    if lines or not known:
        return lines
    slowest, slowest_back = max(known, key=lambda r: known[r]), max(known, key=lambda r: back[r] or 0.0)
    late = max(known[slowest], back[slowest_back] or 0.0)
    text = (f"ranks see rank 0's files after at most {known[slowest]:.2f} s ({seen.who([slowest])}), rank 0 sees theirs after at "
            f"most {back[slowest_back] or 0.0:.2f} s ({seen.who([slowest_back])})")
    if late > seen.visible / 2:
        return [Line("visibility", WARNING, text, f"pass Timeouts(visible={int(4 * late)}), or shorten the mount's cache")]
    return [Line("visibility", OK, text)]


def _disks(seen: Seen, apart: list[int]) -> Line:
    """With node-local storage."""
    if not apart:
        return Line("disks", WARNING, "all ranks see one: storage='node-local' is then as storage='shared'",
                    "leave it out, or choose a root on the nodes' own disks")
    return Line("disks", OK, f"that of rank 0 is seen by {seen.who(set(seen.hosts) - set(apart))}; others are by "
                f"{seen.who(apart)}. A checkpoint exists when every node has its share, and is gone with any node's disk")


def _clocks(seen: Seen) -> list[Line]:
    if len(set(seen.hosts.values())) < 2 or not seen.clocks:
        return []
    worst = max(seen.clocks, key=lambda r: abs(seen.clocks[r]))
    text = f"at most {abs(seen.clocks[worst]):.1f} s apart ({seen.who([worst])})"
    if abs(seen.clocks[worst]) > _SKEW:
        return [Line("clocks", WARNING, text + "; no decision depends on it, the ages that 'distckpt ls' shows do", "run NTP")]
    return [Line("clocks", OK, text)]


def _space(seen: Seen) -> list[Line]:
    known = {rank: facts["space"] for rank, facts in seen.facts.items() if "space" in facts}
    if not known:
        return []
    least = min(known, key=lambda r: known[r]["free"])
    free, newest = known[least]["free"], seen.story.bytes
    text = f"{human.size(free)} of {human.size(known[least]['size'])} free ({seen.who([least])}); a quota is not seen here"
    fix = "free space, lower keep_last, or choose another root"
    if newest is not None:
        text += f"; the newest checkpoint has {human.size(newest)}: room for {free // max(newest, 1)} more"
    if free < (_LEAST if newest is None else newest):
        lines = [Line("space", FAIL, text, fix)]
    elif free < (2 * newest if newest is not None else _GB):
        lines = [Line("space", WARNING, text, fix)]
    else:
        lines = [Line("space", OK, text)]
    few = min(known, key=lambda r: known[r]["inodes"] if known[r]["of_inodes"] else 1 << 62)
    inodes, of = known[few]["inodes"], known[few]["of_inodes"]
    if of and inodes < 100_000:
        state = FAIL if inodes < 100 else WARNING if inodes < 10_000 else OK
        lines.append(Line("inodes", state, f"{inodes} of {of} free ({seen.who([few])})",
                          "" if state == OK else "remove small files, or choose another root"))
    return lines


def _speed(seen: Seen) -> list[Line]:
    saved = seen.saved
    if not saved:
        return []
    if "error" in saved:
        return [Line("a small save", FAIL, saved["error"], "the message says what to do; a training job would get it too")]
    if "skipped" in saved:
        return [Line("a small save", WARNING, f"not tried: {saved['skipped']}", "mend the above, then run this again")]
    rate = f"{human.size(int(saved['rate']))}/s" if saved["rate"] else "too fast to tell"
    text = (f"{human.size(saved['bytes'])} through the library, durable and committed: {rate} in all, and {saved['fixed']:.2f} s "
            "for each save whatever its size")
    newest = seen.story.bytes
    if newest is not None and saved["rate"]:
        text += f"; one of the newest's size would take about {saved['fixed'] + newest / saved['rate']:.0f} s"
    if saved["fixed"] > 5:
        return [Line("a small save", WARNING, text, "small files are slow here: is the metadata server, or the network, busy?")]
    return [Line("a small save", OK, text)]


def _owner(seen: Seen) -> list[Line]:
    story = seen.story
    if story.problem:
        return [Line("run", WARNING, story.problem, "'distckpt ls' and 'distckpt verify' say more")]
    if story.owner_lives:
        return [Line("live writer", FAIL, f"{story.owner} writes to this root: another job would be refused (RootInUse)",
                     "wait for it, stop it, or use another root")]
    if story.owner_lives is None:
        return [Line("live writer", WARNING, f"{story.owner or 'somebody'}, on another machine, may still write to this root: a "
                     "new job first waits 90 s to see", "make sure that job is over")]
    return [Line("live writer", OK, "none")] if seen.facts[0]["exists"] else []


def _leftovers(seen: Seen) -> list[Line]:
    story = seen.story
    lines = [Line("leftovers", WARNING, text, "'distckpt gc --dry-run' says more") for text in story.unclear]
    if story.leftovers:
        lines.append(Line("leftovers", OK, "; ".join(story.leftovers)))
    return lines


def _grace(seen: Seen) -> list[Line]:
    found, story, saved = launcher(), seen.story, seen.saved
    expected = story.seconds
    if expected is None and story.bytes is not None and saved.get("rate"):
        expected = saved["fixed"] + story.bytes / saved["rate"]
    text = found.name + (f": SIGKILL comes {found.grace:g} s after a stop signal" if found.grace is not None else
                         ": how long after a stop signal SIGKILL comes is not known here")
    if expected is not None:
        text += f"; {story.takes or f'a save takes about {expected:.0f} s'}"
    if found.grace is not None and expected is not None and expected > found.grace:
        return [Line("grace", WARNING, text + ": a save begun at the signal would not be finished", found.longer)]
    return [Line("grace", OK, text, "" if found.grace is not None else found.longer)]


def _limits(seen: Seen) -> list[Line]:
    lines = []
    world, limit = len(seen.hosts), seen.facts[0].get("files")
    needed = _OF_ITS_OWN + _SOCKETS * world
    if limit is not None and limit < needed:
        lines.append(Line("open files", WARNING, f"{limit} on rank 0, which holds {_SOCKETS} connections to each of {world} "
                          f"ranks: about {needed} are needed", "ulimit -n 65536 before the launcher, or LimitNOFILE"))
    elif limit is not None:
        lines.append(Line("open files", OK, f"{limit} on rank 0"))
    for limit, ranks in seen.groups(lambda f: f.get("largest")).items():
        if limit is not None:
            lines.append(Line("largest file", WARNING, f"{human.size(limit)} on {seen.who(ranks)}", "ulimit -f unlimited"))
    return lines


def _memory(seen: Seen) -> list[Line]:
    """A background save keeps a second copy of the state in host memory."""
    lines = []
    on_host: dict[str, list[int]] = {}
    for rank, host in seen.hosts.items():
        on_host.setdefault(host, []).append(rank)
    known = {host: min(seen.facts[r]["memory"] for r in ranks if "memory" in seen.facts[r])
             for host, ranks in on_host.items() if any("memory" in seen.facts[r] for r in ranks)}
    if known:
        least = min(known, key=lambda h: known[h])
        newest = seen.story.bytes
        text = f"{human.size(known[least])} free on {least}"
        if newest is None:
            lines.append(Line("memory", OK, f"{text}; a background save takes as much as the state of all ranks of a host"))
        else:
            need = newest * len(on_host[least]) // len(seen.hosts)
            text += f"; a background save stages about {human.size(need)} there"
            lines.append(Line("memory", WARNING if need > known[least] * 0.8 else OK, text,
                              "save in the foreground, or give the job more memory" if need > known[least] * 0.8 else ""))
    small = {rank: facts["shm"]["size"] for rank, facts in seen.facts.items() if "shm" in facts and facts["shm"]["size"] < _GB}
    if small:
        rank = min(small, key=lambda r: small[r])
        lines.append(Line("/dev/shm", WARNING, f"{human.size(small[rank])} on {seen.who([rank])}: enough for this library, which "
                          "stages in memory of its own, and little for NCCL and DataLoader workers",
                          "docker run --shm-size=8g, or --ipc=host"))
    return lines
