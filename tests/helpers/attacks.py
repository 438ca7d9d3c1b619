"""What a program may try against the machine, by tier: for test_sandbox_attacks.py.

Each attack is the source of a program that prints `GOT ...` where it succeeds, and how it may end."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Attack:
    """`ends`: how it may end; `says`: what it prints at least; `limits`: changes to the small ones it runs under;
    `files`, `argv`: of the program."""

    code: str
    ends: tuple[str, ...] = ("exited",)
    says: str = ""
    limits: tuple[tuple[str, float], ...] = ()
    argv: tuple[str, ...] = ()
    files: bool = False
    memory_mb: float = 400.0  # all its processes had no more than this


COMMON = """
import ctypes, errno, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *args):
    "A system call by number: its answer, or the name of the error."
    got = libc.syscall(ctypes.c_long(number), *(ctypes.c_long(a) if isinstance(a, int) else a for a in args))
    return got if got != -1 else errno.errorcode[ctypes.get_errno()]
def refused(name, number, *args):
    got = call(number, *args)
    print("refused" if got in ("EPERM", "ENOSYS", "EACCES", "EINVAL", "ESRCH", "EBADF", "EFAULT") else \
f"GOT {name}: {got}")
def denied(function, *args, **named):
    try:
        got = function(*args, **named)
    except (OSError, ValueError, RuntimeError, MemoryError) as error:
        print("refused", type(error).__name__)
    else:
        print("GOT", function, str(got)[:200])
NUMBERS = {n: i for i, n in enumerate("x86_64 aarch64".split())}[os.uname().machine]
def nr(x86, arm):
    return (x86, arm)[NUMBERS]
