"""`python -m services.admission`: one admission as a process.

Shell.
"""

from __future__ import annotations

import sys

from services.runtime.service import run_service

from .service import serve

if __name__ == "__main__":
    sys.exit(run_service("admission", serve))
