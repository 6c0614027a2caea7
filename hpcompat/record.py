"""What a training computes, recorded to the bit for ``hpcompat compare``: on any framework and number of ranks alike.

A recording is a directory, written by rank 0 while the training runs:

- ``index.json``: the format, the framework, versions, the number of ranks, the optimizer's options, the parameters'
  names and dtypes.
- ``step-000001/after_backward/index.json``, and so on for every step and phase: the losses, and which tensors there
  are. It is written last, so a phase without one is incomplete.
- beside it ``parameter/NAME.safetensors``, ``gradient/NAME.safetensors``, ``state/exp_avg/NAME.safetensors``, ...: one
  whole tensor each, so that there is never more than one in memory.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcompat import optim, registry
from hpcompat.training import named_parameters

if TYPE_CHECKING:
    from hpcompat.contract.backend import Backend

__all__ = ["FORMAT", "INDEX", "PHASES", "StepRecording", "record"]

FORMAT = 1
INDEX = "index.json"
PHASES = ("after_backward", "after_clip", "before_optim", "after_optim")


@contextmanager
def record(model: Any, optimizer: Any, directory: str | os.PathLike[str]) -> Iterator[StepRecording]:
    """Write the parameters, gradients and optimizer states of every step to ``directory``, whole and to the bit.

        with hpcompat.record(model, optimizer, "run-a") as recording:
            for batch in batches:
                loss = loss_of(model, batch)
                hpcompat.backward(loss)
                recording.loss(loss)
                recording.phase("after_backward")
                hpcompat.clip_grad_norm_(model, 1.0)
                recording.phase("after_clip")
                hpcompat.optimizer_step(optimizer)
                hpcompat.zero_grad(optimizer)

    ``before_optim`` and ``after_optim`` need no call where :func:`hpcompat.optimizer_step` steps. What is not called is
    not recorded. The numbers that the training computes do not change.

    Args:
        model: sharded or not, by whatever library whose distributed parameters the framework can gather.
        optimizer: over the parameters of ``model``.
        directory: on rank 0's file system; it must not hold a recording yet.

    Raises:
        TypeError: ``model`` is no module, or ``optimizer`` no optimizer of its framework.
        ValueError: ``directory`` holds a recording.
        OSError: it cannot be written; raised on all ranks.
    """
    impl = registry.backend_for(model)
    if not impl.is_module(model):
        raise TypeError(f"record expects a module, but got {type(model).__name__}; pass the model")
    if not impl.optim.is_optimizer(optimizer):
        raise TypeError(f"record expects an optimizer of {impl.name}, but got {type(optimizer).__name__}")
    recording = StepRecording(impl, model, optimizer, Path(directory))
    optim.listeners.append(recording._hear)
    try:
        yield recording
    finally:
        optim.listeners.remove(recording._hear)


class StepRecording:
    """A recording that is being written.

    Attributes:
        step: the number of the current step, from 1; 0 before the first phase.
        directory: where it is written.
    """

    def __init__(self, impl: Backend, model: Any, optimizer: Any, directory: Path) -> None:
        self.step = 0
        self.directory = directory
        self._impl, self._model, self._optimizer = impl, model, optimizer
        is_job = impl.distributed.is_initialized()
        self._rank = impl.distributed.get_rank(None) if is_job else 0
        self._world_size = impl.distributed.get_world_size(None) if is_job else 1
        self._last_phase: str | None = None
        self._losses: list[dict[str, str]] = []
        failure: Exception | None = None
        if self._rank == 0:
            try:
                self._begin()
            except (OSError, ValueError) as error:
                failure = error
        self._share(failure)

    def loss(self, value: Any) -> None:
        """Add a loss to the next phase: a number, or a tensor with one element. Rank 0's counts, so to compare runs on
        different numbers of ranks pass the mean over them (:func:`hpcompat.all_reduce_scalar`).
        """
        is_number = isinstance(value, int | float)
        number = value if is_number else self._impl.training.to_numpy(value).item()
        dtype = "float64" if is_number else _dtype_of(value)
        self._losses.append({"value": float(number).hex(), "dtype": dtype})

    def phase(self, name: str) -> None:
        """Record the tensors as they are now: collective. A phase that does not come after the last one begins a step.

        Args:
            name: ``"after_backward"``, ``"after_clip"``, ``"before_optim"`` or ``"after_optim"``. The last two are for
                steps without :func:`hpcompat.optimizer_step`.

        Raises:
            ValueError: another name.
            OSError: rank 0 cannot write; raised on all ranks, once they have passed the collectives.
        """
        if name not in PHASES:
            raise ValueError(f"expected a phase of {PHASES}, but got {name!r}")
        if self._last_phase is None or PHASES.index(name) <= PHASES.index(self._last_phase):
            self.step += 1
        self._last_phase = name
        folder = self.directory / f"step-{self.step:06d}" / name
        tensors: list[dict[str, str]] = []
        failure: Exception | None = None
        for kind, tensor_name, tensor in self._whole_tensors():
            if self._rank == 0 and failure is None:
                try:
                    tensors.append(self._write(folder, kind, tensor_name, tensor))
                except (ImportError, OSError) as error:
                    failure = error
            del tensor  # before the next one is gathered
        if self._rank == 0 and failure is None:
            try:
                _write_json(folder / INDEX, {"losses": self._losses, "tensors": tensors})
            except OSError as error:
                failure = error
        self._losses = []
        self._share(failure)

    def _hear(self, phase: str, optimizer: Any) -> None:
        if optimizer is self._optimizer:
            self.phase(phase)

    def _whole_tensors(self) -> Iterator[tuple[str, str, Any]]:
        """Kind, name and whole tensor of everything there is, in the same order on all ranks."""
        impl = self._impl
        for name, parameter in named_parameters(self._model):
            yield "parameter", name, self._whole(parameter, None)
            gradient = impl.optim.gradient_of(parameter)
            if gradient is not None:
                yield "gradient", name, self._whole(parameter, gradient)
            for key, value in sorted(impl.optim.optimizer_state(self._optimizer, parameter).items()):
                if impl.owns(value):
                    kind = f"state/{urllib.parse.quote(key, safe='')}"
                    # Numbers such as `step` are no shards. Nothing here may hold a whole tensor while the next comes.
                    yield kind, name, self._whole(parameter, value) if len(value.shape) > 0 else value

    def _whole(self, parameter: Any, value: Any) -> Any:
        with self._impl.training.no_grad():
            return self._impl.training.full_tensor(parameter, value)

    def _write(self, folder: Path, kind: str, name: str, tensor: Any) -> dict[str, str]:
        file = f"{kind}/{urllib.parse.quote(name, safe='')}.safetensors"
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        self._impl.checkpoint.write_tensors(path, [(name, tensor)])
        return {"kind": kind, "name": name, "file": file}

    def _begin(self) -> None:
        path = self.directory / INDEX
        if path.exists():
            raise ValueError(f"expected a directory without a recording, but got {str(self.directory)!r}; remove it")
        self.directory.mkdir(parents=True, exist_ok=True)
        _write_json(path, self._description())

    def _description(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "framework": self._impl.name,
            "versions": {
                "hpcompat": importlib.metadata.version("hpcompat"),
                "python": platform.python_version(),
                self._impl.name: sys.modules[self._impl.name].__version__,
            },
            "world_size": self._world_size,
            "optimizer": {"type": type(self._optimizer).__name__, "groups": _options_of(self._optimizer)},
            "parameters": {name: _dtype_of(parameter) for name, parameter in named_parameters(self._model)},
        }

    def _share(self, failure: Exception | None) -> None:
        """Raise on every rank what failed on rank 0: the others would wait for it in the next collective."""
        if self._world_size > 1:
            fine = self._impl.distributed.gather_bytes(b"\1" if failure is None else b"\0", None)
            if failure is None and b"\0" in fine:
                failure = OSError(f"expected rank 0 to write {str(self.directory)!r}, but it failed; see its error")
        if failure is not None:
            raise failure


def _options_of(optimizer: Any) -> list[dict[str, str]]:
    """Those of each group, as text: a learning rate may be a tensor."""
    groups = [group for group in getattr(optimizer, "param_groups", ()) if isinstance(group, Mapping)]
    left_out = ("params", "param_names")
    return [{str(key): repr(value) for key, value in group.items() if key not in left_out} for group in groups]


def _dtype_of(tensor: Any) -> str:
    """Without the framework: ``"bfloat16"``."""
    return str(tensor.dtype).rpartition(".")[2].lower()


def _write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
