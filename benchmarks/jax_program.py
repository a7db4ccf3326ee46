"""A model as a list of operations that another framework can run: ``program.json`` and ``arrays.npz`` in a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind

from benchmarks.contender import CLIP_NORM, LEARNING_RATE, MOMENTUM, NOISE_MULTIPLIER, NoSuchModelError
from benchmarks.workload import Workload

_SHAKEN: Final = 0.02


def write_program(workload: Workload, folder: Path) -> None:
    """The workload's model, its weights, its rows by unit, and the outputs that PyTorch has for them."""
    model, (rows, targets) = _shaken(workload.make_model()), workload.make_rows()
    # One unit's rows: every framework that clips sees them alone.
    program = torch.export.export(model, (rows[: workload.views],), strict=False)
    with torch.no_grad():
        arrays = {"rows": rows, "targets": targets, "expected": model(rows)}
    arrays = {name: tensor.unflatten(0, (workload.batch, workload.views)) for name, tensor in arrays.items()}
    held = _tensors(program)
    named: dict[str, Any] = {name: _array(tensor) for name, tensor in {**held, **arrays}.items()}
    np.savez(folder / "arrays.npz", **named)
    content = {
        **_operations(program),
        "trained": [name for name, tensor in held.items() if tensor.requires_grad],
        "batch": workload.batch,
        "microbatch_size": workload.microbatch_size,
        "clip_norm": CLIP_NORM,
        "noise_multiplier": NOISE_MULTIPLIER,
        "learning_rate": LEARNING_RATE,
        "momentum": MOMENTUM,
    }
    (folder / "program.json").write_text(json.dumps(content))


def _shaken(model: nn.Module) -> nn.Module:
    """Move every weight a little: with biases at zero and gains at one, outputs agree even if those are forgotten."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=_SHAKEN)
    return model


def _tensors(program: torch.export.ExportedProgram) -> dict[str, Tensor]:
    """Parameters, buffers and constants by the names that the program's nodes have for them."""
    places = {**program.constants, **program.state_dict}
    inputs = program.graph_signature.input_specs
    return {one.arg.name: places[str(one.target)] for one in inputs if one.kind is not InputKind.USER_INPUT}


def _array(tensor: Tensor) -> np.ndarray[Any, Any]:
    values = tensor.detach()
    return (values.float() if values.is_floating_point() else values.int()).numpy()


def _operations(program: torch.export.ExportedProgram) -> dict[str, Any]:
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    return {
        "input": next(iter(program.graph_signature.user_inputs)),
        "output": next(iter(program.graph_signature.user_outputs)),
        "nodes": [
            {
                "name": node.name,
                "operation": str(node.target),
                "arguments": _plain(node.args),
                "named": {name: _plain(value) for name, value in node.kwargs.items()},
            }
            for node in nodes
        ],
    }


def _plain(argument: Any) -> Any:
    """An argument for JSON: another node by its name, a list, or a plain value."""
    if isinstance(argument, fx.Node):
        return {"node": argument.name}
    if isinstance(argument, list | tuple):
        return [_plain(one) for one in argument]
    if argument is None or isinstance(argument, bool | int | float | str):
        return argument
    raise NoSuchModelError(f"an argument of type {type(argument).__name__}")
