"""The studies as data: their grids, the runs they share, the paper's numbers, what a run is known by."""

import csv
import json
from dataclasses import replace

import pytest

from heloco.engine.local import Collector, LocalRun
from heloco.engine.schedule import schedule, summarize
from heloco.engine.simulation import Simulation
from heloco.errors import UserError
from heloco.ledger import Ledger
from heloco.methods import METHODS, get_method
from heloco.policy import Drop, inner_steps, make_choice, make_weight
from heloco.records.evaluations import EvaluationRecord
from heloco.records.provenance import Provenance
from heloco.records.tape import ArrivalRecord
from heloco.run import RunConfig, resolve, with_fields
from heloco.study.grid import digest, grid, once_for_all_paces, row_time, settings_of, total_steps
from heloco.study.kept_runs import RunStore, make_record
from heloco.study.plan import make_plan
from heloco.study.results import PlacedRun
from heloco.study.spec import SCALES, GridPart, Study, find_study, names
from heloco.synchronizer import Contribution, Synchronizer
from support.repository import REPOSITORY

RUNS = {
    "table1": 13 * 4 + 1,
    "convergence": 6 * 4 + 2,
    "languages": 2 * 4 + 1,
    "staleness": 13 * 2,
    "flexible": 13,
    "dropping": 12 * 6,
    "ablation": 3 * 16,
    "sensitivity": 22,
    "inner": 3 * 7 + 1,
    "recipe": 2 * (14 + 1) + 5 * 13 + 6 * 4,
    "scale": 8 * 2 + 5,
    "size": 3 * 8,
}
"""Distinct runs of one seed."""
COMPUTED = Provenance(device="cpu", precision="fp32", torch="2.13.0")


def runs_of(name: str, scale: str) -> dict[str, RunConfig]:
    return {digest(place.config, ""): place.config for place in grid(find_study(name), scale=scale, seeds=1)}


def test_these_are_the_studies():
    assert names() == list(RUNS)


@pytest.mark.parametrize("scale", ["paper", "small"])
@pytest.mark.parametrize("name", RUNS)
def test_every_run_of_a_study_resolves_and_equal_ones_are_merged(name, scale):
    study = find_study(name)
    places = grid(study, scale=scale, seeds=1)
    assert len({place.name for place in places}) == len(places)
    assert len(runs_of(name, scale)) == RUNS[name]
    for place in places:
        assert resolve(place.config) == place.config
    assert len({digest(place.config, "") for place in grid(study, scale=scale, seeds=3)}) == 3 * RUNS[name]


@pytest.mark.parametrize("scale", ["paper", "small"])
def test_studies_share_their_runs(scale):
    table1, convergence = runs_of("table1", scale).keys(), runs_of("convergence", scale).keys()
    assert runs_of("staleness", scale).keys() <= table1
    assert runs_of("languages", scale).keys() <= convergence
    assert len(runs_of("dropping", scale).keys() & table1) == 12
    assert len(runs_of("dropping", scale).keys() & runs_of("flexible", scale).keys()) == 12
    assert len(runs_of("ablation", scale).keys() & table1) == 3 * 4  # heloco, heloco-ramp, mla, async-nesterov
    shared = runs_of("sensitivity", scale).keys() & (table1 | runs_of("flexible", scale).keys())
    assert len(shared) == (2 if scale == "paper" else 1)


def test_the_papers_scale_is_the_papers_setting():
    for config in runs_of("table1", "paper").values():
        assert total_steps(config) == 24_000
        assert (config.model.width, config.model.layers, config.model.heads, config.model.context) == (128, 8, 4, 128)
        inner = config.inner
        assert (inner.batch_size, inner.lr, inner.lr_min, inner.schedule_steps) == (2, 2e-4, 1e-6, 4800)
        assert config.input.tokenizer == "gpt2"
        if config.outer.method == "sync-nesterov":
            assert config.run.eval_every == 5  # after every round: what it is compared by at any time


