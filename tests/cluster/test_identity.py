"""Ids are not credentials: nobody acts in another machine's name, and who was sent away stays away."""

import pytest

from heloco.cluster.client.machine_identity import MachineIdentity
from heloco.cluster.protocol.messages import Assignment, ContributionReport, RoundKey, Ticket
from heloco.cluster.protocol.refusals import RefusalCode, Refused
from heloco.cluster.protocol.tokens import format_token, parse_token
from heloco.cluster.server.token_book import TokenBook
from heloco.errors import UserError
from support.small_cluster import NO_DIGEST, Clock, Hand, delta, opened


def refused_with(ask):
    with pytest.raises(Refused) as refused:
        ask()
    return refused.value.code


ACTS = {
    "take its round": lambda s, t, _: s.rounds.next(t),
    "fetch its start": lambda s, t, k: s.rounds.start(t, k),
    "give its round back": lambda s, t, _: s.rounds.abandon(t, "mine"),
    "look at its upload": lambda s, t, k: s.contributions.progress(t, k),
    "upload for it": lambda s, t, k: s.contributions.upload(t, k),
    "hand in for it": lambda s, t, k: s.contributions.commit(t, k, NO_DIGEST, ContributionReport()),
    "beat for it": lambda s, t, _: s.members.beat(t, 1),
    "leave for it": lambda s, t, _: s.members.leave(t, "mine"),
}


@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS)
@pytest.mark.parametrize("secret", ["", "guessed", "own"])
def test_with_another_machines_id_nothing_can_be_done(tmp_path, act, secret):
    service = opened(tmp_path / "run", Clock())
    victim, attacker = Hand(service, "victim"), Hand(service, "attacker")
    victim.take()
    forged = Ticket(machine=victim.id, secret=attacker.ticket.secret if secret == "own" else secret)
    before = service.state.run.journal.end
    assert refused_with(lambda: act(service, forged, victim.key)) is RefusalCode.SECRET
    assert service.state.run.journal.end == before and victim.id in service.state.roster.present
    assert victim.hand_in(delta(1)).verdict == "applied"


def test_coming_back_takes_the_secret_and_without_it_one_is_somebody_else(tmp_path):
    service = opened(tmp_path / "run", Clock())
    victim = Hand(service, "victim")
    victim.take()
    thief = Hand(service, "victim", Ticket(machine=victim.id, secret="guessed"))
    assert thief.id != victim.id and thief.ticket.secret != victim.ticket.secret
    assert victim.hand_in(delta(1)).verdict == "applied"
    returning_victim = Hand(service, "victim", victim.ticket)
    assert returning_victim.ticket == victim.ticket


def test_secrets_hold_over_a_restart_and_are_not_in_the_runs_folder(tmp_path):
    service = opened(tmp_path / "run", Clock())
    hand = Hand(service, "m")
    hand.take()
    service.close()
    everything = b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert hand.ticket.secret.encode() not in everything
    service = hand.service = opened(tmp_path / "run", Clock())
    assert refused_with(lambda: service.rounds.next(Ticket(machine=hand.id, secret="x"))) is RefusalCode.SECRET
    hand.join()
    assert hand.hand_in(delta(1)).verdict == "applied"
    service.close()


def test_an_evicted_machine_loses_its_round_and_never_comes_back_under_its_id(tmp_path):
    clock = Clock()
    service = opened(tmp_path / "run", clock)
    bad, good = Hand(service, "bad"), Hand(service, "good")
    lost_round = bad.take()
    service.members.evict(bad.id, "it sends rubbish")
    assert refused_with(bad.take) is RefusalCode.BARRED and refused_with(bad.join) is RefusalCode.BARRED
    workers = set()
    for seed in range(4):
        answer = good.take()
        assert isinstance(answer, Assignment)
        workers.add(answer.worker)
        good.hand_in(delta(seed))
    assert lost_round.worker in workers
    service.close()
    service = bad.service = opened(tmp_path / "run", clock)
    assert refused_with(bad.join) is RefusalCode.BARRED
    assert refused_with(lambda: service.members.evict("nobody#1", "")) is RefusalCode.NO_SUCH
    service.close()


def test_the_machines_of_a_revoked_token_are_sent_away(tmp_path):
    from support.small_cluster import join_request

    service = opened(tmp_path / "run", Clock())
    tickets = [service.members.join(join_request(f"m{i}"), None, f"worker-{i % 2}").ticket for i in range(3)]
    service.members.evict_token("worker-0", "its token was revoked")
    assert [m.id for m in service.state.roster] == [tickets[1].machine]
    assert service.state.book.get(tickets[1].machine).token == "worker-1"


# ---- keeping it


def test_a_process_that_is_started_again_is_the_same_machine_and_two_at_a_time_are_two(tmp_path, monkeypatch):
    monkeypatch.setenv("HELOCO_CACHE", str(tmp_path))
    ticket = Ticket(machine="host#1", secret="s" * 32)
    first = MachineIdentity("run", "host")
    assert first.ticket is None
    first.keep(ticket)
    second = MachineIdentity("run", "host")
    assert second.ticket is None  # the first is still here
    second.keep(Ticket(machine="host#2", secret="t"))
    first.close()
    third = MachineIdentity("run", "host")
    assert third.ticket == ticket
    assert MachineIdentity("another-run", "host").ticket is None
    assert MachineIdentity(None, "host").ticket is None
    files = [path for path in (tmp_path / "machines").rglob("*") if path.is_file()]
    assert files and all(path.stat().st_mode & 0o777 == 0o600 for path in files)
    (tmp_path / "machines" / "run" / "host-0").write_text("rubbish")
    third.close()
    assert MachineIdentity("run", "host").ticket is None


# ---- tokens


def test_a_run_has_a_token_of_each_right_and_they_are_made_and_revoked_one_by_one(tmp_path):
    book = TokenBook(tmp_path / "credentials")
    assert [(token.id, token.right) for token in book.all()] == [
        ("worker-1", "worker"), ("viewer-1", "viewer"), ("admin-1", "admin"),
    ]  # fmt: skip
    more = book.add("worker", "for the other site")
    assert book.find(more.secret.encode()) == more
    assert book.find(b"") is None and book.find(b"x" * 43) is None
    book.revoke("worker-2")
    assert book.find(more.secret.encode()) is None
    assert TokenBook(tmp_path / "credentials").all() == book.all()  # kept
    assert (tmp_path / "credentials" / "tokens.json").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "credentials").stat().st_mode & 0o777 == 0o700
    book.revoke("worker-1")
    assert book.first("worker").id == "worker-3"
    with pytest.raises(Refused):
        book.revoke("worker-9")


def test_a_damaged_token_file_is_reported(tmp_path):
    TokenBook(tmp_path)
    (tmp_path / "tokens.json").write_bytes(b"\xff\x00")
    with pytest.raises(UserError, match=r"tokens\.json cannot be read .* restore it, or remove it"):
        TokenBook(tmp_path)


def test_a_token_says_its_right_and_is_read_back_whole_or_not_at_all():
    text = format_token("viewer", "s" * 43, "0f" * 32)
    assert parse_token(f" {text}\n") == ("viewer", "s" * 43, "0f" * 32)
    for wrong in (text[:-1], text[1:], text.replace("viewer", "god"), "", "heloco1.x.y", text + "x"):
        with pytest.raises(UserError, match="The token is not whole"):
            parse_token(wrong)


def test_a_key_is_a_place_of_three_numbers():
    assert RoundKey(1, 2, 3)._asdict() == {"worker": 1, "round": 2, "version": 3}
