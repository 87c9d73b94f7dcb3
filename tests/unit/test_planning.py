"""What the workflow imports at every parse stays light."""

import subprocess
import sys


def test_planning_imports_no_torch() -> None:
    code = "import sys, attngeo.jobs.stamps; print(sorted({'torch', 'scipy', 'pandas', 'mlflow'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
