"""Jails: what they are made of, what is left when something dies, and workspaces that travel."""

import errno
import io
import os
import shutil
import signal
import tarfile
import tempfile
import time
from pathlib import Path

import pytest
from jailer import USERS, ask, below, prison
from patience import until

from rlbench.base.status import is_alive
from rlbench.sandbox import zygote_sessions
from rlbench.sandbox.filters import PROFILES, load_filter, make_filter
from rlbench.sandbox.jail import MOST_LAYERS, Jail
from rlbench.sandbox.jail_start import self_test
from rlbench.sandbox.types import End, Fault, Order, Program, SandboxLimits
from rlbench.sandbox.workspace import LayerStore, put_files, put_tree, read_file, view_layers

TIERS = ("bwrap-zygote", "landlock", "rlimits")


@pytest.fixture
def start(tmp_path):
    "Starts jails that share a store; all are closed, and none leaves a process."
    made = []

    def jail(tier: str = "bwrap-zygote", **more) -> Jail:
        made.append(Jail(f"z{len(made)}", LayerStore(tmp_path / "store"), tier, allow_unsafe=tier == "rlimits", **more))
        return made[-1]

    yield jail
    everybody = set().union(*(below(each.pid) for each in made if not each.lost))
    for each in made:
        each.close()
    assert gone(everybody)


def gone(pids, seconds: float = 10.0) -> bool:
    "Whether processes end within some time."
    end = time.monotonic() + seconds
    while left := [pid for pid in pids if is_alive(pid)]:
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return not left


class Client:
    "Orders with tickets of their own."

    def __init__(self, jail: Jail):
        self.jail, self.ticket = jail, 0

    def order(self, kind: str, **more) -> Order:
        self.ticket += 1
        return Order(self.ticket, kind, **more)

    def __call__(self, kind: str, **more):
        reply = ask(self.jail, self.order(kind, **more))[0]
        if reply.fault:
            raise reply.fault
        if reply.missing:
            raise FileNotFoundError(more.get("path"))
        return reply.value

    def sh(self, text: str, session: str = "", **more) -> str:
        done = self(
            "exec",
            program=Program(argv=("sh", "-c", text), **more),
            session=session,
            limits=SandboxLimits(processes=1 if self.jail.tier == "landlock" else 16),
        )
        assert done.ok, done
        return done.stdout.decode()


@pytest.mark.parametrize("machine", ("x86_64", "aarch64"))
@pytest.mark.parametrize("profile", PROFILES)
def test_kept_filter_is_what_the_list_makes(machine, profile):
    "The filters in the data are those that libseccomp makes of the list."
    assert make_filter(profile, machine) == load_filter(profile, machine)


@pytest.mark.parametrize("tier", TIERS)
def test_nothing_is_left_when_the_owner_is_killed(script, tier):
    "A process with a jail that runs programs is killed: everything below it ends."
    owner = script(
        """
import sys, time
from rlbench.sandbox.jail import Jail
from rlbench.sandbox.types import Order, Program
jail = Jail("z", None, sys.argv[1], allow_unsafe=True)
for i in range(4):
    jail.submit(Order(i + 1, "exec", program=Program("import time; time.sleep(9)")))
jail.arm(2)
while not jail.ready:
    jail.poll(); time.sleep(0.05)
print("ready", flush=True)
while True:
    jail.poll(); time.sleep(0.05)
""",
        tier,
    )
    assert owner.stdout.readline() == "ready\n"
    family = until(
        lambda: len(found := below(owner.pid)) >= 8 and found, 5
    )  # the zygote, four programs and two that wait
    os.kill(owner.pid, signal.SIGKILL)
    assert gone(family)


