"""The tables of a study as its TOML asks for them, with the paper's numbers next to ours."""

from collections.abc import Iterator
from dataclasses import replace

from heloco.records.provenance import note_if_mixed
from heloco.report.table_data import Cell, TableData
from heloco.study.budget import budget_tables, order_table
from heloco.study.results import Results, Stat, stat, tones
from heloco.study.spec import TableSpec


def tables_of(results: Results) -> list[TableData]:
    """Every table that has something to show. If the runs were not all computed alike, each table says so."""
    tables = [table for spec in results.study.tables for table in _tables(results, spec) if table.rows and len(table.header) > 1]
    note = note_if_mixed(run.record.computed for run in results.runs.values())
    return [replace(table, caption=f"{table.caption} {note}".strip()) for table in tables]


def _tables(results: Results, spec: TableSpec) -> Iterator[TableData]:
    if spec.kind == "losses":
        yield _losses(results, spec)
    elif spec.kind == "sources":
        yield _sources(results, spec)
    elif spec.kind == "budget":
        yield from budget_tables(results, spec)
    else:
        yield order_table(results, spec)


def _losses(results: Results, spec: TableSpec) -> TableData:
    """Final mean losses, rows × methods or the other way round; under each, by how much it differs from the baseline."""
    methods = _methods(results, spec)
    down, across = (results.rows, methods) if spec.lines == "rows" else (methods, results.rows)

    def cells(line: str) -> list[Cell]:
        pairs = [(line, other) if spec.lines == "rows" else (other, line) for other in across]
        return [_loss_cell(results, spec, row, method) for row, method in pairs]

    lines = [[Cell(line), *cells(line)] for line in down]
    compared = f" Under each loss the difference to {spec.baseline}." if spec.baseline in methods else ""
    caption = f"{spec.caption} Mean validation loss at the end{results.loss_unit}. {results.note_on_seeds()}{compared}".strip()
    return TableData(spec.title, ["", *across], lines, caption)


def _methods(results: Results, spec: TableSpec) -> list[str]:
    return [method for method in results.methods if not spec.methods or method in spec.methods]


def _loss_cell(results: Results, spec: TableSpec, row: str, method: str) -> Cell:
    loss = results.final(row, method)
    if loss is None:
        return Cell("diverged" if results.diverged(row, method) else "–")
    notes = []
    if spec.baseline in results.methods and method != spec.baseline and (difference := _difference(results, row, method, spec)):
        notes.append(f"{difference.text(2, '+')} %")
    if (paper := results.study.paper_number(row, "loss", method)) is not None:
        notes.append(f"paper {paper:.2f}")
    tone = tones({m: results.seed_values(row, m) for m in _methods(results, spec) if results.at(row, m)})[method]
    return Cell(loss.text(), " · ".join(notes), tone)


def _difference(results: Results, row: str, method: str, spec: TableSpec) -> Stat | None:
    """The difference from the baseline in % of its loss, taken seed by seed, so that what a seed does to both cancels out."""
    pairs = zip(results.at(row, method), results.at(row, spec.baseline), strict=False)
    losses = [(ours.final(), base.final()) for ours, base in pairs]
    return stat(100 * (a - b) / b if a is not None and b is not None else None for a, b in losses)


def _sources(results: Results, spec: TableSpec) -> TableData:
    """A measure at the end of each run, source by source."""
    lines = []
    for row in results.rows:
        for method in _methods(results, spec):
            if not results.at(row, method):
                continue
            cells = [_source_cell(results, row, method, source, spec.measure) for source in (*results.sources, "")]
            lines.append([Cell(row), Cell(method), *cells])
    unit = {"loss": f"Validation loss at the end{results.loss_unit}.", "bits_per_byte": "Bits per byte at the end."}
    caption = f"{spec.caption} {unit.get(spec.measure, spec.measure)} {results.note_on_seeds()}".strip()
    has_measure = spec.measure in results.measures
    return TableData(spec.title, ["", "method", *results.sources, "mean"], lines if has_measure else [], caption)


def _source_cell(results: Results, row: str, method: str, source: str, measure: str) -> Cell:
    value = results.final(row, method, source, measure)
    if value is None:
        return Cell("diverged" if results.diverged(row, method) else "–")
    keys = ("source", source, method) if source else ("loss", method)
    paper = results.study.paper_number(row, *keys) if measure == "loss" else None
    methods = [other for other in results.methods if results.at(row, other)]
    tone = tones({other: results.seed_values(row, other, source, measure) for other in methods})[method]
    return Cell(value.text(), "" if paper is None else f"paper {paper:.2f}", tone)
