"""The study: its report is what its results say, its rules are those of the protocol, its commands exist."""
import json

import pytest

import decode
import eval as evaluate
import report
import study
import swap
import tabom
from tests.tiny import HERE


def write_results(folder, seed, **measures):
    """{folder: {name: {key: share}}} as study.py collects it."""
    found = {}
    for measure, by_name in measures.items():
        found[measure] = {name: {"accuracy": {key: {"share": share} for key, share in shares.items()}}
                          for name, shares in by_name.items()}
    (folder / f"base{seed}.json").write_text(json.dumps(found))


def test_report_is_what_the_results_say(monkeypatch):
    monkeypatch.chdir(HERE)
    assert report.study() == (HERE / "study" / "report.md").read_text()


@pytest.mark.parametrize("xs, above, want", [
    ([1, 2, 3, 2], 0, "shown"), ([1, 4, -1, 3], 0, "not shown"), ([-1, -2, -3, -2], 0, "contrary"),
    ([-1, -0.9, -1.1, -1], -2, "shown"),
    ([1, 2, 3], 0, "not shown"), ([1, 2, 2], 0, "shown"), ([5, 5.1], 0, "too few bases"), ([], 0, "not run")])
def test_a_verdict_needs_three_bases_and_the_errors_of_students_t(xs, above, want):
    assert report.verdict(dict(zip(report.BASES, xs, strict=False)), above) == want


def test_differences_are_paired_and_a_part_that_was_not_run_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    for seed, base, mine in ((1, 0.5, 0.6), (2, 0.4, 0.6), (3, 0.3, None)):
        names = {"base": base} if mine is None else {"base": base, "mine": mine}
        write_results(tmp_path, seed, long={name: {"test-long/2": x, "test-long/4": 0.5} for name, x in names.items()})
    assert report.gain("mine", "long, 2") == {1: pytest.approx(10), 2: pytest.approx(20)}
    assert report.gain("mine", *report.PARALLEL) == {1: pytest.approx(5), 2: pytest.approx(10)}
    assert report.show(report.gain("mine", "long, 2")) == "+15.0 ± 5.0 (2 bases)"
    assert report.show(report.gain("yours", "long, 2")) == "not run"


def test_the_best_rate_on_validation_is_selected_and_the_lower_of_equals(monkeypatch, tmp_path):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    scores = {"gt": (0.1, 0.2, 0.3, 0.3), "control": (0.5, 0.5, 0.5, 0.5), "sampled-ce": (0.1, 0.2, None, None),
              "greedy-ce": (0.2, 0.4, 0.2, 0.1)}
    names = {f"{label}@{rate}": {"val-long/2": x} for label, xs in scores.items()
             for rate, x in zip(report.RATES, xs, strict=True) if x is not None}
    for seed in report.CHOSEN_ON:
        write_results(tmp_path, seed, val=names)
    assert report.select() == {"gt": "1e-3", "control": "1e-4", "sampled-ce": "3e-4", "greedy-ce": "3e-4"}


def test_every_run_of_the_study_has_flags_that_exist():
    for flags in study.DATA.values():
        decode.flags().parse_args(flags.format(base="b").split())
    for name, flags in study.MEASURES.items():
        script = swap if name == "swap" else evaluate
        script.parse_args(["--model", "m", *flags.format(base="b").split()])
    best = dict.fromkeys(report.GRID, "1e-3")
    names = {name for steps in study.parts(best).values() for _, some, _ in steps for name in some}
    names |= {f"{label}@{rate}" for label in report.GRID for rate in report.RATES}
    for name in names:
        data, flags = study.RUNS[name.split("@")[0]]
        tabom.parse_args(["--data", data, *flags.split()])


def test_what_is_in_the_results_is_not_run_again(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(study, "train", lambda out, seed, name: calls.append(name) or out)
    monkeypatch.setattr(study, "run", lambda out, *words: calls.append(" ".join(map(str, words))))
    names = ["sampled-ce@1e-3", "again-ce@1e-3"]
    study.job(tmp_path, 1, names, ["long"], True)
    first, measured, second, again = calls
    assert [first, second] == names and "/base1/model " in measured and "--no-base" not in measured
    assert measured.startswith("eval.py ")
    assert "/base1/round1-ce " in again and "--no-base" in again             # the second round has another model
    write_results(tmp_path, 1, long=dict.fromkeys(["base", *names], {}))
    calls.clear()
    study.job(tmp_path, 1, names, ["long"], True)
    assert calls == []
    study.job(tmp_path, 1, ["sampled-ce@1e-3", "sampled-tabom@1e-3"], ["long"], False)
    assert calls[0] == "sampled-tabom@1e-3" and len(calls) == 2 and "sampled-ce" not in calls[1]
    study.job(tmp_path, 1, ["sampled-ce@1e-3"], ["swap"], False)
    assert calls[-1].startswith("study/swap.py ") and "--no-base" in calls[-1]
