"""A planned restart is at least as gentle as a crash: machines keep their rounds and wait, and go on when the run is back."""

import hashlib
import os
import re
import signal
import ssl
from pathlib import Path
from typing import Any

import pytest

import heloco
from faults.fault_places import children_of
from heloco.cluster.client.obsolete_rounds import why_obsolete
from heloco.cluster.gateway.https_link import HttpsLink
from heloco.cluster.protocol.messages import Acknowledgement, ContributionReport, RoundKey, Ticket
from heloco.cluster.protocol.refusals import RefusalCode
from heloco.records.events import Abandon
from heloco.records.journal_reader import FOLDER, read_events
from heloco.records.serving import ServingRecord
from heloco.run import RunFolder
from support.local_link import LocalLink
from support.own_loops import Heard, adam, assert_same, batches, external_runs, net, outer, step, values
from support.own_loops import tape as tape_of
from support.programs import SMALL, Programs, Served, assert_whole, wait_until
from support.runs import heloco as command
from support.runs import tape
from support.service_checks import refuses
from support.small_cluster import Hand, delta, opened

for part in ("uvicorn", "starlette", "httpx", "cryptography"):
    pytest.importorskip(part, reason=f"{part} is not installed")


def abandoned(folder: Path) -> list[Abandon]:
    return [event for event, _ in read_events(folder / FOLDER) if isinstance(event, Abandon)]


# ---- the service


def test_a_suspended_run_keeps_its_machines_rounds_and_takes_them_in_when_it_is_served_again(tmp_path, clock):
    service = opened(tmp_path / "run", clock)
    one, two = Hand(service, "one"), Hand(service, "two")
    one.work(1)
    held = [hand.take().key for hand in (one, two)]
    service.admin.suspend("an update")
    assert service.state.ended.kind == "suspended" and not service.state.is_over
    for ask in (one.take, one.join, lambda: one.hand_in(delta(2)), LocalLink(service).describe, lambda: service.admin.stop("")):
        refuses(RefusalCode.SUSPENDED, ask)
    refuses(RefusalCode.NOT_HELD, service.rounds.final, one.ticket)
    answer = one.beat()
    assert answer.ended.kind == "suspended" and why_obsolete(answer, held[0]) is None, "its round is worth finishing"
    assert RunFolder.open(tmp_path / "run").checkpoints()[-1].name == "arrival-00000001"
    service.close()

    service = opened(tmp_path / "run", clock)
    for hand in (one, two):
        hand.service = service
        hand.join()
    assert [hand.take().key for hand in (one, two)] == held
    assert [hand.hand_in(delta(2)).verdict for hand in (one, two)] == ["applied", "applied"]
    service.close()
    assert not abandoned(tmp_path / "run") and len(tape(tmp_path / "run")) == 3


def test_a_machine_that_leaves_a_suspended_run_has_its_round_given_to_another_later(tmp_path, clock):
    service = opened(tmp_path / "run", clock)
    one = Hand(service, "one")
    one.take()
    service.admin.suspend("an update")
    one.leave()
    service.close()
    service = opened(tmp_path / "run", clock)
    two = Hand(service, "two")
    for _ in range(40):
        clock.now += 1.0
        two.beat()
        service.housekeeping.tick()
    assert [event.kind for event in abandoned(tmp_path / "run")] == ["lost"]
    two.work(1)
    assert service.state.run.synchronizer.arrivals == 1 and not service.state.run.synchronizer.rounds_under_way
    service.close()


def test_a_loop_of_ones_own_waits_while_its_run_is_suspended_and_goes_on(tmp_path):
    """Twice: in the middle of a round, and while a contribution is on its way."""
    fields = {"inner_steps": 3, "arrivals": 6, "beat_s": 0.02}
    with external_runs(tmp_path) as start:

        class Restarted(Heard):
            suspensions = 0

            def suspend(self) -> None:
                self.suspensions += 1
                self.service.admin.suspend("an update")

            def hand_in(
                self, ticket: Ticket, key: RoundKey, layout: Any, tensors: Any, report: ContributionReport
            ) -> Acknowledgement:
                if key.round == 3 and self.suspensions == 1:
                    self.suspend()
                return super().hand_in(ticket, key, layout, tensors, report)

        link, messages = Restarted(start(**fields)), []

        def tell(line: str) -> None:
            messages.append(line)
            if line.endswith("Trying again.") and link.service.state.ended is not None:  # it waits: now the run is served again
                link.service.close()
                link.service = start(**fields)

        model = net()
        optimizer = adam(model)
        steps = 0
        with heloco.join(link, model, optimizer, tell=tell) as run:
            for batch in batches():
                steps += 1
                step(model, optimizer, batch)
                if steps == 4:
                    link.suspend()
        assert run.ended and run.arrivals == 6 and steps == 18 and link.suspensions == 2
        assert [line["round"] for line in tape_of(link.service)] == list(range(6)) and not abandoned(tmp_path / "run")
        assert_same(values(model), outer(link.service))
    assert messages.count("The run is back.") == 2
    assert any("The run is suspended" in message for message in messages)


