"""What a caller may change about the communication, and what that must not change."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from hpcompat_conformance.case import case
from hpcompat_conformance.checks import check, check_array, check_arrays, check_equal, check_raises
from hpcompat_conformance.custom_comm import ForwardingAllGather, ForwardingReduceScatter
from hpcompat_conformance.framework import Array
from hpcompat_conformance.recipes import Chain
from hpcompat_conformance.run_context import Context, padded_elements
from hpcompat_conformance.training import trained
from hpcompat_conformance.two_meshes import shard_on_two_meshes

UNITS = ("layers.0", "layers.1", "layers.2")
UNEVEN = Chain(sizes=(4, 7, 5, 3), own=True)
CUSTOM = ("FSDPModule.set_custom_all_gather", "FSDPModule.set_custom_reduce_scatter")
HOOK = ("FSDPModule.set_all_reduce_hook",)


def members(ctx: Context, model: Any) -> list[Any]:
    """The root and the units below it: most setters do not recurse."""
    return [model, *(ctx.framework.child(model, path) for path in UNITS)]


def install(ctx: Context, model: Any) -> tuple[ForwardingAllGather, ForwardingReduceScatter]:
    """The same two objects for all units."""
    gather, scatter = ForwardingAllGather(ctx.framework), ForwardingReduceScatter(ctx.framework)
    for module in members(ctx, model):
        module.set_custom_all_gather(gather)
        module.set_custom_reduce_scatter(scatter)
    return gather, scatter


@case("COM-01", procs=(2, 4), requires=(*CUSTOM, "bfloat16"))
def arguments_of_an_all_gather(ctx: Context) -> None:
    for param_dtype in (None, "bfloat16"):
        model = ctx.shard(ctx.model(UNEVEN), mp_policy=ctx.policy(param_dtype=param_dtype))
        gather = ForwardingAllGather(ctx.framework)
        model.set_custom_all_gather(gather)
        shapes = [ctx.framework.shape(parameter) for parameter in ctx.framework.parameters(model).values()]
        numel = padded_elements(shapes, ctx.world_size)
        model(ctx.inputs(UNEVEN))
        check_equal(gather.sizes, [(numel,)], what="sizes allocated")
        dtype = ctx.framework.dtype(param_dtype or "float32")
        check_equal(gather.dtypes, [dtype], what="dtypes allocated")
        call = gather.calls[0]
        names = ["async_op", "group", "input_tensor", "output_tensor"]
        check_equal([sorted(call) for call in gather.calls], [names], what="names of the arguments")
        check(call["output_tensor"] is gather.buffers[0], "expected the allocated tensor to be the output")
        check_equal(call["async_op"], False, what="async_op")
        check_equal(ctx.framework.ranks_of(call["group"]), tuple(range(ctx.world_size)), what="ranks of the group")
        check_slot(ctx, call)


def check_slot(ctx: Context, call: dict[str, Any]) -> None:
    """The input must be this rank's part of the output, in its memory."""
    output, part = (ctx.framework.array(call[name]) for name in ("output_tensor", "input_tensor"))
    check_array(part, output.reshape(ctx.world_size, -1)[ctx.rank], what="input against this rank's part of the output")
    is_view = ctx.framework.shares_memory(call["input_tensor"], call["output_tensor"])
    check(is_view, "expected the input to lie in the memory of the output")


