"""What a state dict needs of a param group: the shards, whether or not a forward or a backward is using the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcompat.core.param_group import ParamGroup


def before_reading(group: ParamGroup) -> Callable[..., None]:
    def reshard_hook(*args: Any, **kwargs: Any) -> None:
        if not group.is_in_use:
            group.to_sharded()

    return reshard_hook


def after_reading(group: ParamGroup, *, shard_of: Callable[[Any, Any], Any]) -> Callable[..., None]:
    """In the middle of a forward or backward the whole parameters stay where they are; the shards go into the dict.

    ``shard_of`` gives what takes the place of a parameter's value there.
    """

    def shards_hook(module: Any, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if not group.is_in_use:
            return
        for param in group.tensors.params:  # type: ignore[attr-defined]
            for holder, attribute in param.places:
                name = prefix + attribute
                if holder is module and name in state_dict:
                    state_dict[name] = shard_of(param, state_dict[name])

    return shards_hook


def before_loading(group: ParamGroup) -> Callable[..., None]:
    def loading_hook(*args: Any, **kwargs: Any) -> None:
        group.to_sharded_for_loading()

    return loading_hook