"""


def attack(code: str, *ends: str, **more) -> Attack:
    "An attack with the helpers above it."
    return Attack(COMMON + code, ends or ("exited",), **more)


LOOPS = ("cpu_limit",)
SLEEPS = ("wall_limit",)
EATS = ("exited", "memory_limit", "crashed", "cpu_limit", "wall_timeout", "wall_limit")
DIES = (
    "exited",
    "crashed",
)  # by its own hand: where it is the first process of a namespace, the signal does not even reach it
LONGER = (("cpu_s", 3), ("wall_s", 12))  # until the kernel's own limit of a second

# what both tiers must stand
BOTH = {
    "memory, one process": attack("x = []\nwhile True: x.append(bytearray(8 << 20))", *EATS, says="MemoryError"),
    "infinite loop": attack("while True: pass", *LOOPS),
    "sleeps for ever": attack("import time; time.sleep(100)", *SLEEPS),
    "ignores every signal": attack(
        "import signal\n"
        "for s in range(1, 65):\n"
        "    try: signal.signal(s, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\n"
        "while True: pass",
        *LOOPS,
    ),
    "big integer in C": attack(
        "print(len(str(7 ** (7 ** 9))) if hasattr(sys, 'set_int_max_str_digits') and not "
        "sys.set_int_max_str_digits(0) else 7 ** (7 ** 9))",
        "cpu_limit",
        "memory_limit",
        "exited",
    ),
    "huge stdout": attack("while True: os.write(1, b'x' * 65536)", "output_limit"),
    "huge stderr": attack("while True: os.write(2, b'x' * 65536)", "output_limit"),
    "files of the host": attack(
        "for path in ('/etc/shadow', '/root', '/home', '/var/log', '/etc/hostname', '/boot', '/opt'):\n"
        "    denied(os.listdir if not path.startswith('/etc') else lambda p: open(p).read(), path)"
    ),
    "environment": attack(
        "names = set(os.environ) - {'PATH', 'HOME', 'USER', 'LANG', 'PWD', 'TMPDIR', 'LC_CTYPE', "
        "'PYTHONHASHSEED'}\n"
        "print('GOT' if names else 'refused', sorted(names))"
    ),
    "tcp out": attack("import socket\ndenied(lambda: socket.create_connection(('1.1.1.1', 53), 1))"),
    "loopback": attack("import socket\ndenied(lambda: socket.create_connection(('127.0.0.1', 22), 1))"),
    "unix socket": attack(
        "import socket\ndenied(lambda: socket.socket(socket.AF_UNIX).connect('/run/dbus/system_bus_socket'))"
    ),
    "abstract unix socket": attack("import socket\ndenied(lambda: socket.socket(socket.AF_UNIX).bind('\\0mine'))"),
    "netlink": attack("import socket\ndenied(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0))"),
    "raw packets": attack("import socket\ndenied(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0))"),
    "vsock": attack("import socket\ndenied(lambda: socket.socket(40, socket.SOCK_STREAM))"),
    "ptrace the parent": attack("refused('ptrace', nr(101, 117), 16, os.getppid() or 1, 0, 0)"),
    "process_vm_readv": attack("refused('process_vm_readv', nr(310, 270), os.getppid() or 1, 0, 0, 0, 0, 0)"),
    "process_vm_writev": attack("refused('process_vm_writev', nr(311, 271), os.getppid() or 1, 0, 0, 0, 0, 0)"),
    "pidfd_getfd": attack("refused('pidfd_open', 434, os.getppid() or 1, 0)\nrefused('pidfd_getfd', 438, 0, 0, 0)"),
    "io_uring": attack("refused('io_uring', 425, 8, ctypes.create_string_buffer(256))"),
    "bpf": attack("refused('bpf', nr(321, 280), 0, 0, 0)"),
    "userfaultfd": attack("refused('userfaultfd', nr(323, 282), 0)"),
    "keyctl": attack(
        "refused('keyctl', nr(250, 219), 0, -3, 0)\nrefused('add_key', nr(248, 217), b'user', b'x', b'y', 1, -3)"
    ),
    "perf": attack("refused('perf', nr(298, 241), ctypes.create_string_buffer(128), 0, -1, -1, 0)"),
    "mount": attack(
        "refused('mount', nr(165, 40), b'none', b'/', b'tmpfs', 0, 0)\n"
        "refused('fsopen', 430, b'tmpfs', 0)\n"
        "refused('open_tree', 428, -100, b'/', 1)"
    ),
    "umount, pivot_root, chroot": attack(
        "refused('umount', nr(166, 39), b'/usr', 2)\n"
        "refused('pivot_root', nr(155, 41), b'.', b'.')\n"
        "refused('chroot', nr(161, 51), b'.')"
    ),
    "setns, unshare": attack(
        "refused('setns', nr(308, 268), 0, 0)\n"
        "for flag in (0x10000000, 0x20000, 0x20000000, 0x40000000): refused('unshare', nr(272, 97), flag)"
    ),
    "clone with new namespaces": attack(
        "refused('clone', nr(56, 220), 0x10000000 | 17, 0, 0, 0, 0)\n"
        "refused('clone3', 435, ctypes.create_string_buffer(88), 88)"
    ),
    "memfd hoard": attack("refused('memfd_create', nr(319, 279), b'x', 0)\nrefused('memfd_secret', 447, 0)"),
    "other users": attack(
        "for call_ in (lambda: os.setuid(0), lambda: os.setgid(0), lambda: os.setgroups([0]), "
        "lambda: os.setresuid(0, 0, 0)): denied(call_)"
    ),
    "limits back up": attack(
        "import resource\n"
        "for kind in (resource.RLIMIT_DATA, resource.RLIMIT_CPU, resource.RLIMIT_NOFILE, "
        "resource.RLIMIT_FSIZE, resource.RLIMIT_CORE):\n"
        "    denied(resource.setrlimit, kind, (resource.RLIM_INFINITY,) * 2)"
    ),
    "limits of others": attack(
        "import resource\ndenied(resource.prlimit, os.getppid() or 1, resource.RLIMIT_CPU, (1, 1))"
    ),
    "write to the system": attack(
        "for path in ('/usr/x', '/x', '/dev/x', '/etc/x', '/lib/x', '/proc/x', '/sys/x'): denied(open, path, 'w')"
    ),
    "devices": attack(
        "for path in ('/dev/mem', '/dev/kmsg', '/dev/sda', '/dev/vda', '/dev/tty', '/dev/kvm', '/dev/fuse', "
        "'/dev/net/tun'): denied(open, path, 'rb')\n"
        "denied(os.mknod, 'disk', 0o060600, os.makedev(8, 0))"
    ),
    "threads": attack(
        "import threading, time\n"
        "n = 0\n"
        "try:\n"
        "    while n < 5000:\n"
        "        threading.Thread(target=time.sleep, args=(50,), daemon=True).start(); n += 1\n"
        "except (RuntimeError, MemoryError): pass\n"
        "print('GOT' if n > 300 else 'refused', n, flush=True); os._exit(0)",
        *EATS,
    ),
    "open files": attack(
        "found = []\n"
        "try:\n"
        "    while len(found) < 5000: found.append(os.open('/dev/null', 0))\n"
        "except OSError: pass\n"
        "print('GOT' if len(found) > 100 else 'refused', len(found))"
    ),
    "segmentation fault": attack("ctypes.string_at(0)", "crashed"),
    "endless recursion in C": attack(
        "sys.setrecursionlimit(10 ** 9)\ndef f(): return f()\nf()", "crashed", "exited", "memory_limit", "cpu_limit"
    ),
    # of this suite's own
    "memory of the zygote: other programs": attack("""
