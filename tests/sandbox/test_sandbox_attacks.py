"""What a program tries against the machine is contained, in both tiers, as root and as an ordinary user,
and the next program is as well as ever."""

import pytest
from attacks import LIMITS, MARKER, TIERS
from jailer import USERS

from rlbench.sandbox.types import Program, SandboxLimits

CASES = [((tier, user), name) for tier, attacks in TIERS.items() for user in USERS for name in attacks]


@pytest.mark.parametrize(
    "cell, name", CASES, ids=["-".join((*where, name)) for where, name in CASES], indirect=["cell"]
)
def test_attack_is_contained(cell, name):
    "It ends as it may, gets nothing, stays in its limits, leaves no process, and the next program does not notice."
    attack = TIERS[cell.tier][name]
    program = Program(attack.code, attack.argv, files={"seed": b""} if attack.files else {})
    beside = None
    if "other programs" in name:  # one whose code, input, calls and output hold what is searched for
        text = MARKER.decode()
        cell.run(Program(f"print('{text}')", stdin=MARKER, calls=(text,)), SandboxLimits())
        beside = Program(f"import time\nprint('{text}', flush=True)\ntime.sleep(5)", stdin=MARKER, calls=(text, text))
    one = {"processes": 1} if attack.argv and cell.tier == "landlock" else {}  # more is refused there
    # a program that must end at another limit gets the wall time to reach it on a busy machine; one that sleeps would
    # sleep as long
    patient = {} if {"wall_timeout", "wall_limit"} & set(attack.ends) else {"wall_s": 30.0}
    done = cell.run(program, SandboxLimits(**LIMITS | dict(attack.limits) | one | patient), beside)
    told = (done.end, done.status, done.message, done.stdout[-300:], done.stderr[-300:])
    assert done.end in attack.ends, told
    assert b"GOT" not in done.stdout, told
    assert attack.says.encode() in done.stdout + done.stderr or done.end != "exited", told
    assert done.memory_mb < attack.memory_mb and len(done.stdout) + len(done.stderr) <= LIMITS["output_kb"] << 10, told
    assert cell.left() == 0
    after = cell.run(
        Program("import os; open('x', 'w').write('1') if os.access('.', os.W_OK) else 0; print(sum(range(100)))"),
        SandboxLimits(),
    )
    assert (after.end, after.stdout) == ("exited", b"4950\n"), after


def test_there_are_enough():
    "Every attack of the list, and more."
    assert len(TIERS["bwrap-zygote"]) >= 46 and len(TIERS["landlock"]) >= 41


def test_a_search_that_finds_something_says_so():
    "The search through memory is no empty one: a program that holds the marker twice is told."
    from jailer import Prison

    cell = Prison("bwrap-zygote")
    code = TIERS["bwrap-zygote"]["memory of the zygote: other programs"].code
    done = cell.run(Program("again = bytes(bytearray(reversed(b'REHTONA-FO-TERCES')))\n" + code), SandboxLimits())
    assert done.stdout.startswith(b"GOT"), done
    assert cell.close() == 0
