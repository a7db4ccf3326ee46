"""What computes a sum decides its last bits: a resumed run computes alike, or forks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dpvision import kernels as native
from dpvision import models
from dpvision.config import Performance
from dpvision.gradients import plan
from dpvision.training import run_fingerprint
from dpvision.training.resume import resume_run
from dpvision.training.start import start_run
from dpvision.training.trainer import take_step
from tiny_runs import CLASSES, SIDE, tiny_config, write_images


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    return write_images(tmp_path / "pictures.npz")


@pytest.mark.parametrize("kernels", ["auto", "plain"])
def test_how_gradients_are_computed_is_settled_on_everybodys_weights(
    kernels: str, tmp_path: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, seen = plan._make_plan, []

    def watched(model: Any, *arguments: Any) -> Any:
        seen.append({name: value.clone() for name, value in model.state_dict().items()})
        return original(model, *arguments)

    monkeypatch.setattr(plan, "_make_plan", watched)
    config = tiny_config(pictures, performance={"kernels": kernels})
    session, _ = start_run(config, tmp_path / "run", seed=3, device="cpu")
    for _ in range(5):
        take_step(session)
    session.save_checkpoint()
    session.folder.close()
    session, _ = resume_run(tmp_path / "run", allow_fork=False, device="cpu")
    take_step(session)
    public = models.create("linear", num_classes=CLASSES, in_channels=1, image_size=SIDE, seed=0).state_dict()
    assert len(seen) == 2
    for weights in seen:
        assert all(torch.equal(weights[name], value) for name, value in public.items())
    assert not all(torch.equal(session.model.state_dict()[name], value) for name, value in public.items())


@pytest.mark.parametrize(
    ("fact", "module", "name"),
    [
        ("kernels", native, "identity"),
        ("code", run_fingerprint, "code_digest"),
        ("processor", run_fingerprint, "processor"),
    ],
)
def test_other_kernels_or_other_code_make_a_fork(
    fact: str, module: object, name: str, tmp_path: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, _ = start_run(tiny_config(pictures), tmp_path / "run", seed=3, device="cpu")
    take_step(session)
    session.save_checkpoint()
    session.folder.close()
    monkeypatch.setattr(module, name, lambda: "something else, which adds up in another order")
    session, notes = resume_run(tmp_path / "run", allow_fork=False, device="cpu")
    assert session.fork == 1
    assert any(note.startswith(f"{fact} changed: the run forks") for note in notes)


def test_a_digest_of_the_code_sees_every_module_that_computes(tmp_path: Path) -> None:
    def changed(name: str) -> bool:
        before = run_fingerprint.code_digest(tmp_path)
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
        run_fingerprint.code_digest.cache_clear()
        return run_fingerprint.code_digest(tmp_path) != before

    try:
        for name in (
            "privacy/noise.py",
            "gradients/clipped_sum.py",
            "gradients/fast/fused_conv.py",
            "data/batches.py",
            "kernels/winograd.py",
        ):
            assert changed(name)
        assert not changed("release/report_style.py")
        assert run_fingerprint.code_digest(tmp_path) != run_fingerprint.code_digest(
            Path(run_fingerprint.__file__).parent.parent
        )
    finally:
        run_fingerprint.code_digest.cache_clear()


def test_with_compiled_kernels_every_resumption_is_a_fork(tmp_path: Path, pictures: Path) -> None:
    config = tiny_config(pictures).model_copy(update={"performance": Performance(kernels="compiled")})
    session, _ = start_run(config, tmp_path / "run", seed=3, device="cpu")
    take_step(session)
    session.save_checkpoint()
    session.folder.close()
    session, notes = resume_run(tmp_path / "run", allow_fork=False, device="cpu")
    assert session.fork == 1
    assert any(note.startswith("compiled kernels changed: the run forks") for note in notes)
