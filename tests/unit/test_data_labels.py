"""The label files that ImageNet's flat validation folder comes with."""

import numpy as np
import pytest

from attngeo.data.label_files import known_label_files, read_labels
from attngeo.errors import UserError

IMAGES = ["ILSVRC2012_val_00000001.JPEG", "ILSVRC2012_val_00000002.JPEG", "ILSVRC2012_val_00000003.JPEG"]
CLASSES = ["n01", "n02", "n03"]
EXPECTED = ["n03", "n01", "n03"]
KAGGLE = "ImageId,PredictionString\n" + "".join(
    f"{image[:-5]},{name} 85 1 499 272 {name} 3 4 5 6 \n"
    for image, name in zip(IMAGES[::-1], EXPECTED[::-1], strict=True)
)


def write(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("LOC_val_solution.csv", KAGGLE),
        ("imagenet_2012_validation_synset_labels.txt", "n03\nn01\nn03\n"),
        ("val.txt", "".join(f"{image} {number}\n" for image, number in zip(IMAGES, (2, 0, 2), strict=True))),
        ("names.txt", "".join(f"{image}\t{label}\r\n" for image, label in zip(IMAGES, EXPECTED, strict=True))),
        ("names.csv", "".join(f"{image},{label}\n" for image, label in zip(IMAGES, EXPECTED, strict=True))),
        ("more.txt", "another n02\n" + "".join(f"{i} {label}\n" for i, label in zip(IMAGES, EXPECTED, strict=True))),
    ],
)
def test_every_format_gives_the_same_labels(tmp_path, name, text):
    labels, rule = read_labels(write(tmp_path, name, text), IMAGES, CLASSES)
    assert labels == EXPECTED
    assert name in rule


@pytest.mark.parametrize("kind", ["text", "matlab"])
def test_the_numbers_of_the_development_kit_go_through_its_map(tmp_path, kind):
    truth = write(tmp_path, "ILSVRC2012_validation_ground_truth.txt", "1\n3\n1\n")
    with pytest.raises(UserError, match=r"not the order of the class names[\s\S]*map_clsloc.txt or meta.mat"):
        read_labels(truth, IMAGES, CLASSES)
    if kind == "text":
        write(tmp_path, "map_clsloc.txt", "n03 1 kit_fox\nn02 2 setter\nn01 3 cat\n")
    else:
        from scipy.io import savemat

        rows = [(1, "n03"), (2, "n02"), (3, "n01"), (4, "n00")]
        table = np.array(rows, dtype=[("ILSVRC2012_ID", "f8"), ("WNID", object)])
        savemat(tmp_path / "meta.mat", {"synsets": table})
    assert read_labels(truth, IMAGES, CLASSES)[0] == EXPECTED


def test_folders_named_by_numbers_are_names(tmp_path):
    truth = write(tmp_path, "truth.txt", "1\n3\n1\n")
    assert read_labels(truth, IMAGES, ["1", "10", "2", "3"])[0] == ["1", "3", "1"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("n01\nn02\n", "2 labels for 3"),
        ("n01\nn02\nn09\n", "'n09', which is no class folder"),
        (f"{IMAGES[0]} n01\n{IMAGES[1]} n02\n", "no label for 1 of 3"),
        ("".join(f"{image[:-5]} {place}\n" for place, image in enumerate(IMAGES, start=1)), "from 1 to 3"),
        ("n01\nn01 n02\n", "no known format"),
        ("\n", "is empty"),
        ("ImageId,PredictionString\nx,\n", "without a class"),
    ],
)
def test_what_would_give_wrong_labels_is_refused(tmp_path, text, words):
    with pytest.raises(UserError, match=words):
        read_labels(write(tmp_path, "labels.txt", text), IMAGES, CLASSES)
    with pytest.raises(UserError, match="cannot be read"):
        read_labels(tmp_path / "none.txt", IMAGES, CLASSES)


def test_label_files_are_found_where_the_archives_have_them(tmp_path):
    kit = tmp_path / "ILSVRC2012_devkit_t12/data"
    kit.mkdir(parents=True)
    write(kit, "ILSVRC2012_validation_ground_truth.txt", "1")
    write(tmp_path, "LOC_val_solution.csv", "x")
    assert [path.name for path in known_label_files(tmp_path)] == [
        "LOC_val_solution.csv",
        "ILSVRC2012_validation_ground_truth.txt",
    ]
