"""Steps, clipping and clearing."""

from __future__ import annotations

from typing import Any

from hpcompat_conformance.mutants.plant import Plant, mutant

NORM = "hpcompat_torch.norm"


@mutant("NRM-03", "NRM-01")
def count_a_norm_twice(plant: Plant) -> None:
    """Under HSDP every replica's part of the norm is counted."""

    def on_all_axes(original: Any, mesh: Any, placements: Any) -> Any:
        placed = original(mesh, placements)
        return placed._replace(sharded=placed.every)

    plant.around("hpcompat_torch.axes:_placed", on_all_axes)


@mutant("NRM-01")
def the_norm_of_this_rank(plant: Plant) -> None:
    """The norm is that of this rank's shards, so that ranks scale by different factors."""
    plant.instead(f"{NORM}:_exchange")


@mutant("NRM-09")
def a_tied_parameter_counts_twice(plant: Plant) -> None:
    """A parameter that two modules share counts twice in the norm."""

    def again(original: Any, parameters: Any) -> Any:
        members = original(parameters)
        return [*members, *(one for one in members if len(_places(one)) > 1)]

    plant.around(f"{NORM}:_members", again)


def _places(parameter: Any) -> Any:
    from hpcompat_torch.param import owner_of

    owner = owner_of(parameter)
    return () if owner is None else owner.places


@mutant("NRM-08")
def a_norm_in_the_dtype_of_the_gradients(plant: Plant) -> None:
    """The norm of low-precision gradients is rounded to their dtype."""

    def rounded(original: Any, gradients: Any, order: float) -> Any:
        total = original(gradients, order)
        dtypes = {grad.dtype for _, grad in gradients if grad is not None}
        return total.to(dtypes.pop()).to(total.dtype) if len(dtypes) == 1 else total

    plant.around(f"{NORM}:total_norm", rounded)


@mutant("NRM-02")
def clipping_stretches_small_gradients(plant: Plant) -> None:
    """Gradients below the allowed norm are scaled up to it."""

    def exact(original: Any, parameters: Any, max_norm: float, **options: Any) -> Any:
        parameters = list(parameters)
        total = original(parameters, max_norm, **options)
        for parameter in parameters:
            if 0 < float(total) < max_norm and parameter.grad is not None:
                parameter.grad._local_tensor.mul_(max_norm / float(total))
        return total

    plant.around("hpcompat_torch.optim:clip_grad_norm_", exact)


@mutant("NRM-07")
def a_norm_that_is_not_finite_passes(plant: Plant) -> None:
    """error_if_nonfinite=True is ignored: the gradients become NaN."""

    def pass_on(original: Any, parameters: Any, max_norm: float, **options: Any) -> Any:
        return original(parameters, max_norm, **{**options, "error_if_nonfinite": False})

    plant.around("hpcompat_torch.optim:clip_grad_norm_", pass_on)


@mutant("NUM-02")
def a_step_that_rounds_once(plant: Plant) -> None:
    """AdamW in bfloat16 computes in float32 and rounds at the end."""

    def widened(original: Any, optimizer: Any, closure: Any = None) -> Any:
        for group in optimizer.param_groups:
            if "fused" in group:
                group["fused"], group["foreach"] = True, False
        return optimizer.step() if closure is None else optimizer.step(closure)

    plant.around("hpcompat_torch.optim:step", widened)


@mutant("NUM-02")
def the_step_forgets_its_states(plant: Plant) -> None:
    """optimizer_step starts from zero averages every time."""

    def fresh(optimizer: Any, *args: Any) -> None:
        optimizer.state.clear()

    plant.before("hpcompat_torch.optim:step", fresh)


@mutant("OPT-06")
def a_step_without_a_gradient(plant: Plant) -> None:
    """A parameter without a gradient is stepped as if it were zero: weight decay moves it."""

    def with_zeros(optimizer: Any, *args: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None and parameter.requires_grad:
                    parameter.grad = parameter.detach() * 0

    plant.before("hpcompat_torch.optim:step", with_zeros)


@mutant("REC-02")
def pending_gradients_outlive_zero_grad(plant: Plant) -> None:
    """Clearing the gradients leaves those that wait for their reduction, and the next step adds them."""
    plant.instead("hpcompat_torch.param:ShardedParam.drop_gradients")
