"""Reports of runs on real machines: who took part, pauses, measured paces, real time; and runs that evaluate nothing."""

import io
import json
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import heloco as package
from heloco.cli.serve_view import machines_table
from heloco.cluster.protocol.refusals import Refused
from heloco.cluster.server.process import ListenConfig, RunHost, spec_of
from heloco.records.events import Dispatch, Pause, Resume
from heloco.records.journal import Journal
from heloco.records.journal_reader import read_events, segments
from heloco.report import overview
from heloco.report.charts import machine_charts, worker_charts
from heloco.report.charts.chart import seat_groups
from heloco.report.charts.curves import NOTHING_EVALUATED, scores
from heloco.report.machine_tables import machine_tables
from heloco.report.page_data import page_data
from heloco.report.page_writer import render_report
from heloco.report.run_reader import Run, read_runs
from heloco.report.terminal import contributions_table, workers_table
from heloco.synchronizer import NOT_FINITE
from support.browsers import silent_page
from support.runs import evals, heloco, tape
from support.small_cluster import Clock, Hand, config, delta, opened

PACES_S = {"quick": 1.0, "steady": 2.0, "slow": 5.0}
WINDOW = 6


def moment(clock: Clock, service: Any, seconds: float) -> None:
    clock.now += seconds
    service.housekeeping.tick()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three machines; NaN from one of them; the others leave, and after 30 s one comes back. Only look at it."""
    clock, path = Clock(), tmp_path_factory.mktemp("real") / "run"
    service = opened(path, clock, arrivals=40, min_workers=2, participation=WINDOW, eval_every=8, patience=1000.0)
    hands = {name: Hand(service, name) for name in PACES_S}
    due = {name: (hands[name].take(), pace)[1] for name, pace in PACES_S.items()}

    def work(until: int) -> None:
        run = service.state.run
        while run.synchronizer.arrivals < until:
            name = min(due, key=lambda name: due[name])
            moment(clock, service, due[name] - clock.now)
            hands[name].hand_in(delta(run.synchronizer.arrivals), loss=2.0 if name == "slow" else 1.0)
            hands[name].take()
            due[name] += PACES_S[name]

    work(12)
    with pytest.raises(Refused, match=NOT_FINITE):
        hands["quick"].hand_in(delta(0) | {"pseudo_gradient.1": torch.full((4,), float("nan"))})
    hands["quick"].take()
    for name in ("steady", "slow"):
        hands[name].leave("stopped by hand")
        del due[name]
    moment(clock, service, 30.0)
    hands["steady"] = Hand(service, "steady", hands["steady"].ticket)
    hands["steady"].take()
    due |= {"quick": clock.now + 1, "steady": clock.now + 2}
    work(30)
    service.admin.stop("stopped")
    service.close()
    return path


@pytest.fixture
def run(folder: Path) -> Run:
    [only_run] = read_runs([folder])
    return only_run


def cells(table: Any) -> dict[str, dict[str, str]]:
    """First cell of a row -> heading -> text."""
    return {row[0].text: {name: c.text for name, c in zip(table.header, row, strict=True)} for row in table.rows}


# ---- participation


def test_who_contributed_lately_is_drawn_against_how_many_must(run: Run, folder: Path) -> None:
    chart = machine_charts.participation([run])
    assert chart is not None
    by_time, by_arrival, parts = chart.views[0].content.panels
    lines = tape(folder)
    names = [line["machine"].partition("#")[0] for line in lines]
    lately = [names[max(0, i - WINDOW + 1) : i + 1] for i in range(len(names))]
    for panel, x in ((by_arrival, "arrival"), (by_time, "time_s")):
        took_part, least = panel.lines[:2]
        assert list(took_part.x) == [line[x] for line in lines]
        assert list(took_part.y) == [len(set(window)) for window in lately]
        assert least.label == "at least (min_workers)" and set(least.y) == {2}
    assert list(took_part.y) == [line["participants"] for line in lines]
    for line in parts.lines:
        assert list(line.y) == [window.count(line.label) / len(window) for window in lately]
    assert {line.label for line in parts.lines} == set(PACES_S)
    assert by_time.x_label == parts.x_label == "real time (s)"


def test_the_table_of_machines_says_what_each_brought(run: Run, folder: Path) -> None:
    table, _ = machine_tables([run])
    rows, lines = cells(table), tape(folder)
    assert list(rows) == ["quick", "slow", "steady"]
    for name, row in rows.items():
        machine_lines = [line for line in lines if line["machine"].startswith(name)]
        assert row["contributions"] == str(len(machine_lines)) and row["share"] == f"{len(machine_lines) / len(lines):.1%}"
        assert row["worker"] == ", ".join(map(str, sorted({line["worker"] for line in machine_lines})))
        assert row["mean staleness"] == f"{sum(line['staleness'] for line in machine_lines) / len(machine_lines):.2f}"
        assert row["last contribution"].startswith(f"arrival {machine_lines[-1]['arrival']} at ")
        took_s = sum(line["time_s"] - line["start_s"] for line in machine_lines)
        assert row["s per step"] == f"{took_s / sum(line['inner_steps'] for line in machine_lines):.3g}"
        lately = sum(line in machine_lines for line in lines[-WINDOW:])
        assert row[f"of the last {WINDOW} arrivals"] == f"{lately / WINDOW:.1%}"
    assert rows["slow"][f"of the last {WINDOW} arrivals"] == "0.0%"
    notes = {row[0].text: [cell.note for cell in row if cell.note] for row in table.rows}
    assert notes == {"quick": [], "steady": [], "slow": ["left at 0:08: stopped by hand"]}


def test_a_refusal_that_is_not_on_the_tape_is_counted(run: Run, folder: Path) -> None:
    assert not any(line["verdict"] == "refused" for line in tape(folder))
    assert {name: row["refused"] for name, row in cells(machine_tables([run])[0]).items()} == {
        "quick": "1",
        "slow": "0",
        "steady": "0",
    }
    assert "run: 1 contributions were refused." in overview.notes([run])
    assert list(workers_table(run.summary).columns[-1].cells) == ["1", "0", "0"]


def test_pauses_are_told_with_their_reasons(run: Run, folder: Path) -> None:
    rows = [[cell.text for cell in row] for row in machine_tables([run])[1].rows]
    reason = "1 of at least 2 machines are here"
    assert rows[-1] == ["0:08", "12", "30.0 s", reason] and all(row[-1] == reason for row in rows)
    chart = machine_charts.participation([run])
    assert chart is not None
    [paused] = [line for line in chart.views[0].content.panels[0].lines if line.label == "paused"]
    events = [event for event, _ in read_events(folder / "journal")]
    assert list(paused.x[0::3]) == [event.time_s for event in events if isinstance(event, Pause)]
    assert list(paused.x[1::3]) == [event.time_s for event in events if isinstance(event, Resume)]


def cut(folder: Path, to: Path, until: str) -> tuple[Path, list[str]]:
    """The run as it was just after the last event of a kind; and the rest of its journal."""
    shutil.copytree(folder, to)
    [(_, path)] = segments(to / "journal")
    events = path.read_text().splitlines(keepends=True)
    last = max(i for i, event in enumerate(events) if json.loads(event).get("event") == until) + 1
    arrivals = sum(json.loads(event).get("event") == "receive" for event in events[:last])
    path.write_text("".join(events[:last]))
    (to / "tape.jsonl").write_text("".join((folder / "tape.jsonl").read_text().splitlines(keepends=True)[:arrivals]))
    return path, events[last:]


def test_a_pause_shows_while_it_lasts_and_its_end_is_noticed(folder: Path, tmp_path: Path) -> None:
    path, rest = cut(folder, tmp_path / "run", "pause")
    [run] = read_runs([tmp_path / "run"])
    assert "run paused at 0:08: 1 of at least 2 machines are here." in overview.notes([run])
    assert machine_tables([run])[1].rows[-1][2].text == "not ended"
    with path.open("a") as journal:
        journal.writelines(rest)
    assert run.refresh() and not any("paused" in note for note in overview.notes([run]))
    assert machine_tables([run])[1].rows[-1][2].text == "30.0 s"


def test_a_pause_that_a_crash_ended_does_not_last_for_ever(folder: Path, tmp_path: Path) -> None:
    """A restart after a kill hands out rounds again and says nothing about the pause."""
    cut(folder, tmp_path / "run", "pause")
    (tmp_path / "run" / "journal" / "acknowledged").write_text(f"{0:020d}\n")
    journal = Journal(tmp_path / "run")
    paused_s = [event.time_s for event, _ in read_events(journal.folder) if isinstance(event, Pause)][-1]
    journal.append(Dispatch(time_s=paused_s + 30.0, worker=0, steps=2, machine="quick#1", start_digest=""))
    journal.close()
    [run] = read_runs([tmp_path / "run"])
    assert not run.journal.is_paused and machine_tables([run])[1].rows[-1][2].text == "30.0 s"


def test_without_its_journal_a_run_is_shown_and_the_page_says_what_is_missing(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "journal")
    [run] = read_runs([tmp_path / "run"])
    table, pauses = machine_tables([run])
    assert len(table.rows) == 3 and not pauses.rows and "journal, which is not here: run" in pauses.caption


def test_an_edited_journal_is_named(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "run")
    with segments(tmp_path / "run" / "journal")[0][1].open("a") as journal:
        journal.write('{"event": "dispatch"}\n')
    assert re.search(r"events-0+\.jsonl: the line of event \d+ was edited", heloco("report", tmp_path / "run").sentence)


# ---- words and paces


def test_paces_are_measured_and_time_is_real(run: Run, folder: Path) -> None:
    lines = tape(folder)
    table = workers_table(run.summary)
    for worker, pace_text in enumerate(table.columns[1].cells):
        worker_lines = [line for line in lines if line["worker"] == worker]
        measured = sum(line["time_s"] - line["start_s"] for line in worker_lines) / sum(
            line["inner_steps"] for line in worker_lines
        )
        assert pace_text == f"{measured:.3g} s"
        assert worker_charts.timeline([run]).views[0].content.rows[worker] == f"worker {worker} ({measured:.3g} s)"
    assert "as measured" in str(table.caption)
    data = page_data([run])
    page_text = json.dumps(data)
    assert "virtual" not in page_text and "real time (s)" in page_text and "real time" in data["tables"][0]["header"]
    assert " by quick" in worker_charts.timeline([run]).views[0].content.hover[0]


def test_a_simulation_keeps_its_words(unbroken: Any) -> None:
    [run] = read_runs([unbroken()])
    data = page_data([run])
    page_text = json.dumps(data)
    assert "virtual time (s)" in page_text and not any(word in page_text for word in ("real time", "measured", "took part"))
    assert [chart["name"] for chart in data["charts"] if chart["name"] in ("participation", "machines")] == []
    assert [table["title"] for table in data["tables"]] == ["Runs", "Settings"]


def test_many_seats_are_drawn_together_by_number() -> None:
    assert [group.label for group in seat_groups(3)] == ["worker 0", "worker 1", "worker 2"]
    many = seat_groups(30)
    assert many[0].label == "workers 0–2" and len(many) <= 12
    assert [worker for group in many for worker in group.workers] == list(range(30))


def test_the_terminal_tables_of_a_real_run(run: Run) -> None:
    table = contributions_table(run.summary)
    columns = {str(column.header): list(map(str, column.cells)) for column in table.columns}
    assert columns["machine"] == ["quick", "slow", "steady"] and columns["refused"] == ["1", "0", "0"]
    assert (
        columns["lately"][1] == "0.0%"
        and str(WINDOW) in str(table.caption)
        and [len(cells) for cells in columns.values()] == [3] * 9
    )


# ---- a run that evaluates nothing


def test_where_evaluations_would_stand_there_is_a_sentence(run: Run, folder: Path, tmp_path: Path) -> None:
    chart = scores([run])
    assert not chart.views and chart.about == NOTHING_EVALUATED and "the data is with the machines" in NOTHING_EVALUATED
    names = [chart["name"] for chart in page_data([run])["charts"]]
    assert names[:2] == ["scores", "training"] and {"participation", "staleness", "shares", "machines", "correction"} < set(names)
    assert "sources" not in names and overview.notes([run])[0] == "run stands at arrival 30 of 40."
    losses = [float(y) for line in worker_charts.training([run]).views[0].content.panels[0].lines for y in line.y]
    assert sorted(losses) == sorted(line["loss"] for line in tape(folder))
    result = heloco("report", folder, "--out", tmp_path / "page.html")
    assert result.code == 0 and NOTHING_EVALUATED in (tmp_path / "page.html").read_text(), result.err
    assert heloco("report", folder, shutil.copytree(folder, tmp_path / "other"), "--out", tmp_path / "two.html").code == 0


def test_such_runs_are_not_compared(folder: Path) -> None:
    assert "its data is with the machines. `heloco report` shows" in heloco("compare", folder, folder).sentence


def test_a_run_without_an_arrival_can_be_looked_at(tmp_path: Path) -> None:
    opened(tmp_path / "run").close()
    assert [chart["name"] for chart in page_data(read_runs([tmp_path / "run"]))["charts"]] == ["scores"]


def test_machines_that_report_no_loss(tmp_path: Path) -> None:
    service = opened(tmp_path / "run", arrivals=2)
    hand = Hand(service, "mute")
    for _ in range(2):
        hand.take()
        hand.hand_in(delta(1), loss=float("nan"), last_loss=float("nan"))
    service.close()
    [run] = read_runs([tmp_path / "run"])
    assert any("report no loss" in note for note in worker_charts.training([run]).views[0].notes)
    watched = heloco("watch", run.path, "--text")
    assert watched.code == 0 and "training loss not reported" in watched.out, watched.err
    assert "Nothing is evaluated in this run" in watched.out and "mute" in watched.out


def test_a_browser_shows_such_a_run_in_silence(folder: Path, tmp_path: Path, browser_path: str | None) -> None:
    (tmp_path / "page.html").write_text(render_report(page_data(read_runs([folder]))))
    with silent_page(browser_path) as page:
        page.goto((tmp_path / "page.html").as_uri())
        page.evaluate("heloco.drawAll()")
        card = page.locator("#chart-scores")
        assert NOTHING_EVALUATED in card.inner_text()
        assert not card.locator(".plot").is_visible() and not card.get_by_role("button", name="CSV").is_visible()
        lines = page.evaluate("heloco.cards.get('participation').plot.data.map(trace => trace.name)")
        assert (
            lines[:2] == ["took part", "at least (min_workers)"]
            and "paused" in lines
            and lines[-3:] == ["quick", "slow", "steady"]
        )
        titles = page.locator("#tables-first h2").all_inner_texts()
        assert titles == ["Runs", "Machines", "Pauses"] and page.locator("#tables-last h2").all_inner_texts() == ["Settings"]
        page.set_viewport_size({"width": 360, "height": 740})
        page.wait_for_timeout(300)
        page.evaluate("heloco.drawAll()")
        assert page.evaluate("document.documentElement.scrollWidth") == 360


# ---- rates


def test_rates_shares_and_staleness_are_those_of_the_last_arrivals(tmp_path: Path) -> None:
    clock = Clock()
    service = opened(tmp_path / "run", clock, participation=4, patience=1000.0)
    assert service.admin.status().per_minute is None
    quick, slow = Hand(service, "quick"), Hand(service, "slow")
    slow.take()
    for i in range(4):
        clock.now += 2.0
        quick.work(i)
    status = service.admin.status()
    assert status.per_minute == pytest.approx(30) and status.machines[0].per_minute == pytest.approx(30)
    clock.now += 2.0
    slow.hand_in(delta(9))
    machines = {m.name: m for m in service.admin.status().machines}
    assert service.admin.status().per_minute == pytest.approx(30)
    assert [machines[name].per_minute for name in ("quick", "slow")] == pytest.approx([22.5, 7.5])
    assert [machines[name].share for name in ("quick", "slow")] == [0.75, 0.25]
    assert [machines[name].staleness for name in ("quick", "slow")] == [0, 4]
    clock.now += 52.0  # nothing comes any more: the rate falls
    assert service.admin.status().per_minute == pytest.approx(4)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(machines_table(service.admin.status()))
    text = console.export_text()
    assert "2 contributed to the last 4 arrivals (4 a minute)" in text and "per min" in text
    [row] = [line.split() for line in text.splitlines() if line.strip().startswith("slow")]
    assert row[:7] == ["slow", "1", "waits", "5", "s", "1", "25%"] and row[7:9] == ["4.0", "1"]
    assert max(map(len, text.splitlines())) <= 80
    service.close()


# ---- over HTTPS, with loops of one's own


@pytest.fixture
def host(tmp_path: Path) -> Iterator[RunHost]:
    for part in ("uvicorn", "starlette", "httpx", "cryptography"):
        pytest.importorskip(part, reason=f"{part} is not installed")
    settings = config(paces=[1.0, 1.0], arrivals=12, inner_steps=3, min_workers=2, eval_every=4)
    listen = ListenConfig("127.0.0.1", 0, page="heloco.cli.page:page_of")
    host = RunHost.open(spec_of(settings, tmp_path / "run", listen=listen))
    yield host
    host.close()


def loop(address: str, token: str, name: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with package.join(address, model, optimizer, token=token, name=name, tell=lambda _: None) as run:
        for _ in range(10_000):
            x = torch.randn(8, 3)
            loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
            loss.backward()
            run.report(loss, samples=8)
            optimizer.step()
            optimizer.zero_grad()


def test_loops_that_join_over_https_are_watched_and_reported(host: RunHost, tmp_path: Path) -> None:
    token = host.token("worker")
    loops = [threading.Thread(target=loop, args=(host.address, token, name), daemon=True) for name in ("one", "two")]
    for thread in loops:
        thread.start()
    watched = heloco(
        "watch", host.address, "--token", host.token("viewer"), "--text"
    )  # from before there is a model to the run's end
    for thread in loops:
        thread.join(60)
    assert host.status().ended.kind == "finished" and watched.code == 0, watched.err
    progress_lines = re.findall(r"arrival +(\d+)/12  real \S+  ([\d,]+) samples  mean training loss (\d\.\d+)", watched.out)
    assert [arrival for arrival, *_ in progress_lines] == ["4", "8", "12"], watched.out
    assert "Nothing is evaluated in this run" in watched.out and "one" in watched.out and "two" in watched.out
    folder = tmp_path / "run"
    assert not (folder / "evals.jsonl").exists() or not evals(folder)
    result = heloco("report", folder, "--out", tmp_path / "page.html")
    assert result.code == 0, result.err
    [run] = read_runs([folder])
    table = cells(machine_tables([run])[0])
    assert set(table) == {"one", "two"} and sum(int(row["contributions"]) for row in table.values()) == 12
    assert all(float(row["s per step"]) > 0 for row in table.values())
    assert run.summary.units == 12 * 3 * 8 and overview.notes([run]) == []
