"""Packing an image set: what is written, what is refused, and how that is said."""

import csv
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from attngeo.cli import app
from attngeo.data import ffcv_available, progress
from attngeo.data.batches import open_batches
from attngeo.data.images import decode_image
from attngeo.data.index import read_index
from attngeo.data.layout import Names, working_folder
from attngeo.data.packing import pack
from attngeo.errors import UserError
from attngeo.files import read_json, sha256_file
from tests.tolerances import STATISTICS_ABSOLUTE
from tests.unit.data_support import image_folder

COUNTS = {"a": (4, 2), "b": (3, 2)}


def packed(root, out, **options):
    manifest = pack(root, out, **({"storage": "folder"} | options))
    return read_json(manifest), {path: reason for path, action, reason in report(out) if action != "repaired"}


def report(out):
    """The rows of a report."""
    with (out / "report.csv").open(encoding="utf-8", newline="") as stream:
        head, *rows = csv.reader(stream)
    assert head == ["path", "action", "reason"]
    return rows


def test_a_clean_set_is_packed_and_described(tmp_path):
    manifest, refused = packed(image_folder(tmp_path / "set", COUNTS), tmp_path / "out")
    assert refused == {}
    assert manifest["dataset"] == "set"
    assert manifest["classes"] == ["a", "b"]
    assert (manifest["train"]["n"], manifest["val"]["n"]) == (7, 4)
    assert manifest["image_shape"] == [3, 13, 17]
    assert all(0 < value < 1 for value in manifest["mean"] + manifest["std"])


def test_packing_twice_gives_the_same_manifest(tmp_path):
    root = image_folder(tmp_path / "set", COUNTS)
    first = pack(root, tmp_path / "out", storage="folder").read_bytes()
    assert pack(root, tmp_path / "out", storage="folder", workers=2).read_bytes() == first


def test_the_mean_and_spread_are_those_of_the_pixels(tmp_path):
    for name, level in (("a", 0), ("b", 255)):
        for split in ("train", "val"):
            (tmp_path / "set" / split / name).mkdir(parents=True)
            Image.new("RGB", (3, 2), (level, 51, 0)).save(tmp_path / "set" / split / name / "x.png")
    manifest, _ = packed(tmp_path / "set", tmp_path / "out")
    assert manifest["mean"] == pytest.approx([0.5, 0.2, 0.0], abs=STATISTICS_ABSOLUTE)
    assert manifest["std"] == pytest.approx([0.5, 1e-4, 1e-4], abs=STATISTICS_ABSOLUTE)


@pytest.mark.parametrize("workers", [1, 2])
def test_the_index_of_a_folder_holds_the_hash_of_every_image(tmp_path, workers):
    root = image_folder(tmp_path / "set", COUNTS)
    packed(root, tmp_path / "out", workers=workers)
    files = [file for split in ("train", "val") for file in read_index(tmp_path / f"out/{split}.jsonl")]
    assert len(files) == 11
    assert all(file.sha256 == sha256_file(root / file.path) for file in files)


def test_unreadable_images_are_left_out_and_listed(tmp_path):
    root = image_folder(tmp_path / "set", COUNTS)
    (root / "train/a/zz.jpg").write_bytes(b"not an image")
    (root / "val/b/notes.txt").write_text("x")
    os.rename(root / "val/a/001.png", os.fsencode(root / "val/a") + b"/\xf1.png")
    (root / "val/a/bad.png").write_bytes(b"")
    manifest, refused = packed(root, tmp_path / "out")
    assert manifest["refused"] == 2
    assert manifest["train"]["n"] == 7
    assert set(refused) == {"train/a/zz.jpg", "val/a/bad.png", "val/b/notes.txt"}
    assert "Unidentified" in refused["train/a/zz.jpg"]
    assert [os.fsencode(file.path) for file in read_index(tmp_path / "out/val.jsonl")][1] == b"val/a/\xf1.png"


def test_a_class_of_unreadable_images_is_refused(tmp_path):
    root = image_folder(tmp_path / "set", COUNTS)
    for file in (root / "val/b").iterdir():
        file.write_bytes(b"broken")
    with pytest.raises(UserError, match="no image of class b"):
        packed(root, tmp_path / "out")
    assert not (tmp_path / "out/manifest.json").exists()


def test_names_in_any_script_survive_packing(tmp_path):
    names = ["naïve", "日本", "50% #1 'q' \"d\""]
    root = image_folder(tmp_path / "sét", {name: (2, 1) for name in names})
    manifest, _ = packed(root, tmp_path / "out")
    assert sorted(manifest["classes"]) == sorted(names)
    batches = open_batches(tmp_path / "out", "train", batch_size=3, seed=0, image_size=8, augment=True)
    assert sum(len(labels) for _, labels in batches) == 6


