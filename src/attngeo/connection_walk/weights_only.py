"""What the weights alone tell of a connection walk, one layer in memory at a time: no text and no forward pass."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from attngeo.connection_walk.analysis import measure_random_init, write_head_isometry, write_sizes
from attngeo.connection_walk.measurements import COLUMNS, Rows
from attngeo.errors import UserError
from attngeo.language_models.loading import LoadedModel, load, parameters

if TYPE_CHECKING:
    import pandas as pd


def analyze_weights(
    model: Path | str | LoadedModel,
    *,
    model_id: str | None = None,
    seed: int = 0,
    null_draws: int = 16,
    inits: int = 5,
) -> "pd.DataFrame":
    """The rows of `analyze` that no text decides: parameters and the heads' isometry with its controls.

    A folder's weights stay on disk and are read one layer at a time.

    Raises:
        UserError: unreadable or unsupported model.
    """
    import pandas as pd

    if null_draws < 2:
        raise UserError(f"null_draws = {null_draws} gives the null no spread", "ask for at least 2")
    loaded = load(model, None, model_id=model_id, on_demand=True) if not isinstance(model, LoadedModel) else model
    loaded = replace(loaded, id=model_id or loaded.id)
    rows = Rows(loaded)
    write_sizes(rows, loaded)
    write_head_isometry(rows, loaded.sites, seed, null_draws)
    measure_random_init(rows, loaded.model.config, parameters(loaded.model), [], seed, inits, on_demand=True)
    frame = pd.DataFrame(rows.rows, columns=list(COLUMNS))
    return frame.sort_values(["layer", "head"], kind="stable", ignore_index=True)