@pytest.mark.parametrize("tier", TIERS)
def test_a_lost_zygote_answers_for_everything(start, tier):
    "A zygote that is killed: each order is answered once, with backend_lost, and so is what comes later."
    jail = start(tier)
    client = Client(jail)
    client("exec", program=Program("1"))
    orders = [client.order("exec", program=Program("import time; time.sleep(9)")) for _ in range(3)]
    for order in orders:
        jail.submit(order)
    time.sleep(0.2)
    family = below(jail.pid)
    os.kill(max(family - {jail.pid}) if tier == "bwrap-zygote" else jail.pid, signal.SIGKILL)
    os.kill(jail.pid, signal.SIGKILL)
    replies = ask(jail, client.order("read", session="none", path="x"))
    end = time.monotonic() + 5
    while len(replies) < 4 and time.monotonic() < end:
        replies += jail.poll()
    later = ask(jail, client.order("exec", program=Program("1")))
    assert jail.lost and not jail.ready and gone(family)
    assert sum(reply.fault.end == End.BACKEND_LOST for reply in jail.poll() + later) == 1


def test_tier_is_what_was_asked_for_or_nothing(start, monkeypatch, request):
    """Without bubblewrap, or where it is refused, the self-test says so and names the remedy;
    nobody falls without a word."""
    with pytest.raises(Fault, match="allow_unsafe = true"):
        Jail("z", None, "rlimits")
    refusing = Path(tempfile.mkdtemp(dir="/var/tmp"))  # where every user may start it
    request.addfinalizer(lambda: shutil.rmtree(refusing))
    refusing.chmod(0o755)
    (refusing / "bwrap").write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    (refusing / "bwrap").chmod(0o755)
    for folder, said in (
        (refusing, "No permissions to create new namespace; user namespaces are refused here"),
        (refusing / "empty", "install Debian's package bubblewrap"),
    ):
        monkeypatch.setenv("PATH", str(folder))
        found = self_test.__wrapped__()
        assert found.tier == "landlock" and said in found.missing("bwrap-zygote") and said in str(found), found
        with pytest.raises(Fault, match="tier bwrap-zygote does not work here"):
            Jail("z", None, "bwrap-zygote", found=found)
        assert start(None, found=found).tier == "landlock"


@pytest.mark.parametrize("tier", TIERS)
def test_workspace_goes_from_zygote_to_zygote(start, tier):
    "A snapshot of one session is where another begins, in the same jail and in another; so does a long chain of them."
    first, second = Client(start(tier)), Client(start(tier))
    store = first.jail.store
    base = put_files(store, {"a/b/c": b"base", "gone": b"x", "old/1": b"1", "old/2": b"2"})
    first("open", session="s", base=base)
    first("write", session="s", path="new/file", data=b"new")
    assert first(
        "exec",
        session="s",
        program=Program(
            "import os, shutil\n"
            "os.unlink('gone'); shutil.rmtree('old'); os.mkdir('old'); open('old/3', 'w').write('3')\n"
            "os.symlink('/etc', 'link')\n"
            "open('a/b/c', 'a').write('+')"
        ),
    ).ok
    layer = first("snapshot", session="s", turn=3, version=7)
    assert (layer.base, layer.turn, layer.version, layer.processes, layer.parent) == (base, 3, 7, 0, "")
    found = {path for path, (_, member) in view_layers(store, (base, layer.digest)).items() if not member.isdir()}
    assert (
        found == {"a/b/c", "old/3", "new/file", "link"} and read_file(store, (base, layer.digest), "a/b/c") == b"base+"
    )
    for client in (first, second):
        client("open", session="t", base=base, layers=(layer.digest,))
        assert (
            client("read", session="t", path="a/b/c") == b"base+"
            and client("read", session="t", path="old/3") == b"3"
            and client("read", session="t", path="new/file", most=2) == b"ne"
        )
        for path in ("gone", "old/1", "nowhere", "a", "link/passwd"):
            with pytest.raises(FileNotFoundError):
                client("read", session="t", path=path)
    chain = (layer.digest,)
    for i in range(MOST_LAYERS + 3):
        second("restore", session="t", layers=chain)
        second("write", session="t", path=f"step/{i}", data=str(i).encode())
        made = second("snapshot", session="t")
        chain = (*made.below, made.digest)
        assert len(chain) <= MOST_LAYERS
    first("restore", session="t", layers=chain)
    assert [first("read", session="t", path=f"step/{i}") for i in range(MOST_LAYERS + 3)] == [
        str(i).encode() for i in range(MOST_LAYERS + 3)
    ]
    assert (
        first("read", session="t", path="a/b/c") == b"base+"
        and first("exec", session="t", program=Program("import os; print(sorted(os.listdir('old')))")).stdout
        == b"['3']\n"
    )
    first("restore", session="t", layers=())
    assert first("read", session="t", path="gone") == b"x"