@pytest.mark.parametrize("changed", [{}, {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}], ids=["c", "strictly ascii"])
def test_no_locale_keeps_a_name_from_being_packed_and_told(tmp_path, changed):
    root = image_folder(tmp_path / "set", {"naïve": (3, 1), "日本 %#'\"": (2, 1)})
    (root / "train/naïve/000.png").rename(root / "train/naïve/🦀.png")
    os.rename(root / "train/naïve/001.png", os.fsencode(root / "train/naïve") + b"/\xf1.png")
    (root / "train/naïve/é.jpg").write_bytes(b"not an image")
    language = {"LANG": "C", "LC_ALL": "C", "PYTHONWARNINGS": "error::EncodingWarning"}
    command = [sys.executable, "-m", "attngeo", "pack", str(root), str(tmp_path / "out"), "--storage", "folder"]
    done = subprocess.run(command, env=os.environ | language | changed, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    manifest = read_json(tmp_path / "out/manifest.json")
    assert manifest["classes"] == ["naïve", "日本 %#'\""]
    assert manifest["train"]["n"] == 5
    assert [(path, action) for path, action, _ in report(tmp_path / "out")] == [("train/naïve/é.jpg", "refused")]
    packed_names = {os.fsencode(file.path) for file in read_index(tmp_path / "out/train.jsonl")}
    assert {"train/naïve/🦀.png".encode(), "train/naïve/".encode() + b"\xf1.png"} < packed_names


def test_without_ffcv_auto_keeps_the_files_and_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(ffcv_available, "is_installed", lambda: False)
    root = image_folder(tmp_path / "set", COUNTS)
    manifest, _ = packed(root, tmp_path / "out", storage="auto")
    assert manifest["storage"] == "folder"
    assert manifest["why_storage"] == "ffcv is not installed"
    with pytest.raises(UserError, match="apt-get install"):
        packed(root, tmp_path / "out", storage="beton")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_resolution": 0}, "max_resolution"),
        ({"write_mode": "smart"}, "write_mode"),
        ({"jpeg_quality": 101}, "jpeg_quality"),
        ({"workers": 0}, "workers"),
        ({"min_crop_area": 0.0}, "min_crop_area"),
        ({"storage": "arrays"}, "not for image folders"),
    ],
)
def test_options_out_of_range_are_refused_by_name(tmp_path, options, words):
    with pytest.raises(UserError, match=words):
        packed(image_folder(tmp_path / "set", COUNTS), tmp_path / "out", **options)


def test_what_is_no_image_set_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"neither a folder nor an embedded set[\s\S]*fashion-mnist"):
        packed("imagenet", tmp_path / "out")
    with pytest.raises(UserError, match="language-model"):
        packed("minilm-l6", tmp_path / "out")


def encoded(mode, kind, **options):
    stream = io.BytesIO()
    Image.new(mode, (9, 7)).save(stream, kind, **options)
    return stream.getvalue()


def turned():
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded("RGB", "JPEG", exif=exif)


def test_the_report_lists_every_file_that_was_refused_repaired_or_left_out_and_why(tmp_path):
    root = image_folder(tmp_path / "set", COUNTS)
    odd = {
        "cmyk.jpg": encoded("CMYK", "JPEG"),
        "grey.jpg": encoded("L", "JPEG"),
        "palette.png": encoded("P", "PNG"),
        "alpha.png": encoded("RGBA", "PNG"),
        "deep.png": encoded("I;16", "PNG"),
        "turned.jpg": turned(),
        "really.JPEG": encoded("RGB", "PNG"),
        "cut.jpg": encoded("RGB", "JPEG")[:-80],
        "empty.jpg": b"",
        "dot.png": encoded("RGB", "PNG"),
    }
    for name, content in odd.items():
        (root / "train/a" / name).write_bytes(content)
    Image.new("RGB", (1, 1)).save(root / "train/a/dot.png")
    os.rename(root / "train/b/000.png", os.fsencode(root / "train/b") + b"/\xf1 \xe2\x82\xac.png")
    (root / ".cache").mkdir()
    (root / "train/.DS_Store").write_bytes(b"x")
    (root / "train/a/.thumbs").mkdir()
    (root / "elsewhere").mkdir()
    (root / "train/a/gone.jpg").symlink_to("nowhere.jpg")
    os.symlink(root / "train/b/001.png", root / "train/b/link.png")
    manifest, _ = packed(root, tmp_path / "out")
    assert {(path, action): reason for path, action, reason in report(tmp_path / "out")} == {
        ("train/a/cut.jpg", "refused"): "OSError: Truncated File Read",
        ("train/a/empty.jpg", "refused"): "UnidentifiedImageError: no image of a known format",
        (".cache", "left out"): "hidden",
        ("elsewhere", "left out"): "neither train/ nor val/",
        ("train/.DS_Store", "left out"): "hidden",
        ("train/a/.thumbs", "left out"): "hidden",
        ("train/a/gone.jpg", "left out"): "dangling link",
        ("train/a/cmyk.jpg", "repaired"): "CMYK to RGB",
        ("train/a/grey.jpg", "repaired"): "grey to RGB",
        ("train/a/palette.png", "repaired"): "palette to RGB",
        ("train/a/alpha.png", "repaired"): "RGBA with transparency put on white",
        ("train/a/deep.png", "repaired"): "16-bit grey scaled to 8 bits",
        ("train/a/turned.jpg", "repaired"): "EXIF orientation 6 applied",
        ("train/a/really.JPEG", "repaired"): "PNG content named .jpeg",
        ("train/a/dot.png", "warning"): "1 x 1 pixels",
    }
    assert (manifest["refused"], manifest["repaired"]["images"], manifest["warnings"]) == (2, 7, 1)
    assert manifest["train"]["n"] == 7 + 8 + 1  # what is repaired is kept, and so is the link
    assert "EXIF orientation applied" in manifest["decode_rule"]


