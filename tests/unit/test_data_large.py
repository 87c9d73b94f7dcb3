"""Many tiny images in one file: bounded time to the first batch, and bounded memory."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image

from attngeo.data import ffcv_available
from attngeo.data.packing import pack
from tests.unit.data_support import picture

IMAGES = 200_000
LINKS = 20_000  # names of one file; file systems allow 65,000 at most
READ = """
import json, resource, sys, time
begun = time.monotonic()
from attngeo.data.batches import open_batches
imported = time.monotonic()
batches = open_batches(sys.argv[1], "train", batch_size=256, seed=0, image_size=16, augment=True, loader=sys.argv[2])
opened = time.monotonic()
iterator = iter(batches)
next(iterator)
first = time.monotonic()
for _ in range(100):
    next(iterator)
print(json.dumps({
    "open_s": opened - imported, "first_batch_s": first - opened, "images_per_s": 25600 / (time.monotonic() - first),
    "memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
}))
"""


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.skipif(bool(ffcv_available.why_unavailable()), reason="FFCV is not installed")
def test_two_hundred_thousand_images_are_packed_and_opened_in_bounded_time_and_memory(tmp_path: Path) -> None:
    for split, count in (("train", IMAGES), ("val", 400)):
        for name in "ab":
            folder = tmp_path / "images" / split / name
            folder.mkdir(parents=True)
            for place in range(count // 2):
                if place % LINKS == 0:
                    original = folder / f"{place:06d}.png"
                    Image.fromarray(picture(place, 8, 8)).save(original)
                else:
                    os.link(original, folder / f"{place:06d}.png")
    begun = time.monotonic()
    manifest = pack(tmp_path / "images", tmp_path / "many.beton", write_mode="raw", workers=2)
    told = {"packing": {"s": time.monotonic() - begun}}
    for loader in ("ffcv", "torch"):
        command = [sys.executable, "-c", READ, str(manifest), loader]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
        told[loader] = json.loads(done.stdout)
        assert told[loader]["open_s"] + told[loader]["first_batch_s"] < 90, told
        assert told[loader]["memory_mib"] < 1500, told
    print(json.dumps(told))
