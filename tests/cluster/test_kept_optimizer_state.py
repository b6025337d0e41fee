"""With kept optimizer state: what becomes of it when a seat changes hands, when a process ends, and after a restart."""

from heloco.cluster.client.worker import Worker
from support.local_link import LocalLink
from support.small_cluster import Hand, delta, opened

ONE_SEAT = {"paces": [1.0]}


def keeps_state(hand, seed):
    """Whether the hand may use its state in its next round, which it does and hands in."""
    answer = hand.take().keeps_state
    assert hand.hand_in(delta(seed)).verdict == "applied"
    return answer


def test_only_the_machine_that_did_a_workers_last_round_may_use_its_state(tmp_path, clock):
    service = opened(tmp_path / "run", clock, **ONE_SEAT)
    first = Hand(service, "first")
    assert [keeps_state(first, seed) for seed in range(3)] == [False, True, True]
    first.leave()
    second = Hand(service, "second")
    assert [keeps_state(second, seed) for seed in range(3, 5)] == [False, True]
    second.leave()
    first.join()
    assert [keeps_state(first, seed) for seed in range(5, 7)] == [
        False,
        True,
    ]  # what it kept is older than the worker's last round


def test_a_round_that_another_machine_gave_up_takes_the_state_from_nobody(tmp_path, clock):
    service = opened(tmp_path / "run", clock, **ONE_SEAT)
    first = Hand(service, "first")
    keeps_state(first, 0)
    first.leave()
    second = Hand(service, "second")
    second.take()
    second.leave()
    first.join()
    assert keeps_state(first, 1)


def test_a_restarted_run_knows_whose_state_is_the_latest(tmp_path, clock):
    """From its checkpoint and from the journal after it."""
    for arrivals in (4, 6):  # a checkpoint is made at 4
        folder = tmp_path / f"run-{arrivals}"
        service = opened(folder, clock, **ONE_SEAT)
        first = Hand(service, "first")
        for seed in range(arrivals):
            keeps_state(first, seed)
            service.housekeeping.save_if_due(wait=True)
        assert service.state.run is not None
        service.state.run.close()
        first.service = opened(folder, clock, **ONE_SEAT)
        first.join()
        assert keeps_state(first, arrivals)


class Recorder(Worker):
    """A worker that leaves after some rounds, and notes for each whether it began with optimizer state."""

    def __init__(self, tiny):
        super().__init__(*tiny, tell=lambda _: None, after_round=self._leave_if_done)
        self.began_with_state = []
        self.last_round = 0
        run = self.inner.run

        def recorded(rounds):
            if self._client is not None:  # not the warm-up
                self.began_with_state += [r.memory is not None for r in rounds]
            return run(rounds)

        self.inner.run = recorded

    def work(self, service, name, rounds):
        """Does this many rounds of the run. Returns which of them began with optimizer state."""
        self.began_with_state, self.stop_requested, self._client = [], None, None
        self.last_round = self.rounds + rounds
        self.run(LocalLink(service), name, service.describe().run)
        return self.began_with_state

    def _leave_if_done(self):
        if self.rounds >= self.last_round:
            self.stop_requested = "the test wants it"


def test_a_machine_begins_with_a_fresh_state_where_its_own_is_not_the_workers_latest(serve, tiny):
    service = serve(keep_state=True, **ONE_SEAT).service
    task, config = tiny
    kept = (task, service.state.config)
    assert kept[1].inner.keep_state and not config.inner.keep_state
    first, second = Recorder(kept), Recorder(kept)
    assert first.work(service, "first", 3) == [False, True, True]
    assert second.work(service, "second", 2) == [False, True]
    assert first.work(service, "first", 2) == [False, True]
    assert Recorder(kept).work(service, "first", 2) == [False, True]  # a new process of the same machine has no state
    without = serve(**ONE_SEAT).service
    assert Recorder((task, without.state.config)).work(without, "third", 3) == [False] * 3
