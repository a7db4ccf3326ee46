"""``dpvision bench``: everybody takes part, ratios follow from the raw seconds, failures are told, pages are whole."""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from benchmarks import Figures, Row, Settings, Target, Workload, memory, run, suite
from benchmarks import Result as Measured
from benchmarks.bench_command import app
from benchmarks.breakdown import PARTS, Watch, breakdown
from benchmarks.contender import Contender
from benchmarks.contenders import ALL, contender, default, named
from benchmarks.figures import joined
from benchmarks.machine import machine, step_flops, threads
from benchmarks.memory import peak_memory
from benchmarks.page import KEPT, write_page
from benchmarks.suites import SUITES, Item
from benchmarks.timing import reason_of, time_contenders
from dpvision import models
from dpvision.errors import ArgumentError, DPVisionError
from dpvision.kernels.memory import give_back_freed_memory

pytestmark = pytest.mark.slow  # they measure, and start many processes

TINY = Workload.of("shoefit_cnn", batch=4)
EVERYBODY = [one.name for one in ALL if not one.compiles and one.name != "jax-privacy"]


def silent(_: str) -> None:
    pass


def dpvision(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)])


@pytest.fixture(scope="module")
def tiny_run() -> dict[str, Any]:
    result = dpvision("--batch", "4", "--repeats", "2", "--threads", "1", "--no-memory", "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_options_of_the_model_are_part_of_the_workload() -> None:
    relu, mish = (Workload.of("resnet9", batch=4, options=f"activation={name}") for name in ("relu", "mish"))
    kinds = [{type(module) for module in workload.make_model().modules()} for workload in (relu, mish)]
    assert [torch.nn.ReLU in each for each in kinds] == [True, False]
    assert relu.title == "resnet9 (activation=relu), 32 px, batch 4"
    with pytest.raises(ArgumentError, match="resnet9 has no option colour"):
        Workload.of("resnet9", batch=4, options="colour=red")
    result = dpvision(
        "--option", "activation=tanh", "--batch", "2", "--repeats", "1", "--contenders", "eager", "--json"
    )
    assert json.loads(result.stdout)["results"][0]["workload"]["options"] == "activation=tanh"


def rows_of(figures: dict[str, Any]) -> dict[str, dict[str, Any]]:
    (result,) = figures["results"]
    return {row["contender"]: row for row in result["rows"]}


def test_everybody_takes_part_and_nobody_fails_on_a_small_network(tiny_run: dict[str, Any]) -> None:
    rows = rows_of(tiny_run)
    assert list(rows) == EVERYBODY
    without_kernels = {"dpvision-native", "dpvision-unclipped"}  # refused where there is no compiler
    assert not {name for name, row in rows.items() if row["fails"]} - without_kernels
    assert all(len(row["all_seconds"]) == 2 for row in rows.values() if not row["fails"])


def test_ratios_follow_from_the_raw_seconds_and_the_ordinary_step_is_exactly_one(tiny_run: dict[str, Any]) -> None:
    rows = {name: row for name, row in rows_of(tiny_run).items() if not row["fails"]}
    medians = {name: statistics.median(row["all_seconds"]) for name, row in rows.items()}
    fastest = min(medians["eager"], medians["channels-last"])
    assert rows["eager"]["ratio"] == 1.0
    for name, row in rows.items():
        assert row["seconds"] == medians[name]
        assert row["ratio"] == medians[name] / medians["eager"]
        assert row["ratio_to_fastest_ordinary"] == medians[name] / fastest
        assert row["gflops"] == pytest.approx(tiny_run["results"][0]["flops"] / medians[name] / 1e9)
        assert row["share_of_peak"] == pytest.approx(row["gflops"] / tiny_run["peak_gflops"])


def test_privacy_costs_what_the_private_step_takes_beyond_the_unclipped_one() -> None:
    result = measured({"eager": 1.0, "dpvision-native": 0.42, "dpvision-unclipped": 0.40})
    assert result.privacy_cost == pytest.approx(0.05)
    assert measured({"eager": 1.0, "dpvision-native": 0.42}).privacy_cost is None


def test_the_breakdown_names_every_part_and_sees_the_engine_at_work(tiny_run: dict[str, Any]) -> None:
    parts = tiny_run["results"][0]["breakdown"]
    assert tuple(parts) == PARTS
    # A renamed function of the engine would leave its part at zero.
    assert all(seconds > 0 for seconds in parts.values()), parts


def test_an_inner_part_is_not_charged_to_the_outer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 11.0, 12.0])
    monkeypatch.setattr("benchmarks.breakdown.time.perf_counter", lambda: next(clock))
    watch = Watch()
    with watch.part("outer"), watch.part("inner"):
        pass
    assert watch.seconds == {"outer": 1.0 + 1.0, "inner": 10.0}