marker = bytes(reversed(b'REHTONA-FO-TERCES'))
found = 0
for line in open('/proc/self/maps') if os.path.exists('/proc/self/maps') else ():
    span, mode = line.split()[:2]
    if 'r' in mode and 'w' in mode and '[v' not in line:
        a, b = (int(x, 16) for x in span.split('-'))
        found += ctypes.string_at(a, b - a).count(marker)
import gc
found += sum(x.count(marker) for x in gc.get_objects() if type(x) is bytes)
print('GOT' if found > 1 else 'refused', found)  # one is the marker here
"""),
    "files left open": attack(
        "left = []\n"
        "for fd in range(3, 4096):\n"
        "    try: os.fstat(fd); left.append(fd)\n"
        "    except OSError: pass\n"
        "print('GOT' if left else 'refused', left)"
    ),
    "asks for its own death signal to go": attack(
        "refused('prctl', nr(157, 167), 1, 0, 0, 0, 0)\n"
        "refused('prctl', nr(157, 167), 4, 1, 0, 0, 0)\n"
        "refused('seccomp', nr(317, 277), 0, 0, 0)"
    ),
    "types into a terminal": attack("refused('ioctl', nr(16, 29), 0, 0x5412, ctypes.create_string_buffer(b'x'))"),
    "signals by file ownership": attack("r, w = os.pipe()\nrefused('fcntl', nr(72, 25), r, 8, os.getppid() or 1)"),
    "executes memory from a file without a name": attack(
        "denied(os.memfd_create, 'x')\ndenied(os.open, '/usr', os.O_TMPFILE | os.O_RDWR)"
    ),
    "closes its output and goes on": attack("os.close(1); os.close(2)\nwhile True: pass", *LOOPS),
    "writes to the calls' files": attack("for fd in (3, 4, 5, 6, 7): denied(os.write, fd, b'x 0\\ngo 1')"),
    "kernel log and clocks": attack(
        "refused('syslog', nr(103, 116), 3, ctypes.create_string_buffer(64), 64)\n"
        "refused('settimeofday', nr(164, 170), 0, 0)\n"
        "refused('reboot', nr(169, 142), 0, 0, 0, 0)\n"
        "refused('kexec', nr(246, 104), 0, 0, 0, 0)"
    ),
    "shared memory of system v": attack(
        "refused('shmget', nr(29, 194), 0, 1 << 20, 0o1600)\n"
        "refused('msgget', nr(68, 186), 0, 0o1600)\n"
        "refused('semget', nr(64, 190), 0, 1, 0o1600)"
    ),
    "handles of files": attack(
        "refused('name_to_handle_at', nr(303, 264), -100, b'/', 0, 0, 0)\n"
        "refused('open_by_handle_at', nr(304, 265), -100, 0, 0)\n"
        "refused('fanotify', nr(300, 262), 0, 0)\n"
        "refused('inotify', nr(294, 26), 0)"
    ),
    # memory that no process shows
    "shared memory, touched and let go": attack(
        "import mmap\n"
        "denied(mmap.mmap, -1, 448 << 20)\n"
        "for flags in (0x21, 0x23, 0x8021):\n"
        "    got = call(nr(9, 222), 0, 64 << 20, 3, flags, -1, 0)\n"
        "    print('refused' if got == 'ENOMEM' else 'GOT', got)",
        says="refused",
    ),
    "shared memory of /dev/zero": attack(
        "import mmap\n"
        "def zeros(flags):\n"
        "    return mmap.mmap(os.open('/dev/zero', flags), 64 << 20, mmap.MAP_SHARED, mmap.PROT_READ)\n"
        "denied(zeros, os.O_RDONLY)\n"
        "denied(zeros, os.O_RDWR)"
    ),
    "larger buffers of sockets": attack(
        "import socket\n"
        "a, b = socket.socketpair()\n"
        "for option in (7, 8, 32, 33): denied(a.setsockopt, socket.SOL_SOCKET, option, 1 << 22)"
    ),
    "sockets full of sockets": attack(
        "import socket\n"
        "a, b = socket.socketpair()\n"
        "denied(socket.send_fds, a, [b'x'], [b.fileno()])\n"
        "a.send(b'1'); print('works' if b.recv(1) == b'1' else 'GOT')",
        says="works",
    ),
    "buffers of sockets": attack(
        "import socket, time\n"
        "held, kept = 0, []\n"
        "try:\n"
        "    while True:\n"
        "        kept.append(socket.socketpair())\n"
        "        for end in kept[-1]:\n"
        "            end.setblocking(False)\n"
        "            try:\n"
        "                while True: held += end.send(bytes(65536))\n"
        "            except BlockingIOError: pass\n"
        "except OSError: pass\n"
        "time.sleep(0.3)\n"
        "print('GOT' if held > 16 << 20 else 'refused', held >> 20)",
        "exited",
        "memory_limit",
        memory_mb=150,
    ),
    "larger pipes": attack("import fcntl\nr, w = os.pipe()\ndenied(fcntl.fcntl, w, 1031, 1 << 20)"),
    "message queues": attack("refused('mq_open', nr(240, 180), b'mine', 0o102, 0o600, 0)"),
    "the pool's mark": attack(
        "held = ctypes.POINTER(ctypes.c_char_p).in_dll(libc, 'environ')\n"
        "n, block = 0, []\n"
        "while held[n]: block.append(held[n]); n += 1\n"
        "found = [text for text in block if b'RLBENCH' in text] + [name for name in os.environ if 'RLBENCH' "
        "in name]\n"
        "try: found += [b'file'] * (b'RLBENCH' in open('/proc/self/environ', 'rb').read())\n"
        "except OSError: pass\n"
        "print('GOT' if found else 'refused', found)"
    ),
    "a thousand lines of traceback": attack(
        "sys.tracebacklimit = 10 ** 6\nraise Exception('x' * (1 << 20))", "output_limit"
    ),
    "exhausts its disk by a file with holes": attack(
        "with open('holes', 'wb') as f:\n    denied(f.truncate, 1 << 40)", files=True
    ),
}

# ways to look as if the machine had failed: each is the program's own doing, and counted
LOWERED = "import resource\nresource.setrlimit(resource.RLIMIT_{}, ({}, {}))\n"
PRETENDED = {
    "lowers its CPU limit and loops": attack(
        LOWERED.format("CPU", 1, 1) + "while True: pass", "crashed", "cpu_limit", limits=LONGER
    ),
    "SIGXCPU first, by a softer limit": attack(
        LOWERED.format("CPU", 1, 2) + "while True: pass", "cpu_limit", "crashed", limits=LONGER
    ),
    "a shell lowers its CPU limit": Attack(
        "", ("crashed", "cpu_limit"), argv=("sh", "-c", "ulimit -t 1; while :; do :; done"), limits=LONGER
    ),
    "a shell kills itself": Attack("", ("crashed",), argv=("sh", "-c", "kill -9 $$")),
    "a shell's child kills it": Attack(
        "", ("crashed", "exited"), argv=("sh", "-c", "exec python3 -c 'import os; os.kill(os.getpid(), 9)'")
    ),
    "kills itself": attack("os.kill(os.getpid(), 9)", *DIES),
    "kills its group": attack("os.killpg(0, 9)", *DIES),
    "kills itself by its thread": attack("call(nr(234, 131), os.getpid(), os.getpid(), 9)", *DIES),
    "kills itself by another thread": attack(
        "import threading\nt = threading.Thread(target=os.kill, args=(os.getpid(), 9)); t.start(); t.join()", *DIES
    ),
    "kills itself by a queued signal": attack(
        "call(nr(129, 138), os.getpid(), 9, ctypes.create_string_buffer(b'\\x09' + bytes(11) + "
        "b'\\xff\\xff\\xff\\xff' + bytes(112), 128))",
        *DIES,
    ),
    "kills itself by a file's number of it": attack("call(424, call(434, os.getpid(), 0), 9, 0, 0)", *DIES),
    "a timer kills it": attack(
        "import struct, time\n"
        "event, timer = ctypes.create_string_buffer(struct.pack('QiiQQ', 0, 9, 0, 0, 0) + bytes(40)), "
        "ctypes.c_int()\n"
        "call(nr(222, 107), 1, event, ctypes.byref(timer))\n"
        "call(nr(223, 110), timer.value, 0, ctypes.create_string_buffer(struct.pack('4q', 0, 0, 0, "
        "20_000_000)), 0)\n"
        "time.sleep(0.3)",
        *DIES,
    ),
    "has its parent's death kill it": attack(
        "call(nr(157, 167), 1, 9, 0, 0, 0)\nos.kill(os.getppid() or os.getpid(), 0) if os.getppid() else None",
        "exited",
        "crashed",
    ),
    "raises SIGXCPU": attack("os.kill(os.getpid(), 24)", "exited", "crashed", "cpu_limit"),
    "raises SIGSYS": attack("import signal\nsignal.raise_signal(31)", "exited", "crashed", "forbidden"),
    "aborts": attack("os.abort()", "crashed"),
    "lowers its memory": attack(LOWERED.format("AS", 1 << 24, 1 << 24) + "x = bytearray(1 << 25)", "exited", "crashed"),
    "lowers its data": attack(
        LOWERED.format("DATA", 1 << 20, 1 << 20) + "x = [bytearray(1 << 16) for _ in range(999)]", "exited", "crashed"
    ),
    "lowers its stack": attack(
        LOWERED.format("STACK", 1 << 16, 1 << 16) + "sys.setrecursionlimit(10 ** 6)\ndef f(): return [f()]\nf()",
        "exited",
        "crashed",
        "cpu_limit",
        "memory_limit",
    ),
    "lowers its open files": attack(LOWERED.format("NOFILE", 0, 0) + "open('/dev/null')"),
    "lowers its file size": attack(
        LOWERED.format("FSIZE", 0, 0) + "open('x', 'w').write('1' * 99999)", "exited", "crashed", files=True
    ),
    "lowers its processes": attack(
        LOWERED.format("NPROC", 0, 0) + "import threading\nthreading.Thread(target=print).start()"
    ),
    "offers itself to the kernel, and eats": attack(
        "try: open('/proc/self/oom_score_adj', 'w').write('1000')\n"
        "except OSError: pass\n"
        "x = []\n"
        "while True: x.append(bytearray(b'1' * (4 << 20)))",
        *EATS,
    ),
    "closes every file": attack("os.closerange(0, 4096)\nos._exit(0)"),
    "closes every file and dies": attack("os.closerange(0, 4096)\nos.kill(os.getpid(), 9); os.abort()", "crashed"),
    "sleeps with many threads": attack(
        "import threading, time\n[threading.Thread(target=time.sleep, args=(99,)).start() for _ in range(6)]", *SLEEPS
    ),
    "waits for a signal": attack("import signal\nsignal.pause()", *SLEEPS),
    "waits for itself": attack("import threading\nt = threading.Lock(); t.acquire(); t.acquire()", *SLEEPS),
    "waits for a pipe of its own": attack("r, w = os.pipe()\nos.read(r, 1)", *SLEEPS),
    "stops itself": attack("import time\nos.kill(os.getpid(), 19); time.sleep(99)", *SLEEPS),
    "works a little and sleeps": attack("import time\nwhile True: sum(range(9999)); time.sleep(0.1)", *SLEEPS),
}
BOTH |= PRETENDED

TREES = """
import signal, time
def forks(act):
    n = 0
    try:
        while n < 2000:
            if os.fork() == 0:
                act(); os._exit(0)
            n += 1
    except OSError: pass
    return n
