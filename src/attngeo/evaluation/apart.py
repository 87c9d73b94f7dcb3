"""A measurement in a process of its own, which nothing before it has warmed up, filled with memory or broken."""

import multiprocessing
import resource
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import ParamSpec, TypeVar

from attngeo.evaluation.timing import status_kib

P = ParamSpec("P")
R = TypeVar("R")


class Killed(Exception):
    """The process ended without an answer, which happens where it needs more memory than there is."""


def apart(function: Callable[P, R], *arguments: P.args, **options: P.kwargs) -> R:
    """What a function of a module returns, called in a fresh process; raises what it raises, or Killed."""
    # Forked from a server that has loaded the module and computed nothing: without seconds of imports.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([function.__module__])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            return pool.submit(function, *arguments, **options).result()
        except BrokenProcessPool as error:
            raise Killed from error


def limit_memory(mebibytes: float) -> None:
    """Refuse this process more than so much memory beyond what it has, for the rest of its life.

    An allocation above fails with an exception of its caller's, where the system would kill some process instead.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = int(status_kib("VmData") * 2**10 + mebibytes * 2**20)
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