def test_watching_leaves_the_interpreter_as_it_was() -> None:
    before = sys.getprofile()
    breakdown(Workload.of("linear", batch=2), kernels="plain", repeats=1)
    assert sys.getprofile() is before


def test_the_machine_is_named_by_features_only(tiny_run: dict[str, Any]) -> None:
    assert set(tiny_run["machine"]) <= {"cores", "simd", "l2_cache", "l3_cache", "torch"}
    assert tiny_run["machine"] == machine()


def test_threads_are_as_asked_for_and_put_back(tiny_run: dict[str, Any]) -> None:
    before = torch.get_num_threads()
    with threads(before + 1) as count:
        assert torch.get_num_threads() == count == before + 1
    assert torch.get_num_threads() == before
    assert tiny_run["threads"] == 1


def test_operations_grow_with_the_rows_and_are_those_of_the_layers() -> None:
    linear = Workload.of("linear", batch=8, image_size=1, in_channels=2048)
    # Forward 2·N·D·O, weight gradient the same; the input needs no gradient.
    assert step_flops(linear) == 2 * (2 * 8 * 2048 * 10)
    assert step_flops(replace(linear, views=3)) == 3 * step_flops(linear)


def test_each_contender_has_one_turn_a_round_in_changing_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.timing._MOST_STEPS", 1)
    order: list[str] = []
    crowd = [made_up(name, lambda name=name: order.append(name)) for name in "abcd"]
    times = time_contenders(crowd, TINY, repeats=3, progress=silent)
    assert order[:4] == list("abcd"), "warm-up first"
    rounds = [order[start : start + 4] for start in range(4, len(order), 4)]
    assert [sorted(one) for one in rounds] == [list("abcd")] * 3
    assert len({tuple(one) for one in rounds}) > 1
    assert {name: len(seconds) for name, seconds in times.seconds.items()} == dict.fromkeys("abcd", 3)


@pytest.mark.parametrize(("seconds", "steps"), [(0.2, 1), (0.1, 1), (0.04, 3), (0.0, 50)])
def test_short_steps_are_taken_several_at_a_time(seconds: float, steps: int) -> None:
    """A step that tells its own seconds: turns last a tenth of a second, but no more than 50 steps."""
    told = itertools.chain([9.0], itertools.cycle([seconds]))  # the warm-up's does not count
    taken: list[float] = []
    times = time_contenders(
        [made_up("one", lambda: taken.append(next(told)) or taken[-1])], TINY, repeats=2, progress=silent
    )
    assert len(taken) == 1 + 2 * steps
    assert times.seconds["one"] == pytest.approx([seconds, seconds])


