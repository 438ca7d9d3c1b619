"""Commands in a mount namespace of their own."""

import subprocess
from pathlib import Path


def in_namespace(script: str, cwd: Path, timeout: int = 150) -> subprocess.CompletedProcess:
    "Run a shell script in a mount namespace of its own."
    return subprocess.run(
        ["unshare", "--mount", "bash", "-c", script], cwd=cwd, capture_output=True, text=True, timeout=timeout
    )
