"""Memory that an analysis may use and memory that it will need, compared before it starts."""

import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from attngeo.errors import UserError

ON_DEMAND_SHARE = 0.25  # of the memory at hand: larger weights stay on disk, and are read layer by layer
_GROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIPS = Path("/proc/self/cgroup")
_MAPS = 6  # copies [H, N, N] in float64 at once: scores, masked scores, softmax and its float32 form, gates, a product
_GRAPHS = 8  # matrices [N, N] in float64: the graph, its symmetrised form, eigenvectors and the solver's workspace
_FIXED = 64 * 2**20  # bytes, whatever the window: blocks of transported states, frames, the solver's own
_STATES = 3  # of the heads' separate outputs, [H, N, C] in float64


def available_bytes() -> int:
    """What this process may still take: free memory of the machine, of its control groups and of its own limit."""
    import psutil

    least = min([int(psutil.virtual_memory().available), *_rooms_in_groups()])
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        least = min(least, soft - int(psutil.Process().memory_info().vms))
    return max(least, 0)


def _rooms_in_groups() -> Iterator[int]:
    """What each control group around this process has left, in bytes; file pages that it can drop at once are room."""
    try:
        memberships = _MEMBERSHIPS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in memberships:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, limit, used, pages = _GROUPS, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            mount, limit, used = _GROUPS / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            pages = "total_inactive_file"
        else:
            continue
        own = mount / path.strip("/")
        for group in (own, *own.parents):
            if group.is_relative_to(mount):
                with suppress(OSError, ValueError, KeyError):  # no such file, as in a container; or it says "max"
                    droppable = dict(entry.split() for entry in (group / "memory.stat").read_text().splitlines())[pages]
                    room = int((group / limit).read_text()) - int((group / used).read_text())
                    yield room + int(droppable)


def window_bytes(config: Any, tokens: int, parameters: int) -> int:
    """Estimate of the peak while one window of `tokens` runs through a model in float64, in bytes.

    One layer's maps and states, the head-averaged graphs of all layers in float32, and one block upcast to float64.
    """
    heads, width, layers = config.num_attention_heads, config.hidden_size, config.num_hidden_layers
    maps = (_MAPS * heads + _GRAPHS) * 8 * tokens**2
    states = _STATES * 8 * heads * tokens * width
    return _FIXED + maps + states + 4 * layers * tokens**2 + 8 * parameters // max(layers, 1)


def require_memory(config: Any, tokens: int, parameters: int, model: str) -> None:
    """UserError with the longest window that fits, if one of `tokens` does not fit into the memory at hand."""
    free = available_bytes()
    if window_bytes(config, tokens, parameters) <= free:
        return
    fits = 0
    for bit in reversed(range(tokens.bit_length())):
        if window_bytes(config, fits + (1 << bit), parameters) <= free:
            fits += 1 << bit
    raise UserError(
        f"a window of {tokens} tokens of {model} takes about {window_bytes(config, tokens, parameters) / 2**30:.1f} "
        f"GiB (one layer's maps, states and weights), and {free / 2**30:.1f} GiB are free",
        f"lower window_tokens to {fits}" if fits > 1 else "free memory, or measure the weights alone",
    )
