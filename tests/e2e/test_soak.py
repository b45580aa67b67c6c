"""scripts/soak for a moment: hostile clients beside good ones."""

import json
import subprocess
import sys

from service import ROOT


def test_a_moment_of_soak(default_model, library) -> None:
    done = subprocess.run([sys.executable, ROOT / "scripts" / "soak", "--seconds", "3", "--seed", "5", "--model", default_model, "--library", library],
                          capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["good"] > 5 and found["bad"] > 20 and found["wrong"] == []
