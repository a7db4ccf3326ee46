"""The other processes of ``dpvision train``: they compute for rank 0, which runs the whole program.

Rank 0 is the run: it prepares, charges, draws noise, moves the weights and writes files, with the same code as a run of
one process. A follower loads the same data, receives the weights and the step, and sends back the clipped sums of its
micro-batches, the features of its images and the outputs of its test images. It has no ledger, no optimizer and no
folder, and prints nothing.

Rank 0 sends one message for each job, in this order: ``prepare``, ``weights``, any number of ``extract`` and
``features``, ``begin``, any number of ``step`` and ``evaluate``, and ``end``. The functions above ``Follower`` are rank
0's side of the first few.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from dpvision import __version__
from dpvision.config import RunConfig, parse_config
from dpvision.data import FeatureDraws, Features, ImageBatches, Normalisation
from dpvision.data.splits import RunSplits, load_splits, stored_normalisation
from dpvision.errors import ArgumentError
from dpvision.gradients.clipped_sum import assist_clipped_sum
from dpvision.inference.predict import shared_outputs
from dpvision.own_code import RunCode
from dpvision.privacy.randomness import Keys
from dpvision.ranks import RankError, Ranks
from dpvision.training.callbacks import RunCallback, stop_on_signals
from dpvision.training.notebook import ShownCertificate
from dpvision.training.run_fingerprint import Binding, code_digest, own_code_facts, run_binding
from dpvision.training.stages import (
    SplitFeatures,
    Stage,
    choose_gradient_plans,
    frozen_copy,
    loss_of,
    model_and_stages,
    set_trained,
    stage_features,
    synthetic_like,
)
from dpvision.training.trainer import Session, image_draws, keyed_randomness, stage_draws, trained_parameters
from dpvision.training.write_release import RunResult

CodeOf = Callable[[RunConfig], RunCode]

# ---- Rank 0's side


@contextmanager
def leading(ranks: Ranks) -> Iterator[None]:
    """Tell the followers if the block fails: they end too."""
    try:
        yield
    except BaseException as error:
        if ranks.several and not isinstance(error, RankError) and not ranks.all_know(error):
            with suppress(RankError):
                ranks.tell({"do": "end", "error": str(error) or type(error).__name__})
        raise


def require_shareable(config: RunConfig, ranks: Ranks) -> None:
    """Refuse what only one process can train.

    Raises:
        ArgumentError: the run has no privacy, or a baseline without privacy.
    """
    if ranks.several and (config.baseline or not config.privacy.enabled):
        what = "--baseline" if config.baseline else "--no-privacy"
        raise ArgumentError(f"{what} trains in one process: start it without torchrun.")


def agree_on_start(ranks: Ranks, *, asked: RunConfig | None, device: str, seed: int | None = None) -> None:
    """Require the same program and settings on every rank, before anything is read or written."""
    ranks.agree(
        {
            "settings": "" if asked is None else asked.digest(),
            "device": device,
            "seed": str(seed),
            "threads": str(torch.get_num_threads()),
            "torch": torch.__version__,
            "dpvision": __version__,
            "code": code_digest(),
        }
    )


def share_preparation(
    ranks: Ranks, config: RunConfig, keys: Keys, binding: Binding, *, places: Iterable[Path | None] = ()
) -> None:
    """Let the followers load data and model, and require that they are those of rank 0.

    Args:
        ranks: the processes.
        config: the run's configuration.
        keys: of the held-out split.
        binding: every fact on which the bits of a gradient depend; each rank computes its own.
        places: folders in which relative paths of the data are looked for.
    """
    if not ranks.several:
        return
    found = [str(place) for place in places if place is not None]
    ranks.tell({"do": "prepare", "config": config.to_json(), "run": binding["run"], "places": found, **_sent(keys)})
    ranks.settle()
    ranks.agree(binding)


def share_weights(ranks: Ranks, config: RunConfig, model: nn.Module) -> None:
    """Give the followers the pixel constants and all weights."""
    if ranks.several:
        ranks.tell({"do": "weights", "config": config.to_json()})
        ranks.spread(list(model.state_dict().values()))


def share_keys(session: Session) -> Session:
    """Give the followers the keys of the steps; return the session."""
    if session.ranks.several:
        session.ranks.tell({"do": "begin", **_sent(session.keys)})
    return session


def share_end(ranks: Ranks, result: RunResult) -> RunResult:
    """Let the followers end with the same result; return it."""
    if ranks.several:
        values = {"certificate": dict(result.certificate), "metrics": result.metrics, "seconds": result.train_seconds}
        ranks.tell({"do": "end", "run": str(result.run), "outcome": result.outcome, **values})
    return result


def _sent(keys: Keys) -> dict[str, Any]:
    return {"secret": keys.secret.hex(), "context": keys.context, "hand_seeded": keys.hand_seeded}


def _received(message: Mapping[str, Any]) -> Keys:
    return Keys(bytes.fromhex(message["secret"]), message["context"], hand_seeded=message["hand_seeded"])


# ---- The followers' side


@final
class Follower:
    """A process that computes for rank 0.

    Args:
        ranks: the processes of the run.
        code_of: gives the user's own model and loss for a configuration.
        device: torch's name of the device.
        data: images that are given in Python, as for ``train``.

    Guarantee: what leaves this process are clipped sums, features and outputs, and only to rank 0. It makes no release.
    """

    def __init__(self, ranks: Ranks, *, code_of: CodeOf, device: str, data: object | None = None) -> None:
        self._ranks, self._code_of, self._device, self._data = ranks, code_of, device, data
        self._config: RunConfig
        self._code: RunCode
        self._splits: RunSplits
        self._normalisation: Normalisation
        self._model: nn.Module
        self._stages: tuple[Stage, ...]
        self._features: SplitFeatures | None = None
        self._keys: Keys
        self._images: ImageBatches
        self._draws: ImageBatches | FeatureDraws | None = None
        self._stage = -1

    def follow(self) -> RunResult:
        """Do what rank 0 asks for, until it ends.

        Returns:
            The result of the run.

        Raises:
            RankError: the run failed. ``told`` says whether rank 0 knows the reason, and prints it.
        """
        jobs = {
            "prepare": self._prepare,
            "weights": self._take_weights,
            "extract": self._extract,
            "features": self._take_features,
            "begin": self._begin,
            "step": self._step,
            "evaluate": self._evaluate,
        }
        with stop_on_signals():  # rank 0 decides when to stop; a second signal ends this process
            while True:
                message = self._ranks.tell()
                if message["do"] == "end":
                    return _result(message)
                try:
                    jobs[message["do"]](message)
                except RankError:
                    raise
                except Exception as error:  # every job settles its errors: rank 0 knows it
                    raise RankError(f"rank {self._ranks.rank}: {error}", told=True) from error

    def _prepare(self, message: Mapping[str, Any]) -> None:
        binding: Binding = {}
        with self._ranks.settling():
            config = self._config = parse_config(message["config"])
            self._code = self._code_of(config)
            located = config.found_from([*map(Path, message["places"]), Path.cwd()])
            splits = self._splits = load_splits(located, _received(message), self._data)
            self._model, self._stages = model_and_stages(config, splits, self._device, self._code)
            loss = loss_of(config, splits, self._code)
            facts = own_code_facts(self._code, self._model, loss, synthetic_like(splits, self._device))
            choose_gradient_plans(self._model, self._stages, config, splits, self._device, self._code)
            binding = run_binding(config, splits, run_id=message["run"], device=self._device) | facts
        self._ranks.agree(binding)

    def _take_weights(self, message: Mapping[str, Any]) -> None:
        self._config = parse_config(message["config"])
        self._normalisation = stored_normalisation(self._config)
        self._ranks.spread(list(self._model.state_dict().values()))

    def _extract(self, message: Mapping[str, Any]) -> None:
        stage = self._feature_stage
        store = self._splits.train if message["train"] else self._splits.test
        with self._config.performance.chosen_kernels():
            stage_features(
                frozen_copy(stage.backbone or nn.Identity()),
                store,
                self._config,
                self._normalisation,
                mirrored=message["mirrored"],
                dtype=stage.dtype,
                device=self._device,
                callback=RunCallback(),
                ranks=self._ranks,
            )

    @property
    def _feature_stage(self) -> Stage:
        """The stage that trains on features: only the first one does."""
        return self._stages[0]

    def _take_features(self, message: Mapping[str, Any]) -> None:
        values = torch.empty(message["shape"], dtype=self._feature_stage.dtype)
        self._ranks.spread([values])
        self._features = SplitFeatures(Features(values), Features(values[:0]))

    def _begin(self, message: Mapping[str, Any]) -> None:
        self._keys = _received(message)
        self._images = image_draws(self._config, self._splits, self._normalisation, self._keys, self._device)

    def _step(self, message: Mapping[str, Any]) -> None:
        """Send this process's share of the clipped sum of a step."""
        stage, step = self._stages[message["stage"]], int(message["step"])
        if message["stage"] != self._stage:
            set_trained(self._model, stage)
            self._draws = stage_draws(stage, self._images, self._features, self._splits, self._device)
            self._stage = message["stage"]
        self._ranks.spread(list(trained_parameters(self._model, stage).values()))
        mechanism = self._config.mechanism
        with keyed_randomness(self._keys, step, self._device):
            try:
                batch = (self._draws or self._images).batch(step)
            except Exception as error:  # noqa: BLE001 - settled here in the place of the sum
                self._ranks.settle(error)
                return
            assist_clipped_sum(
                stage.network,
                loss_of(self._config, self._splits, self._code),
                batch,
                clip_norm=mechanism.clip_norm,
                clipping=mechanism.clipping,
                performance=self._config.performance,
                own_code=self._code.is_given,
                ranks=self._ranks,
            )

    def _evaluate(self, message: Mapping[str, Any]) -> None:
        own = dict(self._model.named_parameters())
        used = {name: torch.empty_like(own[name].detach()) for name in message["names"]}
        self._ranks.spread(list(used.values()))
        images, apply = self._splits.test.images, self._normalisation.apply
        shared_outputs(self._model, images, apply, parameters=used, ranks=self._ranks)


def _result(message: Mapping[str, Any]) -> RunResult:
    """Return the result that rank 0 told, or raise its error."""
    if "error" in message:
        raise RankError(f"rank 0: {message['error']}", told=True)
    certificate = ShownCertificate(message["certificate"])
    return RunResult(Path(message["run"]), message["outcome"], certificate, message["metrics"], message["seconds"])
