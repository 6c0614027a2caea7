"""Ways into a unit other than its own forward, and what belongs to which unit."""

from __future__ import annotations

import copy
import gc
from typing import Any

from hpcompat_conformance.case import case
from hpcompat_conformance.checks import check, check_arrays, check_equal, check_raises
from hpcompat_conformance.recipes import Chain, Tied
from hpcompat_conformance.run_context import Context

UNITS = ("layers.0", "layers.1", "layers.2")
RECIPE = Chain(own=True)
REGISTER = ("register_fsdp_forward_method",)


@case("ENT-01", procs=(1, 2, 4), requires=REGISTER, reports=("pytorch/pytorch#125394",))
def a_registered_method_trains(ctx: Context) -> None:
    truth = ctx.true_gradients(RECIPE)
    for policy in (None, True, False):
        logs = []
        for name in ("__call__", "generate"):
            model = ctx.shard(ctx.model(RECIPE), units=UNITS, reshard_after_forward=policy)
            ctx.api.register_fsdp_forward_method(model, "generate")
            with ctx.record() as log:
                output = getattr(model, name)(ctx.inputs(RECIPE))
                forms = ctx.sharded(model)
                ctx.framework.backward(ctx.framework.loss(output))
            check_arrays(ctx.gradients(model), truth, what=f"gradient by {name} with reshard_after_forward={policy}")
            check_equal(set(ctx.sharded(model).values()), {True}, what="sharded after backward")
            logs.append((ctx.schedule(log), forms))
        check_equal(logs[1], logs[0], what="collectives, and forms after forward, of the registered method")


@case("ENT-01", procs=(1, 2, 4), requires=REGISTER, reports=("pytorch/pytorch#125394",))
def a_registered_method_without_gradients(ctx: Context) -> None:
    truth = ctx.framework.array(ctx.model(RECIPE)(ctx.inputs(RECIPE)))
    model = ctx.shard(ctx.model(RECIPE), units=UNITS)
    ctx.api.register_fsdp_forward_method(model, "generate")
    with ctx.framework.no_grad():
        for _ in range(2):
            found = ctx.framework.array(model.generate(ctx.inputs(RECIPE)))
            check_arrays({"output": found}, {"output": truth}, what="generated")


@case("ENT-02", procs=(1, 2), requires=REGISTER)
def a_method_of_a_plain_module_and_a_missing_one(ctx: Context) -> None:
    plain = ctx.model(RECIPE)
    before = ctx.framework.array(plain.generate(ctx.inputs(RECIPE)))
    ctx.api.register_fsdp_forward_method(plain, "generate")
    after = ctx.framework.array(plain.generate(ctx.inputs(RECIPE)))
    check_arrays({"output": after}, {"output": before}, what="of a module that is not wrapped")
    with check_raises(ValueError, containing="does not have a method"):
        ctx.api.register_fsdp_forward_method(ctx.shard(ctx.model(RECIPE)), "no_such_method")


@case("ENT-03", procs=(1, 2), reports=("huggingface/accelerate#4171",))
def a_parameter_in_two_units(ctx: Context) -> None:
    model = ctx.model(Tied())
    with check_raises(ValueError, containing="is shared with a parameter already managed"):
        ctx.shard(model, units=("embed", "head"))
        model(ctx.inputs(Tied()))


@case("ENT-03", procs=(1, 2, 4), reports=("pytorch/pytorch#176076", "huggingface/accelerate#4171"))
def a_parameter_in_a_list_of_modules(ctx: Context) -> None:
    model = ctx.model(Tied())
    ctx.api.fully_shard([ctx.framework.child(model, path) for path in ("embed", "head")], mesh=ctx.mesh())
    ctx.shard(model, units=("layers.0",))
    for step in range(2):
        ctx.train(model, ctx.inputs(Tied(), step=step))
    check_arrays(ctx.gradients(model), ctx.true_gradients(Tied(), steps=range(2)), what="gradient")


@case("ENT-04", procs=(1, 2, 4))
def models_that_come_and_go(ctx: Context) -> None:
    kept = ctx.shard(ctx.model(Tied()))
    truth = ctx.true_gradients(Tied())
    for round in range(6):
        model = ctx.shard(ctx.model(Tied()))
        ctx.train(model, ctx.inputs(Tied()))
        check_arrays(ctx.gradients(model), truth, what=f"gradient of model {round}")
        del model
        gc.collect()
        ctx.framework.zero_grad(kept)
        ctx.train(kept, ctx.inputs(Tied()))
        check_arrays(ctx.gradients(kept), truth, what=f"gradient of the model that stayed after model {round}")


