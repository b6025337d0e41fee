"""Places for connections: who gets one, who gives one up, and how many there are."""

import errno
import subprocess
import sys

import pytest

from heloco.cluster.gateway.admission import (
    FRUITLESS_BURST,
    FRUITLESS_PER_S,
    RESERVED_DESCRIPTORS,
    UNDISTURBED_S,
    Admission,
    Places,
    Visitor,
    group_of,
)
from heloco.cluster.server.descriptors import has_run_out
from heloco.errors import UserError


class ClockedAdmission:
    """An admission with a clock of its own, and the names of the connections that were ended."""

    def __init__(self, places: Places) -> None:
        self.now_s = 0.0
        self.admission = Admission(places, clock=lambda: self.now_s)
        self.ended_names: list[str] = []

    def arrive(self, address: str, name: str = "") -> Visitor | None:
        return self.admission.arrive(address, lambda: self.ended_names.append(name or address))

    def admitted(self, address: str, name: str = "") -> Visitor:
        visitor = self.arrive(address, name)
        assert visitor is not None and self.admission.admit(visitor)
        return visitor


SMALL = Places(strangers=6, strangers_per_address=3, admitted=4)


def test_one_address_holds_few_places_and_only_old_ones_give_way():
    entrance = ClockedAdmission(SMALL)
    assert all(entrance.arrive("1.1.1.1", f"first-{i}") for i in range(3))
    assert entrance.arrive("1.1.1.1") is None and not entrance.ended_names
    entrance.now_s = UNDISTURBED_S
    assert entrance.arrive("1.1.1.1", "fourth") and entrance.ended_names == ["first-0"]
    assert entrance.arrive("2.2.2.2") and entrance.admission.strangers == 4


def test_when_all_places_are_taken_the_address_with_the_most_gives_one_up():
    entrance = ClockedAdmission(SMALL)
    for address in ("1.1.1.1", "2.2.2.2"):
        for i in range(3):
            assert entrance.arrive(address, f"{address} {i}")
    assert entrance.arrive("3.3.3.3") and entrance.ended_names == ["1.1.1.1 0"]
    assert entrance.arrive("4.4.4.4") and entrance.ended_names == ["1.1.1.1 0", "2.2.2.2 0"]
    assert entrance.admission.strangers == 6


def test_among_many_addresses_with_one_place_each_only_old_ones_give_way():
    entrance = ClockedAdmission(SMALL)
    for i in range(6):
        assert entrance.arrive(f"1.1.1.{i}")
    assert entrance.arrive("9.9.9.9") is None and not entrance.ended_names
    entrance.now_s = UNDISTURBED_S
    assert entrance.arrive("9.9.9.9") and len(entrance.ended_names) == 1


def test_strangers_never_take_the_place_of_one_that_is_admitted():
    entrance = ClockedAdmission(SMALL)
    machines = [entrance.admitted("1.1.1.1", f"machine-{i}") for i in range(4)]
    assert entrance.admission.admitted == 4 and entrance.admission.strangers == 0
    for second in range(100):
        entrance.now_s = float(second)
        for i in range(10):
            entrance.arrive(f"2.2.2.{i}", "stranger")
    assert all(entrance.admission.admit(machine) for machine in machines)
    assert set(entrance.ended_names) == {"stranger"} and entrance.admission.strangers <= 6


def test_among_the_admitted_whoever_holds_many_gives_up_the_one_that_was_quiet_for_longest():
    entrance = ClockedAdmission(SMALL)
    many = [entrance.admitted("1.1.1.1", f"many-{i}") for i in range(4)]
    entrance.admission.admit(many[0])  # asks again
    entrance.admitted("2.2.2.2")
    entrance.admitted("3.3.3.3")
    entrance.admitted("4.4.4.4")
    assert entrance.ended_names == ["many-1", "many-2", "many-3"] and entrance.admission.admitted == 4


def test_without_a_place_among_the_admitted_a_request_is_refused():
    entrance = ClockedAdmission(Places(6, 3, 2))
    entrance.admitted("1.1.1.1")
    entrance.admitted("2.2.2.2")
    third = entrance.arrive("3.3.3.3")
    assert third is not None and not entrance.admission.admit(third)
    assert not entrance.ended_names and not third.is_admitted


def test_who_leaves_makes_room_and_is_ended_no_more():
    entrance = ClockedAdmission(SMALL)
    machine, stranger = entrance.admitted("1.1.1.1"), entrance.arrive("1.1.1.1")
    assert stranger is not None
    for visitor in (machine, stranger):
        entrance.admission.leave(visitor)
        visitor.end()
    assert (entrance.admission.strangers, entrance.admission.admitted, entrance.ended_names) == (0, 0, [])


def test_an_address_that_comes_and_goes_without_credentials_has_to_wait():
    entrance = ClockedAdmission(Places())
    for _ in range(int(FRUITLESS_BURST)):
        visitor = entrance.arrive("1.1.1.1")
        assert visitor is not None
        entrance.admission.leave(visitor)
    assert entrance.arrive("1.1.1.1") is None and entrance.arrive("1.1.1.2") is not None
    entrance.now_s = 1 / FRUITLESS_PER_S
    assert entrance.arrive("1.1.1.1") is not None


def test_machines_that_come_and_go_with_credentials_never_have_to_wait():
    entrance = ClockedAdmission(Places())
    for _ in range(3 * int(FRUITLESS_BURST)):
        entrance.admission.leave(entrance.admitted("1.1.1.1"))


def test_addresses_that_one_machine_can_choose_among_are_one():
    assert group_of("10.0.0.7") == group_of("::ffff:10.0.0.7") == "10.0.0.7"
    assert group_of("2001:db8:1:2::1") == group_of("2001:db8:1:2:ffff::9") == "2001:db8:1:2::/64"
    assert group_of("2001:db8:1:3::1") != group_of("2001:db8:1:2::1")
    assert group_of("fe80::1%eth0") == "fe80::/64" and group_of("a socket") == "a socket"


@pytest.mark.parametrize("descriptors", [256, 512, 1024, 4096, 20_000, 1 << 20])
@pytest.mark.parametrize("seats", [1, 5, 32])
def test_all_places_together_leave_descriptors_for_files(descriptors, seats):
    places = Places.within(descriptors, seats)
    assert places.strangers + places.admitted + seats <= descriptors - RESERVED_DESCRIPTORS
    assert 4 <= places.strangers_per_address <= places.strangers <= 256 and 8 <= places.admitted <= 4096


def test_with_too_few_descriptors_the_remedy_is_named():
    with pytest.raises(UserError, match=r"130 workers cannot be served with 256 open files: raise the limit, .*`ulimit -n"):
        Places.within(256, 130)


RAISED = """
import resource
from heloco.cluster.server.descriptors import descriptor_limit, raise_descriptor_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 777))
before = descriptor_limit()
raise_descriptor_limit()
print(before, descriptor_limit(), resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_a_process_raises_its_limit_to_what_it_may_have():
    result = subprocess.run([sys.executable, "-c", RAISED], capture_output=True, text=True)
    assert result.stdout.split() == ["100", "777", "(777,", "777)"], result.stderr


@pytest.mark.parametrize(
    ("error", "ran_out"),
    [
        (OSError(errno.EMFILE, ""), True), (OSError(errno.ENFILE, ""), True), (OSError(errno.ENOENT, ""), False),
        (MemoryError(), True), (RuntimeError("can't start new thread"), True), (RuntimeError("no"), False), (ValueError(), False),
    ],
)  # fmt: skip
def test_errors_that_pass(error, ran_out):
    assert has_run_out(error) == ran_out
