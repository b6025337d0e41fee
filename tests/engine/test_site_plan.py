"""`heloco plan`: its numbers by hand, against the virtual clock, and as a user asks for them."""

import json
from dataclasses import replace

import pytest

from heloco.cli.plan_command import parse_link, parse_parameter_count
from heloco.engine.site_plan import Site, SitePlan, plan_site, rehearse
from support.runs import heloco

SITE = Site(parameters=30_000_000, workers=8, step_s=0.25, up_mbit_s=50, down_mbit_s=200, latency_s=0.1)


def test_times_by_hand():
    """4.25 bits: 15.9375 MB, 2.55 s up at 50 Mbit/s and .6375 s down at 200; latency .1 s each; 32 s of inner steps."""
    plan = SitePlan(site=SITE, inner_steps=128, wire="int4", overlap=False)
    assert plan.sizes.contribution == plan.sizes.difference == 15_937_500 and plan.sizes.start == 120_000_000
    assert plan.upload_s == pytest.approx(2.65) and plan.download_s == pytest.approx(0.7375)
    assert plan.computing_s == 32.0
    assert plan.travel_s == pytest.approx(2.65 + 0.7375 + plan.taking_in_s)
    assert plan.utilisation == pytest.approx(32 / plan.round_s) and plan.round_s > 32 + plan.travel_s
    hidden = replace(plan, overlap=True)
    assert hidden.utilisation > 0.99 and hidden.delay_steps == pytest.approx(plan.travel_s / 0.25)
    assert hidden.bytes_per_day == pytest.approx(8 * 86_400 / hidden.round_s * 2 * 15_937_500)


def test_a_slow_link_bounds_the_round():
    plan = SitePlan(site=replace(SITE, up_mbit_s=1), inner_steps=10, wire="fp32", overlap=True)
    assert plan.round_s == pytest.approx(plan.travel_s) and plan.utilisation < 0.01
    assert len(list(plan.warnings)) == 2


@pytest.mark.parametrize(("speed", "expected"), [(100_000, "fp32"), (800, "bf16"), (300, "int8"), (150, "int4"), (20, "int4")])
def test_the_widest_format_that_is_fast_enough_is_chosen(speed, expected):
    plan = plan_site(replace(SITE, up_mbit_s=speed, down_mbit_s=speed, latency_s=0.0, step_s=0.25))
    assert plan.wire == expected
    assert plan.travel_s <= 0.1 * plan.computing_s or plan.inner_steps == 500
    assert plan.inner_steps == 100 if speed >= 150 else plan.inner_steps > 100


def test_what_is_given_is_kept():
    plan = plan_site(replace(SITE, up_mbit_s=1), inner_steps=7, wire="bf16", overlap=False)
    assert (plan.inner_steps, plan.wire, plan.overlap) == (7, "bf16", False)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("up", "workers"), [(50, 1), (50, 8), (5, 8), (200, 40)])
def test_the_virtual_clock_agrees(overlap, up, workers):
    plan = plan_site(replace(SITE, up_mbit_s=up, workers=workers), inner_steps=128, wire="int4", overlap=overlap)
    rehearsal = rehearse(plan)
    assert rehearsal.utilisation == pytest.approx(plan.utilisation, abs=0.02)
    assert rehearsal.load == pytest.approx(plan.load, abs=0.02)
    assert rehearsal.most_stale == workers - 1


def test_where_one_synchronizer_ends():
    """With 2,000 workers arrivals queue: the clock says so, and the plan spreads the synchronizer until it is not too busy."""
    plan = plan_site(replace(SITE, workers=2000), inner_steps=128, wire="int4")
    rehearsal = rehearse(plan, rounds=6)
    assert rehearsal.load > 0.99 and rehearsal.utilisation < 0.5
    assert plan.shards > 1 and any(f"needs {plan.shards} of them" in warning for warning in plan.warnings)
    assert plan_site(replace(SITE, workers=2), inner_steps=128, wire="int4").shards == 1


def test_unequal_paces_are_unequally_stale():
    plan = plan_site(replace(SITE, workers=4), inner_steps=100, wire="int4")
    rehearsal = rehearse(plan, [0.25, 1.0])
    assert rehearsal.most_stale > 4 > rehearsal.mean_staleness


@pytest.mark.parametrize(
    ("text", "count"), [("14468608", 14468608), ("124M", 124_000_000), ("1.3b", 1_300_000_000), ("5k", 5000)]
)
def test_counts(text, count):
    assert parse_parameter_count(text) == count


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("100mbit,80ms", (100, 100, 0.08)), ("50/200mbit,100ms", (50, 200, 0.1)), ("1gbit", (1000, 1000, 0)),
        ("2.5, 0.1s", (2.5, 2.5, 0.1)),
    ],
)  # fmt: skip
def test_links(text, link):
    assert parse_link(text) == pytest.approx(link)


GOOD = ("--params", "1.3B", "--step", "0.5", "--link", "100mbit,80ms", "--workers", "12")


def test_a_plan_in_the_terminal_and_as_json():
    result = heloco("plan", *GOOD)
    assert result.code == 0 and "--wire int4 --overlap" in result.out and "synchronizer" in result.out
    numbers = json.loads(heloco("plan", *GOOD, "--simulate", "--json").out)
    assert numbers["wire"] == "int4" and 0.9 < numbers["utilisation"] <= 1
    assert numbers["simulated"]["utilisation"] == pytest.approx(numbers["utilisation"], abs=0.05)


@pytest.mark.parametrize(
    "changed",
    [
        ("--params", "many"), ("--params", "0"), ("--step", "0"), ("--step", "fast"), ("--link", "quick"), ("--link", "0mbit"),
        ("--link", "10mbit,-5ms"), ("--workers", "0"), ("--workers", "x"), ("--wire", "int5"), ("--overlap", "maybe"),
        ("--params", "inf"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_bad_input(changed):
    result = heloco("plan", *GOOD, *changed)
    assert result.code == 2 and result.sentence