def test_only_an_admin_may_suspend_a_run(served):
    refused = refuses(RefusalCode.RIGHT, served.link(right="worker").suspend, "")
    assert served.service.state.ended is None, refused
    refuses(RefusalCode.RIGHT, served.link(right="viewer").suspend, "")
    served.link(right="admin").suspend("an update")
    assert served.service.state.ended.kind == "suspended"
    refuses(RefusalCode.SUSPENDED, served.link(right="admin").stop, "")
    assert served.link(right="admin").status().ended.kind == "suspended"


# ---- as a person does it


def machines_of(served: Served) -> dict[str, str]:
    """The machines that are here: name -> id."""
    return {m["name"]: m["machine"] for m in served.status()["machines"] if not m["is_away"]}


def shown_fingerprint(served: Served) -> str:
    """What a browser shows of the certificate."""
    certificate = ssl.get_server_certificate(("127.0.0.1", int(served.port)))
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(certificate)).hexdigest().upper()


def guest_is_one(run: Path) -> bool:
    return len({line["machine"] for line in tape(run) if line["machine"].startswith("guest")}) == 1


def test_ctrl_c_and_stop_restart_keep_the_machines_and_stop_ends_the_run_for_all(programs: Programs, tmp_path: Path) -> None:
    run = tmp_path / "run"
    served = programs.serve(
        run, *SMALL, "--seats", "2", "--workers", "1", "--arrivals", "100000", "--patience", "1000", "--beat-s", "0.3"
    )
    assert "The browser will warn" in served.program.out.read_text() and served.program.match_output(r"fingerprint:\n +(\S+)\n")[
        1
    ].replace(":", "") == shown_fingerprint(served)
    guest = programs.join(served, "--name", "guest")
    wait_until(lambda: machines_of(served).keys() == {"local-0", "guest"} and served.arrivals() >= 6, "both take part")
    machines = machines_of(served)

    served.program.signal(signal.SIGINT)
    result = served.program.end()
    assert result.code == 130 and f"keep their rounds and wait for it. `heloco serve {run}` goes on.\n" in result.out, result
    guest.match_output("The run is suspended")
    before = served.arrivals()

    second = programs.serve(run, "--give-up-after-s", "77", port="")
    assert (second.address, second.token, second.viewer) == (served.address, served.token, served.viewer)
    wait_until(lambda: second.arrivals() >= before + 6 and machines_of(second) == machines, "the same machines take part")
    guest.match_output("The run is back.")
    assert not [event for event in abandoned(run) if event.kind in ("stopped", "lost")]

    stop = command("stop", run, "--restart")
    assert stop.code == 0 and "its machines wait" in stop.out
    result = second.program.end()
    assert result.code == 0 and "Suspended and saved" in result.out and guest.process.poll() is None, result
    for child in children_of(guest.process.pid):  # it waits even if its own process is killed now
        os.kill(child, signal.SIGKILL)
    guest.match_output("was killed by SIGKILL: it is started again(.|\n)*Trying again.")

    third = programs.serve(run, "--workers", "0", port="")
    assert ServingRecord.load(run) == ServingRecord(workers=0, ray="off", cluster="[cluster]\ngive_up_after_s = 77.0\n")
    config = HttpsLink(third.address, third.token).describe().config
    assert "give_up_after_s = 77.0" in config and "patience = 1000.0" in config, "one setting does not reset the others"
    before = third.arrivals()
    wait_until(lambda: third.arrivals() >= before + 3, "the guest goes on alone")
    assert machines_of(third) == {"guest": machines["guest"]}

    assert command("stop", run).code == 0
    assert third.program.end().code == 0
    result = guest.end()
    assert guest_is_one(run), "it was one machine all the time"
    assert result.code == 0 and result.out.endswith("The run has ended: stopped by `heloco stop`\n"), result
    assert re.search(r"^Round \d+ of worker \d is in: loss [\d.]+, step \S+ s, rounds 1, share \d+%, sent ", result.out, re.M)
    assert_whole(run, third.arrivals())


def test_a_record_that_cannot_be_read_is_as_for_a_new_run(tmp_path: Path) -> None:
    record = ServingRecord(workers=3, ray="off", data="/text")
    record.save(tmp_path)
    assert ServingRecord.load(tmp_path) == record
    [path] = (tmp_path / "credentials").iterdir()
    assert path.stat().st_mode & 0o77 == 0, "for its owner alone"
    for content in (b"", b'{"workers": -1}', b'{"workers": "many"}', b"\xff"):
        path.write_bytes(content)
        assert ServingRecord.load(tmp_path) == ServingRecord()
