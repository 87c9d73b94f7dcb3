"""Whether FFCV can be used here, asked without the side effects of importing it."""

import ctypes
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch

INSTALL = (
    "install it: `apt-get install g++ pkg-config libopencv-imgproc-dev libturbojpeg0-dev libgl1 libglib2.0-0`, then "
    "`PKG_CONFIG_PATH=$PWD/tools/opencv-min pip install --no-build-isolation ffcv==1.0.2` in the project's folder"
)


@contextmanager
def torch_threads_kept() -> Iterator[None]:
    """Restore torch's number of threads, which FFCV sets to its own when it is imported and when it starts."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def keep_tbb_loaded() -> None:
    """Have Numba's TBB threads, which importing FFCV starts, stay until the process is gone.

    Numba waits for them when its module is freed at the exit; on one core that wait never ends. So the module is not
    freed: it gets a reference that no one drops.
    """
    pool = sys.modules.get("numba.np.ufunc.tbbpool")
    if pool is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))


def is_installed() -> bool:
    """Whether the package is there; it may still fail to import."""
    return importlib.util.find_spec("ffcv") is not None


@lru_cache(maxsize=1)
def why_unavailable() -> str | None:
    """None if FFCV imports here, else the reason in words."""
    if not is_installed():
        return "ffcv is not installed"
    try:
        with torch_threads_kept():
            importlib.import_module("attngeo.data.ffcv_loader")  # a missing system library shows only on import
    except Exception as error:  # numba and OpenCV raise many kinds
        return f"ffcv does not import ({type(error).__name__}: {error})"
    return None


def version() -> str:
    """Version of the installed package; the module's own `__version__` is that of an older release."""
    return importlib.metadata.version("ffcv")
