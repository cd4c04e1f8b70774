"""Puts the native scan into a wheel: ``HATCH_BUILD_HOOK_ENABLE_CUSTOM=1 python -m hatchling build -t wheel``.

Off by default, so that an installation from source compiles nothing.
"""

import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = "torchrum/ops/rum_scan/native"


class PrebuiltHook(BuildHookInterface):
    """Compiles the objects, and tags the wheel with the platform that they are for."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        sys.path.insert(0, str(Path(self.root) / "src" / NATIVE))
        import build  # by itself: the package would import torch

        self.folder = tempfile.TemporaryDirectory()
        made = build.prebuild(Path(self.folder.name))
        if version == "editable" or not made:
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
        build_data["force_include"].update({str(path): f"{NATIVE}/prebuilt/{path.name}" for path in made})

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        self.folder.cleanup()
