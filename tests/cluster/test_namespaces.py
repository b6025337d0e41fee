"""Two hosts, as network namespaces with a cable between them: one serves a run, the other joins it, and the cable is pulled."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.programs import SMALL, Programs, assert_whole, wait_until

ARRIVALS = 400
CUT_S = 3.0


@dataclass(frozen=True)
class Hosts:
    """Two namespaces and the addresses of a veth pair's ends in them."""

    head: str
    site: str
    head_address: str
    cable: str
    """The end at the site."""

    def at(self, host: str, *command: str) -> list[str]:
        return ["ip", "netns", "exec", host, *command]


def ip(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if not shutil.which("ip"):
        pytest.skip("there is no ip command here")
    mine = f"h{os.getpid()}"
    head, site = f"heloco-head-{mine}", f"heloco-site-{mine}"
    namespaces: list[str] = []
    try:
        for name in (head, site):
            result = ip("netns", "add", name)
            if result.returncode:
                pytest.skip(f"network namespaces cannot be made here: {result.stderr.strip()}")
            namespaces.append(name)
        for words in (
            ("link", "add", f"{mine}a", "netns", head, "type", "veth", "peer", "name", f"{mine}b", "netns", site),
            ("-n", head, "addr", "add", "10.213.7.1/24", "dev", f"{mine}a"),
            ("-n", site, "addr", "add", "10.213.7.2/24", "dev", f"{mine}b"),
            ("-n", head, "link", "set", f"{mine}a", "up"),
            ("-n", site, "link", "set", f"{mine}b", "up"),
            ("-n", head, "link", "set", "lo", "up"),
            ("-n", site, "link", "set", "lo", "up"),
            ("netns", "exec", site, "true"),
        ):
            result = ip(*words)
            if result.returncode:
                pytest.skip(f"`ip {' '.join(words)}` does not work here: {result.stderr.strip()}")
        yield Hosts(head, site, "10.213.7.1", f"{mine}b")
    finally:
        for name in namespaces:  # their ends of the cable go with them
            ip("netns", "del", name)


def test_a_cable_is_pulled_and_put_back(hosts: Hosts, programs: Programs, tmp_path: Path) -> None:
    run = tmp_path / "run"
    heloco = (sys.executable, "-m", "heloco.cli")
    settings = (
        *SMALL,
        "--seats",
        "2",
        "--arrivals",
        str(ARRIVALS),
        "--ray",
        "off",
        "--host",
        hosts.head_address,
        "--port",
        "8443",
    )
    serve = programs.start("head", hosts.at(hosts.head, *heloco, "serve", *settings, "--out", str(run)))
    match = serve.match_output(r"HELOCO_TOKEN=(\S+) heloco join (https://10\.213\.7\.1:8443)\n")
    join = programs.start("site", hosts.at(hosts.site, *heloco, "join", match[2], "--name", "site"), HELOCO_TOKEN=match[1])

    def arrivals() -> int:
        return (run / "tape.jsonl").read_bytes().count(b"\n")

    wait_until(lambda: arrivals() >= 20, "twenty arrivals")
    assert ip("-n", hosts.site, "link", "set", hosts.cable, "down").returncode == 0
    down_since = time.monotonic()
    broken = (
        shutil.which("ss")
        and subprocess.run(  # where the kernel can, its connections die too: it must make new ones
            hosts.at(hosts.site, "ss", "-K", "-H", "-t", "dst", hosts.head_address), capture_output=True, text=True, timeout=20
        ).stdout.strip()
    )
    wait_until(lambda: time.monotonic() - down_since > 0.5, "what was on its way has arrived")
    arrivals_at_cut = arrivals()
    assert arrivals_at_cut < ARRIVALS
    wait_until(lambda: time.monotonic() - down_since > CUT_S, "the cable was out for a while")
    assert arrivals() == arrivals_at_cut
    if broken:
        join.match_output("cannot be reached .*Trying again")
    assert ip("-n", hosts.site, "link", "set", hosts.cable, "up").returncode == 0

    serve_result, join_result = serve.end(), join.end()
    assert serve_result.code == 0 and join_result.code == 0, (serve_result, join_result)
    assert re.search(r"The run has ended: all arrivals are in\n$", join_result.out), join_result
    assert_whole(run, ARRIVALS)
