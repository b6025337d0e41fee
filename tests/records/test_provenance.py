"""What computed a run's numbers, and the sentence where that differs."""

from heloco.records.provenance import Provenance, note_if_mixed

GPU = Provenance(device="NVIDIA H200", precision="tf32", torch="2.11.0+cu130")
CPU = Provenance(device="cpu", precision="fp32", torch="2.13.0")


def test_runs_that_were_computed_alike_need_no_note() -> None:
    assert note_if_mixed([]) == note_if_mixed([GPU]) == note_if_mixed([CPU, CPU]) == ""


def test_a_mixture_is_named_with_its_numbers() -> None:
    note = note_if_mixed([GPU, CPU, GPU])
    assert note == "Not all of it was computed alike: NVIDIA H200, tf32, torch 2.11.0 (2); cpu, fp32, torch 2.13.0 (1)."
