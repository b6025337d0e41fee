"""From an arrival to its line on the tape."""

from heloco.records.json_numbers import finite_or_none, shorten_number
from heloco.records.tape import CASES, ArrivalRecord, BlockColumns, Traffic
from heloco.synchronizer import Arrival, Contribution

LETTERS = {case: letter for letter, case in CASES.items()}


def arrival_record(
    arrival: Arrival, contribution: Contribution, *, time_s: float, start_s: float, traffic: Traffic, numbers: bool = True
) -> ArrivalRecord:
    """The line of an arrival. Without `numbers` only the cases of its blocks are on it, for hundreds of runs at once."""
    return ArrivalRecord(
        arrival=arrival.arrival,
        verdict=arrival.verdict,
        time_s=time_s,
        start_s=start_s,
        outer_step=arrival.outer_step,
        worker=arrival.worker,
        round=arrival.round,
        version=arrival.version,
        staleness=arrival.staleness,
        weight=arrival.weight,
        shard=arrival.shard,
        spans=arrival.spans,
        inner_steps=arrival.inner_steps,
        loss=finite_or_none(contribution.loss),
        last_loss=finite_or_none(contribution.last_loss),
        samples=contribution.samples,
        units=contribution.units,
        code=arrival.code,
        reason=arrival.reason if arrival.code else "",
        clipped=arrival.clipped if arrival.clipped < 1 else None,
        blocks=_block_columns(arrival, numbers),
        bytes_down=traffic.bytes_down,
        bytes_up=traffic.bytes_up,
    )


def _block_columns(arrival: Arrival, numbers: bool) -> BlockColumns | None:
    outcomes = arrival.outcomes
    case = "".join(LETTERS[o.case] for o in outcomes)
    if not outcomes or not numbers:
        return BlockColumns(case) if outcomes else None
    return BlockColumns(
        case,
        cosine=[_short(o.cosine) for o in outcomes],
        confidence=[_short(o.confidence) for o in outcomes],
        strength=[_short(o.strength) for o in outcomes],
        pseudo_gradient_norm=[_short(o.pseudo_gradient_norm) for o in outcomes],
        momentum_norm=[_short(o.momentum_norm) for o in outcomes],
        movement=[_short(movement) for movement in arrival.movements],
    )


def _short(value: float | None) -> float | None:
    """Six significant digits are more than a plot needs and keep the tape small."""
    return shorten_number(value, 6)