def test_a_class_without_validation_images_shifts_no_label(tmp_path):
    root = image_folder(tmp_path / "set", {"a": (2, 1), "b": (2, 1), "c": (2, 1)})
    for path in (root / "val/b").iterdir():
        path.unlink()
    manifest, warned = packed(root, tmp_path / "out")
    assert manifest["classes"] == ["a", "b", "c"]
    assert [file.label for file in read_index(tmp_path / "out/val.jsonl")] == [0, 2]
    assert warned == {"val/b": "the class has no validation image; labels are not shifted"}
    (root / "val/b").rmdir()
    assert packed(root, tmp_path / "again")[1] == warned


def test_the_order_of_the_classes_lies_beside_the_set_and_is_checked(tmp_path):
    manifest = pack(image_folder(tmp_path / "set", {"ä,b": (2, 1), "Z": (2, 1)}), tmp_path / "out", storage="folder")
    order = tmp_path / "out/classes.csv"
    assert order.read_text() == 'label,class\n0,Z\n1,"ä,b"\n'
    options = {"batch_size": 1, "seed": 0, "image_size": 8, "augment": False}
    assert open_batches(manifest, "val", **options).describe()["classes"] == ["Z", "ä,b"]
    order.write_text('label,class\n0,"ä,b"\n1,Z\n')
    with pytest.raises(UserError, match="another order"):
        open_batches(manifest, "val", **options)
    order.unlink()
    with pytest.raises(UserError, match=r"classes.csv is missing"):
        open_batches(manifest, "val", **options)


def test_flat_validation_images_get_the_labels_of_their_file(tmp_path):
    root = image_folder(tmp_path / "set", {"n01": (2, 1), "n02": (2, 1), "n03": (2, 1)})
    for number, name in enumerate(("n03", "n01", "n03")):
        os.rename(root / f"val/{('n01', 'n02', 'n03')[number]}/000.png", root / f"val/val_{number:08d}.png")
        (tmp_path / "labels.txt").open("a").write(f"{name}\n")
    for folder in (root / "val").iterdir():
        if folder.is_dir():
            folder.rmdir()
    with pytest.raises(UserError, match=r"3 images beside or instead of class folders[\s\S]*--val-labels"):
        packed(root, tmp_path / "out")
    manifest, warned = packed(root, tmp_path / "out", val_labels=tmp_path / "labels.txt")
    assert [(file.path, file.label) for file in read_index(tmp_path / "out/val.jsonl")] == [
        ("val/val_00000001.png", 0),
        ("val/val_00000000.png", 2),
        ("val/val_00000002.png", 2),
    ]
    assert list(warned) == ["val/n02"]
    assert "labels.txt" in manifest["label_rule"]


def test_a_set_under_a_name_of_its_own_lies_beside_that_file(tmp_path):
    """Without FFCV this is a refusal, since .beton was asked for; its pixels are tested in test_data_ffcv."""
    root = image_folder(tmp_path / "set", COUNTS)
    with pytest.raises(UserError, match=r"ends in .beton, but storage is 'folder'"):
        pack(root, tmp_path / "out.beton", storage="folder")
    names = Names.of(tmp_path / "deep/out.beton")
    assert names.folder == tmp_path / "deep"
    assert names.all() == [
        "out.beton",
        "out.val.beton",
        "out.train.jsonl",
        "out.val.jsonl",
        "out.classes.csv",
        "out.report.csv",
        "out.manifest.json",
    ]