def test_what_a_session_may_not(start):
    "Links out of it, pipes, more than its disk holds: refused, without harm to the jail."
    client = Client(start())
    client("open", session="other")
    client("write", session="other", path="secret", data=b"of another")
    client("open", session="s", limits=SandboxLimits(disk_mb=2, inodes=50))
    client.sh(
        "ln -s / root; ln -s ../../1/m/secret up; ln -s /z/s/1/m/secret over; mkfifo pipe; ln -s "
        "/proc/self/root/etc magic",
        "s",
    )
    for path in ("root/etc/passwd", "up", "over", "pipe", "magic/passwd"):
        with pytest.raises(FileNotFoundError):
            client("read", session="s", path=path)
    client("write", session="s", path="root/planted", data=b"1")  # the link leads to the workspace's own top
    assert client("read", session="s", path="planted") == b"1"
    for path in ("../x", "a/../../x", ""):
        with pytest.raises(Fault, match="no path below the workspace"):
            client("write", session="s", path=path, data=b"")
    with pytest.raises(Fault, match="unusable"):
        client("write", session="s", path="large", data=bytes(4 << 20))
    assert (
        client(
            "exec",
            session="s",
            program=Program("n = 0\ntry:\n    while True: open(f'f{n}', 'w'); n += 1\nexcept OSError: print(n)"),
        ).stdout.strip()
        < b"50"
    )
    with pytest.raises(Fault, match="no session 'nobody'"):
        client("exec", session="nobody", program=Program("1"))
    with pytest.raises(Fault, match="no layer"):
        client("open", session="u", base="0" * 64)
    client("close", session="s")
    client("close", session="s")
    assert client.sh("echo well") == "well\n"


def test_a_tree_of_processes_has_one_limit(start):
    "CPU time and memory count for all processes together."
    client = Client(start())
    burns = Program("import os\nfor _ in range(3): os.fork()\nwhile True: pass")
    done = client("exec", program=burns, limits=SandboxLimits(cpu_s=0.5, wall_s=20))
    assert done.end == End.CPU_LIMIT and done.cpu_s < 1.5
    hides = Program(argv=("sh", "-c", "sh -c 'while :; do :; done' & wait"))
    assert client("exec", program=hides, limits=SandboxLimits(cpu_s=0.3, wall_s=20)).end == End.CPU_LIMIT


def test_a_repository_from_a_folder(start, tmp_path):
    "A folder becomes a base; a program runs in it, with what it needs besides."
    (tmp_path / "repo" / "pkg").mkdir(parents=True)
    (tmp_path / "repo" / "pkg" / "__init__.py").write_text("def double(x):\n    return 2 * x\n")
    client = Client(start())
    client("open", session="s", base=put_tree(client.jail.store, tmp_path / "repo"))
    done = client(
        "exec",
        session="s",
        program=Program(
            "import os, sys, pkg, test_it\nprint(pkg.double(21), os.environ['MODE'], sys.stdin.read())",
            files={"test_it.py": b"assert __import__('pkg').double(2) == 4"},
            environ={"MODE": "fast"},
            stdin=b"typed",
        ),
    )
    assert done.stdout == b"42 fast typed\n"
    ran = client.sh("python3 -m unittest -q 2>&1; ls", "s")
    assert "pkg" in ran and "test_it.py" in ran


def test_many_at_once(start):
    "Two hundred programs, given at once, each with its own answer."
    client = Client(start())
    orders = [client.order("exec", program=Program(f"print({i})", calls=("x",) * (i % 3))) for i in range(200)]
    replies = ask(client.jail, *orders, seconds=60)
    assert [reply.value.stdout for reply in replies] == [f"{i}\n".encode() for i in range(200)]


