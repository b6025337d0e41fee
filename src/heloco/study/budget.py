"""The paper's Table 1: losses after equal tokens, gains of HeLoCo over each method there and at equal virtual time.

gain over X = 100 · (L_X − L_HeLoCo) / L_X, in %. At equal time both are taken at T, when the last of the row's asynchronous
runs ends; a barrier's loss is then that after its last round finished by T.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean
from typing import Any

from heloco.report.run_groups import is_beyond_noise
from heloco.report.table_data import Cell, TableData, Tone
from heloco.study.grid import row_time
from heloco.study.results import Results, Stat, plain, stat, tones, usual_spread
from heloco.study.spec import PAPERS_NAME, Study, TableSpec


@dataclass(frozen=True)
class Budget:
    """Which methods are compared, and their losses: by row, method and seed, at the end and at T."""

    results: Results
    variants: list[str]
    against: list[str]
    times_s: dict[str, float]
    """T of each row that has all of these methods."""

    @property
    def rows(self) -> list[str]:
        return list(self.times_s)

    def losses(self, row: str, method: str, at_time: bool = False) -> list[float | None]:
        """One per seed of the row; None where the run diverged or the study has none."""
        runs = [self.results.runs.get((row, method, seed)) for seed in self.results.seeds_of(row)]
        return [None if one is None else one.loss_at(self.times_s[row]) if at_time else one.final() for one in runs]

    def mean_losses(self, method: str, at_time: bool = False) -> list[float | None]:
        """For each seed that all rows have, the mean over the rows; None where one of them has none."""
        by_seed = zip(*(self.losses(row, method, at_time) for row in self.rows), strict=False)
        return [None if None in losses else fmean(v for v in losses if v is not None) for losses in by_seed]

    def gain(self, row: str | None, variant: str, other: str, at_time: bool = False) -> Stat | None:
        """The gain in a row, or in the mean over the rows if `row` is None. It is taken seed by seed."""
        a, b = (self.mean_losses(m, at_time) if row is None else self.losses(row, m, at_time) for m in (variant, other))
        return stat(percent(x, y) for x, y in zip(a, b, strict=True))

    def order(self, row: str, variant: str) -> list[str]:
        """The methods from the lowest loss to the highest; those that diverged last."""
        means = {method: stat(self.losses(row, method)) for method in (variant, *self.against)}
        return sorted(means, key=lambda method: loss.mean if (loss := means[method]) else float("inf"))

    def papers_order(self, row: str, variant: str) -> list[str]:
        losses = {m: self.results.study.paper_number(row, "loss", m) for m in (variant, *self.against)}
        return sorted(losses, key=lambda m: losses[m] or 0.0) if None not in losses.values() else []


def percent(loss: float | None, other: float | None) -> float | None:
    return None if loss is None or other is None else 100 * (other - loss) / other


def budget_of(results: Results, spec: TableSpec) -> Budget:
    """The methods and rows that can be compared: a part of a study may lack some of them."""
    variants, against = ([m for m in names if m in results.methods] for names in (spec.variants, spec.against))
    whole = [row for row in results.rows if all(results.at(row, method) for method in (*variants, *against))]
    times = {row: results.time_of(row) for row in whole}
    return Budget(results, variants, against, times)


# ---- tables


def budget_tables(results: Results, spec: TableSpec) -> Iterator[TableData]:
    budget = budget_of(results, spec)
    for variant in budget.variants:
        yield _fixed_tokens(budget, spec, variant)
        if budget.against:
            yield _fixed_time(budget, spec, variant)


def _fixed_tokens(budget: Budget, spec: TableSpec, variant: str) -> TableData:
    results = budget.results
    methods = [variant, *budget.against]

    def line(row: str | None) -> list[Cell]:
        losses = {m: budget.mean_losses(m) if row is None else budget.losses(row, m) for m in methods}
        tone_of = tones({m: dict(enumerate(values)) for m, values in losses.items()})
        cells = [Cell(row or f"mean of {len(budget.rows)} rows")]
        for method, values in losses.items():
            cells.append(_cell_with_paper(stat(values), _paper_mean(budget, row, method), 3, tone_of[method]))
        for other in budget.against:
            cells.append(_gain_cell(budget, row, variant, other, "gain"))
        return cells

    header = ["paces", *(f"L {m}" for m in methods), *(f"Δ {m} %" for m in budget.against)]
    caption = (
        f"{spec.caption} L: mean validation loss at the end{results.loss_unit}. Δ X: by how much {variant}'s loss is below "
        f"X's. Small: the paper's number. {results.note_on_seeds()}{_caution(results)}"
    ).strip()
    lines = [line(row) for row in budget.rows] + ([line(None)] if len(budget.rows) > 1 else [])
    return TableData(f"{spec.title}, fixed tokens: {variant}", header, lines, caption)


def _fixed_time(budget: Budget, spec: TableSpec, variant: str) -> TableData:
    results, study = budget.results, budget.results.study
    waiting = [method for method in budget.against if results.waits(method)]

    def line(row: str) -> list[Cell]:
        losses = [_cell_with_paper(stat(budget.losses(row, other, at_time=True)), None, 3) for other in waiting]
        gains = [_gain_cell(budget, row, variant, other, "time_gain") for other in budget.against]
        return [Cell(row), _time_cell(study, row, budget.times_s[row]), *losses, *gains]

    header = ["paces", "T s", *(f"L {m} at T" for m in waiting), *(f"TΔ {m} %" for m in budget.against)]
    caption = (
        f"{spec.caption} T: virtual time when the asynchronous runs end. L X at T: X's loss then, a barrier's after its last "
        f"round finished by T. TΔ X: by how much {variant}'s loss is below it. {times_sentence(study, budget.rows)} "
        f"{results.note_on_seeds()}{_caution(results)}"
    ).strip()
    return TableData(f"{spec.title}, fixed time: {variant}", header, [line(row) for row in budget.rows], caption)


def _cell_with_paper(loss: Stat | None, paper: float | None, digits: int, tone: Tone = "") -> Cell:
    note = "" if paper is None else f"paper {paper:.2f}"
    return Cell("diverged" if loss is None else loss.text(digits), note, tone)


def _paper_mean(budget: Budget, row: str | None, method: str) -> float | None:
    """The paper's loss of a row, or (None) its mean over the rows shown."""
    rows = budget.rows if row is None else [row]
    losses = [budget.results.study.paper_number(each, "loss", method) for each in rows]
    return None if None in losses else fmean(loss for loss in losses if loss is not None)