@pytest.mark.parametrize(
    ("seconds", "facts", "made"),
    [(0.05, {}, 3), (0.2, {}, 1), (0.05, {"kind": "peer"}, 1), (0.05, {"compiles": True}, 1)],
)
def test_contenders_with_short_steps_are_made_anew_for_every_round(
    seconds: float, facts: dict[str, Any], made: int
) -> None:
    """Their place in memory is luck; peers and compilers take too long."""
    count: list[None] = []

    def make(_: Workload) -> Callable[[], float]:
        count.append(None)
        return lambda: seconds

    one = replace(made_up("one", lambda: None), **{"kind": "private", "make": make, **facts})
    times = time_contenders([one], TINY, repeats=3, progress=silent)
    assert len(count) == made
    assert len(times.seconds["one"]) == 3


@pytest.mark.parametrize("last_good_step", [0, 2])
def test_a_failing_contender_is_a_row_that_says_why_and_stops_nobody(last_good_step: int) -> None:
    taken: list[None] = []

    def fragile() -> None:
        if len(taken) >= last_good_step:
            raise RuntimeError("no such thing in /home/somebody/secret/place.py\nmore")
        taken.append(None)

    crowd = [made_up("good", lambda: None), made_up("fragile", fragile)]
    times = time_contenders(crowd, TINY, repeats=3, progress=silent)
    assert times.failures == {"fragile": "RuntimeError: no such thing in …"}
    assert set(times.seconds) == {"good"}
    assert len(times.seconds["good"]) == 3


def test_a_reason_is_one_short_line() -> None:
    assert len(reason_of(ValueError("x" * 1000))) <= 160
    assert reason_of(ValueError()) == "ValueError"


def test_memory_is_measured_in_a_process_of_its_own() -> None:
    workload = Workload.of("linear", batch=64, image_size=1, in_channels=2**16)
    found = peak_memory("eager", workload, num_threads=1)
    assert found.fails is None
    # Gradient and momentum, each as large as the weights; model and data were there before.
    assert found.added_bytes is not None
    assert found.added_bytes >= 2 * 10 * 2**16 * 4


def test_memory_counts_what_a_step_holds_and_not_the_code_that_it_reads_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 64 << 20
    (tmp_path / "library").write_bytes(bytes(size))
    kept: list[object] = []

    def reads() -> None:
        mapped = np.memmap(tmp_path / "library", dtype=np.uint8, mode="r")
        kept.append((mapped, int(mapped.sum())))

    def holds() -> None:
        kept.append(np.ones(size, dtype=np.uint8))

    def measured_for(step: Callable[[], None]) -> int:
        monkeypatch.setattr("benchmarks.memory.contender", lambda _: SimpleNamespace(make=lambda _: step))
        give_back_freed_memory()  # what other tests freed would be used again
        return memory.added_bytes("any", TINY)

    assert measured_for(reads) < size / 4
    assert measured_for(holds) >= 2 * size


def test_a_contender_that_cannot_run_has_no_memory_but_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    asked = {"contender": "opacus-ghost", "workload": asdict(replace(TINY, views=2)), "threads": 1}
    memory.main(json.dumps(asked))
    answer = json.loads(capsys.readouterr().out)
    assert "one row per unit" in answer["fails"]
    assert "bytes" not in answer


def test_a_process_that_dies_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.memory.sys.executable", "/bin/false")
    assert peak_memory("eager", TINY, num_threads=1).fails == "ended with exit code 1"


def test_views_are_rows_of_one_unit_and_the_ordinary_step_has_as_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.measure.peak_flops", lambda: 1e9)
    workload = replace(TINY, views=3)
    inputs, targets = workload.make_rows()
    assert inputs.shape[0] == targets.shape[0] == workload.num_rows == 12
    names = ("dpvision-plain", "opacus-hooks", "opacus-ghost")
    settings = Settings(contenders=names, repeats=1, memory=False, breakdown=False)
    (result,) = run([Item(suite="x", workload=workload)], settings, silent).results
    failed = {row.contender for row in result.rows if row.fails}
    assert failed == {"opacus-ghost"}


