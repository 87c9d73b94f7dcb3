"""Geometry of attention: rebuild, check and extend four papers.

Importing the package is cheap (no torch); the model names are registered with timm as soon as timm is imported.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

__version__ = "0.1.0"


def _register_models() -> None:
    importlib.import_module("attngeo.models.registry")
    importlib.import_module("attngeo.models.fiber_bundle_registry")


class _RegisterModelsWithTimm(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import hook that registers the models once timm has loaded, so that `import attngeo` needs no torch."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target) if fullname == "timm" else None
        if spec is not None and spec.loader is not None:
            self._timm_loader = spec.loader
            spec.loader = self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._timm_loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        sys.meta_path.remove(self)
        if module.__spec__ is not None:
            module.__spec__.loader = self._timm_loader
        self._timm_loader.exec_module(module)
        _register_models()


if "timm" in sys.modules:
    _register_models()
else:
    sys.meta_path.insert(0, _RegisterModelsWithTimm())