def _gain_cell(budget: Budget, row: str | None, variant: str, other: str, kind: str) -> Cell:
    gain = budget.gain(row, variant, other, at_time=kind == "time_gain")
    if row is None:
        paper = percent(_paper_mean(budget, None, variant), _paper_mean(budget, None, other))
    else:
        paper = budget.results.study.paper_number(row, kind, other)
    note = "" if paper is None else f"paper {paper:+.2f}"
    if gain is None:
        return Cell("–", note)
    if not gain.is_clear_percentage:
        return Cell(gain.text(2, "+"), note)
    return Cell(gain.text(2, "+"), note, "good" if gain.mean > 0 else "bad")


def _time_cell(study: Study, row: str, time_s: float) -> Cell:
    paper = study.paper_number(row, "time_s")
    if paper is None:
        return Cell(f"{time_s:g}")
    ours = row_time(study, "paper", row)
    if ours == paper:
        return Cell(f"{time_s:g}", f"paper {paper:g}")
    return Cell(f"{time_s:g}", f"paper {paper:g}, ours at its setting {ours:g}", "bad")


def times_sentence(study: Study, rows: Sequence[str]) -> str:
    """How many of the paper's times come out exactly, at the paper's own setting."""
    times = {row: paper for row in rows if (paper := study.paper_number(row, "time_s")) is not None}
    exact = sum(row_time(study, "paper", row) == paper for row, paper in times.items())
    return f"At the paper's setting T equals the paper's exactly in {exact} of {len(times)} rows." if times else ""


def _caution(results: Results) -> str:
    if results.scale == "paper":
        return ""
    return " At the small scale, with another model and other data, only orders and signs can be compared with the paper."