def test_opacus_averages_views_before_it_clips() -> None:
    from benchmarks.contenders_opacus import _average_views

    layer = torch.nn.Linear(1, 1, bias=False)
    layer.weight.grad_sample = torch.arange(6.0).view(6, 1, 1)  # pyright: ignore[reportAttributeAccessIssue]
    _average_views(layer, 3)
    assert layer.weight.grad_sample.flatten().tolist() == [1.0, 4.0]  # pyright: ignore[reportAttributeAccessIssue]


def test_segmentation_has_one_loss_per_picture() -> None:
    workload = Workload.of("linknet9", batch=2, image_size=16)
    inputs, masks = workload.make_rows()
    losses = workload.row_losses(workload.make_model()(inputs), masks)
    assert losses.shape == (2,)


def test_the_reference_always_takes_part_and_the_order_is_the_usual_one() -> None:
    assert [one.name for one in named(["opacus-hooks", "dpvision-plain"])] == [
        "eager",
        "dpvision-plain",
        "opacus-hooks",
    ]
    assert not any(one.compiles for one in default(compile_=False))
    assert any(one.compiles for one in default(compile_=True))


def test_a_suite_can_be_cut_down_to_some_of_its_models(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Item] = []

    def watched(items: list[Item], *_: Any) -> Figures:
        seen.extend(items)
        raise ArgumentError("enough")

    monkeypatch.setattr("benchmarks.run", watched)
    assert dpvision("--suite", "quick,targets", "--model", "scaleresnet9,unet9").exit_code == 2
    assert [item.workload.title for item in seen] == [
        "scaleresnet9, 32 px, batch 8",
        "scaleresnet9, 32 px, batch 256",
        "unet9, 128 px, batch 32",
    ]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("--model nonsense", "nonsense"),
        ("--contenders eager,nonsense", "nonsense"),
        ("--suite nonsense", "targets"),
        ("--batch 0", "batch"),
        ("--views 0", "views"),
        ("--repeats 0", "repeats"),
        ("--threads 0", "threads"),
        ("--image-size 0", "--image-size"),
        ("--microbatch-size 0", "--microbatch-size"),
        ("--suite quick --batch 3", "batch"),
        ("--suite quick --model resnet18", "resnet18"),
        ("--model resnet9 --image-size 3", "can't take such rows"),
        ("--write nowhere/x.md", "folder"),
        ("--write page.html", "Markdown"),
        ("--read nowhere.json", "nowhere.json"),
    ],
)
def test_nonsense_is_one_line_with_exit_code_2(
    arguments: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("benchmarks.measure.peak_flops", lambda: 1e9)
    result = dpvision(*arguments.split())
    assert result.exit_code == 2, result.output
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert told in line
    assert not list(tmp_path.iterdir())


def test_every_suite_can_be_built_and_the_catalogue_leaves_nobody_out() -> None:
    for name in SUITES:
        items = suite(name)
        assert {item.suite for item in items} == {name}
        assert all(contender(one) for item in items for one in item.contenders or ())
    assert len(suite("targets")) == 8
    assert all(item.target is not None for item in suite("targets"))
    assert [item.workload.model for item in suite("catalogue")] == [entry.name for entry in models.catalogue()]
    batches = [item.workload.batch for item in suite("scaling")]
    assert (min(batches), max(batches)) == (256, 16_384)


def made_up(name: str, step: Any) -> Contender:
    return Contender(name=name, label=name, kind="peer", make=lambda _: step)


def measured(seconds: dict[str, float], *, memory: dict[str, int] | None = None, **facts: Any) -> Measured:
    kept = {"suite": "targets", "workload": TINY, "flops": 10**9, **facts}
    rows = tuple(
        Row(
            contender=name,
            label=contender(name).label,
            kind=contender(name).kind,
            all_seconds=(value,),
            memory_bytes=(memory or {}).get(name),
        )
        for name, value in seconds.items()
    )
    return Measured(rows=rows, **kept)


def made_up_figures(*results: Measured) -> Figures:
    return Figures(
        machine={"cores": 2, "simd": "AVX2", "torch": "2"}, threads=2, repeats=7, peak_flops=1e11, results=results
    )


@pytest.mark.parametrize(
    ("native", "memory", "plain", "met"),
    [
        (0.40, 80, 1.1, True),
        (0.41, 80, 1.1, False),
        (0.40, 81, 1.1, False),
        (0.40, 80, 1.2, False),
        (0.40, None, 1.1, None),
        (0.41, None, 1.1, False),
    ],
)
def test_a_target_is_met_only_if_time_memory_and_the_plain_path_are(
    native: float, memory: int | None, plain: float, met: bool | None
) -> None:
    bytes_of = {"eager": 100} if memory is None else {"eager": 100, "dpvision-native": memory}
    result = measured(
        {"eager": 1.0, "dpvision-native": native, "dpvision-plain": plain},
        memory=bytes_of,
        target=Target(ratio=0.40, memory_ratio=0.8, plain_ratio=1.15),
    )
    assert result.met is met


def test_below_the_peers_means_below_each_of_them() -> None:
    seconds = {"eager": 1.0, "dpvision-native": 0.5, "opacus-hooks": 0.6, "opacus-ghost": 0.4}
    memory = {"eager": 5, "dpvision-native": 5, "opacus-hooks": 9, "opacus-ghost": 6}
    result = measured(seconds, memory=memory)
    assert (result.fastest_peer, result.faster_than_peers, result.smaller_than_peers) == ("opacus-ghost", False, True)


def a_page() -> Figures:
    seconds = {"eager": 1.0, "channels-last": 0.8, "dpvision-native": 0.4, "dpvision-plain": 1.1, "opacus-hooks": 2.0}
    memory = {"eager": 100 << 20, "dpvision-native": 70 << 20}
    target = Target(ratio=0.5, memory_ratio=0.8)
    failed = Row(contender="opacus-ew", label="Opacus, expanded weights", kind="peer", fails="RuntimeError: no")
    first = measured(seconds, memory=memory, target=target, breakdown={"forward": 0.3, "noise": 0.1})
    grown = measured(seconds, memory=memory, suite="scaling", workload=replace(TINY, batch=1024))
    return made_up_figures(replace(first, rows=(*first.rows, failed)), grown)


def test_a_page_holds_tables_chart_command_and_what_failed(tmp_path: Path) -> None:
    write_page(a_page(), tmp_path / "benchmarks.md")
    text = (tmp_path / "benchmarks.md").read_text()
    assert "python -m benchmarks --suite targets,scaling --threads 2 --repeats 7" in text
    row = (
        "| shoefit_cnn, 28 px, batch 4 | 1,000 | 0.80 (channels-last) | **0.40** | 0.50 | 1.10 | 2.00 (opacus-hooks) |"
    )
    assert row + " 0.70 | time yes | ≤ 0.5, memory ≤ 0.8 | met |" in text
    assert "| shoefit_cnn, 28 px, batch 4 | 75% | 25% |" in text
    assert "| 1,024 | 1,000 | 400 | 390.6 | 100 | 70 |" in text
    assert "Opacus, expanded weights: RuntimeError: no" in text
    for table in text.split("\n\n"):
        widths = {line.count("|") for line in table.splitlines() if line.startswith("|")}
        assert len(widths) <= 1, table
    chart = (tmp_path / "benchmarks.svg").read_text()
    assert "(benchmarks.svg)" in text
    assert "fastest peer" in chart
    assert Figures.from_dict(json.loads((tmp_path / "benchmarks.json").read_text())) == a_page()


def test_the_same_figures_give_the_same_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_page(a_page(), tmp_path / name / "x.md")
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()


def test_notes_below_the_line_stay_and_everything_above_it_is_new(tmp_path: Path) -> None:
    path = tmp_path / "x.md"
    path.write_text(f"old figures\n{KEPT}\n\nWhat holds it back: memory.\n")
    write_page(a_page(), path)
    text = path.read_text()
    assert text.startswith("# Benchmarks")
    assert "old figures" not in text
    assert text.endswith(f"{KEPT}\n\nWhat holds it back: memory.\n")


def test_a_failed_run_leaves_the_old_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.md"
    path.write_text("old")
    monkeypatch.setattr("benchmarks.measure.peak_flops", lambda: 1e9)
    assert dpvision("--model", "resnet9", "--image-size", "3", "--write", path).exit_code == 2
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"x.md": "old"}