def test_evaluations_are_a_small_part_of_what_a_study_adds():
    """On a GPU one evaluation of 100 windows per language takes about as long as 60 inner steps of a stack."""
    earlier_keys: set[str] = set()
    for name in names():
        added = {key: config for key, config in runs_of(name, "paper").items() if key not in earlier_keys}
        earlier_keys |= added.keys()
        evaluations = sum(
            (1 + config.run.arrivals / config.run.eval_every) * config.model.eval_windows for config in added.values()
        )
        assert evaluations * 60 / 100 <= 0.07 * sum(map(total_steps, added.values()))
        for config in added.values():
            assert config.rounds.steps == "dylu" or config.run.arrivals % config.run.eval_every == 0
            assert config.outer.method == "sync-nesterov" or config.run.arrivals / config.run.eval_every <= (
                22 if name == "scale" else 16
            )


def test_the_grid_is_in_the_order_of_the_seeds():
    assert [place.seed for place in grid(find_study("flexible"), scale="small", seeds=3)] == [0] * 13 + [1] * 13 + [2] * 13


def test_a_study_has_its_own_first_seed_and_rows_with_more_seeds(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(
        'like = "table1"\nfirst_seed = 7\n[rows]\na = { seeds = 4 }\nb = { paces = [1, 1, 2, 2, 2] }\n[methods]\nmla = {}'
    )
    study = find_study(str(path))
    assert [(place.row, place.seed) for place in grid(study, scale="small")] == [
        ("a", 7), ("b", 7), ("a", 8), ("b", 8), ("a", 9), ("b", 9), ("a", 10),
    ]  # fmt: skip
    assert [(place.row, place.seed) for place in grid(study, scale="small", seeds=1)] == [("a", 7), ("b", 7)]
    path.write_text('like = "table1"\n[rows]\na = { seeds = 0 }\n')
    with pytest.raises(UserError, match=r"own.toml: seeds of 'a' must be a whole number ≥ 1"):
        find_study(str(path))


# ---- the paper's numbers


def test_table_1s_times_come_out_exactly():
    study = find_study("table1")
    assert len(study.rows) == 13
    for row in study.rows:
        assert row_time(study, "paper", row) == study.paper_number(row, "time_s")


def test_table_1_is_as_printed(shared):
    study = find_study("table1")
    with (shared / "paper" / "table1.csv").open() as file:
        printed = list(csv.DictReader(file))
    assert [line["paces"] for line in printed] == list(study.rows)
    columns = {"mla": ("async_mla", "mla"), "async-nesterov": ("async_nesterov", "an"), "sync-nesterov": ("sync_nesterov", "sn")}
    for line in printed:
        row = line["paces"]
        assert study.rows[row].settings["paces"] == [int(pace) for pace in row.split(",")]
        assert study.paper_number(row, "loss", "heloco") == float(line["heloco"])
        assert study.paper_number(row, "loss", "heloco-ramp") == float(line["heloco"])
        for method, (loss, short) in columns.items():
            assert study.paper_number(row, "loss", method) == float(line[loss])
            assert study.paper_number(row, "gain", method) == float(line[f"gain_over_{short}_pct"])
            assert study.paper_number(row, "time_gain", method) == float(line[f"time_gain_over_{short}_pct"])


def test_the_papers_gains_follow_from_its_losses_but_for_the_row_that_mixes_two_runs():
    study = find_study("table1")
    for row in study.rows:
        ours = study.paper_number(row, "loss", "heloco")
        for method in ("mla", "async-nesterov", "sync-nesterov"):
            other = study.paper_number(row, "loss", method)
            gain = 100 * (other - ours) / other
            contradicted = (row, method) == ("1,1,6,6,6", "sync-nesterov")
            assert (study.paper_number(row, "gain", method) == pytest.approx(gain, abs=0.16)) != contradicted


def test_section_4_1s_shares_and_staleness_come_out():
    place = next(p for p in grid(find_study("convergence"), scale="paper", seeds=1) if p.row == "non-iid-unequal")
    config, order = place.config, ("de", "en", "es", "fr", "it")
    steps = inner_steps("constant", 20, config.rounds.paces)
    _, shares = summarize(schedule(paces_s=config.rounds.paces, inner_steps=steps, arrivals=500), steps)
    assert config.run.arrivals == 500 and config.rounds.inner_steps == 20
    by_language = {
        language: (share.arrivals, round(share.mean_staleness, 2)) for language, share in zip(order, shares, strict=True)
    }
    assert by_language["en"] == (291, 0.72)
    assert (by_language["de"], by_language["it"]) == ((32, 14.38), (28, 16.50))
    assert by_language["fr"][1] == 5.12
    assert inner_steps("dylu", 20, config.rounds.paces) == [2, 20, 5, 6, 2]


# ---- what is dropped


@pytest.mark.parametrize("row", find_study("dropping").rows)
@pytest.mark.parametrize("action", ["zero", "skip"])
def test_exactly_what_the_slow_workers_hand_in_is_dropped(row, action):
    study = find_study("dropping")
    [place] = grid(study, scale="paper", seeds=1, rows=[row], methods=[f"heloco-ramp-{action}"])
    paces, outer = place.config.rounds.paces, place.config.outer
    synchronizer = Synchronizer(
        None,
        inner_steps=[80] * 5,
        windows_per_step=1,
        ledger=Ledger([1 << 40] * 5),
        choose_shard=make_choice("fixed", workers=5, shards=5, seed=0),
        weight=make_weight("base"),
        drop=Drop(outer.drop, outer.drop_above),
    )
    simulation = Simulation(synchronizer, paces_s=paces, arrivals=300)
    dropped = set()
    while not simulation.finished:
        if (arrived := simulation.advance()) is None:
            under_way = simulation.next_needed()
            simulation.give(Contribution(under_way.worker, under_way.index, under_way.version))
        else:
            slow = paces[arrived[0].worker] > min(paces)
            assert arrived[0].verdict == ({"zero": "zeroed", "skip": "skipped"}[action] if slow else "applied")
            dropped.add(slow)
    assert dropped == {True, False}


# ---- one run for all paces behind a barrier


@pytest.mark.parametrize("paces", [[1, 1, 6, 6, 6], [6.58, 0.737, 3.12, 2.62, 7.5], [2, 2, 2, 2, 2]])
def test_behind_a_barrier_one_run_stretched_is_the_run_of_any_paces(paces, one_thread):  # noqa: ARG001
    settings = {"method": "sync-nesterov", "paces": paces, "width": 16, "layers": 1, "heads": 2, "context": 16}
    rest = {"inner_steps": 3, "arrivals": 20, "eval_every": 5, "eval_windows": 2, "batch_size": 2, "lr": 3e-3}
    real = resolve(with_fields(RunConfig(), settings | rest))
    folded, stretch = once_for_all_paces(real)
    assert folded.rounds.paces == [1] * 5 and folded.run.eval_every == 5

    def run(config: RunConfig) -> tuple:
        from heloco.engine.build import build_task

        task, config = build_task(config)
        collected = Collector()
        LocalRun(task, config, observers=[collected]).run()
        return make_record(config, task.digest, COMPUTED, collected)

    [place, *_] = grid(find_study("table1"), scale="small", seeds=1, methods=["sync-nesterov"])
    theirs = run(real)
    ours = PlacedRun(replace(place, stretch=stretch), run(folded))
    assert ours.times_s == pytest.approx(theirs.evals.time_s, rel=1e-12)
    assert ours.time_s == pytest.approx(theirs.time_s, rel=1e-12)
    assert ours.time_s == pytest.approx(4 * 3 * max(paces))  # rounds · H · slowest pace
    assert ours.values() == pytest.approx(theirs.evals.loss, rel=1e-4)
    for source in theirs.evals.sources:
        assert ours.values(source) == pytest.approx(theirs.evals.sources[source]["loss"], rel=1e-4)
    # at a time: the last round that was over
    for rounds in range(5):
        until = (rounds + 0.5) * 3 * max(paces)
        assert ours.loss_at(until) == ours.values()[rounds]
    assert ours.loss_at(ours.times_s[2]) == ours.values()[2]


def test_behind_a_barrier_a_methods_own_eval_every_holds_and_a_studys_does_not():
    [table1, convergence] = (find_study(name) for name in ("table1", "convergence"))
    assert (table1.settings["eval_every"], convergence.settings["eval_every"]) == (20, 50)
    for study, scale, every in (
        (table1, "paper", 5),
        (table1, "small", 5),
        (convergence, "paper", 25),
        (convergence, "small", 5),
    ):
        places = grid(study, scale=scale, seeds=1, methods=["sync-nesterov"])
        assert {place.config.run.eval_every for place in places} == {every}


def test_what_paces_decide_behind_a_barrier_is_not_folded():
    for settings in ({"steps": "dylu"}, {"grace": 0.1}):
        config = resolve(with_fields(RunConfig(), {"method": "sync-nesterov", "paces": [1, 2], **settings}))
        assert once_for_all_paces(config) == (config, 1.0)
    for name, method in METHODS.items():
        config = resolve(with_fields(RunConfig(), {"method": name, "paces": [1, 2]}))
        assert (once_for_all_paces(config)[0] == config) != method.barrier


# ---- what a run is known by


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("scale", SCALES)
def test_studies_have_no_norm_guard_and_their_digests_know_nothing_of_it(name, scale):
    """Their runs were kept before there was one."""
    for place in grid(find_study(name), scale=scale, seeds=1):
        assert place.config.outer.norm_limit == "off"
        assert not {"norm_limit", "norm_policy"} & settings_of(place.config).keys()


def test_the_runs_in_the_results_are_those_of_the_studies():
    """What was kept is found again: the settings of each, but for what only the data tells, are those of a place in a grid."""
    told_by_data = {"languages", "vocab_size"}

    def text_of(settings: dict[str, object]) -> str:
        return json.dumps({name: value for name, value in settings.items() if name not in told_by_data}, sort_keys=True)

    planned = {text_of(settings_of(place.config)) for name in names() for place in grid(find_study(name), scale="paper")}
    records = [json.loads(path.read_text()) for path in (REPOSITORY / "results" / "runs").glob("*.json")]
    assert len(records) > 100
    assert {text_of(record["settings"]) for record in records} <= planned


def test_a_study_may_have_a_norm_guard():
    [place] = grid(
        find_study("table1"),
        scale="small",
        seeds=1,
        rows=["1,1,1,1,1"],
        methods=["mla"],
        settings={"norm_limit": 5, "norm_policy": "refuse"},
    )
    settings = settings_of(place.config)
    assert (settings["norm_limit"], settings["norm_policy"]) == (5.0, "refuse")


def test_a_runs_digest_knows_what_decides_it_and_nothing_else():
    config = resolve(RunConfig())
    reference = digest(config, "text")
    for name, value in (("device", "cuda"), ("checkpoint_every", 7), ("data", "/elsewhere"), ("tokenizer", "/a/tokenizer.json")):
        assert digest(with_fields(config, {name: value}), "text") == reference
    for name, value in (("seed", 1), ("lr", 0.1), ("paces", [1.0]), ("kappa", 4.0), ("eval_windows", 7), ("width", 64)):
        assert digest(with_fields(config, {name: value}), "text") != reference
    assert digest(config, "other text") != reference


def test_a_run_of_the_largest_study_is_kept_in_under_12_kb(tmp_path):
    for name in ("convergence", "table1", "sensitivity"):
        places = grid(find_study(name), scale="paper", seeds=1)
        largest = max(places, key=lambda p: (p.config.run.arrivals / p.config.run.eval_every, len(p.config.rounds.paces)))
        config = replace(largest.config, input=replace(largest.config.input, languages=["de", "en", "es", "fr", "it"]))
        collected = Collector(
            tape=[
                ArrivalRecord(
                    arrival=i + 1, worker=i % len(config.rounds.paces), time_s=98765.4321 + i, outer_step=i + 1,
                    verdict="applied", units=256, inner_steps=20, staleness=17, loss=7.1234567, shard=0,
                    start_s=0.0, round=0, version=0, weight=1.0, spans=(), last_loss=7.0, samples=2,
                )
                for i in range(config.run.arrivals)
            ],
            evals=[
                EvaluationRecord(
                    arrival=i, outer_step=i, units=256 * i, time_s=14.74 * i, inner_steps=80 * i, mean={"loss": 7.123456789},
                    scores={s: {"loss": 7.123456789, "bits_per_byte": 2.123456789} for s in config.input.languages},
                )
                for i in range(0, config.run.arrivals + 1, config.run.eval_every)
            ],
        )  # fmt: skip
        record = make_record(config, "0" * 64, COMPUTED, collected)
        store = RunStore(tmp_path)
        store.write(record)
        assert store.path(record.digest).stat().st_size < 12_000
        assert store.read(record.digest) == record


def test_more_workers_repeat_the_pattern_of_paces():
    places = {place.method: place.config for place in grid(find_study("sensitivity"), scale="paper", seeds=1)}
    for count in (10, 20, 40, 64):
        paces = places[f"K-{count}"].rounds.paces
        assert len(paces) == count and all(pace == [1, 1, 6, 6, 6][i % 5] for i, pace in enumerate(paces))
    for name in ("H-20", "H-40", "H-160"):
        assert total_steps(places[name]) == 24_000


def test_the_equal_gain_of_async_nesterov():
    """Steady state: m = ρΔ/(1−μ), so θ moves by η·ρΔ·(1 + μ/(1−μ)); MLA's m = ρΔ, so it moves by η·ρΔ·(1 + μ)."""
    places = {place.method: place.config.outer for place in grid(find_study("ablation"), scale="paper", seeds=1)}
    nesterov, mla = places["async-nesterov-equal-gain"].knobs, places["mla"].knobs
    gain = nesterov["outer_lr"] / (1 - nesterov["momentum"])
    assert gain == pytest.approx(mla["outer_lr"] * (1 + mla["momentum"]), rel=1e-2)
    assert get_method(places["async-nesterov-equal-gain"].method).name == "async-nesterov"


# ---- tasks


def test_runs_with_equal_data_model_and_seed_share_one_task():
    plan = make_plan(find_study("sensitivity"), scale="small", seeds=2)
    assert len({id(run.task) for run in plan.runs.values()}) == 2
    convergence = make_plan(find_study("convergence"), scale="small", seeds=1)
    assert len({id(run.task) for run in convergence.runs.values()}) == 2  # by source and IID
    assert plan.data == convergence.data


@pytest.mark.parametrize("paces", [[1, 2, 2, 2, 2], [1, 6, 6, 6, 6], [1, 1, 15, 15, 15], [1, 1, 1, 1, 1]], ids=str)
@pytest.mark.parametrize("method", ["heloco-adaptive", "sync-nesterov"])
def test_dylu_can_go_on_until_the_steps_are_equal(paces, method):
    settings = {"paces": paces, "inner_steps": 80, "arrivals": 300, "eval_every": 20}
    part = GridPart("a", {"method": method, "steps": "dylu", "equal_steps": True}, {}, ())
    study = Study("s", "", "", settings, {}, {"r": GridPart("r", {}, {}, ())}, {"a": part}, {}, [], [])
    [place] = grid(study, scale="paper", seeds=1)
    config = place.config
    assert 24_000 <= total_steps(config) < 24_000 + 5 * 80
    assert config.inner.schedule_steps == 4800  # the learning rate's course is that of the run without DyLU
    evaluations = config.run.arrivals / config.run.eval_every
    assert evaluations == pytest.approx(15, rel=0.05)
    assert not get_method(method).barrier or config.run.arrivals % 5 == 0