def test_what_a_killed_owner_left_on_disk_is_removed(script, start):
    "A tier without namespaces writes into a folder; the next jail removes that of an owner that was killed."
    owner = script(
        "import sys, time\n"
        "from rlbench.sandbox.jail import Jail\n"
        "jail = Jail('z', None, 'landlock')\n"
        "print(jail.scratch, flush=True)\n"
        "time.sleep(60)"
    )
    folder = Path(owner.stdout.readline().strip())
    assert folder.is_dir() and start("landlock").scratch != str(folder) and folder.is_dir(), (
        "that of a living owner stays"
    )
    owner.kill()
    owner.wait()
    start("landlock")
    assert not folder.exists()


@pytest.mark.parametrize("flood", ("b'x'", "b'\\n'", "b'1\\n' * 400"))
def test_a_flood_of_answers(start, flood):
    """Answers without end, byte by byte or line by line, end the program and nothing else;
    those before their call count for nothing."""
    client = Client(start())
    done = client(
        "exec",
        program=Program(f"import os\nwhile True: os.write(4, {flood})", calls=("1", "2", "3")),
        limits=SandboxLimits(output_kb=64, cpu_s=5, wall_s=20),
    )
    assert (
        done.end == End.OUTPUT_LIMIT
        and len(done.answers) <= 3
        and all(len(answer or "") <= 1 for answer in done.answers)
    ), done
    assert client.sh("echo well") == "well\n"


@pytest.mark.parametrize("tier", TIERS)
def test_a_set_is_in_the_same_order_in_every_jail(start, tier):
    "Texts hash alike, whoever starts Python: the zygote's child, or a command."
    text = "print({f'word {i}' for i in range(50)})"
    limits = SandboxLimits(processes=1 if tier == "landlock" else 16)
    said = {
        Client(start(tier))("exec", program=program, limits=limits).stdout
        for program in (Program(text), Program(argv=("python3", "-c", text)))
        for _ in range(2)
    }
    assert len(said) == 1 and len(said.pop()) > 500


FORKS = """
import os, time
made = 0
try:
    for _ in range({0}):
        if not os.fork():
            time.sleep(9)
            os._exit(0)
        made += 1
except OSError:
    pass
print(made, flush=True)
time.sleep({1})
"""
THREADS = """
import _thread, time
lock, made = _thread.allocate_lock(), 0
lock.acquire()
_thread.stack_size(65536)
try:
    for _ in range({0}):
        _thread.start_new_thread(lock.acquire, ())
        made += 1
except RuntimeError:
    pass
print(made, flush=True)
time.sleep({1})
"""


@pytest.mark.parametrize("user", USERS)
def test_processes_are_counted_by_program(user):
    "One that takes all it may leaves another as many as that one may."
    held = prison("bwrap-zygote", user)
    try:
        for _ in range(2):
            modest = held.run(Program(FORKS.format(12, 0)), SandboxLimits(), beside=Program(FORKS.format(500, 9)))
            assert (modest.end, modest.stdout) == (End.EXITED, b"12\n"), modest
        greedy = held.run(Program(FORKS.format(500, 0)), SandboxLimits(processes=16))
        assert greedy.end is End.EXITED and 10 < int(greedy.stdout) < 16, greedy
    finally:
        assert held.close() == 0


@pytest.mark.parametrize("user", USERS)
def test_threads_are_counted_where_processes_cannot_be(user):
    """Without namespaces a program starts no processes, and one with too many threads is ended.

    Another beside it starts its own."""
    held = prison("landlock", user)
    try:
        for _ in range(2):
            modest = held.run(Program(THREADS.format(12, 0)), SandboxLimits(), beside=Program(THREADS.format(5000, 9)))
            assert (modest.end, modest.stdout) == (End.EXITED, b"12\n"), modest
        greedy = held.run(Program(THREADS.format(5000, 9)), SandboxLimits(processes=16))
        assert (greedy.end, greedy.hit) == (End.FORBIDDEN, ("processes",)) and greedy.wall_s < 5, greedy
    finally:
        assert held.close() == 0


