"""The proof of an adapter: what it says of a family, put against what a model of the family computes."""

from dataclasses import dataclass

from torch import Tensor

from attngeo.connection_walk.identities import relative_error, walk_error
from attngeo.language_models.capture import LayerCapture, in_float64, working_precision_softmax
from attngeo.language_models.comparisons import Comparison, compared_vectors, stream_comparisons
from attngeo.language_models.loading import LoadedModel


@dataclass(frozen=True)
class AdapterErrors:
    """Largest errors over the layers; all vanish, up to rounding, for a right adapter."""

    output: float
    """Of the connection walk, from states, maps, W_V and W_O, against the attention's own output, relative."""
    vectors: float
    """Of queries and keys, from states, W_Q and W_K, against those that the layer compares, relative."""
    maps: float
    """Of the softmax of those queries and keys against the layer's own maps, absolute."""


def adapter_errors(loaded: LoadedModel, inputs: Tensor, *, float64_softmax: bool = True) -> AdapterErrors:
    """Run one window (token ids [N] or an image [3, H, W]) in float64 and compare.

    Where the library computes a norm of queries and keys, rotary positions or, without `float64_softmax`, the softmax
    in float32, its rounding is what is left. UserError for a class whose comparisons cannot be seen.
    """
    sites = loaded.sites
    errors: list[tuple[float, float, float]] = []

    def on_layer(capture: LayerCapture, comparison: Comparison) -> None:
        site = sites[capture.layer]
        query, key = compared_vectors(site, site.states(capture.attention_input), comparison.rotation)
        vectors = max(relative_error(query, comparison.query), relative_error(key, comparison.key))
        maps = (comparison.maps() - capture.attention.double()).abs().max().item()
        errors.append((walk_error(capture, site, site.weights()), vectors, maps))

    with in_float64(loaded):
        if float64_softmax:
            with working_precision_softmax():
                stream_comparisons(loaded, inputs, on_layer)
        else:
            stream_comparisons(loaded, inputs, on_layer)
    return AdapterErrors(*(max(column) for column in zip(*errors, strict=True)))
