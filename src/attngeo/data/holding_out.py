"""Which training images are held out to choose settings on, so that nothing is chosen on the images that score."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attngeo.errors import UserError

if TYPE_CHECKING:
    import numpy as np

SEED = 0


def held_out(labels: "Sequence[int] | np.ndarray", share: float, classes: Sequence[str] = ()) -> "np.ndarray":
    """Which of the training images with these labels are held out, bool [n].

    Of each class of m images, round(share * m), but at least one: those at the places that a permutation of m drawn
    from (0, "hold out", class) names first: a function of the labels in their order, nested in the share, which is
    below 1/2. UserError for a class of one image, named by `classes`.
    """
    import numpy as np

    # Here, since only this draws: packing otherwise does without torch, which that module imports.
    from attngeo.training.seeding import numpy_generator

    labels = np.asarray(labels, dtype=np.int64)
    chosen = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        (members,) = np.nonzero(labels == label)
        if len(members) < 2:
            name = classes[label] if classes else str(label)
            raise UserError(
                f"class {name} has one training image, which cannot be held out and trained on",
                "add images to the class, remove it, or leave hold_out at 0",
            )
        order = numpy_generator(SEED, "hold out", int(label)).permutation(len(members))
        chosen[members[order[: max(1, round(share * len(members)))]]] = True
    return chosen


def rule(share: float) -> str:
    """What "validation" means where images are held out, in words."""
    return (
        f"held out for validation: {100 * share:.4g} % of the training images of each class, drawn from "
        f'(seed {SEED}, "hold out", class); the validation images of the set itself are not read'
    )
