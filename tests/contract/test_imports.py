"""The arrows between the packages hold, and importing KVBridge stays light."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_import_arrows_hold() -> None:
    lint_imports = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run(
        [lint_imports, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_import_loads_no_vendor_library() -> None:
    program = """
import sys
import kvbridge, kvbridge_nixl, kvbridge_mooncake, kvbridge_ucx

vendors = {"torch", "vllm", "nixl", "nixl_cu12", "nixl_cu13", "mooncake", "ucxx", "libucx"}
print(*sorted(vendors & sys.modules.keys()))
"""
    loaded = subprocess.check_output([sys.executable, "-c", program], text=True).split()
    assert loaded == []