class Looks:
    """Notes which parameters are registered in their full form at its calls."""

    def __init__(self, ctx: Context, model: Any) -> None:
        self.seen: dict[str, list[bool]] = {}
        self._ctx, self._model = ctx, model

    def put_on(self, path: str, when: str) -> None:
        """Look before and after each forward of a submodule."""
        module = self._ctx.framework.child(self._model, path)
        self._ctx.framework.on_forward(
            module,
            before=lambda: self._look(path, f"before forward, hook from {when} wrapping"),
            after=lambda output: self._look(path, f"after forward, hook from {when} wrapping"),
        )

    def _look(self, path: str, moment: str) -> None:
        forms = self._ctx.sharded(self._ctx.framework.child(self._model, path))
        check(len(set(forms.values())) == 1, f"expected parameters of one form, but got {forms}")
        self.seen.setdefault(f"{path}, {moment}", []).append(not next(iter(forms.values())))


@case("ENT-05", procs=(1, 2, 4))
def hooks_and_the_form_of_parameters(ctx: Context) -> None:
    for policy in (True, False):
        model = ctx.model(Chain())
        looks = Looks(ctx, model)
        for path in UNITS:
            looks.put_on(path, "before")
        ctx.shard(model, units=UNITS, reshard_after_forward=policy)
        for path in UNITS:
            looks.put_on(path, "after")
        for _ in range(2):
            ctx.train(model, ctx.inputs(Chain()))
        moments = {"before forward, hook from before wrapping", "after forward, hook from before wrapping"}
        moments |= {"before forward, hook from after wrapping"}
        expected = {f"{path}, {moment}": [True] * 2 for path in UNITS for moment in moments}
        expected |= {f"{path}, after forward, hook from after wrapping": [not policy] * 2 for path in UNITS}
        check_equal(looks.seen, expected, what=f"full parameters with reshard_after_forward={policy}")


@case("ENT-13", procs=(1, 2, 4))
def a_root_below_another(ctx: Context) -> None:
    model = ctx.shard(ctx.model(Chain()), units=UNITS)
    ctx.framework.child(model, "layers.0")(ctx.inputs(Chain()))
    with check_raises(RuntimeError, containing="already been lazily initialized"):
        model(ctx.inputs(Chain()))


@case("ENT-14", procs=(1, 2))
def a_list_without_a_root(ctx: Context) -> None:
    model = ctx.model(Chain())
    ctx.api.fully_shard([ctx.framework.child(model, path) for path in UNITS], mesh=ctx.mesh())
    with check_raises(RuntimeError, containing="requires a single root module"):
        model(ctx.inputs(Chain()))


@case("ENT-06", procs=(2, 4))
def a_list_is_one_unit(ctx: Context) -> None:
    model = ctx.model(Chain())
    ctx.api.fully_shard([ctx.framework.child(model, path) for path in UNITS[:2]], mesh=ctx.mesh())
    ctx.shard(model, units=UNITS[2:])
    for _ in range(2):
        ctx.framework.zero_grad(model)
        with ctx.record() as log:
            ctx.train(model, ctx.inputs(Chain()))
        both, last = 4 * 8 + 8 + 8 * 12 + 12, 12 * 16 + 16
        found = [(event.kind, event.num_elements) for event in log]
        gathers = [("all_gather", both), ("all_gather", last)]
        reductions = [("reduce_scatter", last), ("reduce_scatter", both)]
        check_equal([event for event in found if event[0] == "reduce_scatter"], reductions, what="reductions")
        check_equal(found[:2], gathers, what="gathers of forward")
        check_arrays(ctx.gradients(model), ctx.true_gradients(Chain()), what="gradient")


@case("ENT-07", procs=(2, 4))
def what_cannot_be_sharded(ctx: Context) -> None:
    with check_raises(ValueError, containing="containers that do not implement forward"):
        ctx.api.fully_shard(ctx.framework.child(ctx.model(RECIPE), "layers"), mesh=ctx.mesh())
    for dim, kind, words in ((1, NotImplementedError, "uneven sharding on dim 1"), (2, Exception, "is invalid for")):

        def place(parameter: Any, dim: int = dim) -> Any:
            return ctx.framework.shard(dim) if len(ctx.framework.shape(parameter)) == 2 else None

        with check_raises(kind, containing=words):
            ctx.shard(ctx.model(Chain(sizes=(3, 4, 5))), shard_placement_fn=place)