def test_earlier_figures_can_be_read_joined_and_written(tmp_path: Path, tiny_run: dict[str, Any]) -> None:
    other = json.loads(json.dumps(tiny_run))
    other["results"][0]["workload"]["batch"] = 5
    for name, figures in {"a": tiny_run, "b": other}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(figures))
    result = dpvision("--read", tmp_path / "a.json", "--read", tmp_path / "b.json", "--write", tmp_path / "x.md")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("shoefit_cnn, 28 px, batch 4\n") == 1
    assert result.stdout.count("shoefit_cnn, 28 px, batch 5\n") == 1
    assert "--model shoefit_cnn --batch 4" in (tmp_path / "x.md").read_text()


def test_the_chart_of_a_long_page_shows_its_first_suites_and_the_tables_show_all(tmp_path: Path) -> None:
    one = a_page().results[0]
    suites = [("targets", 8), ("peers", 3), ("catalogue", 30)]
    results = [
        replace(one, suite=suite, workload=replace(one.workload, batch=1000 + 100 * i + j))
        for i, (suite, count) in enumerate(suites)
        for j in range(count)
    ]
    write_page(replace(a_page(), results=tuple(results)), tmp_path / "x.md")
    chart, text = (tmp_path / "x.svg").read_text(), (tmp_path / "x.md").read_text()
    assert "batch 1,102" in chart
    assert "batch 1,200" not in chart
    assert "batch 1,229" in text