"""

# with namespaces: processes are allowed, and end with their program
ROOMS = {
    "fork bomb": attack(
        "while True:\n    try: os.fork()\n    except OSError: pass",
        "cpu_limit",
        "wall_timeout",
        "wall_limit",
        "memory_limit",
    ),
    "fork bomb that sleeps": attack(
        TREES + "n = forks(lambda: time.sleep(100))\nprint('GOT' if n > 60 else 'refused', n, flush=True)"
    ),
    "daemon by double fork and setsid": attack(
        "import time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        [os.close(i) for i in range(3)]\n"
        "        time.sleep(1000)\n"
        "    os._exit(0)\n"
        "os.wait(); print('refused')"
    ),
    "memory, thirty processes": attack(
        TREES
        # each takes a MiB in 100 ms: a watcher that a busy machine delays by four seconds still ends them in time
        + "def eat():\n"
        "    x = bytearray(60 << 20)\n"
        "    for i in range(0, len(x), 4096):\n"
        "        x[i] = 1\n"
        "        if i % (1 << 20) == 0: time.sleep(0.1)\n"
        "    time.sleep(100)\n"
        "forks(eat)\n"
        "time.sleep(100)",
        "memory_limit",
        limits=(("processes", 30), ("wall_s", 10)),
        memory_mb=1500,
    ),
    "shared memory, many processes": attack(
        TREES + "import mmap\n"
        "def eat():\n"
        "    try: x = mmap.mmap(-1, 60 << 20)\n"
        "    except OSError: os._exit(0)\n"
        "    for i in range(0, len(x), 4096): x[i] = 1\n"
        "    print('GOT', flush=True)\n"
        "    time.sleep(100)\n"
        "forks(eat)\n"
        "print('refused')",
        "exited",
        "cpu_limit",
        "wall_timeout",
        limits=(("processes", 30), ("wall_s", 10)),
        memory_mb=1500,
    ),
    "memory, children with a bracket in their name": attack(
        TREES + "def eat():\n"
        "    libc.prctl(15, b') R 1 1 (', 0, 0, 0)\n"
        "    x = bytearray(36 << 20)\n"
        "    for i in range(0, len(x), 4096): x[i] = 1\n"
        "    time.sleep(100)\n"
        "for _ in range(8):\n"
        "    if os.fork() == 0: eat()\n"
        "time.sleep(100)",
        "memory_limit",
        limits=(("wall_s", 10),),
    ),
    "a million files": attack(
        "n = 0\n"
        "try:\n"
        "    while n < 10 ** 6: os.close(os.open(f'f{n}', os.O_CREAT)); n += 1\n"
        "except OSError: pass\n"
        "print('GOT' if n > 4096 else 'refused', n)",
        "exited",
        "cpu_limit",
    ),
    "four thousand folders deep": attack(
        "n = 0\n"
        "try:\n"
        "    while n < 10 ** 5: os.mkdir('d'); os.chdir('d'); n += 1\n"
        "except OSError: pass\n"
        "print('GOT' if n > 4096 else 'refused', n)",
        "exited",
        "cpu_limit",
    ),
    "disk": attack(
        "n = 0\n"
        "for i in range(100):\n"
        "    try:\n"
        "        with open(f'f{i}', 'wb') as f:\n"
        "            while True: n += f.write(b'x' * (1 << 20))\n"
        "    except OSError: pass\n"
        "print('GOT' if n > 70 << 20 else 'refused', n >> 20)",
        "exited",
        "cpu_limit",
    ),
    "/dev/shm and /tmp": attack(
        "n = 0\n"
        "for place in ('/dev/shm', '/tmp'):\n"
        "    try:\n"
        "        with open(place + '/x', 'wb') as f:\n"
        "            while True: n += f.write(b'x' * (1 << 20))\n"
        "    except OSError: pass\n"
        "print('GOT' if n > 70 << 20 else 'refused', n >> 20)",
        "exited",
        "cpu_limit",
    ),
    "other processes": attack(
        "seen = [p for p in os.listdir('/proc') if p.isdigit()]\nprint('GOT' if len(seen) > 1 else 'refused', seen)"
    ),
    "command lines": attack(
        "print('refused' if not [p for p in os.listdir('/proc') if p.isdigit() and b'rlbench' in "
        "open(f'/proc/{p}/cmdline', 'rb').read()] else 'GOT')"
    ),
    "kill everybody": attack(
        "import signal\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "for pid in (1, -1, os.getppid(), -os.getpgrp()):\n"
        "    try: os.kill(pid, signal.SIGKILL)\n"
        "    except OSError: pass\n"
        "print('refused')"
    ),
    "x32 system calls": attack(
        "libc.syscall(ctypes.c_long(0x40000000 | 39)) if os.uname().machine == 'x86_64' else "
        "os.kill(os.getpid(), 11) or os.abort()\n"
        "print('GOT')",
        "forbidden",
        "crashed",
    ),
    "writes in /proc": attack(
        "for path in ('/proc/sys/kernel/core_pattern', '/proc/self/oom_score_adj', '/proc/self/uid_map', "
        "'/proc/sysrq-trigger', '/proc/1/mem'):\n"
        "    denied(lambda: open(path, 'r+b', buffering=0).write(b'-1000'))"
    ),
    "capabilities": attack(
        "told = dict(line.split(None, 1) for line in open('/proc/self/status'))\n"
        "caps = [told[f'Cap{kind}:'].strip() for kind in ('Inh', 'Prm', 'Eff', 'Amb')]\n"
        "print('GOT' if any(int(c, 16) for c in caps) or told['NoNewPrivs:'].strip() != '1' else 'refused', "
        "caps)"
    ),
    "capabilities by executing": attack(
        "import subprocess\n"
        "told = subprocess.run(['/bin/cat', '/proc/self/status'], capture_output=True, text=True).stdout\n"
        "caps = [line.split()[1] for line in told.splitlines() if line[:6] in ('CapInh', 'CapPrm', 'CapEff', "
        "'CapAmb')]\n"
        "print('GOT' if len(caps) != 4 or any(int(c, 16) for c in caps) else 'refused', caps)"
    ),
    "what was there before": attack(
        "found = [os.path.join(d, f) for place in ('/sandbox', '/tmp') for d, _, fs in os.walk(place) for f "
        "in fs] + os.listdir('/z')\n"
        "print('GOT' if found else 'refused', found)"
    ),
    "overlay attributes": attack(
        "open('x', 'w')\n"
        "denied(os.setxattr, 'x', 'user.overlay.opaque', b'y')\n"
        "denied(os.setxattr, 'x', 'trusted.overlay.opaque', b'y')"
    ),
    "a shell's bomb": Attack(
        "",
        ("exited", "cpu_limit", "wall_timeout", "wall_limit", "memory_limit"),
        argv=("sh", "-c", "b() { b | b & }; b; sleep 60"),
    ),
    "a shell kills its keeper": Attack(
        "", ("exited",), argv=("sh", "-c", "kill -9 1 -1; kill -9 -- -1; exit 0"), says=""
    ),
    "its child kills it": attack(
        "import time\nif os.fork() == 0:\n    os.kill(os.getppid(), 9); os._exit(0)\ntime.sleep(0.1)"
    ),
    "its parent sleeps in the middle of a fork": attack(
        "import time\nlibc.vfork.restype = ctypes.c_int\nif os.fork() == 0: time.sleep(99)\nos.wait()", *SLEEPS
    ),
    "a shell that sleeps": Attack("", SLEEPS, argv=("sh", "-c", "sleep 99; :")),
    "setuid programs": Attack(
        "",
        ("exited",),
        argv=(
            "python3",
            "-c",
            "import os, subprocess\n"
            "for p in ('/usr/bin/su', '/usr/bin/mount', '/usr/bin/passwd', '/usr/bin/chsh'):\n"
            "    if os.path.exists(p): subprocess.run([p, '--version'], capture_output=True)\n"
            "print('GOT' if os.geteuid() == 0 else 'refused')",
        ),
    ),
}

# without: none can be started, none can be reached
ALONE = {
    "processes": attack(
        "denied(os.fork)\n"
        "denied(os.posix_spawn, '/bin/true', ['true'], {})\n"
        "import subprocess\n"
        "denied(subprocess.run, ['true'])"
    ),
    "kill everybody": attack(
        "import signal\n"
        "try: os.kill(-1, signal.SIGKILL)\n"
        "except OSError: pass\n"
        "for pid in (os.getppid(), -os.getppid(), 1): denied(os.kill, pid, signal.SIGKILL)"
    ),
    "kill by thread": attack(
        "refused('tgkill', nr(234, 131), os.getppid(), os.getppid(), 9)\n"
        "refused('tkill', nr(200, 130), os.getppid(), 9)\n"
        "refused('sigqueue', nr(129, 138), os.getppid(), 9, ctypes.create_string_buffer(128))"
    ),
    "process files": attack(
        "denied(os.listdir, '/proc')\n"
        "denied(lambda: open(f'/proc/{os.getppid()}/environ').read())\n"
        "denied(lambda: open(f'/proc/{os.getppid()}/mem', 'rb').read(1))"
    ),
    "writes without being allowed to": attack(
        "denied(open, 'x', 'w')\n"
        "denied(os.mkdir, 'x')\n"
        "denied(open, '/tmp/x', 'w')\n"
        "denied(open, '/var/tmp/x', 'w')\n"
        "denied(open, '/dev/shm/x', 'w')"
    ),
    "modes and times of its owner's files": attack(
        "for call_ in (lambda: os.chmod('/var/tmp', 0), lambda: os.chown('/var/tmp', 0, 0), "
        "lambda: os.utime('/var/tmp'), lambda: os.setxattr('/var/tmp', 'user.x', b''), "
        "lambda: os.truncate('/etc/passwd', 0)): denied(call_)"
    ),
    "files beside its own": attack(
        "denied(os.listdir, '..')\n"
        "denied(os.listdir, '/var/tmp')\n"
        "denied(open, '../../x', 'w')\n"
        "open('mine', 'w').write('1')",
        files=True,
    ),
    "a million files": attack(
        "n = 0\n"
        "try:\n"
        "    while n < 10 ** 6: os.close(os.open(f'f{n}', os.O_CREAT)); n += 1\n"
        "except OSError: pass\n"
        "print('GOT' if n > 10 ** 5 else 'refused', n)",
        "output_limit",
        "cpu_limit",
        files=True,
    ),
    "disk": attack(
        "n = 0\n"
        "for i in range(1000):\n"
        "    try:\n"
        "        with open(f'f{i}', 'wb') as f:\n"
        "            while n < 20 << 30: n += f.write(b'x' * (1 << 20))\n"
        "    except OSError: pass",
        "output_limit",
        "cpu_limit",
        files=True,
    ),
    "disk, in a folder that cannot be listed": attack(
        "import time\n"
        "os.mkdir('d', 0o300)\n"
        "for i in range(64):\n"
        "    with open(f'd/f{i}', 'wb') as f: f.write(b'x' * (1 << 20))\n"
        "time.sleep(5)\n"
        "print('GOT')",
        "output_limit",
        limits=(("wall_s", 10),),
        files=True,
    ),
    "disk, in files without a name": attack(
        "import time\n"
        "kept = []\n"
        "for i in range(48):\n"
        "    kept.append(open('f', 'wb')); kept[-1].write(b'x' * (1 << 20)); kept[-1].flush(); "
        "os.unlink('f')\n"
        "time.sleep(5)\n"
        "print('GOT')",
        "output_limit",
        limits=(("wall_s", 10),),
        files=True,
    ),
    "disk, in files that only a page is mapped of": attack(
        "import mmap, time\n"
        "kept = []\n"
        "for i in range(48):\n"
        "    with open('f', 'w+b') as f:\n"
        "        f.write(b'x' * (1 << 20)); f.flush(); kept.append(mmap.mmap(f.fileno(), 4096))\n"
        "    os.unlink('f')\n"
        "time.sleep(5)\n"
        "print('GOT')",
        "output_limit",
        limits=(("wall_s", 10),),
        files=True,
    ),
    "links out": attack(
        "for target in ('/etc', '/root', '/proc/1'):\n"
        "    os.symlink(target, 'l'); denied(os.listdir, 'l'); os.unlink('l')\n"
        "denied(os.link, '/etc/passwd', 'p') if os.path.exists('/etc/passwd') else None",
        files=True,
    ),
    # its memory ends before its 17th thread, or its threads are counted before its memory ends
    "threads": replace(BOTH["threads"], ends=(*EATS, "forbidden")),
    "leaves its group": attack(
        "denied(os.setsid)\n"
        "denied(os.setpgid, 0, 0)\n"
        "refused('sched_setaffinity', nr(203, 122), os.getppid(), 8, ctypes.create_string_buffer(8))\n"
        "refused('setpriority', nr(141, 140), 0, os.getppid(), 19)"
    ),
    "x32 system calls": ROOMS["x32 system calls"],
}

TIERS = {"bwrap-zygote": BOTH | ROOMS, "landlock": BOTH | ALONE}

MARKER = b"SECRET-OF-ANOTHER"
LIMITS = {
    "cpu_s": 0.2,
    "wall_s": 0.8,
    "memory_mb": 128,
    "processes": 16,
    "disk_mb": 16,
    "inodes": 1024,
    "output_kb": 64,
}