@pytest.mark.parametrize("tier", TIERS)
def test_children_that_wait_are_sent_away(start, tier):
    "Fewer armed children than there are: the others end, and the jail goes on."
    jail = start(tier)
    client = Client(jail)
    assert client("exec", program=Program("print(1)")).stdout == b"1\n"
    alone = below(jail.pid)
    for _ in range(2):
        jail.arm(3)
        until(lambda: len(below(jail.pid)) >= len(alone) + 3, 5)
        assert client("exec", program=Program("print(1)")).warm
        jail.arm(0)
        assert client("exec", program=Program("print(1)")).stdout == b"1\n"
        until(lambda: below(jail.pid) == alone, 5)


DEEP = """
import os
for i in range(3000):
    os.mkdir("d" * 100)
    os.chdir("d" * 100)
open("f", "w").write("x")
"""


@pytest.mark.parametrize("tier", TIERS)
def test_a_deep_tree_harms_nobody(start, tier):
    """Folders deeper than any path: they count, they go with their program,
    and if nobody is left to remove them the next jail does."""
    jail = start(tier)
    client = Client(jail)
    done = client("exec", program=Program(DEEP, files={"a": b""}), limits=SandboxLimits(cpu_s=5))
    assert (done.end, done.status) in ((End.EXITED, 0), (End.OUTPUT_LIMIT, 9)), done
    assert client("exec", program=Program("print(1)")).stdout == b"1\n"
    if jail.scratch:
        end = time.monotonic() + 5
        while sorted(os.listdir(jail.scratch)) != ["empty"]:
            assert time.monotonic() < end, os.listdir(jail.scratch)
            time.sleep(0.05)