def test_a_workload_that_was_measured_again_has_its_newest_figures() -> None:
    first = a_page()
    again = replace(first, results=tuple(replace(one, flops=one.flops + 1) for one in first.results[:1]))
    both = joined([first, again])
    assert [one.workload for one in both.results] == [one.workload for one in first.results]
    assert [one.flops - old.flops for one, old in zip(both.results, first.results, strict=True)] == [
        1,
        *[0] * (len(first.results) - 1),
    ]


def test_joined_figures_keep_the_workloads_of_a_suite_together() -> None:
    first = a_page()
    larger = replace(first.results[0], workload=replace(first.results[0].workload, batch=7))
    suites = [one.suite for one in joined([first, replace(first, results=(larger,))]).results]
    assert len(suites) == len(first.results) + 1
    assert suites == sorted(suites, key=suites.index)


def test_figures_of_two_machines_are_not_joined() -> None:
    with pytest.raises(ArgumentError, match="one machine"):
        joined([a_page(), replace(a_page(), threads=1)])


@pytest.mark.parametrize("content", ["nonsense", "[]", "{}", '{"machine": 1, "threads": 1}'])
def test_a_file_that_is_not_figures_is_refused(content: str, tmp_path: Path) -> None:
    from benchmarks.figures import load

    (tmp_path / "x.json").write_text(content)
    with pytest.raises(DPVisionError):
        load(tmp_path / "x.json")


@pytest.mark.slow
def test_compiled_contenders_run_or_say_why_not() -> None:
    settings = Settings(contenders=("compiled", "dpvision-compiled"), repeats=1, memory=False, breakdown=False)
    (result,) = run([Item(suite="x", workload=TINY)], settings, silent).results
    for name in ("compiled", "dpvision-compiled"):
        row = result.row(name)
        assert row is not None
        assert (row.fails is None) == (len(row.all_seconds) == 1)