@case("COM-02", procs=(2, 4), requires=(*CUSTOM, "bfloat16"))
def arguments_of_a_reduce_scatter(ctx: Context) -> None:
    for reduce_dtype in (None, "bfloat16"):
        model = ctx.shard(ctx.model(UNEVEN), mp_policy=ctx.policy(reduce_dtype=reduce_dtype))
        scatter = ForwardingReduceScatter(ctx.framework)
        model.set_custom_reduce_scatter(scatter)
        shapes = [ctx.framework.shape(parameter) for parameter in ctx.framework.parameters(model).values()]
        numel = padded_elements(shapes, ctx.world_size)
        ctx.train(model, ctx.inputs(UNEVEN))
        check_equal(scatter.sizes, [(numel,), (numel // ctx.world_size,)], what="sizes allocated")
        dtype = ctx.framework.dtype(reduce_dtype or "float32")
        check_equal(scatter.dtypes, [dtype] * 2, what="dtypes allocated")
        call = scatter.calls[0]
        names = ["group", "input_tensor", "op", "output_tensor"]
        found = [sorted({*call} - {"async_op"}) for call in scatter.calls]
        check_equal(found, [names], what="names of the arguments")
        check(not call.get("async_op", False), "expected a reduce-scatter that is not asynchronous")
        check_equal(ctx.framework.ranks_of(call["group"]), tuple(range(ctx.world_size)), what="ranks of the group")
        sizes = [int(ctx.framework.array(call[name]).size) for name in ("input_tensor", "output_tensor")]
        check_equal(sizes, [numel, numel // ctx.world_size], what="sizes of input and output")


def check_same(ctx: Context, change: Any, **options: Any) -> list[str]:
    """``change(model)`` must leave bits and collectives of four steps as they are without it. Gives the collectives of
    one."""
    logs: list[list[str]] = []
    results: list[dict[str, Array]] = []
    for is_changed in (False, True):
        model = ctx.shard(ctx.model(UNEVEN), units=UNITS, **options)
        if is_changed:
            change(model)
        with ctx.record() as log:
            ctx.train(model, ctx.inputs(UNEVEN, rough=True))
        logs.append([f"{event.kind} of {event.num_elements} {event.dtype} over {event.ranks}" for event in log])
        ctx.framework.zero_grad(model)
        results.append(trained(ctx, model, UNEVEN))
    check_equal(logs[1], logs[0], what=f"collectives with {options}")
    check_arrays(results[1], results[0], what=f"with {options}:")
    return logs[0]


def every_option(ctx: Context) -> list[dict[str, Any]]:
    """What training is compared under."""
    options: list[dict[str, Any]] = [{}, {"reshard_after_forward": False}]
    options.append({"mp_policy": ctx.policy(param_dtype="bfloat16", reduce_dtype="float32")})
    if ctx.world_size == 4:
        options += [{"mesh": ctx.mesh_2d(2)}, {"reshard_after_forward": 2}]
    return options


@case("COM-03", procs=(2, 4), requires=(*CUSTOM, "bfloat16"))
def forwarding_changes_nothing(ctx: Context) -> None:
    for options in every_option(ctx):
        comms: list[Any] = []
        log = check_same(ctx, lambda model, comms=comms: comms.extend(install(ctx, model)), **options)
        for comm, kind in zip(comms, ("all_gather", "reduce_scatter"), strict=True):
            expected = 4 * len([event for event in log if event.startswith(kind)])
            check_equal(len(comm.calls), expected, what=f"calls of the custom {kind} with {options}")


@case("COM-04", procs=(1, 2, 4), requires=CUSTOM)
def unused_over_a_shard_axis_of_one(ctx: Context) -> None:
    mesh = ctx.mesh() if ctx.world_size == 1 else ctx.mesh_2d(ctx.world_size)
    model = ctx.shard(ctx.model(UNEVEN), units=UNITS, mesh=mesh)
    gather, scatter = install(ctx, model)
    ctx.train(model, ctx.inputs(UNEVEN))
    check_equal([len(comm.calls) for comm in (gather, scatter)], [0, 0], what="calls of the custom collectives")
    check_arrays(ctx.gradients(model), ctx.true_gradients(UNEVEN), what="gradient")


@case("COM-05", procs=(2, 4), requires=CUSTOM)
def asynchronous_only_by_hand(ctx: Context) -> None:
    model = ctx.model(UNEVEN)
    values = ctx.values(model)
    ctx.shard(model, units=UNITS)
    gather, _ = install(ctx, model)
    handles = [ctx.framework.child(model, path).unshard(async_op=True) for path in UNITS[:2]]
    check_equal([call["async_op"] for call in gather.calls], [True, True], what="async_op of unshard(async_op=True)")
    for handle in handles:
        handle.wait()
    found = {name: value for name, value in ctx.values(model).items() if name.startswith(UNITS[:2])}
    check_arrays(found, {name: values[name] for name in found}, what="value after wait()")
    ctx.train(model, ctx.inputs(UNEVEN))
    check_equal({call["async_op"] for call in gather.calls[2:]}, {False}, what="async_op in forward and backward")


@case("COM-06", procs=(2, 4), requires=(*CUSTOM, *HOOK, "ShardPlacementResult"))
def refused_with_several_meshes(ctx: Context) -> None:
    model = shard_on_two_meshes(ctx, ctx.model(UNEVEN))
    for setter, argument in (
        (model.set_custom_all_gather, ForwardingAllGather(ctx.framework)),
        (model.set_custom_reduce_scatter, ForwardingReduceScatter(ctx.framework)),
        (model.set_all_reduce_hook, lambda gradient: None),
    ):
        with check_raises(ValueError, containing="is not supported with multiple param groups"):
            setter(argument)


class Hook:
    """Notes what it gets, then doubles it in place."""

    def __init__(self, ctx: Context) -> None:
        self.seen: list[Array] = []
        self._ctx = ctx

    def __call__(self, gradient: Any) -> None:
        self.seen.append(self._ctx.framework.array(gradient))
        self._ctx.framework.scale(gradient, 2.0)


def hooked(ctx: Context, **options: Any) -> tuple[Any, list[Hook]]:
    """A model whose units all have a hook of their own, the root's last."""
    model = ctx.shard(ctx.model(UNEVEN), units=UNITS, **options)
    modules = members(ctx, model)
    hooks = [Hook(ctx) for _ in modules]
    for module, hook in zip(modules, hooks, strict=True):
        module.set_all_reduce_hook(hook)
    return model, [*hooks[1:], hooks[0]]


@case("COM-07", procs=(1, 2, 4), requires=HOOK, reports=("pytorch/pytorch#147114",))
def the_hook_gets_the_reduced_shards(ctx: Context) -> None:
    for num_replicas in (size for size in (1, 2, 4) if ctx.world_size % size == 0):
        model, hooks = hooked(ctx, mesh=ctx.mesh_2d(num_replicas))
        ctx.train(model, ctx.inputs(UNEVEN))
        truth = ctx.true_gradients(UNEVEN)
        doubled = {name: 2 * gradient for name, gradient in truth.items()}
        check_arrays(ctx.gradients(model), doubled, what=f"gradient with a hook that doubles, {num_replicas} replicas")
        shard_size = ctx.world_size // num_replicas
        place = ctx.rank % shard_size
        for path, hook in zip((*UNITS, ""), hooks, strict=True):
            mine = [truth[name] for name in truth if name.startswith(path + ".") or (not path and name == "scale")]
            expected = np.concatenate([_chunk(gradient, place, shard_size) for gradient in mine])
            check_equal(len(hook.seen), 1, what=f"calls of the hook of {path or 'the root'}")
            check_array(hook.seen[0], expected, what=f"argument of the hook of {path or 'the root'}")


def _chunk(array: Array, place: int, num_chunks: int) -> Array:
    """The rows of one rank, flat and padded with zeros to as many rows as the first rank has."""
    size = -(-len(array) // num_chunks)
    padded = np.concatenate([array, np.zeros((size * num_chunks - len(array), *array.shape[1:]), array.dtype)])
    return padded[place * size : (place + 1) * size].reshape(-1)


@case("COM-08", procs=(2, 4), requires=HOOK)
def the_hook_waits_for_the_reduction(ctx: Context) -> None:
    for num_replicas in (1, 2):
        model, hooks = hooked(ctx, mesh=ctx.mesh_2d(num_replicas))
        model.set_requires_gradient_sync(False)
        ctx.train(model, ctx.inputs(UNEVEN, step=0))
        model.set_requires_gradient_sync(True)
        if num_replicas > 1:
            model.set_requires_all_reduce(False)
            ctx.train(model, ctx.inputs(UNEVEN, step=1))
            model.set_requires_all_reduce(True)
        check_equal([len(hook.seen) for hook in hooks], [0] * 4, what="calls before the reduction")
        ctx.train(model, ctx.inputs(UNEVEN, step=2))
        check_equal([len(hook.seen) for hook in hooks], [1] * 4, what="calls after the reduction")
        microbatches = (0, 1, 2) if num_replicas > 1 else (0, 2)
        truth = ctx.true_gradients(UNEVEN, steps=microbatches)
        doubled = {name: 2 * gradient for name, gradient in truth.items()}
        check_arrays(ctx.gradients(model), doubled, what=f"gradient with {num_replicas} replicas")


@case("COM-09", procs=(2, 4), requires=HOOK)
def a_stream_is_refused_under_hsdp(ctx: Context) -> None:
    model = ctx.shard(ctx.model(UNEVEN), mesh=ctx.mesh_2d(2))
    with check_raises(ValueError, containing="stream cannot be set when using native HSDP"):
        model.set_all_reduce_hook(lambda gradient: None, stream=object())


class Event:
    """What a device without events has in their place."""


@case("COM-10", procs=(1, 2, 4), requires=("FSDPModule.set_post_optim_event",))
def the_event_is_used_once(ctx: Context) -> None:
    expected = trained(ctx, ctx.shard(ctx.model(UNEVEN), units=UNITS), UNEVEN)
    model = ctx.shard(ctx.model(UNEVEN), units=UNITS)
    ctx.train(model, ctx.inputs(UNEVEN))
    ctx.framework.zero_grad(model)
    released: list[int] = []

    def set_event(step: int) -> None:
        event = Event()
        weakref.finalize(event, released.append, step)
        model.set_post_optim_event(event)
        del event
        check_equal(released, list(range(step)), what="events released before the next forward")

    found = trained(ctx, model, UNEVEN, after_step=set_event)
    check_arrays(found, expected, what="with an event:")
    model(ctx.inputs(UNEVEN))
    check_equal(released, [0, 1, 2], what="events released by the next forward")


@case("COM-11", procs=(2, 4), requires=(*CUSTOM, "FSDPModule.set_allocate_memory_from_process_group_for_comm"))
def memory_of_the_process_group(ctx: Context) -> None:
    def allocate(model: Any) -> None:
        for module in members(ctx, model):
            module.set_allocate_memory_from_process_group_for_comm(True)

    check_same(ctx, allocate)
    model = ctx.shard(ctx.model(UNEVEN), units=UNITS)
    install(ctx, model)
    with check_raises(AssertionError, containing="custom"):
        model.set_allocate_memory_from_process_group_for_comm(True)


@case("COM-12", procs=(2, 4), requires=("FSDPModule.set_symm_mem_for_comm",))
def symmetric_memory(ctx: Context) -> None:
    model = ctx.shard(ctx.model(UNEVEN), units=UNITS)
    try:
        for module in members(ctx, model):
            module.set_symm_mem_for_comm()
    except NotImplementedError as error:
        check("symmetric memory" in str(error), f"expected the missing capability by name, but got {error!r}")
        ctx.train(model, ctx.inputs(UNEVEN))
        check_arrays(ctx.gradients(model), ctx.true_gradients(UNEVEN), what="gradient after the refusal")
    else:
        found = trained(ctx, model, UNEVEN)
        check_arrays(found, trained(ctx, ctx.shard(ctx.model(UNEVEN), units=UNITS), UNEVEN), what="symmetric memory:")


@case("COM-13", procs=(2, 4), requires=(*CUSTOM, "FSDPModule.set_separate_reduce_scatter_group"))
def a_group_for_reduce_scatters(ctx: Context) -> None:
    meshes = [ctx.mesh()] if ctx.world_size == 2 else [ctx.mesh(), ctx.mesh_2d(2)]
    for mesh in meshes:
        check_same(ctx, lambda model: model.set_separate_reduce_scatter_group(), mesh=mesh)
        model = ctx.shard(ctx.model(UNEVEN), units=UNITS, mesh=mesh)
        gather, scatter = install(ctx, model)
        for is_separate in (False, True, False):
            model.set_separate_reduce_scatter_group(is_separate)
            ctx.train(model, ctx.inputs(UNEVEN))
            groups = [{id(call["group"]) for call in comm.calls} for comm in (gather, scatter)]
            check_equal([len(found) for found in groups], [1, 1], what="numbers of groups")
            check_equal(groups[0] != groups[1], is_separate, what="whether the groups differ")
            ranks = [ctx.framework.ranks_of(comm.calls[0]["group"]) for comm in (gather, scatter)]
            check_equal(ranks[1], ranks[0], what="ranks of the group of reduce-scatters")
            gather.calls.clear()
            scatter.calls.clear()


@case("COM-13", procs=(2,), requires=("replicate", "FSDPModule.set_separate_reduce_scatter_group"))
def no_group_for_reduce_scatters_without_any(ctx: Context) -> None:
    model = ctx.replicate(ctx.model(UNEVEN))
    with check_raises(AssertionError, containing=""):
        model.set_separate_reduce_scatter_group()


@case("COM-14", procs=(1, 2, 4), requires=("FSDPModule.set_reduce_scatter_max_input_buffers",))
def numbers_of_input_buffers(ctx: Context) -> None:
    for number in (1, 2, 8):
        check_same(ctx, lambda model, number=number: model.set_reduce_scatter_max_input_buffers(number))
    expected = trained(ctx, ctx.shard(ctx.model(UNEVEN), units=UNITS), UNEVEN)
    model = ctx.shard(ctx.model(UNEVEN), units=UNITS)
    found = trained(ctx, model, UNEVEN, after_step=lambda step: model.set_reduce_scatter_max_input_buffers(1 + step))
    check_arrays(found, expected, what="with another number after each step:")
    for wrong, kind in ((0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)):
        with check_raises(kind, containing="must be a"):
            ctx.shard(ctx.model(UNEVEN)).set_reduce_scatter_max_input_buffers(wrong)
