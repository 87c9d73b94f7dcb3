"""What MLflow takes as parameters, metrics and tags, and how troubles with it become one warning."""

import json
import math
import re
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attngeo.files import encode_non_finite

_LONGEST_VALUE = 6000  # characters, MLflow's limit for parameters; tags may have more
_LONGEST_KEY = 250
_BATCH = 100  # parameters or tags in a call, MLflow's limit
_METRICS = 1000  # metrics in a call, MLflow's limit


class Quiet:
    """Context that turns the first exception into one warning and swallows those that follow.

    With `raises` it lets them through: for a command whose only work is MLflow.
    """

    def __init__(self, *, raises: bool = False) -> None:
        self.told, self._raises = False, raises

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: Any) -> bool:
        if self._raises or not isinstance(error, Exception):
            return False
        if not self.told:
            self.told = True
            reason = str(error).strip().splitlines()
            warnings.warn(
                f"MLflow does not record this run ({type(error).__name__}: {reason[0] if reason else ''}); "
                "the run itself goes on, and its files are complete: `attngeo track sync` sends what is missing",
                stacklevel=3,
            )
        return True


def place(values: Mapping[str, Any], *counts: str) -> int:
    """Where on the axis of a curve a line of metrics lies: the first of these counts that it has."""
    return int(next(values[count] for count in counts if count in values))


def metrics_of(values: Mapping[str, Any], step: int, at_ms: int | None = None) -> tuple[list[Any], dict[str, str]]:
    """MLflow metrics of the finite numbers among `values`, tags for the non-finite ones; the rest is left out.

    `at_ms` is when they were measured (ms since 1970), now without it.
    """
    from mlflow.entities import Metric

    now_ms = int(time.time() * 1000) if at_ms is None else at_ms
    metrics, tags = [], {}
    for key, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if math.isfinite(value):
            metrics.append(Metric(key_of(key), float(value), now_ms, step))
        else:
            tags[f"non_finite.{key}"] = f"{value}@epoch {step}"
    return metrics, tags


def log_metrics(store: Any, run_id: str, metrics: Sequence[Any]) -> None:
    """Record any number of metrics: after a long outage there are more than a call may hold."""
    for begin in range(0, len(metrics), _METRICS):
        store.log_batch(run_id, metrics=metrics[begin : begin + _METRICS])


def log_params(store: Any, run_id: str, params: Mapping[str, Any], known: Mapping[str, str]) -> dict[str, str]:
    """Record parameters, nested ones flattened and long ones cut, and all of them in full as an artifact.

    MLflow refuses to change a parameter: a new value on resume is returned as a tag `changed_on_resume.<key>`.
    """
    from mlflow.entities import Param

    flat = {key_of(key): cut(value) for key, value in flatten(params)}
    changed = {key: f"{known[key]} -> {value}" for key, value in flat.items() if known.get(key, value) != value}
    new = [Param(key, value) for key, value in flat.items() if key not in known]
    for begin in range(0, len(new), _BATCH):
        store.log_batch(run_id, params=new[begin : begin + _BATCH])
    if new or changed:
        full = json.dumps(encode_non_finite(dict(params)), ensure_ascii=False, indent=1, default=str)
        store.log_text(run_id, full, "params.resumed.json" if changed else "params.json")
    return {f"changed_on_resume.{key}": value for key, value in changed.items()}


def log_tags(store: Any, run_id: str, tags: Mapping[str, str]) -> None:
    """Record tags; a tag that is there already takes the new value."""
    from mlflow.entities import RunTag

    entries = [RunTag(key_of(key), cut(value)) for key, value in tags.items()]
    for begin in range(0, len(entries), _BATCH):
        store.log_batch(run_id, tags=entries[begin : begin + _BATCH])


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Names and values of nested settings, names joined by dots."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def key_of(key: str) -> str:
    """A name that MLflow accepts."""
    return re.sub(r"[^\w\-./ :]", "_", key)[:_LONGEST_KEY]


def cut(value: Any) -> str:
    """A value's text, as long as MLflow accepts."""
    text = str(value)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 1] + "…"
