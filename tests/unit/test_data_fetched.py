"""The embedded models and sets themselves: fetched into the cache of this machine if they are not there."""

import numpy as np
import pytest
import torch

from attngeo.data import text
from attngeo.data.embedded import fetch, source_of
from attngeo.errors import UserError
from attngeo.files import read_json
from tests.tolerances import NEXT_TOKEN_PROBABILITY, SENTENCE_COSINE

pytestmark = pytest.mark.network


def fetched(name):
    try:
        return fetch(name)
    except UserError as error:
        if "could not be downloaded" in error.what or "forbids the network" in error.what:
            pytest.skip(f"no network and not cached: {error.what}")
        raise


@pytest.mark.parametrize(
    ("prompt", "word", "probability"),
    [("The capital of France is", " Paris", 0.773), ("The opposite of hot is", " cold", 0.684)],
)
def test_smollm2_continues_as_the_original_does(prompt, word, probability):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = fetched("smollm2-135m-instruct@gguf-q4_1")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        next_token = model(**tokenizer(prompt, return_tensors="pt")).logits[0, -1].softmax(-1)
    best = int(next_token.argmax())
    assert tokenizer.decode([best]) == word
    assert float(next_token[best]) == pytest.approx(probability, abs=NEXT_TOKEN_PROBABILITY)


def test_smollm2_tokenizer_round_trips_prose_and_splits_digits():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(fetched("smollm2-135m-instruct@gguf-q4_1"))
    for document in text.load():
        assert tokenizer.decode(tokenizer(document).input_ids) == document
    assert len(tokenizer("1234").input_ids) == 4


@pytest.mark.parametrize(("name", "layers"), [("minilm-l6", 6), ("minilm-l3", 3)])
def test_encoders_tell_paraphrases_from_other_sentences(name, layers):
    from transformers import AutoModel, AutoTokenizer

    folder = fetched(name)
    model, tokenizer = AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config.num_hidden_layers == layers
    assert len(tokenizer("word " * 200).input_ids) == 202  # nothing is cut at 128
    sentences = ["A man is playing a guitar", "Someone plays an instrument", "The stock market fell today"]
    batch = tokenizer(sentences, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = model(**batch).last_hidden_state
    mask = batch.attention_mask.unsqueeze(-1)
    vectors = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)
    alike, unlike = (float(vectors[0] @ vectors[other]) for other in (1, 2))
    assert alike > unlike + SENTENCE_COSINE


def test_dinov2_loads_whole_and_runs_at_any_size():
    from transformers import AutoModel

    model, information = AutoModel.from_pretrained(fetched("dinov2-s"), output_loading_info=True)
    assert not information["missing_keys"]
    assert not information["unexpected_keys"]
    images = torch.randn(2, 3, 28, 42, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        states = model(images).last_hidden_state
    assert tuple(states.shape) == (2, 1 + 2 * 3, 384)
    assert torch.isfinite(states).all()


def test_fashion_mnist_is_balanced():
    folder = fetched("fashion-mnist")
    with np.load(folder / "arrays.npz") as arrays:
        assert arrays["train_images"].shape == (60_000, 28, 28)
        assert np.bincount(arrays["train_labels"]).tolist() == [6000] * 10
        assert np.bincount(arrays["val_labels"]).tolist() == [1000] * 10
    assert len(source_of("fashion-mnist").classes) == 10
    assert read_json(folder / "source.json")["served_by"] in ("torchvision's mirror", "Debian mirror")


def test_textile_is_split_four_to_one_in_every_class():
    folder = fetched("textile")
    counts = {
        (split, name): len(list((folder / split / name).glob("*.jpg")))
        for split in ("train", "val")
        for name in ("global", "local", "nominal")
    }
    assert list(counts.values()) == [400, 400, 800, 100, 100, 200]