def order_table(results: Results, spec: TableSpec) -> TableData:
    budget = budget_of(results, spec)
    if not budget.against or not budget.variants:
        return TableData(spec.title, ["paces"], [])
    header, agreements = ["paces", "the paper's"], dict.fromkeys(budget.variants, 0)
    header += [text for variant in budget.variants for text in (f"ours, {variant}", "agrees")]
    lines = []
    for row in budget.rows:
        papers = [PAPERS_NAME.get(m, m) for m in budget.papers_order(row, budget.variants[0])]
        line = [Cell(row), Cell(" < ".join(papers) or "–")]
        for variant in budget.variants:
            ours, theirs = budget.order(row, variant), budget.papers_order(row, variant)
            agreements[variant] += ours == theirs
            line += [Cell(" < ".join(ours)), _agreement(budget, row, ours, theirs)]
        lines.append(line)
    counts = ", ".join(f"{variant} in {count} of {len(budget.rows)} rows" for variant, count in agreements.items())
    caption = f"{spec.caption} From the lowest final loss to the highest. The order agrees with the paper's: {counts}.".strip()
    return TableData(spec.title, header, lines, caption)


def _agreement(budget: Budget, row: str, ours: Sequence[str], theirs: Sequence[str]) -> Cell:
    """Whether our order of the methods is the paper's, and if not, whether the losses that are in another order differ at all."""
    if list(ours) == list(theirs):
        return Cell("yes", tone="good")
    losses = {method: dict(enumerate(budget.losses(row, method))) for method in ours}
    spread = usual_spread(losses.values())
    swapped = [(a, b) for a, b in combinations(ours, 2) if a in theirs and b in theirs and theirs.index(a) > theirs.index(b)]
    if swapped and not any(is_beyond_noise(losses[a], losses[b], spread) for a, b in swapped):
        return Cell("no", "within the noise")
    return Cell("no", tone="bad")


# ---- the same as JSON


def budget_summary(results: Results, spec: TableSpec) -> dict[str, Any]:
    """Every number of the tables above."""
    budget = budget_of(results, spec)
    study, methods = results.study, [*budget.variants, *budget.against]

    def gains(row: str | None, at_time: bool) -> dict[str, Any]:
        pairs = [(variant, other) for variant in budget.variants for other in budget.against]
        gain_of = {pair: plain(budget.gain(row, *pair, at_time=at_time)) for pair in pairs}
        return {variant: {other: gain_of[variant, other] for other in budget.against} for variant in budget.variants}

    rows = {}
    for row in budget.rows:
        orders = {v: (budget.order(row, v), budget.papers_order(row, v)) for v in budget.variants}
        rows[row] = {
            "T": budget.times_s[row],
            "T at the paper's setting": row_time(study, "paper", row),
            "T in the paper": study.paper_number(row, "time_s"),
            "loss": {m: plain(stat(budget.losses(row, m))) for m in methods},
            "loss at T": {m: plain(stat(budget.losses(row, m, at_time=True))) for m in methods},
            "gain": gains(row, at_time=False),
            "time gain": gains(row, at_time=True),
            "order": {v: {"ours": ours, "paper": papers, "agree": ours == papers} for v, (ours, papers) in orders.items()},
            "paper": study.paper.get(row, {}),
        }
    agree = {v: sum(row["order"][v]["agree"] for row in rows.values()) for v in budget.variants}
    mean = {m: plain(stat(budget.mean_losses(m))) for m in methods}
    times = sum(row["T at the paper's setting"] == row["T in the paper"] for row in rows.values())
    overall = {"loss": mean, "gain": gains(None, at_time=False)}
    return {"rows": rows, "mean over rows": overall, "rows whose order agrees": agree, "rows whose T agrees": times}


def losses_at_row_times(results: Results) -> dict[tuple[str, str, int], dict[str, float | None]]:
    """For each (row, method, seed): the row's T, and the loss then."""
    times = {row: results.time_of(row) for row in results.rows}
    return {name: {"T": times[name[0]], "loss at T": run.loss_at(times[name[0]])} for name, run in results.runs.items()}