@case("ENT-08", procs=(1, 2))
def an_averaged_copy(ctx: Context) -> None:
    model, average = (ctx.shard(ctx.model(RECIPE), units=UNITS) for _ in range(2))
    with check_raises(AssertionError, containing="does not support deepcopy"):
        copy.deepcopy(model)
    optimizer = ctx.framework.optimizer(model, kind="sgd", lr=0.125)
    truth = ctx.values(average)
    for step in range(2):
        ctx.train(model, ctx.inputs(RECIPE, step=step))
        ctx.optimizer_step(optimizer)
        optimizer.zero_grad()
        truth = {name: (truth[name] + value) / 2 for name, value in ctx.values(model).items()}
        ctx.framework.load_state_dict(average, truth)
        outputs = [ctx.framework.array(average(ctx.inputs(RECIPE))) for _ in range(2)]
        check_arrays({"output": outputs[1]}, {"output": outputs[0]}, what="of the average")
    check_arrays(ctx.values(average), truth, what="averaged value")


@case("ENT-09", procs=(4,))
def meshes_that_say_too_much_or_too_little(ctx: Context) -> None:
    with check_raises(ValueError, containing="expects a 1D or 2D DeviceMesh"):
        mesh = ctx.framework.mesh((2, 2, 1), axis_names=("a", "b", "c"))
        ctx.api.fully_shard(ctx.model(RECIPE), mesh=mesh)
    with check_raises(AssertionError, containing="Please init the 2D mesh for HSDP with mesh_dim_names specified"):
        ctx.api.fully_shard(ctx.model(RECIPE), mesh=ctx.framework.mesh((2, 2)))


@case("ENT-10", procs=(2, 4), reports=("NVIDIA-NeMo/Automodel#2768",))
def meshes_that_look_like_hsdp(ctx: Context) -> None:
    for names in (("dp_shard", "cp"), ("fsdp", "tp")):
        mesh = ctx.framework.mesh((ctx.world_size // 2, 2), axis_names=names)
        with check_raises(ValueError, containing=names[1]):
            ctx.api.fully_shard(ctx.model(RECIPE), mesh=mesh)


@case("ENT-11", procs=(1, 2, 4), reports=("mindspore-ai/hyper-parallel#279",))
def ignored_parameters(ctx: Context) -> None:
    model = ctx.model(RECIPE)
    parameters = ctx.framework.parameters(model)
    ignored = {name: p for name, p in parameters.items() if name.endswith("bias")}
    ctx.shard(model, units=UNITS, ignored_params=set(ignored.values()))
    found = ctx.framework.parameters(model)
    check_equal(list(found), list(parameters), what="names")
    check(all(found[name] is p for name, p in ignored.items()), "expected ignored parameters to stay the same objects")
    check_equal(ctx.sharded(model), {name: name not in ignored for name in found}, what="sharded")
    ctx.train(model, ctx.inputs(RECIPE))
    truth = ctx.true_gradients(RECIPE)
    own = ctx.true_gradients(RECIPE, ranks=(ctx.rank,))
    truth |= {name: own[name] for name in ignored}
    check_arrays(ctx.gradients(model), truth, what="gradient")


@case("ENT-12", procs=(1,))
def prefetch_lists_of_strangers(ctx: Context) -> None:
    model = ctx.shard(ctx.model(RECIPE), units=UNITS[:1])
    for setter in (model.set_modules_to_forward_prefetch, model.set_modules_to_backward_prefetch):
        with check_raises(ValueError, containing="FSDPModule"):
            setter([ctx.framework.child(model, "layers.1")])


@case("ENT-15", procs=(1, 2), reports=("huggingface/transformers#40750",))
def the_class_of_a_wrapped_module(ctx: Context) -> None:
    models = [ctx.model(RECIPE) for _ in range(3)]
    original = type(models[0])
    for model in models[:2]:
        ctx.shard(model)
    wrapped = type(models[0])
    check_equal(wrapped.__name__, f"FSDP{original.__name__}", what="name of the class")
    check(wrapped is type(models[1]), "expected one class for all wrapped modules of a class")
    check(issubclass(wrapped, ctx.api.FSDPModule), "expected a subclass of FSDPModule")
    check(issubclass(wrapped, original), "expected a subclass of the original class")
    check(type(models[2]) is original, "expected a module that was not wrapped to keep its class")
