"""`heloco plan`: from a model, links and workers to the length of rounds, the wire format, and what is to be expected."""

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from heloco.cli.flags import Parser
from heloco.cli.prose import wrap_line
from heloco.errors import UserError

if TYPE_CHECKING:
    from heloco.engine.site_plan import Rehearsal, SitePlan


INDENT = 14
"""Where the texts stand, after their names."""


def add_plan_flags(parser: Parser) -> None:
    parser.add_argument("--params", required=True, metavar="N", help="parameters of the model: 14468608, 124M, 1.3B")
    parser.add_argument(
        "--step", required=True, metavar="S", help="seconds per inner step of a worker; several: 0.5,1,2, in turn"
    )
    parser.add_argument("--link", required=True, metavar="LINK", help="of each worker: 100mbit,80ms or UP/DOWN 50/200mbit,100ms")
    parser.add_argument("--workers", required=True, metavar="N", help="how many workers")
    parser.add_argument("--inner-steps", metavar="N", help="H, the inner steps of a round [chosen: 100, or more for slow links]")
    parser.add_argument("--wire", metavar="FORMAT", help="fp32, bf16, int8, int4, e3m0 [chosen: the widest that is fast enough]")
    parser.add_argument(
        "--overlap", metavar="true|false", default="true", help="whether workers compute while bytes travel [true]"
    )
    parser.add_argument("--simulate", action="store_true", help="also run the schedule with the virtual clock")
    parser.add_argument("--json", action="store_true", help="print JSON")


def plan(arguments: argparse.Namespace) -> int:
    from heloco.engine.site_plan import Site, plan_site, rehearse
    from heloco.run.values import convert
    from heloco.wire.formats import FormatName

    paces = convert("step", arguments.step, list[float])
    up, down, latency_s = parse_link(arguments.link)
    site = Site(
        parameters=parse_parameter_count(arguments.params), workers=convert("workers", arguments.workers, int),
        step_s=min(paces, default=0.0), up_mbit_s=up, down_mbit_s=down, latency_s=latency_s,
    )  # fmt: skip
    steps = None if arguments.inner_steps is None else convert("inner_steps", arguments.inner_steps, int)
    wire = None if arguments.wire is None else convert("wire", arguments.wire, FormatName)
    site_plan = plan_site(site, inner_steps=steps, wire=wire, overlap=convert("overlap", arguments.overlap, bool))
    rehearsal = rehearse(site_plan, paces) if arguments.simulate else None
    if arguments.json:
        print(json.dumps(as_numbers(site_plan) | ({"simulated": asdict(rehearsal)} if rehearsal else {})))
    else:
        print("\n".join(wrap_line(line, INDENT) for line in as_lines(site_plan, rehearsal)))
    return 0


def as_numbers(plan: "SitePlan") -> dict[str, object]:
    """The plan for programs."""
    names = (
        "inner_steps", "wire", "overlap", "upload_s", "download_s", "taking_in_s", "round_s", "utilisation", "delay_steps",
        "load", "shards", "bytes_per_day", "synchronizer_bytes", "disk_bytes",
    )  # fmt: skip
    return {name: getattr(plan, name) for name in names} | {"warnings": list(plan.warnings)}


def as_lines(plan: "SitePlan", rehearsal: "Rehearsal | None") -> list[str]:
    """The plan for people."""
    flags = f"--inner-steps {plan.inner_steps} --wire {plan.wire}{' --overlap' if plan.overlap else ''}"
    delay = f", its start merged {plan.delay_steps:.1f} steps into the next" if plan.overlap else ""
    rows = [
        ("settings", flags),
        ("a round", f"{plan.round_s:.3g} s: {plan.computing_s:.3g} s of inner steps{delay}"),
        ("upload", f"{plan.sizes.contribution / 1e6:,.1f} MB in {plan.upload_s:.3g} s"),
        (
            "download",
            f"{plan.sizes.difference / 1e6:,.1f} MB in {plan.download_s:.3g} s; the first is {plan.sizes.start / 1e6:,.0f} MB",
        ),
        ("workers", f"compute {plan.utilisation:.1%} of the time"),
        ("synchronizer", f"busy {plan.load:.1%} of the time, {plan.taking_in_s:.3g} s for each arrival"),
        ("memory", f"{plan.synchronizer_bytes / 1e9:.1f} GB at the synchronizer, and {plan.disk_bytes / 1e9:,.0f} GB of disk"),
        ("traffic", f"{plan.bytes_per_day / 1e9:,.0f} GB per day over all links"),
    ]
    if rehearsal is not None:
        rows += [
            ("simulated", f"workers compute {rehearsal.utilisation:.1%} of the time, the synchronizer {rehearsal.load:.1%}"),
            ("", f"{rehearsal.arrivals_per_hour:,.0f} arrivals per hour, staleness {rehearsal.mean_staleness:.1f} in the mean "
                 f"and at most {rehearsal.most_stale}"),
        ]  # fmt: skip
    return [f"{name:<13} {text}" for name, text in rows] + [f"{'note':<13} {warning}" for warning in plan.warnings]


def parse_parameter_count(text: str) -> int:
    """A number of parameters: 14468608, 124M, 1.3B."""
    factors = {"K": 1e3, "M": 1e6, "B": 1e9}
    number, factor = (text[:-1], factors[text[-1].upper()]) if text and text[-1].upper() in factors else (text, 1.0)
    try:
        return round(float(number) * factor)
    except (ValueError, OverflowError):
        raise UserError(f"params cannot be {text!r}: give a number such as 124M or 1.3B.") from None


def parse_link(text: str) -> tuple[float, float, float]:
    """Megabits per second up and down, and seconds of latency, from 100mbit,80ms or 50/200mbit,0.1s."""
    try:
        speed, _, latency = text.lower().replace(" ", "").partition(",")
        up, _, down = speed.removesuffix("mbit").removesuffix("gbit").partition("/")
        factor = 1000.0 if speed.endswith("gbit") else 1.0
        seconds = float(latency.removesuffix("ms")) / 1000 if latency.endswith("ms") else float(latency.removesuffix("s") or 0)
        return float(up) * factor, float(down or up) * factor, seconds
    except ValueError:
        raise UserError(f"link cannot be {text!r}: give speed and latency such as 100mbit,80ms or 50/200mbit,100ms.") from None