def test_what_a_dead_owner_left_is_removed_however_deep():
    """As root and under whatever modes.

    Whoever starts a sandbox sweeps, tests beside this one too: it gets its name when it is whole."""
    from rlbench.sandbox.jail_start import make_scratch, remove_scratch

    built = Path(tempfile.mkdtemp(prefix="rlbench-left-", dir="/var/tmp"))
    here = os.open(built, os.O_RDONLY)
    for _ in range(2000):
        os.mkdir("d" * 50, dir_fd=here)
        below_it = os.open("d" * 50, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below_it
    os.mkdir("closed", 0o000, dir_fd=here)
    os.symlink("/", "link", dir_fd=here)
    os.close(here)
    old = built.rename(f"/var/tmp/rlbench-sandbox-4194999-{os.urandom(4).hex()}")
    end = time.monotonic() + 20
    while old.exists():  # two who sweep at once may get in each other's way; the next one has it
        assert time.monotonic() < end
        remove_scratch(make_scratch((os.geteuid(), os.getegid())))


def test_a_folder_is_removed_although_something_is_still_put_in(tmp_path, monkeypatch):
    """Whoever is killed may have had one more file under way:
    then it goes round again, and what cannot be removed for another reason is told."""
    left, rmdir, late = tmp_path / "left", os.rmdir, ["one", "two"]

    def slow(path, **more):
        if path == str(left) and late:
            (left / late.pop()).mkdir()
        rmdir(path, **more)

    monkeypatch.setattr(zygote_sessions.os, "rmdir", slow)
    (left / "in").mkdir(parents=True)
    zygote_sessions.remove_path(str(left))
    assert not left.exists() and not late

    def refused(path, **more):
        raise PermissionError(errno.EPERM, "not yours", path)

    left.mkdir()
    monkeypatch.setattr(zygote_sessions.os, "rmdir", refused)
    with pytest.raises(PermissionError, match="not yours"):
        zygote_sessions.remove_path(str(left))


@pytest.mark.parametrize("tier", TIERS)
def test_a_session_is_closed_while_it_is_kept(start, tier):
    "A close right behind a snapshot: each order is answered, and the zygote lives on for the others."
    jail = start(tier)
    client = Client(jail)
    client("open", session="other")
    for _ in range(10):
        replies = ask(
            jail,
            client.order("open", session="s"),
            client.order("write", session="s", path="a", data=b"1"),
            client.order("snapshot", session="s"),
            client.order("close", session="s"),
        )
        assert replies[2].fault is None or "closed" in str(replies[2].fault)
        assert replies[3].fault is None
    client("write", session="other", path="b", data=b"2")
    assert client("read", session="other", path="b") == b"2" and not jail.lost


def test_a_command_that_could_start_nothing_is_refused(start):
    """Where there are no processes a command is told so before it runs, with the field and the remedy;
    one that needs none runs."""
    client = Client(start("landlock"))
    with pytest.raises(
        Fault,
        match="limits.processes = 16: under tier landlock the command 'sh' .* give processes = 1 .* or use tier "
        "bwrap-zygote",
    ) as told:
        client("exec", program=Program(argv=("sh", "-c", "ls | wc -l")))
    assert told.value.end is End.GRADER_ERROR
    assert client("exec", program=Program(argv=("echo", "1")), limits=SandboxLimits(processes=1)).stdout == b"1\n"


def layer_of(entries, path):
    "A layer as somebody else might write it: (name, kind, link, bytes) of each entry."
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as layer:
        for name, kind, link, data in entries:
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname, entry.size = kind, link, len(data)
            layer.addfile(entry, io.BytesIO(data))
    return path


HOSTILE_LAYERS = {
    "a path upwards": [("../out", tarfile.REGTYPE, "", b"x")],
    "a path up and down": [("a/../../out", tarfile.REGTYPE, "", b"x")],
    "an absolute path": [("/out", tarfile.REGTYPE, "", b"x")],
    "a long path upwards": [("d" * 120 + "/../../out", tarfile.REGTYPE, "", b"x")],
    "a folder upwards": [("../out", tarfile.DIRTYPE, "", b"")],
    "a hard link": [("out", tarfile.LNKTYPE, "/etc/passwd", b"")],
    "a device": [("out", tarfile.CHRTYPE, "", b"")],
    "a pipe": [("out", tarfile.FIFOTYPE, "", b"")],
    "a mark that hides the folder above": [("a/.wh...", tarfile.REGTYPE, "", b"")],
}


@pytest.mark.parametrize("name", HOSTILE_LAYERS)
def test_a_layer_that_leads_out_of_its_folder_is_refused(tmp_path, name):
    root = tmp_path / "room" / "root"
    root.mkdir(parents=True)
    with open(layer_of(HOSTILE_LAYERS[name], tmp_path / "layer"), "rb") as layer, pytest.raises(OSError, match="layer"):
        zygote_sessions.unpack_layer(layer.fileno(), os.fsencode(root), True)
    assert list((tmp_path / "room").iterdir()) == [root] and not any(root.rglob("out"))


def test_a_link_in_a_layer_is_no_way_out_of_its_folder(tmp_path):
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (outside / "kept").write_bytes(b"as it was")
    entries = [
        ("door", tarfile.SYMTYPE, str(outside), b""),
        ("door/kept", tarfile.REGTYPE, "", b"changed"),
        ("kept", tarfile.SYMTYPE, str(outside / "kept"), b""),
        ("kept", tarfile.REGTYPE, "", b"mine"),
    ]
    with open(layer_of(entries, tmp_path / "layer"), "rb") as layer:
        zygote_sessions.unpack_layer(layer.fileno(), os.fsencode(root), True)
    assert (outside / "kept").read_bytes() == b"as it was"
    assert (root / "door" / "kept").read_bytes() == b"changed" and (root / "kept").read_bytes() == b"mine"


def test_a_layer_that_ends_early_is_refused(tmp_path):
    path = layer_of([("file", tarfile.REGTYPE, "", b"x" * 5000)], tmp_path / "layer")
    os.truncate(path, 2000)
    (root := tmp_path / "root").mkdir()
    with open(path, "rb") as layer, pytest.raises(OSError, match="ends early"):
        zygote_sessions.unpack_layer(layer.fileno(), os.fsencode(root), True)
