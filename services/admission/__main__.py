"""`python -m services.admission`: one admission as a process.

Shell.
"""

from __future__ import annotations

import sys

from services.runtime.priority import give_way
from services.runtime.service import run_service

from .service import serve

if __name__ == "__main__":
    give_way()
    sys.exit(run_service("admission", serve))