def test_a_failed_packing_leaves_the_former_set_and_nothing_else(tmp_path):
    root = image_folder(tmp_path / "set", COUNTS)
    first = pack(root, tmp_path / "out", storage="folder").read_bytes()
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    for file in (root / "val/b").iterdir():
        file.write_bytes(b"broken")
    with pytest.raises(UserError, match="no image of class b"):
        pack(root, tmp_path / "out", storage="folder")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == files
    assert (tmp_path / "out/manifest.json").read_bytes() == first


def test_two_packings_of_one_set_at_once_are_refused(tmp_path):
    root = image_folder(tmp_path / "set", COUNTS)
    with working_folder(Names.of(tmp_path / "out")), pytest.raises(UserError, match="another process packs"):
        pack(root, tmp_path / "out", storage="folder")
    pack(root, tmp_path / "out", storage="folder")


def test_killed_at_any_moment_it_starts_again_without_leftovers(tmp_path):
    root = image_folder(tmp_path / "set", COUNTS)
    whole = pack(root, tmp_path / "whole", storage="folder")
    os.mkfifo(root / "pipe")  # stands where an image was: whoever reads it waits
    os.rename(root / "val/b/001.png", tmp_path / "kept.png")
    (root / "val/b/001.png").symlink_to(root / "pipe")
    script = (
        "import pathlib, sys; from attngeo.data import folders, packing;"
        "folders.Path; import os; entry = os.DirEntry;"
        "found = folders.scan(pathlib.Path(sys.argv[1]));"
        "found.splits['val'].append(folders.ImageFile('val/b/001.png', 1));"
        "packing.scan = lambda root, *options: found;"
        "packing.pack(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), storage='folder')"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(root), str(tmp_path / "out")])
    with (root / "pipe").open("wb"):  # opened once the packing reads it
        process.kill()
        process.wait(60)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".packing"]
    (root / "val/b/001.png").unlink()
    (root / "pipe").unlink()
    os.rename(tmp_path / "kept.png", root / "val/b/001.png")
    pack(root, tmp_path / "out", storage="folder")
    for path in whole.parent.iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes(), path.name
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in whole.parent.iterdir()}


def test_an_image_larger_than_any_screen_is_reduced_and_a_bomb_refused(tmp_path, monkeypatch):
    root = image_folder(tmp_path / "set", COUNTS)
    Image.new("L", (12000, 9000), 90).save(root / "train/a/huge.jpg")
    Image.new("1", (20000, 20000)).save(root / "train/a/bomb.png")
    manifest, refused = packed(root, tmp_path / "out", max_resolution=64)
    assert manifest["train"]["n"] == 8
    assert "DecompressionBomb" in refused["train/a/bomb.png"]
    assert decode_image(root / "train/a/huge.jpg", 64).shape == (48, 64, 3)


def test_the_command_packs_a_folder_outside_of_any_project(tmp_path, monkeypatch):
    root = image_folder(tmp_path / "my images", COUNTS)
    (root / "train/a/zz.jpg").write_bytes(b"not an image")
    monkeypatch.chdir(tmp_path)
    answer = CliRunner().invoke(app, ["pack", str(root), "packed", "--storage", "folder", "--workers", "2"])
    assert answer.exit_code == 0, answer.output
    assert "7 training and 4 validation images of 2 classes" in answer.output
    assert "1 refused: see packed/report.csv" in answer.output
    with pytest.raises(UserError, match="--write-mode"):
        CliRunner().invoke(app, ["pack", str(root), "x", "--write-mode", "png"], catch_exceptions=False)


def test_long_work_tells_how_far_it_is(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    with progress.Progress(10, "images checked", stream=stream) as shown:
        shown.reach(4)
    assert re.fullmatch(r"4 of 10 images checked, \d+ img/s, 0 minutes left\n", stream.getvalue())


def test_the_imagenet_preset_packs_a_flat_folder_by_its_config(tmp_path):
    from attngeo.config import load_preset
    from attngeo.jobs.pack import pack as pack_job

    (tmp_path / "config").symlink_to(Path(__file__).parents[2] / "config")
    root = image_folder(tmp_path / "ilsvrc", {"n01440764": (3, 1), "n01443537": (3, 1)})
    for name, image in (("n01440764", "b"), ("n01443537", "a")):
        os.rename(root / f"val/{name}/000.png", root / f"val/{image}.png")
        (root / "val" / name).rmdir()
    (root / "val.txt").write_text("a 1\nb 0\n")
    changes = {"source": str(root), "val_labels": f"{root}/val.txt", "storage": "folder", "loader": "torch"}
    preset = load_preset(tmp_path, "imagenet", {"datasets": {"imagenet": changes}})
    manifest = read_json(pack_job(preset, "imagenet"))
    assert manifest["max_resolution"] == 500
    assert [file.label for file in read_index(tmp_path / "results/imagenet/data/imagenet/val.jsonl")] == [0, 1]
