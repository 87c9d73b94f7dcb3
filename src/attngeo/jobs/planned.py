"""Stamps that a running Snakemake planned with: no other may change them, since its jobs compare them with the code."""

from contextlib import suppress
from pathlib import Path

from attngeo.config import Preset
from attngeo.errors import UserError
from attngeo.jobs.stamps import code_digests, stamp_names, stamp_path
from attngeo.tracking.code_digest import read_stamp


def refuse_to_change(preset: Preset) -> None:
    """UserError if a stamp that a Snakemake in this folder holds a lock on would be another one now."""
    locked = _locked_inputs(preset.root)
    if not locked:
        return
    digests = code_digests(preset.root)
    for name, content in stamp_names(preset):
        path = stamp_path(preset, name)
        planned = _digest_in(path) if path.relative_to(preset.root).as_posix() in locked else None
        if planned is not None and planned != content(digests)["digest"]:
            raise UserError(
                f"the code, the settings or the data behind {name} changed, and a Snakemake that runs in this folder "
                "planned with the former: its jobs would fail",
                "wait for it, or stop it with Ctrl-C; or undo the change. If none runs, one was killed and left its "
                "lock in .snakemake/locks: snakemake --unlock",
            )


def _digest_in(stamp: Path) -> str | None:
    """None where the file is gone or damaged, which the next plan mends."""
    try:
        return str(read_stamp(stamp)["digest"])
    except (OSError, ValueError, KeyError):
        return None


def _locked_inputs(root: Path) -> set[str]:
    """What the jobs of every Snakemake that holds a lock read, as paths below `root`."""
    found: set[str] = set()
    for lock in (root / ".snakemake" / "locks").glob("*.input.lock"):
        with suppress(FileNotFoundError):  # it has just ended
            found.update(lock.read_text(encoding="utf-8").splitlines())
    return found
